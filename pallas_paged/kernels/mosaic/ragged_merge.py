"""Merge of the partial states of split tiles, a Pallas Mosaic GPU kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LOG2_E
from pallas_paged.kernels.mosaic.ops import (
    MATRIX,
    ROWS,
    along,
    full,
    interpreter,
    load,
    wait_for_previous_kernel,
)
from pallas_paged.kernels.mosaic.ragged_tile import (
    WG_ROWS,
    Rows,
    TileShape,
    finish,
    per_head,
    store_tile,
    store_types,
)


def merge_tiles_kernel(refs: dict[str, Any], *, tile: TileShape, group: int, interpret: bool):
    head_block, merge, wg = (lax.axis_index(name) for name in ("head_block", "merge", "wg"))
    # By all programs, or the next kernel might start before the previous one ends; and before
    # anything is read, whoever wrote it.
    wait_for_previous_kernel(interpret=interpret)
    num_splits, slot, q_start, q_len, offset = (refs["merges"][merge, i] for i in range(5))
    first = lax.rem(head_block, tile.num_blocks) * tile.num_heads
    rows = Rows(
        tile=tile,
        wg=wg,
        q_start=q_start,
        q_len=q_len,
        offset=offset,
        first_head=lax.div(head_block, tile.num_blocks) * group + first,
        num_heads=jnp.minimum(group - first, tile.num_heads),
    )

    @pl.when(num_splits > 0)
    def _():
        head_dim = refs["outs"].shape[-1]

        def merge_one(i, state):
            m_i, l_i, acc = state
            lse = load(refs["lses"].at[head_block, slot + i, wg], ROWS) * LOG2_E
            out = load(refs["outs"].at[head_block, slot + i, wg], MATRIX)
            m_new = jnp.maximum(m_i, lse)
            m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # rows that saw nothing yet
            alpha, w = jnp.exp2(m_i - m_safe), jnp.exp2(lse - m_safe)
            return m_new, l_i * alpha + w, acc * along(alpha, acc) + out * along(w, out)

        state = (
            full((WG_ROWS,), -jnp.inf, ROWS),
            full((WG_ROWS,), 0.0, ROWS),
            full((WG_ROWS, head_dim), 0.0, MATRIX),
        )
        state = lax.fori_loop(0, num_splits, merge_one, state)
        sinks = per_head(refs["sinks"], rows, ROWS) if "sinks" in refs else None
        store_tile(refs, 0, rows, *finish(state, sinks))
        plgpu.wait_smem_to_gmem(0)


def merge_tiles(
    out: jax.Array,  # [T, Hq, D]
    lse: jax.Array | None,  # f32[T, Hq]
    outs: jax.Array,  # f32[head blocks, slots, warpgroups, 64, D]
    lses: jax.Array,  # f32[head blocks, slots, warpgroups, 64]
    merges: jax.Array,  # i32[num_merges, 5]: num_splits, first slot, q_start, q_len, offset
    sinks: jax.Array | None,  # f32[Hq]
    *,
    tile: TileShape,
    group: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """`(out, lse)` with the rows of tiles that several programs shared, from the slots."""
    inputs = {"outs": outs, "lses": lses, "merges": merges}
    if sinks is not None:
        inputs["sinks"] = sinks
    # Written in place: most tiles are there already.
    results = {"out": jax.new_ref(out)}
    if lse is not None:
        results["lse"] = jax.new_ref(lse)

    def body(*refs):
        named = dict(zip((*inputs, *results), refs, strict=True))

        def kernel(**scratch):
            merge_tiles_kernel({**named, **scratch}, tile=tile, group=group, interpret=interpret)

        types = store_types(
            num_warpgroups=1, head_dim=out.shape[-1], dtype=out.dtype, with_lse=lse is not None
        )
        pl.run_scoped(kernel, **types)

    pl.kernel(
        body,
        out_type=(),
        mesh=plgpu.Mesh(
            grid=(outs.shape[2], outs.shape[0], merges.shape[0]),  # the last has no limit
            grid_names=("wg", "head_block", "merge"),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(interpret),
        name="ragged_paged_attention_merge",
    )(*inputs.values(), *results.values())
    return results["out"][...], None if lse is None else results["lse"][...]
