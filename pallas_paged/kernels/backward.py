"""The backward pass of attention over pages, by recomputation: FlashAttention-2 (Dao 2023).

Nothing of the forward pass is kept but its result and log-sum-exps. The kernels of a family
recompute the probabilities twice: once to sum over the keys of each query, once over the queries of
each key. No sum is made by atomic additions, so gradients are the same bits in every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LOG2_E, LogitOptions, base2_logits

# The gradients of the fields of `Arrays` that are named, from `(arrays, d_out, lse, delta, names)`:
# d_out [T, Hq, D], lse f32[T, Hq] in base 2, inf where nothing is seen, and delta f32[T, Hq].
Kernels = Callable[[Arrays, jax.Array, jax.Array, jax.Array, tuple[str, ...]], dict[str, jax.Array]]


def attention_gradient(
    arrays: Arrays,
    out: jax.Array,  # [T, Hq, D]
    lse: jax.Array,  # f32[T, Hq]
    d_out: jax.Array,  # [T, Hq, D]
    d_lse: jax.Array | None,  # f32[T, Hq]
    *,
    names: tuple[str, ...],
    kernels: Kernels,
) -> dict[str, jax.Array]:
    """Return the gradients of the fields `names` of the arrays. Pages of one byte have none.

    `names` are some of "q", "k_pages", "v_pages", "alibi_slopes" and "sinks". From `kernels` come
    all gradients but that of the sinks. `out` and `lse` are the result of the forward pass.
    """
    if arrays.cu_q_lens is None:  # decoding: a query a row
        offsets = jnp.arange(arrays.num_seqs + 1, dtype=jnp.int32)
        arrays = dataclasses.replace(arrays, cu_q_lens=offsets)
    # Padding tokens and queries without keys have no gradient, whatever their cotangents are.
    empty = jnp.isneginf(lse)
    d_out = jnp.where(empty[..., None], 0.0, d_out).astype(arrays.q.dtype)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = jnp.where(empty, 0.0, delta if d_lse is None else delta - d_lse)
    others = tuple(name for name in names if name != "sinks")
    gradients = {}
    if others:
        base2 = jnp.where(empty, jnp.inf, lse * LOG2_E)
        gradients = kernels(arrays, d_out, base2, delta, others)
    if "sinks" in names and arrays.sinks is not None:
        p = jnp.exp(arrays.sinks - jnp.where(empty, jnp.inf, lse))
        gradients["sinks"] = -jnp.sum(p * delta, axis=0)
    return gradients


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
    """Return f32 `p`, the gradients of the logits, and the gradients of `s * sm_scale`.

    With the logits x of a query and its log-sum-exp, `p = exp(x - lse)` needs no maximum. From the
    gradient `do` of the output, `dp = do.v` and `delta = do.out - d_lse`, the gradient of a logit
    is `p * (dp - delta)` (Dao 2023). Sinks are in `lse` and in `out`, and change nothing else.
    """
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
