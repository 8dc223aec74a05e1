"""Sums of tiles of a product over the GPUs of a host, inside of a kernel.

A program writes its tile into the memory of all other devices, and adds up what their programs
wrote into its own, in the order of ranks. The flag is in the data: a word of two elements is 0
until it has arrived, for a zero is sent as -0, and the program clears it when it has read it. Such
a sum counts as one call of `all_reduce`, which has the reason why nothing is overwritten too early.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_paged.decoder.kernels.batch_config import GROUP_BYTES
from pallas_paged.decoder.kernels.peer_memory import MAX_POLLS, PeerMemory, own_address
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm90.config import REDUCE_ROWS

PER_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def load_count(peers: PeerMemory, program: Any, start: int = 0) -> jax.Array:
    """Return a program's copy of a number in the memory, i32`[128]`: one for each thread.

    Args:
        start: bytes before the first copy.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=PER_THREAD),
    )
    def load(_, addresses, program):
        i32 = ir.IntegerType.get_signless(32)
        count = utils.inline_ptx(
            f"{{ .reg .b64 own; .reg .b32 rank; {own_address('$1', peers.num_devices)}"
            f" mad.wide.u32 own, $2, 4, own; ld.volatile.global.u32 $0, [own+{start}]; }}",
            utils.memref_ptr(addresses),
            program.registers.item(),
            result_types=i32,
            has_side_effects=True,
        )
        vector = utils.bitcast(count, ir.VectorType.get((1,), i32))
        return ops.of_registers([vector], PER_THREAD, (128,), is_signed=True)

    return load(peers.addresses, program)


def store_count(
    peers: PeerMemory, count: jax.Array, *, program: Any, num_programs: int, start: int = 0
) -> None:
    """Store a number for later kernels: the copies that are this program's part of all.

    One warpgroup of each program calls this, after all of the program have loaded the number.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, plgpu.Layout.WG_SPLAT))
    def store(_, addresses, count, program):
        utils.inline_ptx(
            "{ .reg .pred p; .reg .b64 own; .reg .b32 rank, i;"
            + own_address("$0", peers.num_devices)
            + f"and.b32 i, $3, 127; mad.lo.u32 i, i, {num_programs}, $2;"
            f"setp.lt.u32 p, i, {REDUCE_ROWS}; mad.wide.u32 own, i, 4, own;"
            f"@p st.volatile.global.u32 [own+{start}], $1; }}",
            utils.memref_ptr(addresses),
            utils.bitcast(count.registers.item(), ir.IntegerType.get_signless(32)),
            program.registers.item(),
            utils.thread_idx(),
            has_side_effects=True,
        )

    store(peers.addresses, count, program)


def next_number(count: jax.Array) -> jax.Array:
    """Return the number of the next sum, as `all_reduce` counts."""
    return jnp.where(count == -1, 2, count + 1)


def sum_over_devices(
    x: jax.Array, peers: PeerMemory, number: jax.Array, *, tile: Any, group: Any, num_rows: int
) -> jax.Array:
    """Return f32 `[64, n]`, the sum of bf16 `x` over the devices; the same bits on each.

    Args:
        x: in the layout of wgmma.
        peers: of the devices.
        number: of this sum, i32`[128]`.
        tile: i32, where the tile is among those of all programs.
        group: i32, which 64 of the rows these are.
        num_rows: rows that there are.
    """
    num_groups = x.shape[1] // 8
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=ops.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(
            *(plgpu.RefType(), ops.WGMMA, PER_THREAD),
            *(plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        ),
        return_type=result,
    )
    def add_up(_, addresses, x, number, tile, group):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        words = [utils.bitcast(pair, i32) for pair in x.registers.reshape(-1)]
        totals = utils.inline_ptx(
            _sum_code(peers, num_groups, num_rows),
            utils.memref_ptr(addresses),
            utils.bitcast(number.registers.item(), i32),
            tile.registers.item(),
            group.registers.item(),
            utils.thread_idx(),
            *words,
            result_types=[f32] * (2 * len(words)),
            has_side_effects=True,
        )
        kind = ir.VectorType.get((2,), f32)
        pairs = [vector.from_elements(kind, totals[i : i + 2]) for i in range(0, len(totals), 2)]
        return ops.of_registers(pairs, ops.WGMMA, x.shape)

    return add_up(peers.addresses, x, number, tile, group)


def _sum_code(peers: PeerMemory, num_groups: int, num_rows: int) -> str:
    """Return PTX that sets `$0` and so on to the sums.

    Then come the addresses, the number of the sum, the tile, the group, the thread and the words.
    """
    num_devices, capacity = peers.num_devices, peers.capacity
    num_words = 2 * num_groups
    count = 2 * num_words  # of sums
    addresses, number, tile, group, thread = (f"${count + i}" for i in range(5))
    words = range(num_words)
    # 16 bytes of each thread after one another, and 8 bytes where an odd group is left.
    parts = [range(i, min(i + 4, num_words)) for i in range(0, num_words, 4)]

    def names(name: str, part: range) -> str:
        return f"{{{', '.join(f'{name}{i}' for i in part)}}}"

    def place(part: range, start: int = 0) -> tuple[str, str]:
        base = "a" if len(part) == 4 else "b"
        return f"v{len(part)}.b32", f"[{base}+{start + part[0] * GROUP_BYTES // 2}]"

    lines = [
        "{ .reg .pred p, mine; .reg .b64 own, peer, a, b, received, sent;",
        ".reg .b32 rank, row, lane, word, polls, empty; .reg .f32 value;",
        f".reg .b32 x<{num_words}>, data<{num_words}>; .reg .f32 total<{count}>;",
        own_address(addresses, num_devices),
        *(f"mov.b32 x{i}, ${count + 5 + i};" for i in words),
        *(f"setp.eq.u32 p, x{i}, 0; @p mov.b32 x{i}, {1 << 31};" for i in words),
        *(f"mov.f32 total{i}, 0f00000000;" for i in range(count)),
        # The first row of a thread, of which a warp has 16: 8 at a time.
        f"and.b32 lane, {thread}, 127; shr.u32 row, lane, 5; shl.b32 row, row, 4;",
        f"mad.lo.u32 row, {group}, 64, row; setp.ge.u32 p, row, {num_rows}; @p bra end;",
        f"mov.b32 empty, 0; and.b32 word, {number}, 1;",
        f"mul.wide.u32 received, word, {num_devices * capacity};",
        f"mad.wide.u32 received, {tile}, {num_groups * GROUP_BYTES}, received;",
        f"add.s64 received, received, {peers.words_start};",
        f"mad.wide.u32 sent, rank, {capacity}, received; add.s64 received, received, own;",
    ]
    for r in range(num_devices):
        lines += [
            f"setp.eq.u32 mine, rank, {r}; @mine bra sent{r};",
            f"ld.global.b64 peer, [{addresses}+{8 * r}]; add.s64 peer, peer, sent;",
            "mad.wide.u32 a, lane, 16, peer; mad.wide.u32 b, lane, 8, peer;",
        ]
        for part in parts:
            kind, at = place(part)
            lines.append(f"st.relaxed.sys.global.{kind} {at}, {names('x', part)};")
        lines.append(f"sent{r}:")
    lines.append("mad.wide.u32 a, lane, 16, received; mad.wide.u32 b, lane, 8, received;")
    for r in range(num_devices):
        lines += [f"mov.b32 data{i}, x{i};" for i in words]
        lines.append(f"setp.eq.u32 mine, rank, {r}; @mine bra got{r};")
        lines.append(f"mov.u32 polls, 0; poll{r}:")
        lines.append(f"add.u32 polls, polls, 1; setp.gt.u32 p, polls, {MAX_POLLS}; @p trap;")
        for part in parts:
            kind, at = place(part, r * capacity)
            lines.append(f"ld.relaxed.sys.global.{kind} {names('data', part)}, {at};")
        lines.append("setp.eq.u32 p, data0, 0;")
        lines += [f"setp.eq.or.u32 p, data{i}, 0, p;" for i in words[1:]]
        lines.append(f"@p bra poll{r};")
        for part in parts:
            kind, at = place(part, r * capacity)
            zeros = ", ".join(["empty"] * len(part))
            lines.append(f"st.relaxed.sys.global.{kind} {at}, {{{zeros}}};")
        lines.append(f"got{r}:")
        for i in words:
            for j, bits in enumerate(("shl.b32 word, {}, 16;", "and.b32 word, {}, -65536;")):
                total = f"total{2 * i + j}"
                lines.append(f"{bits.format(f'data{i}')} mov.b32 value, word;")
                lines.append(f"add.f32 {total}, {total}, value;")
    lines.append("end:")
    lines += [f"mov.f32 ${i}, total{i};" for i in range(count)]
    return "\n".join([*lines, "}"])
