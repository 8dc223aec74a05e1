"""The sum of small arrays over the GPUs of a host, a Pallas Mosaic GPU kernel.

Each device writes its array into the memory of all others, over NVLink, and adds up what the others
wrote into its own. That is one message in each direction. Arrays are cut into packets of 16 bytes,
of which 8 are data and 8 say in which call they were sent, so that no message waits for another
(NCCL's protocol "LL"). The memory of a device is

    u32[NUM_PROGRAMS]              calls so far; a copy for each program
    packets[2, devices, capacity]  of calls with even and with odd numbers, by sender

Packets of a call are overwritten two calls later. A device gets there only after it has received
all packets of the call in between, and so after all devices have ended the call before that.

XLA sees no collective. So the kernel can be in the CUDA graph of a loop, where NCCL can not be.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import result_shape

NUM_PROGRAMS = 128  # at most; they must all run at the same time
NUM_THREADS = 128  # of a program
DATA_BYTES = 8  # of a packet
PACKET_BYTES = 16
HEADER_BYTES = 4 * NUM_PROGRAMS
_MAX_POLLS = 1 << 27  # more than a minute


def memory_bytes(num_devices: int, num_bytes: int) -> int:
    """Return the bytes of a device's memory for arrays of up to `num_bytes`."""
    return HEADER_BYTES + 2 * num_devices * _packets_bytes(num_bytes)


def _packets_bytes(num_bytes: int) -> int:
    return pl.cdiv(num_bytes, DATA_BYTES) * PACKET_BYTES


def _add(dtype: Any, acc: str, data: str) -> str:
    """Return PTX that adds the data of a packet `data`0, `data`1 to f32 `acc`0 and so on."""
    if dtype == jnp.float32:
        return "".join(
            f"mov.b32 value, {data}{i}; add.f32 {acc}{i}, {acc}{i}, value;\n" for i in range(2)
        )
    return "".join(
        f"shl.b32 word, {data}{i}, 16; mov.b32 value, word;"
        f" add.f32 {acc}{2 * i}, {acc}{2 * i}, value;\n"
        f"and.b32 word, {data}{i}, 0xffff0000; mov.b32 value, word;"
        f" add.f32 {acc}{2 * i + 1}, {acc}{2 * i + 1}, value;\n"
        for i in range(2)
    )


def _round(dtype: Any, acc: str) -> str:
    """Return PTX that sets `data0`, `data1` to f32 `acc`0 and so on."""
    if dtype == jnp.float32:
        return f"mov.b32 data0, {acc}0; mov.b32 data1, {acc}1;\n"
    return "".join(
        f"cvt.rn.bf16x2.f32 data{i}, {acc}{2 * i + 1}, {acc}{2 * i};\n" for i in range(2)
    )


def _code(dtype: Any, num_devices: int, num_packets: int, num_programs: int, capacity: int) -> str:
    """Return the kernel in PTX; `$0` to `$2` are the addresses of x, of the peers and of out."""
    threads = num_programs * NUM_THREADS
    rounds = range(pl.cdiv(num_packets, threads))
    ranks = range(num_devices)
    code = [
        "{",
        ".reg .pred mine, valid, wait, wrong, last;",
        ".reg .b32 rank, call, program, thread, word, polls, data<2>, flag<2>, index;",
        f".reg .b32 x0_<{len(rounds)}>, x1_<{len(rounds)}>, unit<{len(rounds)}>;",
        f".reg .b64 address, offset, own, sent, received, peer<{num_devices}>;",
        ".reg .f32 value, acc<4>;",
        "mov.u32 program, %ctaid.x; mov.u32 thread, %tid.x;",
        f"ld.global.b32 rank, [$1+{8 * num_devices}];",
        *(f"ld.global.b64 peer{r}, [$1+{8 * r}];" for r in ranks),
        "mov.b64 own, peer0;",
        *(f"setp.eq.u32 mine, rank, {r}; @mine mov.b64 own, peer{r};" for r in ranks[1:]),
        # The number of this call, from 1. After 2^32 - 1 comes 2: never 0, and odd after even.
        "mul.wide.u32 offset, program, 4; add.s64 address, own, offset;",
        "ld.volatile.global.u32 call, [address]; add.u32 call, call, 1;",
        "setp.eq.u32 wrong, call, 0; @wrong mov.u32 call, 2;",
        f"and.b32 word, call, 1; mul.wide.u32 offset, word, {num_devices * capacity};",
        f"add.s64 received, offset, {HEADER_BYTES};",
        f"mul.wide.u32 offset, rank, {capacity}; add.s64 sent, received, offset;",
        "add.s64 received, received, own;",
        f"mad.lo.u32 unit0, program, {NUM_THREADS}, thread;",
    ]
    for i in rounds:
        if i:
            code.append(f"add.u32 unit{i}, unit{i - 1}, {threads};")
        code += [
            f"setp.lt.u32 valid, unit{i}, {num_packets};",
            f"mul.wide.u32 offset, unit{i}, {DATA_BYTES}; add.s64 address, $0, offset;",
            f"@valid ld.global.v2.b32 {{x0_{i}, x1_{i}}}, [address];",
        ]
    for i in rounds:
        code += [
            f"mul.wide.u32 offset, unit{i}, {PACKET_BYTES}; add.s64 offset, offset, sent;",
            *(
                f"setp.lt.u32 valid, unit{i}, {num_packets};"
                f"setp.ne.and.u32 valid, rank, {r}, valid; add.s64 address, peer{r}, offset;"
                f"@valid st.volatile.global.v4.b32 [address], {{x0_{i}, call, x1_{i}, call}};"
                for r in ranks
            ),
        ]
    for i in rounds:
        code += [
            f"setp.ge.u32 wrong, unit{i}, {num_packets}; @wrong bra END{i};",
            f"mul.wide.u32 offset, unit{i}, {PACKET_BYTES}; add.s64 address, received, offset;",
            *(f"mov.f32 acc{j}, 0f00000000;" for j in range(4)),
        ]
        for r in ranks:
            code += [
                f"mov.b32 data0, x0_{i}; mov.b32 data1, x1_{i};",
                f"setp.eq.u32 mine, rank, {r}; @mine bra SUM{i}_{r};",
                "mov.u32 polls, 0;",
                f"POLL{i}_{r}:",
                "ld.volatile.global.v4.b32 {data0, flag0, data1, flag1}, "
                f"[address+{r * capacity}];",
                "setp.ne.u32 wait, flag0, call; setp.ne.or.u32 wait, flag1, call, wait;",
                "add.u32 polls, polls, 1;",
                f"setp.gt.u32 last, polls, {_MAX_POLLS}; @last trap;",
                f"@wait bra POLL{i}_{r};",
                f"SUM{i}_{r}:",
                _add(dtype, "acc", "data"),
            ]
        code += [
            _round(dtype, "acc"),
            f"mul.wide.u32 offset, unit{i}, {DATA_BYTES}; add.s64 address, $2, offset;",
            "st.global.v2.b32 [address], {data0, data1};",
            f"END{i}:",
        ]
    code += [
        "bar.sync 0;",  # all threads have read the number of the call
        f"mad.lo.u32 index, thread, {num_programs}, program;",
        f"setp.lt.u32 valid, index, {NUM_PROGRAMS};",
        "mul.wide.u32 offset, index, 4; add.s64 address, own, offset;",
        "@valid st.volatile.global.u32 [address], call;",
        "}",
    ]
    return "\n".join(code)


def _kernel(x_ref: Any, peers_ref: Any, memory_ref: Any, out_ref: Any, *, code: str) -> None:
    del memory_ref  # an operand so that it is not freed before
    plgpu.griddepcontrol_wait()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()))
    def run(_, *refs):
        from jax.experimental.mosaic.gpu import utils

        pointers = map(utils.memref_ptr, refs)
        utils.inline_ptx(code, *pointers, has_side_effects=True)

    run(x_ref, peers_ref, out_ref)


def all_reduce(x: jax.Array, peers: jax.Array, memory: jax.Array, *, capacity: int) -> jax.Array:
    """Return the sum of `x` over devices, the same bits on each, in the order of their ranks.

    Args:
        x: bf16 or f32, a multiple of `DATA_BYTES` bytes; inside `shard_map`.
        peers: `i32[2 * devices + 2]`: lower and upper half of the address of each device's memory,
            zero before the first call; the rank of this device, and 0.
        memory: of this device, `i32[1, memory_bytes / 4]`.
        capacity: bytes of the largest array that the memory was made for.
    """
    num_devices = peers.size // 2 - 1
    num_packets = x.size * x.dtype.itemsize // DATA_BYTES
    num_programs = min(pl.cdiv(num_packets, NUM_THREADS), NUM_PROGRAMS)
    sizes = num_devices, num_packets, num_programs, _packets_bytes(capacity)
    return plgpu.kernel(
        functools.partial(_kernel, code=_code(x.dtype, *sizes)),
        out_type=result_shape(x.shape, x.dtype),
        grid=(num_programs,),
        grid_names=("program",),
        kernel_name="all_reduce",
    )(x, peers, memory)
