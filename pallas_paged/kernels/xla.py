"""Attention in plain jax.numpy: the reference semantics, and the path for CPU and TPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions, natural_logits, visible
from pallas_paged.kernels.ragged_tiles import Tiles, Tiling, make_tiles
from pallas_paged.pages.layout import K


def paged_decode(arrays: Arrays, *, options: LogitOptions) -> tuple[jax.Array, jax.Array]:
    """Return attention of one query token per row: `(out [B, Hq, Dv], lse f32[B, Hq])`."""
    keys = jnp.arange(arrays.max_kv_len)
    positions = arrays.seq_lens[:, None] - 1
    seen = visible(keys, positions, options, end=arrays.seq_lens[:, None])
    out, lse = _attend(
        arrays,
        _all_elements(arrays)[:, None],
        arrays.block_tables,
        seen,
        seen[:, None],
        keys - positions[:, None],
        options,
    )
    return out[:, 0], lse[:, 0]


def ragged_paged_attention(arrays: Arrays, *, options: LogitOptions) -> tuple[jax.Array, jax.Array]:
    """Return attention of each row's newest tokens: `(out [T, Hq, Dv], lse f32[T, Hq])`."""
    q, q_positions, tree_mask = _all_elements(arrays), arrays.q_positions, arrays.tree_mask
    num_tokens, num_q_heads, _ = q.shape
    keys = jnp.arange(arrays.max_kv_len)
    # Tiles of one row each, so that its keys are gathered for many queries at once.
    block_q = min(num_tokens, 64)
    tiling = Tiling(
        group=1,
        block_q=block_q,
        block_k=arrays.page_size,
        options=options,
        has_tree=tree_mask is not None,
    )
    tiles = make_tiles(arrays.seq_lens, arrays.cu_q_lens, q_positions, num_tokens, tiling)

    def attend_tile(tile: Tiles) -> tuple[jax.Array, jax.Array]:
        tokens = tile.offset + jnp.arange(block_q)
        q_tokens = tile.q_start + tokens
        before = tile.kv_len - tile.q_len
        positions = before + tokens
        if q_positions is not None:
            positions = q_positions.at[q_tokens].get(mode="clip")

        def in_tree(tree_mask: jax.Array) -> jax.Array:
            places = keys - before
            allowed = tree_mask[tile.row].at[tokens[:, None], places]
            return (places < 0) | allowed.get(mode="fill", fill_value=False)

        causal = options.causal and q_positions is None and tree_mask is None
        seen = (tokens < tile.q_len)[:, None] & visible(
            keys,
            positions[:, None],
            options,
            end=tile.kv_len,
            last=positions[:, None] if causal else None,
            tree=None if tree_mask is None else functools.partial(in_tree, tree_mask),
        )
        out, lse = _attend(
            arrays,
            q.at[q_tokens].get(mode="clip")[None],
            arrays.block_tables[tile.row][None],
            seen.any(axis=0)[None],
            seen[None],
            (keys - positions[:, None])[None],
            options,
        )
        return out[0], lse[0]

    outs, lses = lax.map(attend_tile, tiles)  # [num_tiles, block_q, ...]
    tokens = tiles.offset[:, None] + jnp.arange(block_q)
    where = jnp.where(tokens < tiles.q_len[:, None], tiles.q_start[:, None] + tokens, num_tokens)
    out = jnp.zeros((num_tokens, *outs.shape[2:]), outs.dtype).at[where].set(outs, mode="drop")
    lse = jnp.full((num_tokens, num_q_heads), -jnp.inf).at[where].set(lses, mode="drop")
    return out, lse


def _all_elements(arrays: Arrays) -> jax.Array:
    """Return the queries with all elements that K has."""
    if arrays.q_pe is None:
        return arrays.q
    return jnp.concatenate([arrays.q, arrays.q_pe], axis=-1)


def _gather(pages: jax.Array, axes: str, kv: int, tables: jax.Array, read: jax.Array) -> jax.Array:
    """Return pages or scales in the order of tables `[B, n]`: `[B, Hkv, n * S, ...]`.

    Args:
        axes: of `pages`, as in `PageLayout`.
        kv: K or V, of pages that hold both.
        read: bool`[B, n * S]`; slots that no query reads become 0.
    """
    page_size = pages.shape[axes.index("N")]
    # Table entries of pages that no query reads may hold any integer: take page 0 there. Slots that
    # no query reads may hold NaN: make it 0, since 0 * NaN is NaN.
    tables = jnp.where(read.reshape(*tables.shape, page_size).any(axis=-1), tables, 0)
    dense = jnp.take(pages, tables, axis=axes.index("P"), mode="clip")
    axes = axes.replace("P", "bn")
    if "2" in axes:  # not in front of the gather, where the slice would be a copy of half the pool
        dense = lax.index_in_dim(dense, kv, axes.index("2"), keepdims=False)
        axes = axes.replace("2", "")
    order = "bHnND" if "D" in axes else "bHnN"
    dense = dense.transpose([axes.index(letter) for letter in order])
    num_seqs, num_kv_heads, *_ = dense.shape
    dims = dense.shape[4:]
    dense = dense.reshape(num_seqs, num_kv_heads, -1, *dims)
    return jnp.where(read.reshape(num_seqs, 1, -1, *(1 for _ in dims)), dense, 0)


def _gather_scales(
    scales: jax.Array | None, axes: str, tables: jax.Array, read: jax.Array
) -> jax.Array | None:
    """Return scales f32`[B, Hkv, 1, 1, K]`, or f32`[]` for all tokens, or None."""
    if scales is None or scales.ndim == 0:
        return scales
    return _gather(scales, axes, K, tables, read)[:, :, None, None]


def _attend(
    arrays: Arrays,
    q: jax.Array,  # [B, Q, Hq, D], or with all elements of latents
    tables: jax.Array,  # i32[B, N]
    read: jax.Array,  # bool[B, K], keys that any query of the row sees
    seen: jax.Array,  # bool[B, Q, K]
    distances: jax.Array,  # i32[B, Q, K] key position - query position
    options: LogitOptions,
) -> tuple[jax.Array, jax.Array]:
    """Return dense attention over gathered pages: `(out [B, Q, Hq, Dv], lse f32[B, Q, Hq])`."""
    axes, scale_axes = arrays.layout.axes, arrays.layout.scale_axes
    if arrays.q_pe is None:
        k, v = (_gather(x, axes, kv, tables, read) for kv, x in enumerate(arrays.kv_pages))
    else:
        k = _gather(arrays.k_pages, axes, K, tables, read)
        v = k[..., : arrays.v_head_dim]
    k_scales = _gather_scales(arrays.k_scales, scale_axes, tables, read)
    v_scales = _gather_scales(arrays.v_scales, scale_axes, tables, read)
    if arrays.q_pe is not None:
        v_scales = k_scales
    num_seqs, num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def per_head(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.reshape(num_kv_heads, 1, -1, 1)

    # Queries that see no key may be NaN, as padding may: no gradient of a key may be 0 * NaN.
    q = jnp.where(seen.any(axis=-1)[..., None, None], q, 0)
    # Heads before queries: in other orders XLA's own dot for CPUs fails on bf16 outside jit.
    q = q.reshape(num_seqs, num_queries, num_kv_heads, -1, head_dim).swapaxes(1, 2)
    slopes, sinks = per_head(arrays.alibi_slopes), per_head(arrays.sinks)
    seen, distances = seen[:, None, :, None], distances[:, None, :, None]
    s = einsum("bhqgd,bhkd->bhqgk", q, k.astype(q.dtype))
    if k_scales is not None:
        s *= k_scales
    logits = natural_logits(s, options, slopes, distances)
    logits = jnp.where(seen, logits, -jnp.inf)  # [B, Hkv, Q, G, K]
    m_i = logits.max(axis=-1, keepdims=True)
    empty = jnp.isneginf(m_i)  # queries that see no key; sinks do not change that
    m_i = lax.stop_gradient(jnp.where(empty, 0.0, m_i))
    p = jnp.exp(logits - m_i)
    l_i = p.sum(axis=-1, keepdims=True)
    weights, factor = _weights_of_values(p, v_scales, q.dtype)
    out = einsum("bhqgk,bhkd->bhqgd", weights, v.astype(q.dtype))
    if factor is not None:
        out *= factor
    if sinks is not None:  # after the product: beside a large sink p would vanish in f16
        sinks = jnp.where(empty, -jnp.inf, sinks)
        m_new = lax.stop_gradient(jnp.maximum(m_i, sinks))
        alpha = jnp.exp(m_i - m_new)
        l_i, out, m_i = l_i * alpha + jnp.exp(sinks - m_new), out * alpha, m_new
    l_safe = jnp.where(empty, 1.0, l_i)
    # A select, so that a cotangent of NaN there reaches no value.
    out = jnp.where(empty, 0.0, out / l_safe).astype(q.dtype).swapaxes(1, 2)
    lse = jnp.where(empty, -jnp.inf, m_i + jnp.log(l_safe)).swapaxes(1, 2)
    shape = (num_seqs, num_queries, num_q_heads)
    return out.reshape(*shape, arrays.v_head_dim), lse.reshape(shape)


def merge_states(
    outs: jax.Array,  # [S, ..., D]
    lses: jax.Array,  # f32[S, ...]
    sinks: jax.Array | None = None,  # f32, broadcasts against one state's lse
) -> tuple[jax.Array, jax.Array]:
    """Merge over the first axis; sinks join the denominator where any state saw a key."""
    m = lses.max(axis=0)
    empty = jnp.isneginf(m)  # no state saw a key
    if sinks is not None:
        sinks = jnp.where(empty, -jnp.inf, sinks)
        m = jnp.maximum(m, sinks)
    m = jnp.where(empty, 0.0, m)
    weights = jnp.exp(lses - m)  # [S, ...]
    total = weights.sum(axis=0)
    if sinks is not None:
        total += jnp.exp(sinks - m)
    # A state that saw no key has weight 0, and its out may be NaN: 0 * NaN is NaN.
    seen = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0.0)
    total = jnp.where(empty, 1.0, total)
    out = (seen * (weights / total)[..., None]).sum(axis=0)
    return out.astype(outs.dtype), jnp.where(empty, -jnp.inf, m + jnp.log(total))


def _weights_of_values(
    p: jax.Array,  # f32[..., K]
    v_scales: jax.Array | None,  # f32, broadcasts against p
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array | None]:
    """Return `p * v_scales` as an operand of `dtype`, and a factor of the product, or None."""
    if v_scales is None:
        return p.astype(dtype), None
    weights = p * v_scales
    if dtype != jnp.float16:
        return weights.astype(dtype), None
    # f16 has a smaller range than the scales: the largest weight of each row becomes 1.
    peak = jnp.abs(weights).max(axis=-1, keepdims=True)
    peak = jnp.where(peak > 0, peak, 1.0)
    return (weights / peak).astype(dtype), peak
