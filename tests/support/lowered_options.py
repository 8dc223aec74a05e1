"""Configs and options for tests that only lower the Triton kernels."""

from __future__ import annotations

import numpy as np

LOOP = dict(block_k=32, num_programs=200, num_warps=4, num_stages=2)  # 100 for each of 2 KV heads


def lowered_options(num_q_heads, num_seqs):
    """Every option of attention alone, then all together."""
    per_head = np.ones(num_q_heads, np.float32)
    alone = {
        "sliding_window": 100,
        "soft_cap": 30.0,
        "alibi_slopes": per_head,
        "sinks": per_head,
        "sm_scale": -0.1,
        "return_lse": True,
        "tree_mask": np.ones((num_seqs, 8, 8), bool),
    }
    return [{name: value} for name, value in alone.items()] + [alone]


def not_causal(num_q_heads):
    """Options of ragged attention in which queries see all keys, alone and with others."""
    per_head = np.ones(num_q_heads, np.float32)
    return [
        {"causal": False},
        {"causal": False, "sliding_window": 100, "alibi_slopes": per_head, "sinks": per_head},
    ]
