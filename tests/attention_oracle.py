"""Float64 NumPy attention over pages, row by row. It does not import the library."""

from __future__ import annotations

import numpy as np


def attend(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    sm_scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns float64 (out [B, Hq, D], lse [B, Hq])."""
    q, k_pages, v_pages = (np.asarray(x).astype(np.float64) for x in (q, k_pages, v_pages))
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    out = np.zeros(q.shape)
    lse = np.full((num_seqs, num_q_heads), -np.inf)
    for b in range(num_seqs):
        positions = np.arange(seq_lens[b])
        if positions.size == 0:
            continue
        pages = block_tables[b, positions // page_size]
        for h in range(num_q_heads):
            kv_head = h // (num_q_heads // num_kv_heads)
            k = k_pages[kv_head, pages, positions % page_size]  # [T, D]
            v = v_pages[kv_head, pages, positions % page_size]
            logits = k @ q[b, h] * scale
            peak = logits.max()
            weights = np.exp(logits - peak)
            out[b, h] = weights @ v / weights.sum()
            lse[b, h] = peak + np.log(weights.sum())
    return out, lse


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 error; NaN if anything is NaN, so that no comparison with it passes."""
    actual = np.asarray(actual).astype(np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
