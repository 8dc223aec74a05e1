"""Attention in plain jax.numpy: the semantics, and the path for CPU and TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def paged_decode(
    q: jax.Array,  # [B, Hq, D]
    k_pages: jax.Array,  # [Hkv, P, S, D]
    v_pages: jax.Array,  # [Hkv, P, S, D]
    block_tables: jax.Array,  # i32[B, N]
    seq_lens: jax.Array,  # i32[B], each in [0, N * S]
    *,
    sm_scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query token per row: `(out [B, Hq, D], lse f32[B, Hq])`."""
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    max_len = block_tables.shape[1] * page_size
    valid = jnp.arange(max_len) < seq_lens[:, None]  # [B, N * S]

    def gather(pages: jax.Array) -> jax.Array:
        # Entries past a row's blocks may hold any integer: read page 0 there. What lies in slots
        # that the row does not own may be NaN: make it 0, since 0 * NaN is NaN.
        tables = jnp.where(valid[:, ::page_size], block_tables, 0)
        dense = pages[:, tables].reshape(num_kv_heads, num_seqs, max_len, head_dim)
        return jnp.where(valid[:, :, None], dense, 0)

    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    q = q.reshape(num_seqs, num_kv_heads, -1, head_dim)
    logits = jnp.einsum(
        "bhgd,hbkd->bhgk",
        q,
        gather(k_pages),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    logits = jnp.where(valid[:, None, None, :], logits * sm_scale, -jnp.inf)
    m_i = logits.max(axis=-1, keepdims=True)
    m_i = jnp.where(jnp.isneginf(m_i), 0.0, m_i)  # rows of length 0
    p = jnp.exp(logits - m_i)
    l_i = p.sum(axis=-1)  # [B, Hkv, G]
    out = jnp.einsum(
        "bhgk,hbkd->bhgd",
        p.astype(q.dtype),
        gather(v_pages),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    out = out / jnp.where(l_i == 0.0, 1.0, l_i)[..., None]
    lse = m_i[..., 0] + jnp.log(l_i)
    shape = (num_seqs, num_q_heads)
    return out.astype(q.dtype).reshape(*shape, head_dim), lse.reshape(shape)


def merge_states(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge of `outs [S, ..., D]` and `lses f32[S, ...]` over the first axis."""
    m = lses.max(axis=0)
    m = jnp.where(jnp.isneginf(m), 0.0, m)  # nothing was seen by any state
    weights = jnp.exp(lses - m)  # [S, ...]
    total = weights.sum(axis=0)
    # A state that saw nothing has weight 0, and its out may be anything: 0 * NaN is NaN.
    seen = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0.0)
    out = (seen * weights[..., None]).sum(axis=0) / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.astype(outs.dtype), m + jnp.log(total)
