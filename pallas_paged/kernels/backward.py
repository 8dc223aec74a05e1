"""The backward pass of attention over pages, by recomputation: FlashAttention-2 (Dao 2023).

Nothing of the forward pass is kept but its result and log-sum-exps. The kernels of a family
recompute the probabilities twice: once to sum over the keys of each query, once over the queries of
each key. No sum is made by atomic additions, so gradients are the same bits in every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LOG2_E

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

    Args:
        arrays: of the forward pass.
        out, lse: its result.
        d_out, d_lse: the gradients of the result.
        names: some of "q", "k_pages", "v_pages", "alibi_slopes" and "sinks".
        kernels: make all gradients but that of the sinks.
    """
    if arrays.cu_q_lens is None:  # decoding: a query a row
        offsets = jnp.arange(arrays.num_seqs + 1, dtype=jnp.int32)
        arrays = dataclasses.replace(arrays, cu_q_lens=offsets)
    d_out = d_out.astype(arrays.q.dtype)
    # Padding tokens and queries without keys have no gradient, whatever their cotangents are.
    empty = jnp.isneginf(lse)
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
