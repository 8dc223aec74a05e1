"""Log-probabilities and ranks of tokens, and the best tokens in their place, without a sort."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_paged.engine.sampling_filters import MAX_SHARDS

_MAX_COMPARED = 384  # values that are compared with one another
_NO_TOKEN = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Logprobs:
    """Log-probabilities of S tokens and of the k best tokens in their place.

    Attributes:
        logprob: `f32[S]`.
        rank: `i32[S]`, 1 + the number of tokens with a larger log-probability.
        top_token_ids: `i32[S, k]`, best first; of equal ones the lowest id first.
        top_logprobs: `f32[S, k]`.
    """

    logprob: jax.Array
    rank: jax.Array
    top_token_ids: jax.Array
    top_logprobs: jax.Array


def gather_logprobs(logits: jax.Array, token_ids: jax.Array, num_logprobs: int) -> Logprobs:
    """Return the log-probabilities of tokens and of the best ones.

    Args:
        logits: `f32[S, V]` as the model gave them, before processors, temperature and filters.
        token_ids: `i32[S]`; what is returned for -1 means nothing.
        num_logprobs: static, how many of the best; a small vocabulary gives no more than it has.

    Raises:
        ValueError: the logits are not `f32[S, V]`.
    """
    check_logits(logits)
    logprobs = jax.nn.log_softmax(logits)
    logprob = jnp.take_along_axis(logprobs, jnp.maximum(token_ids, 0)[:, None], axis=1)
    top_logprobs, top_token_ids = top_tokens(logprobs, min(num_logprobs, logits.shape[1]))
    return Logprobs(
        logprob=logprob[:, 0],
        rank=1 + jnp.sum(logprobs > logprob, axis=1, dtype=jnp.int32),
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
    )


def top_tokens(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k largest values of each row and their indices, as `jax.lax.top_k` does.

    Args:
        values: `f32[S, V]`; what is returned for a row with NaN means nothing.
        k: static, at most V.
    """
    num_rows, size = values.shape
    if k == 0:
        return values[:, :0], jnp.zeros((num_rows, 0), jnp.int32)
    # Each part lies on one device where the vocabulary is cut over devices.
    num_parts = math.gcd(size, MAX_SHARDS)
    if size > _MAX_COMPARED and num_parts > 1 and size // num_parts >= k:
        tokens = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], values.shape)
        parts = (x.reshape(num_rows, num_parts, -1) for x in (values, tokens))
        return _largest(*(x.reshape(num_rows, -1) for x in _largest(*parts, k)), k)
    return _largest(values, jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], values.shape), k)


def _largest(values: jax.Array, tokens: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k largest values `[..., k]` of `[..., N]` and their tokens, best first.

    The largest values lie in those k blocks whose best values are the largest.
    """
    size = values.shape[-1]
    if size <= _MAX_COMPARED:
        return _sorted_best(values, tokens, k)
    block = math.isqrt(size // k)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -size % block)]
    values = jnp.pad(values, padding, constant_values=-jnp.inf)
    tokens = jnp.pad(tokens, padding, constant_values=_NO_TOKEN)
    values, tokens = (x.reshape(*x.shape[:-1], -1, block) for x in (values, tokens))
    ...
