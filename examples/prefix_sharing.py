"""Sequences that share pages, in three ways: run `python examples/prefix_sharing.py`.

1. *Prefix cache.* Two prompts begin with the same 24 tokens. The pages of the first are cached;
   `attach` gives them to the second, which computes only what follows.
2. *Fork.* A third sequence starts as a copy of the second and shares its pages.
3. *Copy-on-write.* The last page of a fork is not full, and both go on writing to it; so `fork`
   copies this one page.

Prints the tokens computed and the pages in use. Logits are as if the sequences shared nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallas_paged as pp

VOCAB, LAYERS, HQ, HKV, D = 64, 2, 4, 2, 16
PAGE_SIZE, NUM_SHARED, SEQS = 8, 24, 3
TOKENS = 96  # of a call; the last are padding
attach, retain, fork = jax.jit(pp.attach), jax.jit(pp.retain), jax.jit(pp.PagedKVCache.fork)


def init() -> dict[str, jax.Array]:
    """Return random weights of attention alone, with residual connections."""
    rng, size = np.random.default_rng(0), HQ * D
    shapes = dict(embed=(VOCAB, size), qkv=(LAYERS, size, (HQ + 2 * HKV) * D))
    shapes |= dict(out=(LAYERS, size, size), head=(size, VOCAB))
    return {name: jnp.float32(rng.standard_normal(x) / x[-2] ** 0.5) for name, x in shapes.items()}


@partial(jax.jit, donate_argnames="cache")
def step(weights, cache: pp.PagedKVCache, tokens, cu_q_lens):
    """Return the logits f32[SEQS, V] after the last token of each sequence, and the cache."""
    cache, ok = cache.extend(jnp.diff(cu_q_lens))
    x = weights["embed"][tokens]
    for layer in range(LAYERS):
        heads = (x @ weights["qkv"][layer]).reshape(len(tokens), -1, D)
        q, k, v = jnp.split(heads, (HQ, HQ + HKV), axis=1)
        cache = cache.write(layer, k, v, cu_q_lens)
        x += cache.attend(layer, q, cu_q_lens).reshape(x.shape) @ weights["out"][layer]
    return x[cu_q_lens[1:] - 1] @ weights["head"], ok, cache


def compute(weights, cache, *texts):
    """Append a list of tokens to each sequence; return the logits and the cache."""
    cu_q_lens = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    tokens = np.zeros(TOKENS, np.int32)
    tokens[: cu_q_lens[-1]] = np.concatenate(texts)
    logits, ok, cache = step(weights, cache, tokens, cu_q_lens)
    used = cache.table.num_pages - int(cache.table.num_free)
    print(f"{cu_q_lens[-1]:3} tokens computed: {cache.seq_lens} tokens in {used} pages")
    assert ok.all()
    return np.asarray(logits), used, cache


def main() -> tuple[int, int]:
    weights = init()
    shared = np.random.default_rng(0).integers(0, VOCAB, NUM_SHARED).tolist()
    first, second = [*shared, 5, 5, 5], [*shared, 7, 7, 7]
    sizes = dict(num_pages=32, page_size=PAGE_SIZE, max_seqs=SEQS, pages_per_seq=8)
    sizes |= dict(num_layers=LAYERS, num_kv_heads=HKV, head_dim=D)
    cache = pp.PagedKVCache.create(**sizes, dtype="float32")

    prefixes = pp.PrefixCache(page_size=PAGE_SIZE)  # on the host: which page holds which tokens
    lease = prefixes.lookup(first)
    _, _, cache = compute(weights, cache, first, [], [])
    pages = cache.table.block_tables[0, : len(first) // PAGE_SIZE]
    table, ok = retain(cache.table, np.array(prefixes.insert(lease, first, pages), np.int32))
    assert ok.all()  # they stay when the sequence is freed

    lease = prefixes.lookup(second)
    assert lease.num_tokens == NUM_SHARED
    table, ok = attach(table, np.array([1]), np.array([lease.pages], np.int32))
    assert ok.all()
    cache = replace(cache, table=table)
    _, before_fork, cache = compute(weights, cache, [], second[lease.num_tokens :], [])

    cache, ok = fork(cache, np.array([1]), np.array([2]))
    assert ok.all()
    logits, used, cache = compute(weights, cache, [1], [2], [3])
    assert used == before_fork + 1  # the copy of the partial last page
    is_shared = cache.table.block_tables[1] == cache.table.block_tables[2]
    assert is_shared[:3].all() and not is_shared[3]
    pp.check_page_table(cache.table, retained=prefixes.pages)

    print("without sharing:")
    cache = pp.PagedKVCache.create(**sizes, dtype="float32")
    expected, unshared, _ = compute(weights, cache, [*first, 1], [*second, 2], [*second, 3])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-2 * np.abs(expected).max())
    return used, unshared


if __name__ == "__main__":
    main()
