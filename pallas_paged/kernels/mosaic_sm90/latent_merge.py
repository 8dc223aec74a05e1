"""Merge of the partial states of split tiles of latent attention.

A program waits for memory most of the time, so a loop step starts the loads of many partial states
at once. With few rows a program has some columns of one, with many a warp has a row.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.decode_merge import heads_layout, merge_partials
from pallas_paged.kernels.mosaic.ragged_work import MergeDescriptor, unpack
from pallas_paged.kernels.mosaic.softmax_state import finish

_FEW_ROWS = 512  # up to which a row is divided among programs


def merge_latents(
    out: jax.Array,  # [T * Hq, D]
    lse: jax.Array | None,  # f32[T * Hq]
    partials: ops.Partials,  # [partials, R, ..]
    merges: jax.Array,  # i32[num_merges, 5], packed descriptors
    sinks: jax.Array | None,  # f32[Hq]
    *,
    group: int,
    most_rows: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the final `(out, lse)` of a call: the given ones with the rows of split tiles.

    Args:
        group: query heads.
        most_rows: of a tile that are queries.
    """
    head_dim = partials.out.shape[-1]
    num_rows, num_columns, states_per_step = 4, head_dim, 4
    if most_rows * len(merges) <= _FEW_ROWS:
        num_rows, num_columns, states_per_step = 1, 128, 32
    layout = heads_layout(num_rows, num_columns)
    inputs = partials, merges, sinks
    # Written in place: the rows of other tiles are there already.
    results = jax.new_ref(out), None if lse is None else jax.new_ref(lse)

    def body(partials, merges_ref, sinks_ref, results):
        out_ref, lse_ref = results
        part, rows, merge = (lax.axis_index(name) for name in ("part", "rows", "merge"))
        split = unpack(MergeDescriptor, merges_ref, merge)
        row = rows * num_rows
        packed = split.offset + row  # the heads of a token are a multiple of `num_rows`

        @pl.when((split.num_items > 0) & (packed < split.q_len * group))
        def _():
            elements = pl.ds(part * num_columns, num_columns)
            (state,) = merge_partials(
                partials,
                split.partial,
                split.num_items,
                [lambda i: (i, pl.ds(row, num_rows))],
                states_per_step,
                elements,
                layout,
                heads=(num_rows,),
            )
            sink = None
            if sinks_ref is not None:
                heads = pl.ds(lax.rem(packed, group), num_rows)
                sink = ops.load(sinks_ref.at[heads], layout.reduce(1))
            rows_out, rows_lse = finish(state, sink)
            index = pl.ds(split.q_start * group + packed, num_rows)
            ops.store(out_ref.at[index, elements], rows_out.astype(out_ref.dtype))
            if lse_ref is not None:
                ops.store(lse_ref.at[index], rows_lse)

    pl.kernel(
        ops.with_trees(body, *inputs, results),
        out_type=(),
        mesh=plgpu.Mesh(
            # CUDA does not limit the last.
            grid=(head_dim // num_columns, most_rows // num_rows, len(merges)),
            grid_names=("part", "rows", "merge"),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        name="mla_attention_merge",
        interpret=ops.interpreter(interpret),
    )(*jax.tree.leaves((inputs, results)))
    out_ref, lse_ref = results
    return out_ref[...], None if lse_ref is None else lse_ref[...]
