"""All-reduce of small arrays over the GPUs of a host, a Pallas Mosaic GPU kernel.

Each device writes its array into the memory of all others, over NVLink, and adds up what the others
wrote into its own. That is one message in each direction. Arrays are sent in packets of 16 bytes, 8
of data and 8 with the number of the call, so that no message waits for another (NCCL's protocol
"LL"). `peer_memory` has the memory of a device.

Packets of a call are overwritten two calls later. A device gets there only after it has received
all packets of the call in between, and so after all devices have ended the call before that.

XLA sees no collective. So the kernel can be in the CUDA graph of a loop, where NCCL can not be.
The kernel also adds the residual and norms the row, as a decoder does after the sum. A program has
one row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.decoder.kernels.peer_memory import (
    DATA_BYTES,
    HEADER_BYTES,
    MAX_POLLS,
    PACKET_BYTES,
    packets_bytes,
)
from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.mosaic_sm90.config import REDUCE_ROWS

_MAX_WARPGROUPS = 4  # of a program
_MAX_PACKETS = 8  # that a thread waits for at once


def _f32(value: float) -> str:
    """Return a number in PTX."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


@dataclass(frozen=True, kw_only=True)
class _Code:
    """The kernel in PTX. `ref` of a name is `$0` and so on, the address of that array."""

    names: tuple[str, ...]  # of the arrays, in the order of their addresses
    is_f32: bool  # whether elements of results are f32; else bf16
    num_devices: int  # devices that have a part of the sum
    num_rows: int  # of x
    num_parts: int  # f32 arrays that x is the sum of; 0 if it has the dtype of the results
    packets: int  # of a row
    capacity: int  # bytes of the packets of one sender
    threads: int  # of a program
    size: int  # elements of a row
    eps: float  # of the norm

    def ref(self, name: str) -> str:
        return f"${self.names.index(name)}"

    @property
    def rounds(self) -> range:
        """Packets of a thread."""
        return range(pl.cdiv(self.packets, self.threads))

    @property
    def groups(self) -> Iterator[range]:
        """Rounds of packets that a thread waits for at once."""
        size = max(_MAX_PACKETS // self.num_devices, 1)
        for first in range(0, len(self.rounds), size):
            yield self.rounds[first : first + size]

    def text(self) -> str:
        parts = [*self.start(), *self.load(), *self.find_memory(), *self.add_parts(), *self.send()]
        for rounds in self.groups:
            parts += self.receive(rounds)
            for i in rounds:
                parts += self.finish(i, rounds)
        if "weight" in self.names:
            parts += self.norm()
        return "\n".join(["{", *parts, *self.end(), "}"])

    def start(self) -> Iterator[str]:
        n, peers = len(self.rounds), self.ref("peers")
        most = max(_MAX_PACKETS, self.num_devices)
        yield f".reg .pred mine, valid, wait, wrong, last, need<{most}>;"
        yield ".reg .b32 rank, call, program, thread, word, polls, index;"
        yield f".reg .b32 column<{n}>, unit<{n}>, x0_<{n}>, x1_<{n}>;"
        yield f".reg .b32 residual0_<{n}>, residual1_<{n}>, weight0_<{n}>, weight1_<{n}>;"
        yield f".reg .f32 part<{max(4 * n * self.num_parts, 1)}>;"
        for name in ("data0_", "data1_", "flag0_", "flag1_"):
            yield f".reg .b32 {name}<{most}>;"
        yield f".reg .b64 address, offset, own, sent, received, peer<{self.num_devices}>;"
        yield ".reg .f32 value, other, squares, acc<4>;"
        yield "mov.u32 program, %ctaid.x; mov.u32 thread, %tid.x;"
        yield f"ld.global.b32 rank, [{peers}+{8 * self.num_devices}];"
        for r in range(self.num_devices):
            yield f"ld.global.b64 peer{r}, [{peers}+{8 * r}];"
        yield "mov.f32 squares, 0f00000000;"
        for i in self.rounds:
            yield f"add.u32 column{i}, thread, {i * self.threads};"
            yield f"mad.lo.u32 unit{i}, program, {self.packets}, column{i};"

    def load(self) -> Iterator[str]:
        """Ask for all inputs before the first wait, so that their latencies do not add up."""
        for i, place in self.parts:
            first = self.num_rows * self.packets * place
            yield f"setp.lt.u32 valid, column{i}, {self.packets}; add.u32 index, unit{i}, {first};"
            yield f"mul.wide.u32 offset, index, {2 * DATA_BYTES};"
            yield f"add.s64 address, {self.ref('x')}, offset;"
            words = ", ".join(self.part(i, place, j) for j in range(4))
            yield f"@valid ld.volatile.global.v4.f32 {{{words}}}, [address];"
        arrays = {"x": "unit", "residual": "unit", "weight": "column"}
        for name, index in arrays.items():
            if name not in self.names or (name == "x" and self.num_parts):
                continue
            for i in self.rounds:
                yield f"setp.lt.u32 valid, column{i}, {self.packets};"
                yield self.at(name, f"{index}{i}")
                words = f"{{{name}0_{i}, {name}1_{i}}}"
                # Volatile, so that the assembler keeps these before the waits.
                yield f"@valid ld.volatile.global.v2.b32 {words}, [address];"

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Round and number of all parts of x that a thread adds up."""
        return [(i, place) for i in self.rounds for place in range(self.num_parts)]

    def part(self, i: int, place: int, element: int) -> str:
        return f"part{4 * (i * self.num_parts + place) + element}"

    def add_parts(self) -> Iterator[str]:
        """Set x to the sum of its parts."""
        for i, place in self.parts:
            for j in range(4):
                part = self.part(i, place, j)
                yield f"add.f32 acc{j}, acc{j}, {part};" if place else f"mov.f32 acc{j}, {part};"
            if place == self.num_parts - 1:
                yield from self.round(f"x0_{i}", f"x1_{i}")

    def find_memory(self) -> Iterator[str]:
        """Read the number of this call, and find where packets go to and come from."""
        yield f"mul.wide.u32 offset, program, 4; add.s64 address, {self.ref('memory')}, offset;"
        yield "ld.volatile.global.u32 call, [address];"
        for r in range(self.num_devices):
            yield f"setp.eq.u32 mine, rank, {r}; @mine mov.b64 own, peer{r};"
        # XLA may have copied the memory.
        yield f"setp.ne.s64 wrong, own, {self.ref('memory')}; add.s64 address, own, offset;"
        yield "@wrong ld.volatile.global.u32 call, [address];"
        # The number of this call, from 1. After 2^32 - 1 comes 2: never 0, and even after odd.
        yield "add.u32 call, call, 1; setp.eq.u32 wrong, call, 0; @wrong mov.u32 call, 2;"
        both = self.num_devices * self.capacity
        yield f"and.b32 word, call, 1; mul.wide.u32 offset, word, {both};"
        yield f"add.s64 received, offset, {HEADER_BYTES};"
        yield f"mul.wide.u32 offset, rank, {self.capacity}; add.s64 sent, received, offset;"
        yield "add.s64 received, received, own;"

    def at(self, name: str, index: str) -> str:
        """Set `address` to the address of a packet's data."""
        base = self.ref(name)
        return f"mul.wide.u32 offset, {index}, {DATA_BYTES}; add.s64 address, {base}, offset;"

    def send(self) -> Iterator[str]:
        for i in self.rounds:
            yield f"mul.wide.u32 offset, unit{i}, {PACKET_BYTES}; add.s64 offset, offset, sent;"
            for r in range(self.num_devices):
                yield f"setp.lt.u32 valid, column{i}, {self.packets};"
                yield f"setp.ne.and.u32 valid, rank, {r}, valid; add.s64 address, peer{r}, offset;"
                packet = f"{{x0_{i}, call, x1_{i}, call}}"
                yield f"@valid st.volatile.global.v4.b32 [address], {packet};"

    def receive(self, rounds: range) -> Iterator[str]:
        """Wait for the packets of these rounds from all devices; a thread has its own."""
        places = [(i, r) for i in rounds for r in range(self.num_devices)]
        for place, (i, r) in enumerate(places):
            yield f"mov.b32 data0_{place}, x0_{i}; mov.b32 data1_{place}, x1_{i};"
            yield f"mov.b32 flag0_{place}, call; mov.b32 flag1_{place}, call;"
            yield f"setp.lt.u32 valid, column{i}, {self.packets};"
            yield f"setp.ne.and.u32 need{place}, rank, {r}, valid;"
        yield "mov.u32 polls, 0;"
        yield f"POLL{rounds[0]}:"
        for place, (i, r) in enumerate(places):
            yield f"mul.wide.u32 offset, unit{i}, {PACKET_BYTES};"
            yield "add.s64 address, received, offset;"
            packet = f"{{data0_{place}, flag0_{place}, data1_{place}, flag1_{place}}}"
            at = f"[address+{r * self.capacity}]"
            yield f"@need{place} ld.volatile.global.v4.b32 {packet}, {at};"
        yield "setp.ne.u32 wait, flag0_0, call;"
        for place in range(len(places)):
            yield f"setp.ne.or.u32 wait, flag0_{place}, call, wait;"
            yield f"setp.ne.or.u32 wait, flag1_{place}, call, wait;"
        yield "add.u32 polls, polls, 1;"
        yield f"setp.gt.u32 last, polls, {MAX_POLLS}; @last trap;"
        yield f"@wait bra POLL{rounds[0]};"

    def finish(self, i: int, rounds: range) -> Iterator[str]:
        """Add up the i-th packet of a thread, and the residual."""
        yield f"setp.ge.u32 wrong, column{i}, {self.packets}; @wrong bra END{i};"
        yield from (f"mov.f32 acc{j}, 0f00000000;" for j in range(4))
        for r in range(self.num_devices):
            place = (i - rounds[0]) * self.num_devices + r
            yield from self.add(f"data0_{place}", f"data1_{place}")
        yield from self.round(f"x0_{i}", f"x1_{i}")
        if "residual" in self.names:
            yield from self.unpack(f"x0_{i}", f"x1_{i}")
            yield from self.add(f"residual0_{i}", f"residual1_{i}")
            yield from self.round(f"x0_{i}", f"x1_{i}")
        if "weight" in self.names:
            yield from self.unpack(f"x0_{i}", f"x1_{i}")
            yield from (f"fma.rn.f32 squares, acc{j}, acc{j}, squares;" for j in range(4))
        yield self.at("out", f"unit{i}") + f"st.global.v2.b32 [address], {{x0_{i}, x1_{i}}};"
        yield f"END{i}:"

    def add(self, *words: str) -> Iterator[str]:
        """Add the elements of words to `acc`."""
        for i, data in enumerate(words):
            if self.is_f32:
                yield f"mov.b32 value, {data}; add.f32 acc{i}, acc{i}, value;"
                continue
            for j, bits in enumerate(
                (f"shl.b32 word, {data}, 16", f"and.b32 word, {data}, -65536")
            ):
                acc = f"acc{2 * i + j}"
                yield f"{bits}; mov.b32 value, word; add.f32 {acc}, {acc}, value;"

    def unpack(self, *words: str) -> Iterator[str]:
        """Set `acc` to bf16 elements."""
        for i, word in enumerate(words):
            yield f"shl.b32 word, {word}, 16; mov.b32 acc{2 * i}, word;"
            yield f"and.b32 word, {word}, -65536; mov.b32 acc{2 * i + 1}, word;"

    def round(self, *words: str) -> Iterator[str]:
        """Set words to the elements of `acc`."""
        for i, word in enumerate(words):
            if self.is_f32:
                yield f"mov.b32 {word}, acc{i};"
            else:
                yield f"cvt.rn.bf16x2.f32 {word}, acc{2 * i + 1}, acc{2 * i};"

    def norm(self) -> Iterator[str]:
        """Write the row over the root of its mean square, times the weight."""
        yield "bar.warp.sync -1;"
        for lanes in (16, 8, 4, 2, 1):
            yield "mov.b32 word, squares;"
            yield f"shfl.sync.bfly.b32 word, word, {lanes}, 31, -1; mov.b32 value, word;"
            yield "add.f32 squares, squares, value;"
        sums = self.ref("sums")
        yield "and.b32 word, thread, 31; setp.eq.u32 valid, word, 0;"
        yield f"shr.b32 word, thread, 5; mad.lo.u32 index, word, 4, {sums};"
        yield "@valid st.shared.f32 [index], squares;"
        yield "bar.sync 0;"
        yield "mov.f32 squares, 0f00000000;"
        for warp in range(self.threads // 32):
            yield f"ld.shared.f32 value, [{sums}+{4 * warp}]; add.f32 squares, squares, value;"
        yield f"div.rn.f32 squares, squares, {_f32(self.size)};"
        yield f"add.f32 squares, squares, {_f32(self.eps)}; rsqrt.approx.f32 squares, squares;"
        for i in self.rounds:
            yield f"setp.ge.u32 wrong, column{i}, {self.packets}; @wrong bra NORM{i};"
            yield from self.unpack(f"weight0_{i}", f"weight1_{i}")
            for j in range(4):
                bits = "shl.b32 word, {}, 16;" if j % 2 == 0 else "and.b32 word, {}, -65536;"
                yield bits.format(f"x{j // 2}_{i}") + " mov.b32 other, word;"
                yield f"mul.f32 other, other, squares; mul.f32 acc{j}, acc{j}, other;"
            yield from self.round("data0_0", "data1_0")
            yield self.at("normed", f"unit{i}") + "st.global.v2.b32 [address], {data0_0, data1_0};"
            yield f"NORM{i}:"

    def end(self) -> Iterator[str]:
        yield "bar.sync 0;"  # all threads have read the number of the call
        yield f"mad.lo.u32 index, thread, {self.num_rows}, program;"
        yield f"setp.lt.u32 valid, index, {REDUCE_ROWS};"
        yield "mul.wide.u32 offset, index, 4; add.s64 address, own, offset;"
        yield "@valid st.volatile.global.u32 [address], call;"


def all_reduce(
    x: jax.Array,
    peers: jax.Array,
    memory: jax.Array,
    residual: jax.Array | None = None,
    weight: jax.Array | None = None,
    *,
    eps: float = 0.0,
    capacity: int,
) -> tuple[jax.Array, ...]:
    """Return the sum of `x` over devices, and more; the same bits on each, in the order of ranks.

    Args:
        x: bf16 or f32 `[rows, E]`, at most `REDUCE_ROWS` rows of a multiple of `DATA_BYTES` bytes;
            inside `shard_map`. Or f32 `[parts, rows, E]`, whose parts are added up first, and
            rounded to bf16; with a residual then.
        peers: `i32[2 * devices + 2]`: lower and upper half of the address of each device's memory,
            zero before the first call; the rank of this device, and 0.
        memory: of this device, `i32[1, memory_bytes / 4]`.
        residual: bf16 as x, the same on all devices, is added to the sum.
        weight: bf16 `[E]`, of an RMS norm of the sum.
        eps: of the norm.
        capacity: bytes of the largest array that the memory was made for.

    Returns:
        The sum, and with a weight its norm.
    """
    num_rows, size = x.shape[-2:]
    num_parts = x.shape[0] if x.ndim == 3 else 0
    dtype = jnp.bfloat16 if num_parts else x.dtype
    packets = size * jnp.dtype(dtype).itemsize // DATA_BYTES
    warpgroups = min(pl.cdiv(packets, 128), _MAX_WARPGROUPS)
    operands: dict[str, Any] = {"x": x, "peers": peers, "memory": memory}
    operands |= {} if residual is None else {"residual": residual}
    operands |= {} if weight is None else {"weight": weight}
    results = ("out",) if weight is None else ("out", "normed")
    code = _Code(
        names=(*operands, *results, "sums"),
        is_f32=dtype == jnp.float32,
        num_devices=peers.size // 2 - 1,
        num_rows=num_rows,
        num_parts=num_parts,
        packets=packets,
        capacity=packets_bytes(capacity),
        threads=128 * warpgroups,
        size=size,
        eps=eps,
    ).text()

    def kernel(*refs):  # memory is an operand so that it is not freed before
        plgpu.griddepcontrol_wait()

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def run(_, *refs):
            utils.inline_ptx(code, *map(utils.memref_ptr, refs), has_side_effects=True)

        run(*refs)

    return plgpu.kernel(
        kernel,
        out_type=(result_shape((num_rows, size), dtype),) * len(results),
        scratch_types=(plgpu.SMEM((4 * _MAX_WARPGROUPS,), jnp.float32),),
        grid=(num_rows,),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name="all_reduce",
    )(*operands.values())
