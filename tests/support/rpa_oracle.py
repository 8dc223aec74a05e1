"""Ragged paged attention "v3" in float64 NumPy, token by token. It does not import the library."""

from __future__ import annotations

import numpy as np


def attend(
    queries: np.ndarray,  # [T, Hq, D]
    keys: np.ndarray,  # [T, Hkv, D]
    values: np.ndarray,
    cache: np.ndarray,  # [P, N, 2 * Hkv, D], K0 V0 K1 V1 ...; what the caller gives, unpadded
    kv_lens: np.ndarray,
    page_indices: np.ndarray,  # [S * pages_per_seq]
    cu_q_lens: np.ndarray,
    distribution: np.ndarray,
    *,
    sinks: np.ndarray | None = None,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns float64 (out [T, Hq, D], cache, lse [T, Hq]) with the new K/V in the cache."""
    given = queries, keys, values, cache
    queries, keys, values, cache = (np.array(x).astype(np.float64) for x in given)
    num_tokens, num_q_heads, _ = queries.shape
    group = num_q_heads // keys.shape[1]
    page_size = cache.shape[1]
    table = np.reshape(page_indices, (len(kv_lens), -1))
    out = np.zeros(queries.shape)
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for row in range(distribution[2]):
        begin, end = cu_q_lens[row : row + 2]
        length = kv_lens[row]
        places = [(table[row, j // page_size], j % page_size) for j in range(length)]
        if update_kv_cache:
            for t in range(begin, end):
                page, offset = places[length - end + t]
                cache[page, offset, 0::2], cache[page, offset, 1::2] = keys[t], values[t]
        for t in range(begin, end):
            position = length - end + t
            seen = [
                j
                for j in range(length)
                if (j <= position or not use_causal_mask)
                and (sliding_window is None or j > position - sliding_window)
            ]
            for h in range(num_q_heads):
                k = np.array([cache[places[j]][2 * (h // group)] for j in seen])
                v = np.array([cache[places[j]][2 * (h // group) + 1] for j in seen])
                logits = k @ queries[t, h] * sm_scale * k_scale
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                total = np.exp(logits).sum() + (0 if sinks is None else np.exp(sinks[h]))
                out[t, h] = np.exp(logits) @ v * v_scale / total
                lse[t, h] = np.log(total)
    return out, cache, lse
