"""Merge of the partial states of split tiles, a Pallas Mosaic GPU kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LOG2_E
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.ragged_work import MergeDescriptor, RaggedOutputs, unpack
from pallas_paged.kernels.mosaic.softmax_state import empty_state, finish, merge_partial
from pallas_paged.kernels.mosaic_sm90.ragged_tile import (
    WG_ROWS,
    TileRows,
    TileShape,
    store_buffer,
    store_rows,
)


def _merge_ragged_kernel(
    inputs: Any,  # `Partials`, merges and sinks of `merge_ragged`, and `RaggedOutputs`
    no_outputs: Any,
    buffer: Any,  # of `store_buffer`
    *,
    tile: TileShape,
    interpret: bool,
) -> None:
    """Run one program: the final results of 64 rows of a split tile."""
    partials, merges_ref, sinks_ref, outputs = inputs
    head_tile, merge, wg = (lax.axis_index(name) for name in ("head_tile", "merge", "wg"))
    # Every program waits, idle ones too: otherwise the next kernel could start before the attention
    # kernel ends. The wait comes before the first read.
    ops.wait_for_previous_kernel(interpret=interpret)
    split = unpack(MergeDescriptor, merges_ref, merge)
    first = lax.rem(head_tile, tile.num_head_tiles) * tile.num_heads
    rows = TileRows(
        tile=tile,
        wg=wg,
        q_start=split.q_start,
        q_len=split.q_len,
        offset=split.offset,
        first_head=lax.div(head_tile, tile.num_head_tiles) * tile.group + first,
        num_heads=jnp.minimum(tile.group - first, tile.num_heads),
    )

    @pl.when(split.num_items > 0)
    def _():
        def merge_one(i, state):
            index = (head_tile, split.partial + i, wg)
            lse = ops.load(partials.lse.at[index], ops.WGMMA_ROW) * LOG2_E
            out = ops.load(partials.out.at[index], ops.WGMMA)
            return merge_partial(state, lse, out, interpret=interpret)

        empty = empty_state(WG_ROWS, partials.out.shape[-1])
        state = lax.fori_loop(0, split.num_items, merge_one, empty)
        sinks = None if sinks_ref is None else rows.per_head(sinks_ref)
        store_rows(outputs, buffer.at[0], rows, *finish(state, sinks), interpret=interpret)
        plgpu.wait_smem_to_gmem(0)


def merge_ragged(
    outputs: RaggedOutputs,
    merges: jax.Array,  # i32[num_merges, 5], packed descriptors
    sinks: jax.Array | None,  # f32[Hq]
    *,
    tile: TileShape,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the final `(out, lse)` of a call: `outputs` with the rows of split tiles."""
    partials, out, lse = outputs.partials, outputs.out, outputs.lse
    # Written in place: the rows of other tiles are there already.
    results = RaggedOutputs(
        out=jax.new_ref(out), partials=None, lse=None if lse is None else jax.new_ref(lse)
    )
    head_tiles, _, num_warpgroups, *_ = partials.out.shape
    ops.run_kernel(
        functools.partial(_merge_ragged_kernel, tile=tile, interpret=interpret),
        (partials, merges, sinks, results),
        (),
        store_buffer(num_warpgroups=1, head_dim=out.shape[-1], dtype=out.dtype),
        name="ragged_paged_attention_merge",
        params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        grid=(num_warpgroups, head_tiles, merges.shape[0]),  # CUDA does not limit the last
        grid_names=("wg", "head_tile", "merge"),
    )
    return results.out[...], None if lse is None else results.lse[...]
