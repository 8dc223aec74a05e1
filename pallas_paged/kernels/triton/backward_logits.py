"""What both kernels of the backward pass recompute: probabilities and the gradient of q.k.

With the logits x of a query and its log-sum-exp, `p = exp(x - lse)` needs no maximum. From the
gradient `do` of the output, `dp = do.v` and `delta = do.out - d_lse`, the gradient of a logit is
`p * (dp - delta)` (Dao 2023). Sinks are in `lse` and in `out`, and change nothing else.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.logits import LOG2_E, LogitOptions, base2_logits
from pallas_paged.kernels.triton.one_byte import Operands
from pallas_paged.kernels.triton.softmax import exp2


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


def recompute(
    s: jax.Array,  # f32[..] q.k
    dp: jax.Array,  # f32[..] do.v
    lse: jax.Array,  # f32, broadcasts: base-2 log-sum-exp; inf where nothing is seen
    delta: jax.Array,  # f32, broadcasts
    sees: jax.Array | None,  # bool[..], None for all
    slopes: jax.Array | None,
    distances: jax.Array,
    *,
    options: LogitOptions,
    operands: Operands,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return f32 `p`, the gradients of the logits, and those of `s * sm_scale`."""
    x, factor = base2_logits(s, options, slopes, distances)
    if sees is not None:
        x = jnp.where(sees, x, -jnp.inf)
    p = exp2(x * factor - lse, operands)
    d_logits = p * (dp - delta)
    if sees is not None:  # keys that are not seen may hold NaN
        d_logits = jnp.where(sees, d_logits, 0.0)
    if options.soft_cap is None:
        return p, d_logits, d_logits
    capped, _ = base2_logits(s, options, None, distances)
    tanh = capped * (1 / (options.soft_cap * LOG2_E))
    d_scaled = d_logits * (1.0 - tanh * tanh)
    if sees is not None:
        d_scaled = jnp.where(sees, d_scaled, 0.0)
    return p, d_logits, d_scaled
