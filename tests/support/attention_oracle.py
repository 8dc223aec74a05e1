"""Float64 NumPy attention over pages, query by query. It does not import the library."""

from __future__ import annotations

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
    """Returns float64 (out [T, Hq, D], lse [T, Hq]); without cu_q_lens row b's query is q[b]."""
    q, k_pages, v_pages = (np.asarray(x).astype(np.float64) for x in (q, k_pages, v_pages))
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    slopes = np.zeros(num_q_heads) if alibi_slopes is None else np.asarray(alibi_slopes, float)
    sinks = np.full(num_q_heads, -np.inf) if sinks is None else np.asarray(sinks, float)
    if cu_q_lens is None:
        cu_q_lens = np.arange(num_tokens + 1)
    out = np.zeros(q.shape)
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for b, length in enumerate(seq_lens):
        begin, end = cu_q_lens[b : b + 2]
        before = length - (end - begin)  # keys older than the row's queries
        tree = None if tree_mask is None else tree_mask[b]
        for i in range(end - begin):
            keys = [j for j in range(length) if _sees(i, j, before, sliding_window, tree, causal)]
            if not keys:
                continue
            keys = np.array(keys)
            pages, offsets = block_tables[b, keys // page_size], keys % page_size
            for h in range(num_q_heads):
                kv_head = h // (num_q_heads // num_kv_heads)
                k, v = k_pages[kv_head, pages, offsets], v_pages[kv_head, pages, offsets]  # [K, D]
                logits = k @ q[begin + i, h] * scale
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                distances = keys - (before + i)
                logits += slopes[h] * (distances if causal else -abs(distances))
                peak = max(logits.max(), sinks[h])
                weights = np.exp(logits - peak)
                total = weights.sum() + np.exp(sinks[h] - peak)
                out[begin + i, h] = weights @ v / total
                lse[begin + i, h] = peak + np.log(total)
    return out, lse


def _sees(
    i: int,
    key: int,
    before: int,
    sliding_window: int | None,
    tree: np.ndarray | None,
    causal: bool,
) -> bool:
    """Whether a row's i-th query sees a key; the row has `before` keys before its first query."""
    if sliding_window is not None and key <= before + i - sliding_window:
        return False
    if tree is None:
        return not causal or key <= before + i
    newest = key - before
    return newest < 0 or (i < len(tree) and newest < len(tree) and bool(tree[i, newest]))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 error; NaN if any value is NaN, so that every comparison fails."""
    actual = np.asarray(actual).astype(np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
