"""Partial sums of one row that the programs of all GPUs of a host publish for one another.

As in `one_row_mailbox` the flag is in the data, and each program publishes its sums in the mailbox
of every device. There are three mailboxes for calls one after the other. A call clears that of the
call before, in which the devices write two calls later: they get there only after they have
received all sums of the call in between, and so after this call has ended.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_paged.decoder.kernels.device_sums import PER_THREAD, load_count, store_count
from pallas_paged.decoder.kernels.one_row_mailbox import poll, published
from pallas_paged.decoder.kernels.peer_memory import (
    HEADER_BYTES,
    NUM_BUFFERS,
    ROW_BYTES,
    PeerMemory,
    own_address,
)
from pallas_paged.kernels.mosaic import ops

_CLEARED = 16  # bytes of a thread at once


def begin(peers: PeerMemory, *, program: Any, num_programs: int) -> jax.Array:
    """Clear this program's part of the mailbox of the call before.

    Returns:
        Which mailbox is that of this call, i32`[128]`: one for each thread of the warpgroup.
    """
    buffer = load_count(peers, program, peers.buffers_start)
    last = jnp.where(buffer == 0, NUM_BUFFERS - 1, buffer - 1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, plgpu.Layout.WG_SPLAT))
    def clear(_, addresses, last, program):
        step = 128 * num_programs
        utils.inline_ptx(
            "{ .reg .pred p; .reg .b64 own, a; .reg .b32 rank, i, zero;"
            + own_address("$0", peers.num_devices)
            + f"add.s64 own, own, {_start(peers)}; mad.wide.u32 own, $1, {ROW_BYTES}, own;"
            "and.b32 i, $3, 127; mad.lo.u32 i, $2, 128, i; mov.b32 zero, 0; again:"
            f"setp.ge.u32 p, i, {ROW_BYTES // _CLEARED}; @p bra end;"
            f"mad.wide.u32 a, i, {_CLEARED}, own;"
            "st.relaxed.sys.global.v4.b32 [a], {zero, zero, zero, zero};"
            f"add.u32 i, i, {step}; bra again; end: }}",
            utils.memref_ptr(addresses),
            utils.bitcast(last.registers.item(), ir.IntegerType.get_signless(32)),
            program.registers.item(),
            utils.thread_idx(),
            has_side_effects=True,
        )

    clear(peers.addresses, last, program)
    return buffer


def end(peers: PeerMemory, buffer: jax.Array, *, program: Any, num_programs: int) -> None:
    """Leave the mailbox of the next call to it."""
    following = jnp.where(buffer == NUM_BUFFERS - 1, 0, buffer + 1)
    how = dict(program=program, num_programs=num_programs, start=peers.buffers_start)
    store_count(peers, following, **how)


def publish(
    peers: PeerMemory, buffer: jax.Array, indices: jax.Array, values: jax.Array, *, per_rank: int
) -> None:
    """Publish sums of wgmma f32`[64]` to all devices, and to this one.

    Args:
        buffer: from `begin`.
        indices: i32`[64]`, their elements; nothing is stored at negative ones.
        per_rank: elements from those of a device to those of the next.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, ops.WGMMA_ROW, ops.WGMMA_ROW))
    def store(_, addresses, buffer, indices, values):
        i32 = ir.IntegerType.get_signless(32)
        count = indices.registers.size
        lines = [
            "{ .reg .pred p; .reg .b64 own, a; .reg .b32 rank, first, i;",
            own_address("$0", peers.num_devices),
            f"mul.lo.u32 first, rank, {per_rank};",
            f"mad.lo.u32 first, $1, {ROW_BYTES // 4}, first;",
        ]
        for r in range(peers.num_devices):
            lines.append(f"ld.global.b64 own, [$0+{8 * r}];")
            for n in range(count):
                lines.append(f"setp.ge.s32 p, ${2 + n}, 0; add.u32 i, ${2 + n}, first;")
                lines.append(f"mad.wide.u32 a, i, 4, own; add.s64 a, a, {_start(peers)};")
                lines.append(f"@p st.relaxed.sys.global.b32 [a], ${2 + count + n};")
        registers = [*indices.registers.flat, *values.registers.flat]
        utils.inline_ptx(
            "\n".join([*lines, "}"]),
            utils.memref_ptr(addresses),
            utils.bitcast(buffer.registers.item(), i32),
            *(utils.bitcast(register, i32) for register in registers),
            has_side_effects=True,
        )

    store(peers.addresses, buffer, indices, published(values))


def wait(
    peers: PeerMemory, buffer: jax.Array, starts: list[int], layout: Any, size: int
) -> list[jax.Array]:
    """Wait until all elements from each start on were published; return f32`[size]` of each.

    Args:
        buffer: from `begin`.
        layout: layout of the results, `WG_STRIDED`.
    """
    result = plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD), return_type=[result] * len(starts))
    def load(_, addresses, buffer):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        own = utils.inline_ptx(
            f"{{ .reg .b64 own; .reg .b32 rank; {own_address('$1', peers.num_devices)}"
            f" mad.wide.u32 own, $2, {ROW_BYTES}, own; add.s64 $0, own, {_start(peers)}; }}",
            utils.memref_ptr(addresses),
            utils.bitcast(buffer.registers.item(), i32),
            result_types=i64,
            has_side_effects=True,
        )
        bases = [arith.addi(own, utils.c(4 * start, i64)) for start in starts]
        return poll(bases, layout, size, scope="sys")

    return load(peers.addresses, buffer)


def _start(peers: PeerMemory) -> int:
    return peers.buffers_start + HEADER_BYTES
