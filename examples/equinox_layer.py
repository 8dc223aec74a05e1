"""Parallel sampling with Equinox: sequences fork and share their pages.

Run `python examples/equinox_layer.py`.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

import pallas_paged as pp


class Attention(eqx.Module):
    """Grouped-query attention of the layer `index` of a cache."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    index: int = eqx.field(static=True)
    num_q_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)

    def __init__(self, index: int, size: int, num_q_heads: int, num_kv_heads: int, *, key):
        keys = jax.random.split(key)
        width = (num_q_heads + 2 * num_kv_heads) * (size // num_q_heads)
        self.qkv = eqx.nn.Linear(size, width, use_bias=False, key=keys[0])
        self.out = eqx.nn.Linear(size, size, use_bias=False, key=keys[1])
        self.index, self.num_q_heads, self.num_kv_heads = index, num_q_heads, num_kv_heads

    def __call__(self, x: jax.Array, cache: pp.PagedKVCache) -> tuple[jax.Array, pp.PagedKVCache]:
        heads = jax.vmap(self.qkv)(x).reshape(len(x), self.num_q_heads + 2 * self.num_kv_heads, -1)
        ends = self.num_q_heads, self.num_q_heads + self.num_kv_heads
        q, k, v = jnp.split(heads, ends, axis=1)
        cache = cache.write(self.index, k, v)
        attended = cache.attend(self.index, q)
        return jax.vmap(self.out)(attended.reshape(x.shape)), cache


class Model(eqx.Module):
    """Attention alone, with residual connections."""

    embed: jax.Array
    layers: list[Attention]

    def __init__(self, num_layers: int, vocab_size: int, size: int, *, key):
        keys = jax.random.split(key, num_layers + 1)
        self.embed = jax.random.normal(keys[-1], (vocab_size, size))
        self.layers = [Attention(i, size, 4, 2, key=keys[i]) for i in range(num_layers)]

    def __call__(self, tokens, cache):
        x = self.embed[tokens]
        for layer in self.layers:
            y, cache = layer(x, cache)
            x = x + y
        return x @ self.embed.T / x.shape[1], cache


@eqx.filter_jit(donate="all-except-first")
def sample(inputs: tuple[Model, jax.Array, jax.Array], cache: pp.PagedKVCache):
    """Draw the token after each sequence that has tokens; the cache is donated."""
    model, tokens, key = inputs
    cache, ok = cache.extend(tokens >= 0)
    logits, cache = model(jnp.maximum(tokens, 0), cache)
    drawn = jax.random.categorical(key, logits)
    return jnp.where(tokens >= 0, drawn, -1), cache, ok


def main() -> list[list[int]]:
    model = Model(num_layers=2, vocab_size=100, size=64, key=jax.random.key(0))
    sizes = dict(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
    cache = pp.PagedKVCache.create(num_pages=16, page_size=8, max_seqs=3, pages_per_seq=4, **sizes)
    keys = jax.random.split(jax.random.key(1), 16)
    tokens, texts = jnp.array([7, -1, -1]), []
    for step, key in enumerate(keys):
        if step == 10:  # two more samples go on from here, over the same full pages
            cache, ok = cache.fork(jnp.array([0, 0]), jnp.array([1, 2]))
            tokens = jnp.broadcast_to(tokens[0], 3)
            texts = [jnp.broadcast_to(x[0], 3) for x in texts]
        tokens, cache, ok = sample((model, tokens, key), cache)
        texts.append(tokens)
    assert ok.all()
    pages = cache.table.num_pages - int(cache.table.num_free)
    print(f"three samples of {cache.seq_lens[0]} tokens in {pages} pages")
    return jnp.stack(texts, axis=1).tolist()


if __name__ == "__main__":
    main()
