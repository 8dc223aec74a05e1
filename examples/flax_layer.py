"""A Flax NNX model that decodes with a `PagedKVCache`: run `python examples/flax_layer.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_paged as pp


class Attention(nnx.Module):
    """Grouped-query attention of the layer `index` of a cache."""

    def __init__(self, index: int, size: int, num_q_heads: int, num_kv_heads: int, *, rngs):
        self.index, self.num_q_heads, self.num_kv_heads = index, num_q_heads, num_kv_heads
        self.head_dim = size // num_q_heads
        width = (num_q_heads + 2 * num_kv_heads) * self.head_dim
        self.qkv = nnx.Linear(size, width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(size, size, use_bias=False, rngs=rngs)

    def __call__(
        self, x: jax.Array, cache: pp.PagedKVCache, cu_q_lens: jax.Array | None = None
    ) -> tuple[jax.Array, pp.PagedKVCache]:
        heads = self.qkv(x).reshape(len(x), -1, self.head_dim)
        ends = self.num_q_heads, self.num_q_heads + self.num_kv_heads
        q, k, v = jnp.split(heads, ends, axis=1)
        cache = cache.write(self.index, k, v, cu_q_lens)
        attended = cache.attend(self.index, q, cu_q_lens)
        return self.out(attended.reshape(x.shape)), cache


class Model(nnx.Module):
    """Attention alone, with residual connections."""

    def __init__(self, num_layers: int, vocab_size: int, size: int, *, rngs):
        self.embed = nnx.Embed(vocab_size, size, rngs=rngs)
        self.layers = nnx.List([Attention(i, size, 4, 2, rngs=rngs) for i in range(num_layers)])

    def __call__(self, tokens, cache, cu_q_lens=None):
        x = self.embed(tokens)
        for layer in self.layers:
            y, cache = layer(x, cache, cu_q_lens)
            x = x + y
        return self.embed.attend(x), cache


@nnx.jit(donate_argnames="cache")
def prefill(model: Model, cache: pp.PagedKVCache, tokens, cu_q_lens):
    """Return the token after each prompt, and the cache with the prompts."""
    cache, ok = cache.extend(jnp.diff(cu_q_lens))
    logits, cache = model(tokens, cache, cu_q_lens)
    return logits[cu_q_lens[1:] - 1].argmax(axis=-1), cache, ok


@nnx.jit(donate_argnames="cache")
def decode(model: Model, cache: pp.PagedKVCache, tokens):
    """Return the token after each sequence, and the cache with `tokens`."""
    cache, ok = cache.extend(jnp.ones(len(tokens), jnp.int32))
    logits, cache = model(tokens, cache)
    return logits.argmax(axis=-1), cache, ok


def main() -> list[list[int]]:
    model = Model(num_layers=2, vocab_size=100, size=64, rngs=nnx.Rngs(0))
    sizes = dict(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
    cache = pp.PagedKVCache.create(num_pages=16, page_size=8, max_seqs=2, pages_per_seq=4, **sizes)
    prompts = jnp.array([3, 1, 4, 1, 5, 9, 2]), jnp.array([0, 4, 7])
    tokens, cache, ok = prefill(model, cache, *prompts)
    texts = [tokens]
    for _ in range(5):
        tokens, cache, ok = decode(model, cache, tokens)
        texts.append(tokens)
    assert ok.all()
    print("new tokens of each sequence:", found := jnp.stack(texts, axis=1).tolist())
    return found


if __name__ == "__main__":
    main()
