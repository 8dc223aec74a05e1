"""The backward pass of attention over pages, by recomputation: FlashAttention-2 (Dao 2023).

Nothing of the forward pass is kept but its result and log-sum-exps. Two kernels recompute the
probabilities: one sums over the keys of each query, the other over the queries of each key. No sum
is made by atomic additions, so the gradients are the same bits in every run.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LOG2_E, LogitOptions
from pallas_paged.kernels.triton.backward_config import BackwardConfig, keys_config, queries_config
from pallas_paged.kernels.triton.backward_keys import keys_gradient
from pallas_paged.kernels.triton.backward_queries import queries_gradient


def attention_gradient(
    arrays: Arrays,
    out: jax.Array,  # [T, Hq, D]
    lse: jax.Array,  # f32[T, Hq]
    d_out: jax.Array,  # [T, Hq, D]
    d_lse: jax.Array | None,  # f32[T, Hq]
    *,
    options: LogitOptions,
    names: tuple[str, ...],
    interpret: bool,
    of_queries: BackwardConfig | None = None,
    of_keys: BackwardConfig | None = None,
) -> dict[str, jax.Array]:
    """Return the gradients of the fields `names` of the arrays. Pages of one byte have none.

    Args:
        arrays, options: of the forward pass.
        out, lse: its result.
        d_out, d_lse: the gradients of the result.
        names: some of "q", "k_pages", "v_pages", "alibi_slopes" and "sinks".
        of_queries, of_keys: configs; None for the heuristics'.
    """
    if arrays.cu_q_lens is None:  # decoding: a query a row
        offsets = jnp.arange(arrays.num_seqs + 1, dtype=jnp.int32)
        arrays = dataclasses.replace(arrays, cu_q_lens=offsets)
    num_tokens, _, head_dim = arrays.q.shape
    d_out = d_out.astype(arrays.q.dtype)
    # Padding tokens and queries without keys have no gradient, whatever their cotangents are.
    empty = jnp.isneginf(lse)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = jnp.where(empty, 0.0, delta if d_lse is None else delta - d_lse)
    gradients = {}
    if "sinks" in names:
        p = jnp.exp(arrays.sinks - jnp.where(empty, jnp.inf, lse))
        gradients["sinks"] = -jnp.sum(p * delta, axis=0)
    by_head = (num_tokens, arrays.num_kv_heads, arrays.group)
    of_rows = (
        d_out,
        jnp.where(empty, jnp.inf, lse * LOG2_E).reshape(by_head),
        delta.reshape(by_head),
    )
    sizes = dict(
        head_dim=head_dim,
        itemsize=arrays.q.dtype.itemsize,
        rows=-(-num_tokens * arrays.group // arrays.num_seqs),
    )
    if "q" in names or "alibi_slopes" in names:
        gradients["q"], gradients["alibi_slopes"] = queries_gradient(
            arrays,
            *of_rows,
            options=options,
            config=of_queries or queries_config(**sizes),
            interpret=interpret,
        )
    if "k_pages" in names or "v_pages" in names:
        pages = keys_gradient(
            arrays,
            *of_rows,
            options=options,
            config=of_keys or keys_config(**sizes),
            interpret=interpret,
        )
        gradients |= dict(zip(("k_pages", "v_pages"), pages, strict=False))
    return {name: gradients[name] for name in names}
