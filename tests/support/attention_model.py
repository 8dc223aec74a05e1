"""The model of attention alone that examples and a tutorial have, by NumPy and without a cache."""

import numpy as np


def greedy_of_weights(weights, tokens, num_new):
    """Tokens of a model with 4 query heads and 2 KV heads, from a dict of its weights."""
    num_heads, num_kv_heads = 4, 2
    weights = {name: np.asarray(x) for name, x in weights.items()}
    for _ in range(num_new):
        x = weights["embed"][tokens]
        for qkv, out in zip(weights["qkv"], weights["out"], strict=True):
            heads = (x @ qkv).reshape(len(x), num_heads + 2 * num_kv_heads, -1)
            q, k, v = np.split(heads, (num_heads, num_heads + num_kv_heads), axis=1)
            k, v = (np.repeat(y, num_heads // num_kv_heads, axis=1) for y in (k, v))
            logits = np.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
            logits = np.where(np.tri(len(x), dtype=bool), logits, -np.inf)
            weighted = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weighted /= weighted.sum(axis=-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", weighted, v).reshape(x.shape) @ out
        tokens = [*tokens, int((x[-1] @ weights["head"]).argmax())]
    return tokens[-num_new:]
