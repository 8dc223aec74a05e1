"""Merge of the partial states of split tiles of latent attention, for Ampere and later."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LOG2_E
from pallas_paged.kernels.mosaic import ops as mosaic_ops
from pallas_paged.kernels.mosaic.ops import full
from pallas_paged.kernels.mosaic.ragged_work import MergeDescriptor, unpack
from pallas_paged.kernels.mosaic.softmax_state import finish, merge_partial
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RaggedRows

_ROWS = 16  # of a program


def merge_latent(
    out: jax.Array,  # [T * Hq, D]
    lse: jax.Array | None,  # f32[T * Hq]
    partials: mosaic_ops.Partials,  # [head tiles, partials, R, ..]
    merges: jax.Array,  # i32[num_merges, 5], packed descriptors
    sinks: jax.Array | None,  # f32[head tiles, ..] from `repeat_heads`
    *,
    num_q_heads: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the final `(out, lse)` of a call: the given ones with the rows of split tiles."""
    num_tiles, _, num_rows, head_dim = partials.out.shape
    layouts = ops.MmaLayouts(m_warps=_ROWS // 16)
    inputs = partials, merges, sinks
    # Written in place: the rows of other tiles are there already.
    results = jax.new_ref(out), None if lse is None else jax.new_ref(lse)

    def body(partials: Any, merges_ref: Any, sinks_ref: Any, results: Any) -> None:
        out_ref, lse_ref = results
        part, tile, merge = (lax.axis_index(name) for name in ("part", "head_tile", "merge"))
        split = unpack(MergeDescriptor, merges_ref, merge)
        rows = RaggedRows(
            count=_ROWS,
            group=num_q_heads // num_tiles,
            num_q_heads=num_q_heads,
            kv_head=tile,
            q_start=split.q_start,
            q_len=split.q_len,
            offset=split.offset + part * _ROWS,
            layout=layouts.row,
        )

        @pl.when(split.num_items > 0)
        def _():
            def merge_one(i, state):
                index = (tile, split.partial + i, pl.ds(part * _ROWS, _ROWS))
                lse = mosaic_ops.load(partials.lse.at[index], layouts.row) * LOG2_E
                out = mosaic_ops.load(partials.out.at[index], layouts.acc)
                return merge_partial(state, lse, out, layout=layouts.row, interpret=interpret)

            nothing = (
                full((_ROWS,), -jnp.inf, layouts.row),
                full((_ROWS,), 0.0, layouts.row),
                full((_ROWS, head_dim), 0.0, layouts.acc),
            )
            state = lax.fori_loop(0, split.num_items, merge_one, nothing)
            out, lse = finish(state, None if sinks_ref is None else rows.of_heads(sinks_ref))
            place = rows.first_of_neighbours(), rows.num_neighbours()
            out = out.astype(out_ref.dtype)
            ops.store_words(out_ref, out, *place, layouts.acc, interpret=interpret)
            if lse_ref is not None:
                ops.store_words(lse_ref, lse, *place, layouts.row, interpret=interpret)

    pl.kernel(
        mosaic_ops.with_trees(body, *inputs, results),
        out_type=(),
        mesh=plgpu.Mesh(
            # CUDA does not limit the last.
            grid=(num_rows // _ROWS, num_tiles, merges.shape[0]),
            grid_names=("part", "head_tile", "merge"),
        ),
        compiler_params=ops.COMPILER_PARAMS,
        name="mla_attention_merge",
        interpret=mosaic_ops.interpreter(interpret),
    )(*jax.tree.leaves((inputs, results)))
    out_ref, lse_ref = results
    return out_ref[...], None if lse_ref is None else lse_ref[...]
