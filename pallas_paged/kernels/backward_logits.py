"""What both kernels of the backward pass recompute: probabilities and the gradient of q.k.

With the logits x of a query and its log-sum-exp, `p = exp(x - lse)` needs no maximum. From the
gradient `do` of the output, `dp = do.v` and `delta = do.out - d_lse`, the gradient of a logit is
`p * (dp - delta)` (Dao 2023). Sinks are in `lse` and in `out`, and change nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.kernels.logits import LOG2_E, LogitOptions, base2_logits


def recompute(
    s: jax.Array,  # f32[..] q.k
    dp: jax.Array,  # f32[..] do.v
    lse: jax.Array,  # f32, broadcasts: base-2 log-sum-exp; inf where nothing is seen
    delta: jax.Array,  # f32, broadcasts
    sees: jax.Array | None,  # bool[..], None for all
    slopes: jax.Array | None,
    distances: Any,  # i32, not used without slopes
    *,
    options: LogitOptions,
    exp2: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return f32 `p`, the gradients of the logits, and those of `s * sm_scale`."""
    x, factor = base2_logits(s, options, slopes, distances)
    if sees is not None:
        x = jnp.where(sees, x, -jnp.inf)
    p = exp2(x * factor - lse)
    d_logits = p * (dp - delta)
    if sees is not None:  # keys that are not seen may hold NaN
        d_logits = jnp.where(sees, d_logits, 0.0)
    if options.soft_cap is None:
        return p, d_logits, d_logits
    capped, factor = base2_logits(s, options, None, distances)
    tanh = capped * (factor / (options.soft_cap * LOG2_E))
    d_scaled = d_logits * (1.0 - tanh * tanh)
    if sees is not None:
        d_scaled = jnp.where(sees, d_scaled, 0.0)
    return p, d_logits, d_scaled
