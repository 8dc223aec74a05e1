"""Sums over the programs of a cluster, through distributed shared memory.

Each program of a cluster has a product of the same features over its part of the columns. It sends
one part of the features to each of the others. Parts are added in the order of the programs, so
results have the same bits each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_paged.kernels.mosaic import ops

_BLOCK_BYTES = 2048  # of 8 features: 16 bytes of each thread


def _meet_cluster(barrier: Any) -> None:
    """Wait for the other programs of the cluster."""
    ops.inline(lambda utils: utils.warpgroup_barrier())  # one warp arrives at the others
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def sum_over_cluster(
    accs: Sequence[jax.Array],  # f32[64, n] in the layout of wgmma, with consecutive features
    buffer: Any,  # ref to shared memory, the same in all programs
    transforms: Any,  # of the buffer
    *,
    may_send: Any,  # barrier of the cluster
    sent: Any,  # barrier of the cluster
    part: int,  # features of each program, in units of 8; parts are spread over those of `accs`
    cluster_size: int,  # a power of 2
    num_rows: int,  # that there are
    group: Any,  # i32, which 64 of the rows these are
) -> jax.Array:
    """Return f32 `[64, 8 * part]`, the cluster's sum of this program's part of the features."""
    num_features = 8 * part
    ref, splat = plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT

    def start_of(buffer, group):
        """Return the thread, and where its elements begin in shared memory."""
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        start = llvm.ptrtoint(i32, utils.memref_ptr(buffer))
        start = arith.addi(start, arith.muli(thread, utils.c(16, i32)))
        group_bytes = utils.c(cluster_size * part * _BLOCK_BYTES, i32)
        return thread, arith.addi(start, arith.muli(group, group_bytes))

    @plgpu.inline_mgpu(arg_types=([ops.WGMMA] * len(accs), ref, splat))
    def send(_, accs, buffer, group):
        """Store each program's part of the features in its shared memory."""
        i32 = ir.IntegerType.get_signless(32)
        rank = utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=i32)
        group = group.registers.item()
        thread, start = start_of(buffer, group)
        row = arith.addi(arith.muli(group, utils.c(128, i32)), thread)
        registers = np.concatenate([acc.registers.reshape(-1, 2) for acc in accs])
        # The buffer has the parts of one program after those of another.
        part_of_this = arith.andi(rank, utils.c(cluster_size - 1, i32))
        first = arith.subi(rank, part_of_this)
        start = arith.addi(start, arith.muli(part_of_this, utils.c(part * _BLOCK_BYTES, i32)))
        lines = [
            "{ .reg .pred p; .reg .b32 a, r;",
            f"setp.ge.u32 p, $1, {-(-num_rows // 16) * 32}; @p bra end;",  # 16 rows of a warp
        ]
        operands = []
        for to in range(cluster_size):
            block = to * (len(registers) - part) // (cluster_size - 1)
            lines.append(f"add.u32 r, $2, {to}; mapa.shared::cluster.u32 a, $0, r;")
            for i in range(part):
                names = ", ".join(f"${3 + len(operands) + j}" for j in range(4))
                lines.append(f"st.shared::cluster.v4.f32 [a+{i * _BLOCK_BYTES}], {{{names}}};")
                for register in registers[block + i]:
                    operands += [vector.extract(register, [], [j]) for j in range(2)]
        # Before the arrival at a barrier of the cluster.
        lines.append("fence.acq_rel.cluster; end: }")
        utils.inline_ptx("\n".join(lines), start, row, first, *operands, has_side_effects=True)

    @plgpu.inline_mgpu(
        arg_types=(ref, splat),
        return_type=plgpu.ShapeDtypeStruct((64, num_features), jnp.float32, layout=ops.WGMMA),
    )
    def receive(_, buffer, group):
        """Return the sum of the parts that programs sent to this one."""
        f32 = ir.F32Type.get()
        _, start = start_of(buffer, group.registers.item())
        count = 4 * part
        totals: list[Any] = []
        for i_from in range(cluster_size):
            lines = []
            for i in range(part):
                names = ", ".join(f"${4 * i + j}" for j in range(4))
                at = (i_from * part + i) * _BLOCK_BYTES
                lines.append(f"ld.shared.v4.f32 {{{names}}}, [${count}+{at}];")
            loaded = utils.inline_ptx(
                "\n".join(lines), start, result_types=[f32] * count, has_side_effects=True
            )
            added = [arith.addf(x, y) for x, y in zip(totals, loaded, strict=False)]
            totals = added or loaded
        # Copies may write here next.
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        kind = ir.VectorType.get((2,), f32)
        pairs = [vector.from_elements(kind, totals[i : i + 2]) for i in range(0, count, 2)]
        return ops.of_registers(pairs, ops.WGMMA, (64, num_features))

    _meet_cluster(may_send)
    send(list(accs), buffer, group)
    _meet_cluster(sent)
    return receive(buffer, group)
