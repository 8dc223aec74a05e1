"""Merge of the partial states of split tiles, for Ampere and later."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LOG2_E
from pallas_paged.kernels.mosaic import ops as wgmma_ops
from pallas_paged.kernels.mosaic.ragged_work import MergeDescriptor, RaggedOutputs, unpack
from pallas_paged.kernels.mosaic.softmax_state import empty_state, finish, merge_partial
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import result_columns
from pallas_paged.kernels.mosaic_sm80.ragged_products import padded
from pallas_paged.kernels.mosaic_sm80.ragged_rows import (
    ROW,
    ROWS,
    RaggedRows,
    columns_of_part,
    store_rows,
)

_ROWS = 64  # of a program


def merge_ragged(
    outputs: RaggedOutputs,
    merges: jax.Array,  # i32[num_merges, 5], packed descriptors
    sinks: jax.Array | None,  # f32[Hkv, ..] from `repeat_heads`
    *,
    group: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the final `(out, lse)` of a call: `outputs` with the rows of split tiles."""
    out, lse, partials = outputs.out, outputs.lse, outputs.partials
    num_kv_heads, _, num_rows, head_dim = partials.out.shape
    num_parts, num_columns = result_columns(head_dim)
    # Written in place: the rows of other tiles are there already.
    results = jax.new_ref(out), None if lse is None else jax.new_ref(lse)
    buffers = (
        plgpu.SMEM((_ROWS, padded(num_columns, out.dtype)), out.dtype),
        plgpu.SMEM((_ROWS,), jnp.int32),
    )

    def body(inputs, _, buffers):
        partials, merges_ref, sinks_ref, (out_ref, lse_ref) = inputs
        buffer, row_index = buffers
        tile, kv_head, merge = (lax.axis_index(name) for name in ("tile", "kv_head", "merge"))
        part = 0
        if num_parts > 1:
            tile, part = lax.div(tile, num_parts), lax.rem(tile, num_parts)
        columns = columns_of_part(part, head_dim)
        split = unpack(MergeDescriptor, merges_ref, merge)
        rows = RaggedRows(
            count=_ROWS,
            group=group,
            num_q_heads=group * num_kv_heads,
            kv_head=kv_head,
            q_start=split.q_start,
            q_len=split.q_len,
            offset=split.offset + tile * _ROWS,
        )

        @pl.when(split.num_items > 0)
        def _():
            def merge_one(i, state):
                index = (kv_head, split.partial + i, pl.ds(tile * _ROWS, _ROWS))
                lse = wgmma_ops.load(partials.lse.at[index], ROW) * LOG2_E
                out = wgmma_ops.load(partials.out.at[(*index, columns)], ROWS)
                return merge_partial(state, lse, out, interpret=interpret)

            state = lax.fori_loop(0, split.num_items, merge_one, empty_state(_ROWS, num_columns))
            row_index[...] = rows.index()
            state_sinks = None if sinks_ref is None else rows.of_heads(sinks_ref)
            store_rows(
                out_ref.at[:, columns],
                lse_ref,
                buffer,
                row_index,
                *finish(state, state_sinks),
                head_dim=head_dim,
                interpret=interpret,
            )

    wgmma_ops.run_kernel(
        body,
        (partials, merges, sinks, results),
        (),
        buffers,
        name="ragged_paged_attention_merge",
        params=ops.COMPILER_PARAMS,
        interpret=interpret,
        # CUDA does not limit the last.
        grid=(num_rows // _ROWS * num_parts, num_kv_heads, merges.shape[0]),
        grid_names=("tile", "kv_head", "merge"),
    )
    out_ref, lse_ref = results
    return out_ref[...], None if lse_ref is None else lse_ref[...]
