"""Which keys a query sees, in both kernels of the backward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.logits import LogitOptions


def seen(
    tokens: jax.Array,  # i32 [Q, 1] or [1, Q], places of queries among those of the row
    positions: jax.Array,  # i32, like tokens
    keys: jax.Array,  # i32 [1, K] or [K, 1]
    before: jax.Array,  # i32[], keys older than the row's queries
    *,
    row: jax.Array,
    tree_mask_ref: Any,  # i8[B, M, M] or None
    options: LogitOptions,
    all_older: bool,  # whether every key is older than every query
) -> jax.Array:
    """Return which of the keys of a row each query sees."""
    if tree_mask_ref is not None:
        newest, size = keys - before, tree_mask_ref.shape[1]
        known = (tokens < size) & (newest >= 0) & (newest < size)
        allowed = plgpu.load(tree_mask_ref.at[row[None, None], tokens, newest], mask=known, other=0)
        sees = (newest < 0) | (allowed != 0)
    elif options.causal and not all_older:
        sees = keys <= positions
    else:
        sees = jnp.full(jnp.broadcast_shapes(keys.shape, tokens.shape), True)
    if options.sliding_window is not None:
        sees &= keys >= options.first_key(positions)
    return sees
