"""The baseline: a static batch over a contiguous cache of max_len tokens for each row.

A plain Flax generate loop, done well: prompts, padded on the right to a power of two, go through
the model in one call; then one jitted, donated loop decodes until every row of the batch has its
tokens. The model is the engine's; only the attention and the cache differ.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.serving.batches import BatchTimes
from bench.serving.requests import TraceRequest
from models.decoder import Attend, Decoder, LayerCache, dense_attend

_MIN_PROMPT = 64
_TRIAL_STEPS = 64
Cache = tuple[LayerCache, ...]  # k, v [B, max_len, Hkv, D] of each layer


def prompt_attend() -> Attend:
    """Attention of prompts `[B, T]` to themselves; their K/V become the first T cached tokens."""
    dense = dense_attend()

    def attend(q, k, v, cache, *, sliding_window):
        new = tuple(
            jax.lax.dynamic_update_slice(old, x, (0, 0, 0, 0))
            for old, x in zip(cache, (k, v), strict=True)
        )
        return dense(q, k, v, None, sliding_window=sliding_window)[0], new

    return attend


def token_attend(positions: jax.Array, implementation: str) -> Attend:
    """Attention of one new token per row over the row's cache.

    Args:
        positions: `i32[B]`, where the token's K/V go; beyond the cache they are dropped.
        implementation: of `jax.nn.dot_product_attention`.
    """

    def attend(q, k, v, cache, *, sliding_window):
        rows = jnp.arange(len(positions))
        new = tuple(
            old.at[rows, positions].set(x, mode="drop", unique_indices=True)
            for old, x in zip(cache, (k, v), strict=True)
        )
        if sliding_window is not None:
            raise ValueError(f"{sliding_window=} must be None: queries see all of their row")
        out = jax.nn.dot_product_attention(
            q[:, None],
            *new,
            key_value_seq_lengths=jnp.minimum(positions + 1, new[0].shape[1]),
            implementation=implementation,
        )
        return out[:, 0], new

    return attend


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def prefill(
    graphdef: nnx.GraphDef[Any],
    params: nnx.State,
    cache: Cache,
    prompts: jax.Array,
    lens: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Run prompts; return the cache that holds them and their next tokens `i32[B]`.

    Args:
        graphdef, params: `nnx.split(model)`.
        cache: donated.
        prompts: `i32[B, T]`, padded on the right with any valid token.
        lens: `i32[B]`, at least 1.
    """
    model = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    hidden, layers = model(prompts, positions, prompt_attend(), cache)
    last = hidden[jnp.arange(len(lens)), lens - 1]  # [B, E]
    return layers or cache, _greedy(model, last)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "implementation"), donate_argnames=("cache", "tokens")
)
def decode(
    graphdef: nnx.GraphDef[Any],
    params: nnx.State,
    cache: Cache,
    tokens: jax.Array,
    lens: jax.Array,
    num_tokens: jax.Array,
    *,
    implementation: str,
) -> tuple[Cache, jax.Array]:
    """Decode all rows until the row with the longest output has its tokens.

    Args:
        graphdef, params: `nnx.split(model)`.
        cache: donated.
        tokens: `i32[B, W]`, donated; column 0 holds the first tokens.
        lens: `i32[B]`, tokens of the prompts.
        num_tokens: `i32[]`, tokens of the longest output, including the first; at most W.
        implementation: of `jax.nn.dot_product_attention`.
    """
    model = nnx.merge(graphdef, params)

    def step(carry: tuple[jax.Array, Cache, jax.Array]) -> tuple[jax.Array, Cache, jax.Array]:
        index, cache, tokens = carry
        positions = lens + index - 1
        last = jax.lax.dynamic_index_in_dim(tokens, index - 1, axis=1, keepdims=False)
        attend = token_attend(positions, implementation)
        hidden, layers = model(last, positions, attend, cache)
        new = _greedy(model, hidden)[:, None]
        tokens = jax.lax.dynamic_update_slice(tokens, new, (0, index))
        return index + 1, layers or cache, tokens

    start = (jnp.int32(1), cache, tokens)
    return jax.lax.while_loop(lambda carry: carry[0] < num_tokens, step, start)[1:]


class StaticBatch:
    """A cache of batch_size rows of max_len tokens, with the programs that run batches in it.

    Attributes:
        implementation: attention of single tokens; the faster one where there are two.
    """

    def __init__(self, model: Decoder, *, batch_size: int, max_len: int) -> None:
        self.batch_size, self.max_len = batch_size, max_len
        self._graphdef, self._params = nnx.split(model)
        config, dtype = model.config, model.embed_tokens.weight[...].dtype
        shape = (batch_size, max_len, config.num_kv_heads, config.head_dim)
        self._cache: Cache = tuple(
            (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
        )
        self.implementation = "xla"

    def warmup(self, trace: Sequence[TraceRequest]) -> None:
        """Compile every program that batches of this trace need, and choose the attention."""
        longest = max(len(one.prompt) for one in trace)
        length = _MIN_PROMPT
        while True:
            ones = np.ones(min(length, self.max_len), np.int32)
            self.run([TraceRequest(arrival=0.0, prompt=ones, num_tokens=2)])
            if length >= longest:
                break
            length *= 2
        if jax.default_backend() == "gpu" and self._cache[0][0].dtype.itemsize == 2:
            seconds = {name: self._trial(name) for name in ("xla", "cudnn")}
            self.implementation = min(seconds, key=seconds.__getitem__)

    def run(self, batch: Sequence[TraceRequest]) -> tuple[list[np.ndarray], BatchTimes]:
        """Run a batch; return the output tokens of each request and the times."""
        longest = max(len(one.prompt) for one in batch)
        padded_len = min(max(_MIN_PROMPT, 1 << (longest - 1).bit_length()), self.max_len)
        prompts = np.zeros((self.batch_size, padded_len), np.int32)
        lens = np.ones(self.batch_size, np.int32)
        for row, one in enumerate(batch):
            prompts[row, : len(one.prompt)], lens[row] = one.prompt, len(one.prompt)
        self._cache, first = prefill(self._graphdef, self._params, self._cache, prompts, lens)
        first.block_until_ready()
        first_token = time.perf_counter()
        tokens = jnp.zeros((self.batch_size, self.max_len), jnp.int32).at[:, 0].set(first)
        num_tokens = max(one.num_tokens for one in batch)
        self._cache, tokens = decode(
            self._graphdef,
            self._params,
            self._cache,
            tokens,
            lens,
            np.int32(num_tokens),
            implementation=self.implementation,
        )
        outputs = np.asarray(tokens)
        times = BatchTimes(
            first_token=first_token, finish=time.perf_counter(), padded_len=padded_len
        )
        return [outputs[row, : one.num_tokens] for row, one in enumerate(batch)], times

    def _trial(self, implementation: str) -> float:
        """Seconds of some steps with prompts of a quarter of the cache; inf if they fail."""
        self.implementation = implementation
        prompt = np.ones(self.max_len // 4, np.int32)
        one = TraceRequest(arrival=0.0, prompt=prompt, num_tokens=_TRIAL_STEPS)
        try:
            self.run([one] * self.batch_size)
        except Exception:  # cuDNN may reject these shapes; XLA does not
            return float("inf")
        _, times = self.run([one] * self.batch_size)
        return times.finish - times.first_token


def _greedy(model: Decoder, hidden: jax.Array) -> jax.Array:
    return jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
