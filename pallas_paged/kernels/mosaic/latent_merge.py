"""Merge of the partial states of split tiles of latent attention.

A program has rows of one tile. With many states of a tile it has few elements, and loads
those of many states at once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Self

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.mosaic import ops as mosaic_ops
from pallas_paged.kernels.mosaic.decode_merge import heads_layout, merge_partials
from pallas_paged.kernels.mosaic.ragged_work import (
    MergeDescriptor,
    RaggedOutputs,
    of_tokens,
    unpack,
)
from pallas_paged.kernels.mosaic.softmax_state import finish
from pallas_paged.kernels.ragged_plan import PlanShape

_FEW_STATES = 8  # of a tile


@dataclasses.dataclass(frozen=True)
class MergeShape:
    """What a program of the merge has."""

    rows: int  # 1, 2 or 4 of a tile, all within a sequence or all past its end
    columns: int  # of their results
    block_s: int  # partial states per loop step

    @classmethod
    def of(cls, shape: PlanShape, head_dim: int) -> Self:
        """Return the sizes for a plan, from static sizes only."""
        # Under a fixed split size the order of sums must not depend on the batch.
        if shape.fixed_split_size is not None:
            return cls(rows=math.gcd(2, shape.group), columns=head_dim, block_s=_FEW_STATES)
        if shape.num_programs <= shape.num_tiles * _FEW_STATES // 2:
            block_s = 2 * -(-shape.num_programs // shape.num_tiles)
            rows = math.gcd(4 if block_s <= 4 else 2, shape.group)
            return cls(rows=rows, columns=head_dim, block_s=block_s)
        return cls(rows=1, columns=math.gcd(head_dim, 128), block_s=32)


def merge_latent(
    outputs: RaggedOutputs,  # partials [head tiles, partials, R, ..]
    merges: jax.Array,  # i32[num_merges, 5], packed descriptors
    plan_shape: PlanShape,
    arrays: Arrays,
    *,
    most_rows: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the final `(out, lse)` of a call: `outputs` with the rows of split tiles.

    Args:
        most_rows: of a tile that may be queries, a multiple of those of a program.
    """
    out, lse, partials = outputs.out, outputs.lse, outputs.partials
    num_tiles, _, _, head_dim = partials.out.shape
    num_q_heads, sinks = arrays.num_q_heads, arrays.sinks
    shape = MergeShape.of(plan_shape, head_dim)
    group, layout = num_q_heads // num_tiles, heads_layout(shape.rows, shape.columns)
    # Written in place: the rows of other tiles are there already.
    results = jax.new_ref(out), None if lse is None else jax.new_ref(lse)

    def body(inputs, _):
        partials, merges_ref, sinks_ref, (out_ref, lse_ref) = inputs
        program, tile, merge = (lax.axis_index(x) for x in ("program", "head_tile", "merge"))
        num_parts = head_dim // shape.columns
        row = lax.div(program, num_parts) * shape.rows
        columns = pl.ds(lax.rem(program, num_parts) * shape.columns, shape.columns)
        split = unpack(MergeDescriptor, merges_ref, merge)
        offset = split.offset + row

        @pl.when((split.num_items > 0) & (offset < split.q_len * group))
        def _():
            (state,) = merge_partials(
                partials,
                split.partial,
                split.num_items,
                [lambda i: (tile, i, pl.ds(row, shape.rows))],
                shape.block_s,
                columns,
                layout,
                heads=(shape.rows,),
                may_be_empty=True,
            )
            token, head = split.q_start + lax.div(offset, group), lax.rem(offset, group)
            head = tile * group + head
            heads, rows = (pl.ds(first, shape.rows) for first in (head, token * num_q_heads + head))
            of_heads = None
            if sinks_ref is not None:
                of_heads = mosaic_ops.load(sinks_ref.at[heads], layout.reduce(1))
            out, lse = finish(state, of_heads)
            mosaic_ops.store(out_ref.at[rows, columns], out.astype(out_ref.dtype))
            if lse_ref is not None:  # all parts have the same
                mosaic_ops.store(lse_ref.at[rows], lse)

    num_programs = most_rows // shape.rows * (head_dim // shape.columns)
    mosaic_ops.run_kernel(
        body,
        (partials, merges, sinks, results),
        (),
        name="mla_attention_merge",
        params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        grid=(num_programs, num_tiles, merges.shape[0]),  # CUDA does not limit the last
        grid_names=("program", "head_tile", "merge"),
    )
    out_ref, lse_ref = results
    lse = None if lse_ref is None else lse_ref[...]
    return of_tokens(out_ref[...], lse, arrays.q.shape[0], num_q_heads)
