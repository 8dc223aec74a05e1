"""Speculation with rollback: run `python examples/speculation.py`.

Each sequence guesses its next tokens: those that followed the last token where it occurred before
(prompt lookup). One ragged call runs the model on the newest token and the guesses of all
sequences. The guesses that are what the model itself chooses are kept, and `truncate` drops the K/V
of the others. The tokens are those of plain greedy decoding, which is the same program without
guesses.

Prints the calls of the model, with and without guesses.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallas_paged as pp

VOCAB, LAYERS, HQ, HKV, D = 64, 2, 4, 2, 16


def init() -> dict[str, jax.Array]:
    """Return random weights of attention alone, with residual connections."""
    rng, size = np.random.default_rng(0), HQ * D
    shapes = dict(embed=(VOCAB, size), qkv=(LAYERS, size, (HQ + 2 * HKV) * D))
    shapes |= dict(out=(LAYERS, size, size), head=(size, VOCAB))
    return {name: jnp.float32(rng.standard_normal(x) / x[-2] ** 0.5) for name, x in shapes.items()}


def model(weights, tokens, cache: pp.PagedKVCache, cu_q_lens):
    """Return logits f32[T, V] of the tokens of the last `extend`, and the cache with their K/V."""
    x = weights["embed"][tokens]
    for layer in range(LAYERS):
        heads = (x @ weights["qkv"][layer]).reshape(len(tokens), -1, D)
        q, k, v = jnp.split(heads, (HQ, HQ + HKV), axis=1)
        cache = cache.write(layer, k, v, cu_q_lens)
        x += cache.attend(layer, q, cu_q_lens).reshape(x.shape) @ weights["out"][layer]
    return x @ weights["head"], cache


@partial(jax.jit, donate_argnames="cache")
def verify(weights, cache: pp.PagedKVCache, tokens):
    """Run the model on tokens i32[B, 1 + K], the newest of each sequence and then its guesses.

    Returns:
        The tokens that the model chooses after each, i32[B, 1 + K]; how many guesses are right,
        i32[B]; ok bool[B]; and the cache, with the K/V of the newest token and right guesses.
    """
    num_seqs, width = tokens.shape
    cache, has_room = cache.extend(jnp.full(num_seqs, width, jnp.int32))
    cu_q_lens = jnp.arange(num_seqs + 1, dtype=jnp.int32) * width
    logits, cache = model(weights, tokens.ravel(), cache, cu_q_lens)
    chosen = logits.argmax(axis=-1).reshape(tokens.shape)
    is_right = jnp.cumprod(tokens[:, 1:] == chosen[:, :-1], axis=1)  # none after a wrong one
    num_right = is_right.sum(axis=1, dtype=jnp.int32)
    cache, ok = cache.truncate(cache.seq_lens - (width - 1 - num_right))
    return chosen, num_right, has_room & ok, cache


def guess(text: list[int], count: int) -> list[int]:
    """Return the `count` tokens that followed the last token of `text` where it occurred before."""
    earlier = [at for at, token in enumerate(text[:-1]) if token == text[-1]]
    found = text[earlier[-1] + 1 :] if earlier else []
    return (found + [text[-1]] * count)[:count]


def generate(num_tokens: int, num_guesses: int) -> tuple[list[list[int]], int]:
    """Return the first tokens of three sequences, and the number of calls."""
    weights, texts, calls = init(), [[1], [2], [3]], 0
    cache = pp.PagedKVCache.create(
        **dict(num_pages=64, page_size=8, max_seqs=len(texts), pages_per_seq=16),
        **dict(num_layers=LAYERS, num_kv_heads=HKV, head_dim=D, dtype="float32"),
    )
    while min(map(len, texts)) < num_tokens:
        tokens = [[text[-1], *guess(text, num_guesses)] for text in texts]
        chosen, num_right, ok, cache = verify(weights, cache, np.array(tokens, np.int32))
        assert ok.all()
        for text, new, count in zip(texts, chosen.tolist(), num_right.tolist(), strict=True):
            text += new[: count + 1]  # the right guesses, and the model's token after them
        calls += 1
    return [text[:num_tokens] for text in texts], calls


def main(num_tokens: int = 40, num_guesses: int = 3) -> tuple[list[list[int]], int]:
    with jax.default_matmul_precision("highest"):  # without TF32, which rounds shapes differently
        plain, plain_calls = generate(num_tokens, 0)
        found, calls = generate(num_tokens, num_guesses)
    assert found == plain
    print(f"{num_tokens} tokens of {len(plain)} sequences, the same by {plain_calls} calls of the")
    print(f"model without guesses and by {calls} calls with {num_guesses} guesses a sequence")
    return found, calls


if __name__ == "__main__":
    main()
