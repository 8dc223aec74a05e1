"""tokamax: `tokamax.ops.ragged_paged_attention` on this library."""

from __future__ import annotations

from typing import Any

import jax

from pallas_paged.interop import rpa

__all__ = ["ragged_paged_attention"]


def ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    kv_layout: str = "head_along_sublane",
    cp_group_size: int | None = None,
    cp_rank: jax.Array | None = None,
    attention_scope: str = "full",
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Write new K/V and attend, as `pallas_paged.interop.ragged_paged_attention`.

    Scales multiply, as in tokamax's kernels for TPUs: `k_scale` the logits and `v_scale` the
    result, and `q_scale` cancels. tokamax's reference divides by all three, so the two disagree
    there as soon as a scale is given.

    Args:
        queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution: as there.
        kv_layout: only "head_along_sublane", the order of axes of caches there.
        cp_group_size, cp_rank: only None: see `docs/parallel.md` for pages on several devices.
        attention_scope: only "full".
        **options: other keywords of either function. `implementation` is ours.

    Returns:
        The output, the cache and, with `return_lse`, the log-sum-exps.

    Raises:
        ValueError: an option has another value than those above.
    """
    for name, given, only in (
        ("kv_layout", str(kv_layout), "head_along_sublane"),
        ("attention_scope", str(attention_scope), "full"),
        ("cp_group_size", cp_group_size, None),
        ("cp_rank", cp_rank, None),
    ):
        if given != only:
            raise ValueError(f"{name}={given!r} must be {only!r}")
    return rpa.ragged_paged_attention(
        queries,
        keys,
        values,
        kv_cache,
        kv_lens,
        page_indices,
        cu_q_lens,
        distribution,
        **options,
    )


batched_ragged_paged_attention = ragged_paged_attention
