"""Attention whose partial states are united by the kernel that follows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_paged import dispatch
from pallas_paged.checks import default_promotion
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.validation import checked_arrays, logit_options


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UnmergedAttention:
    """The output of `paged_attention` before its last kernel, without gradients.

    Attributes:
        states: from the decode kernel.
        merge: returns `(out [B, Hq, D], lse f32[B, Hq])` of them.
        dtype: of the output.
    """

    states: DecodeStates
    merge: Callable[[DecodeStates], tuple[jax.Array, jax.Array]]
    dtype: Any

    @property
    def shape(self) -> tuple[int, int]:
        """That of the merged output, `[B, Hq * D]`."""
        return self.states.unit_ends.shape[0], self.states.num_q_heads * self.states.head_dim

    def merged(self) -> jax.Array:
        """Return the output `[B, Hq * D]`."""
        with jax.enable_x64(False):
            return self.merge(self.states)[0].reshape(self.shape)


@default_promotion()
def unmerged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    kv_layout: Any = "HPND",
    implementation: Any = None,
) -> UnmergedAttention | None:
    """Do the same as `paged_attention`, without the merge.

    Args:
        q, k_pages, v_pages, block_tables, seq_lens, k_scales, v_scales, sm_scale, soft_cap,
            sliding_window, alibi_slopes, sinks, kv_layout, implementation: as there.

    Returns:
        None where the implementation has no partial states, and on a mesh.

    Raises:
        ValueError, NotImplementedError: as `paged_attention`.
    """
    arrays = checked_arrays(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        block_tables=block_tables,
        seq_lens=seq_lens,
        k_scales=k_scales,
        v_scales=v_scales,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        kv_layout=kv_layout,
        one_query_a_row=True,
    )
    if any(jax.typeof(x).sharding.mesh.size > 1 for x in jax.tree.leaves(arrays)):
        return None
    options = logit_options(
        arrays.head_dim, sm_scale=sm_scale, soft_cap=soft_cap, sliding_window=sliding_window
    )
    found = dispatch.decode_states(arrays, options=options, implementation=implementation)
    if found is None:
        return None
    states, merge = found
    return UnmergedAttention(states=states, merge=merge, dtype=arrays.q.dtype)
