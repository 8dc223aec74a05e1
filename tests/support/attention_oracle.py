"""Float64 NumPy attention over pages, row by row. It does not import the library."""

import numpy as np


def attend(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    cu_q_lens: np.ndarray | None = None,
    *,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    tree_mask: np.ndarray | None = None,
    causal: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns float64 (out [T, Hq, D], lse [T, Hq]); without cu_q_lens row b's query is q[b].

    D is that of V, which may differ from that of K.
    """
    q = np.asarray(q).astype(np.float64)
    k_pages, v_pages = np.asarray(k_pages), np.asarray(v_pages)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    group = num_q_heads // num_kv_heads
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    slopes = np.zeros(num_q_heads) if alibi_slopes is None else np.asarray(alibi_slopes, float)
    sinks = np.full(num_q_heads, -np.inf) if sinks is None else np.asarray(sinks, float)
    if cu_q_lens is None:
        cu_q_lens = np.arange(num_tokens + 1)
    out = np.zeros((num_tokens, num_q_heads, v_pages.shape[-1]))
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for b, length in enumerate(map(int, seq_lens)):
        begin, end = map(int, cu_q_lens[b : b + 2])
        keys, i = np.arange(length), np.arange(end - begin)[:, None]
        before = length - (end - begin)  # keys older than the row's queries
        newest = keys - before
        if tree_mask is None:
            seen = (newest <= i) | (not causal)  # [Q, K]
        else:
            tree, size = np.asarray(tree_mask[b]), len(tree_mask[b])
            known = (i < size) & (newest < size)
            known &= tree[np.minimum(i, size - 1), np.clip(newest, 0, size - 1)]
            seen = (newest < 0) | known
        if sliding_window is not None:
            seen = seen & (newest > i - sliding_window)
        seen = seen & np.ones((end - begin, length), bool)
        some, read = seen.any(axis=1), seen.any(axis=0)  # queries that see keys, keys that are seen
        if not read.any():
            continue
        seen, keys, i = seen[some][:, read], keys[read], i[some]
        where = begin + np.flatnonzero(some)
        pages, offsets = block_tables[b, keys // page_size], keys % page_size
        k, v = (x[:, pages, offsets].astype(np.float64) for x in (k_pages, v_pages))  # [Hkv, K, D]
        rows = q[where].reshape(len(where), num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        rows = rows.reshape(num_kv_heads, -1, head_dim)  # heads of a group share a product
        logits = (rows @ k.swapaxes(1, 2) * scale).reshape(num_q_heads, *seen.shape)  # [Hq, Q, K]
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        if slopes.any():
            distances = keys - (before + i)
            logits += slopes[:, None, None] * (distances if causal else -abs(distances))
        logits = np.where(seen, logits, -np.inf)
        peak = np.maximum(logits.max(axis=-1), sinks[:, None])
        weights = np.exp(logits - peak[..., None])
        total = weights.sum(axis=-1) + np.exp(sinks[:, None] - peak)
        sums = (weights.reshape(num_kv_heads, -1, len(keys)) @ v).reshape(*total.shape, -1)
        out[where] = (sums / total[..., None]).swapaxes(0, 1)
        lse[where] = (peak + np.log(total)).T
    return out, lse


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 error; NaN if any value is NaN, so that every comparison fails."""
    actual = np.asarray(actual).astype(np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
