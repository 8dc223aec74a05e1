"""Log-probabilities and ranks of tokens, and the best tokens in their place, without a sort."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

_MAX_PAIRS = 2**24  # of values that are compared at a time
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


def gather_logprobs(
    logits: jax.Array, token_ids: jax.Array, num_logprobs: int, num_devices: int = 1
) -> Logprobs:
    """Return the log-probabilities of tokens and of the best ones.

    Args:
        logits: `f32[S, V]` as the model gave them, before processors, temperature and filters.
        token_ids: `i32[S]`; what is returned for -1 means nothing.
        num_logprobs: static, how many of the best; a small vocabulary gives no more than it has.
        num_devices: static, over which the vocabulary is cut.

    Raises:
        ValueError: the logits are not `f32[S, V]`.
    """
    check_logits(logits)
    logprobs = jax.nn.log_softmax(logits)
    logprob = jnp.take_along_axis(logprobs, jnp.maximum(token_ids, 0)[:, None], axis=1)
    num_logprobs = min(num_logprobs, logits.shape[1])
    top_logprobs, top_token_ids = top_tokens(logprobs, num_logprobs, num_devices)
    return Logprobs(
        logprob=logprob[:, 0],
        rank=1 + jnp.sum(logprobs > logprob, axis=1, dtype=jnp.int32),
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
    )


def top_tokens(values: jax.Array, k: int, num_devices: int = 1) -> tuple[jax.Array, jax.Array]:
    """Return the k largest values of each row and their indices, as `jax.lax.top_k` does.

    Args:
        values: `f32[S, V]`; what is returned for a row with NaN means nothing.
        k: static, at most V.
        num_devices: static, over which the rows are cut; the best of each are then compared.
    """
    num_rows, size = values.shape
    if k == 0:
        return values[:, :0], _indices(values)[:, :0]
    if num_devices == 1 or size % num_devices or k * num_devices >= size:
        return _largest(values, _indices(values), k)
    shape = (num_rows, num_devices, size // num_devices)
    parts = _largest(values.reshape(shape), _indices(values).reshape(shape), k)
    best, tokens = (_join(x).reshape(num_rows, -1) for x in parts)
    return _compare(best, tokens, k)


def _join(parts: jax.Array) -> jax.Array:
    """Return parts `[S, P, k]` as they are, all of them on each device that has some of them.

    Each is the sum of itself and zeros: devices add, and don't have to agree on a layout.
    """
    is_own = np.eye(parts.shape[1], dtype=bool)[None, :, :, None]
    return jnp.sum(jnp.where(is_own, parts[:, :, None], 0), axis=1)


def _largest(values: jax.Array, tokens: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k largest of values `[..., N]`, whose tokens rise, best first, and their tokens.

    Long rows are cut into blocks. The largest values lie in those k blocks whose best values are
    the largest, so that only these are compared.
    """
    size = values.shape[-1]
    most = max(math.isqrt(_MAX_PAIRS * size // values.size), 4 * k)
    block = -(-size // most)
    if block == 1:
        return _compare(values, tokens, k)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -size % block)]
    values = jnp.pad(values, padding, constant_values=-jnp.inf)
    tokens = jnp.pad(tokens, padding, constant_values=_NO_TOKEN)
    values, tokens = (x.reshape(*x.shape[:-1], -1, block) for x in (values, tokens))
    best = jnp.max(values, axis=-1)
    chosen = _rising(_largest(best, _indices(best), k)[1])  # so that tokens stay in order

    def take(x: jax.Array) -> jax.Array:
        x = jnp.take_along_axis(x, chosen[..., None], axis=-2, mode="clip")
        return x.reshape(*x.shape[:-2], k * block)

    return _largest(take(values), take(tokens), k)


def _rising(values: jax.Array) -> jax.Array:
    """Return different integers `[..., k]` in rising order."""
    place = jnp.sum(values[..., None, :] < values[..., :, None], axis=-1, dtype=jnp.int32)
    is_placed = place[..., None, :] == _indices(values)[..., :, None]
    return jnp.sum(jnp.where(is_placed, values[..., None, :], 0), axis=-1)


def _compare(values: jax.Array, tokens: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return what `_largest` does, for tokens in any order, by comparing all values."""
    one, other = values[..., :, None], values[..., None, :]
    is_better = (other > one) | ((other == one) & (tokens[..., None, :] < tokens[..., :, None]))
    place = jnp.sum(is_better, axis=-1, dtype=jnp.int32)
    is_placed = place[..., None, :] == _indices(values[..., :k])[..., :, None]
    values = jnp.max(jnp.where(is_placed, values[..., None, :], -jnp.inf), axis=-1)
    return values, jnp.max(jnp.where(is_placed, tokens[..., None, :], 0), axis=-1)


def _indices(values: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)


def check_logits(logits: jax.Array) -> None:
    """Raise ValueError unless the logits are `f32[S, V]`."""
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"{logits.shape=} {logits.dtype=} must be f32[S, V]")
