"""Decode in plain JAX, in one compiled loop: run `python examples/decode_loop.py`.

The prompts go through a small model of random weights in one ragged call. A `lax.while_loop` then
decodes greedily. A sequence stops at the token END, with its last new token, or when no page is
left for it. The loop carries the cache, which both functions take as donated, so no page is copied.

Prints the new tokens of each sequence, and how many pages are still free.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallas_paged as pp

VOCAB, LAYERS, HQ, HKV, D = 64, 2, 4, 2, 16
END = 52


def init() -> dict[str, jax.Array]:
    """Return random weights of attention alone, with residual connections."""
    rng, size = np.random.default_rng(0), HQ * D
    shapes = dict(embed=(VOCAB, size), qkv=(LAYERS, size, (HQ + 2 * HKV) * D))
    shapes |= dict(out=(LAYERS, size, size), head=(size, VOCAB))
    return {name: jnp.float32(rng.standard_normal(x) / x[-2] ** 0.5) for name, x in shapes.items()}


def model(weights, tokens, cache: pp.PagedKVCache, cu_q_lens=None):
    """Return logits f32[T, V] of the tokens of the last `extend`, and the cache with their K/V."""
    x = weights["embed"][tokens]
    for layer in range(LAYERS):
        heads = (x @ weights["qkv"][layer]).reshape(len(tokens), -1, D)
        q, k, v = jnp.split(heads, (HQ, HQ + HKV), axis=1)
        cache = cache.write(layer, k, v, cu_q_lens)
        x += cache.attend(layer, q, cu_q_lens).reshape(x.shape) @ weights["out"][layer]
    return x @ weights["head"], cache


@partial(jax.jit, donate_argnames="cache")
def prefill(weights, cache: pp.PagedKVCache, tokens, cu_q_lens):
    """Return the token after each prompt, which sequences have room, and the cache."""
    cache, ok = cache.extend(jnp.diff(cu_q_lens))
    logits, cache = model(weights, tokens, cache, cu_q_lens)
    return logits[cu_q_lens[1:] - 1].argmax(axis=-1), ok, cache


@partial(jax.jit, donate_argnames="cache", static_argnames="max_tokens")
def decode(weights, cache: pp.PagedKVCache, tokens, active, max_tokens: int):
    """Return the new tokens of each sequence, i32[B, max_tokens], and the cache.

    `tokens` are the first of them. Where a sequence has stopped, its tokens are -1.
    """
    texts = jnp.full((len(tokens), max_tokens), -1).at[:, 0].set(jnp.where(active, tokens, -1))

    def goes_on(state):
        count, _, active, _, _ = state
        return (count < max_tokens) & active.any()

    def step(state):
        count, tokens, active, texts, cache = state
        cache, ok = cache.extend(active)  # a row that gets no page keeps its tokens
        active &= ok
        logits, cache = model(weights, tokens, cache)
        tokens = logits.argmax(axis=-1)
        texts = texts.at[:, count].set(jnp.where(active, tokens, -1))
        return count + 1, tokens, active & (tokens != END), texts, cache

    state = 1, tokens, active & (tokens != END), texts, cache
    *_, texts, cache = jax.lax.while_loop(goes_on, step, state)
    return texts, cache


def main(max_tokens: int = 40, num_pages: int = 32) -> list[list[int]]:
    weights = init()
    prompts = [[3, 1, 4, 1], [5, 9, 2], [6, 5, 3, 5, 8], [9]]
    cu_q_lens = np.cumsum([0, *map(len, prompts)], dtype=np.int32)
    before = cache = pp.PagedKVCache.create(
        **dict(num_pages=num_pages, page_size=8, max_seqs=len(prompts), pages_per_seq=8),
        **dict(num_layers=LAYERS, num_kv_heads=HKV, head_dim=D, dtype="float32"),
    )
    tokens, active, cache = prefill(weights, cache, np.concatenate(prompts), cu_q_lens)
    assert before.pool.layers[0].k_pages.is_deleted()  # donated: its memory is that of the new one
    texts, cache = decode(weights, cache, tokens, active, max_tokens)

    found = [[token for token in text if token >= 0] for text in texts.tolist()]
    for prompt, text in zip(prompts, found, strict=True):
        print(prompt, "->", text)
    print(f"{cache.seq_lens} tokens; {cache.table.num_free} of {num_pages} pages are free")
    return found


if __name__ == "__main__":
    main()
