"""Attention in f32, the reference for the results of all benches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from bench.measuring.options import PLAIN, Options


@functools.partial(jax.jit, static_argnames="options")
def reference_states(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    tables: jax.Array,
    seq_lens: jax.Array,
    *,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    options: Options = PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """Attention in f32 at the highest precision, one query at a time; q is scaled already.

    Args:
        q: `[N, Hq, D]`; each query is the last of its `seq_lens` tokens.
        k_pages, v_pages: `[Hkv, P, S, D]`.
        tables: `i32[N, pages]`.
        seq_lens: `i32[N]`.
        k_scales, v_scales: of int8 or fp8 K and V, `f32[Hkv, P, S]`.
        options: static.

    Returns:
        out `f32[N, Hq, D]` and lse `f32[N, Hq]`.
    """
    einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    num_kv_heads, _, _, head_dim = k_pages.shape
    num_q_heads = q.shape[1]
    slopes, sinks = options.slopes(num_q_heads), options.sink_logits(num_q_heads)

    def gather(pages, table, scales):  # [Hkv, T, D]
        tokens = pages[:, table].astype(jnp.float32)
        if scales is not None:
            tokens *= scales[:, table][..., None]
        return tokens.reshape(num_kv_heads, -1, head_dim)

    def one(args):
        q, table, length = args
        q = q.reshape(num_kv_heads, -1, head_dim).astype(jnp.float32)  # [Hkv, G, D]
        k = gather(k_pages, table, k_scales)
        v = gather(v_pages, table, v_scales)
        logits = einsum("hgd,htd->hgt", q, k)
        if options.soft_cap is not None:
            logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
        distances = jnp.arange(k.shape[1]) - (length - 1)
        if slopes is not None:
            logits += slopes.reshape(num_kv_heads, -1, 1) * distances
        seen = distances <= 0
        if options.sliding_window is not None:
            seen &= distances > -options.sliding_window
        logits = jnp.where(seen, logits, -jnp.inf)
        sink = jnp.full(num_q_heads, -jnp.inf) if sinks is None else sinks
        sink = sink.reshape(num_kv_heads, -1, 1)
        lse = jax.nn.logsumexp(jnp.concatenate([logits, sink], axis=-1), axis=-1)
        out = einsum("hgt,htd->hgd", jnp.exp(logits - lse[..., None]), v)
        return out.reshape(num_q_heads, head_dim), lse.reshape(num_q_heads)

    return lax.map(one, (q, tables, seq_lens))
