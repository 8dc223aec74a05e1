"""Log-probabilities and ranks of tokens, and the best tokens in their place, without a sort."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_paged.checks import pytree
from pallas_paged.decoder.peers import DevicePeers, Peers

_MAX_PAIRS = 2**24  # of values that are compared at a time


@pytree
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
    logits: jax.Array, token_ids: jax.Array, num_logprobs: int, peers: Peers | None = None
) -> Logprobs:
    """Return the log-probabilities of tokens and of the best ones.

    Args:
        logits: `f32[S, V]` as the model gave them, before processors, temperature and filters.
        token_ids: `i32[S]`; what is returned for -1 means nothing.
        num_logprobs: static, how many of the best; a small vocabulary gives no more than it has.
        peers: of the devices over which the vocabulary is sharded.

    Raises:
        ValueError: the logits are not `f32[S, V]`.
    """
    check_logits(logits)
    num_logprobs = min(num_logprobs, logits.shape[1])
    if peers is None or logits.shape[1] % peers.mesh.size:
        return _gather_logprobs(None, logits, token_ids, num_logprobs)
    sharded, replicated = PartitionSpec(None, peers.axis), PartitionSpec()
    local = partial(_gather_logprobs, num_logprobs=num_logprobs)
    logprobs: Logprobs = peers.run(local, (sharded, replicated), logits, token_ids)
    return logprobs


def _gather_logprobs(
    group: DevicePeers | None, logits: jax.Array, token_ids: jax.Array, num_logprobs: int
) -> Logprobs:
    """Return what `gather_logprobs` does, of a device's part of the logits if there is a group.

    The barrier makes both sides of each comparison the same numbers: XLA may compute logits for
    each side anew, with sums in another order, and two tokens would get one place.
    """
    logits = jax.lax.optimization_barrier(logits)
    size = logits.shape[1]
    places = token_ids if group is None else token_ids - group.index * size
    is_here = (places >= 0) & (places < size)
    logit = jnp.take_along_axis(logits, jnp.clip(places, 0, size - 1)[:, None], axis=1)[:, 0]
    largest = jnp.max(logits, axis=1)
    total = jnp.sum(jnp.exp(logits - largest[:, None]), axis=1)
    values, tokens = top_tokens(logits, min(num_logprobs, size))
    if group is not None:
        tokens += group.index * size  # f32 has all integers up to 2**24
        columns = [jnp.stack([largest, total, jnp.where(is_here, logit, 0.0)], 1), values, tokens]
        found = group.gather(jnp.concatenate(columns, axis=1))
        parts, totals, logit = found[..., 0], found[..., 1], jnp.sum(found[..., 2], axis=0)
        largest = jnp.max(parts, axis=0)
        # A part whose logits are all -inf has no sum.
        total = jnp.sum(jnp.where(totals > 0, totals * jnp.exp(parts - largest), 0.0), axis=0)
        if num_logprobs:
            values, tokens = (
                jnp.concatenate([*x], axis=1) for x in jnp.split(found[..., 3:], 2, axis=2)
            )
            values, tokens = _compare(values, tokens.astype(jnp.int32), num_logprobs)
    num_larger = jnp.sum(logits > logit[:, None], axis=1, dtype=jnp.float32)
    if group is not None:
        num_larger = group.sum(num_larger)
    log_total = jnp.log(total)
    return Logprobs(
        logprob=logit - largest - log_total,
        rank=1 + num_larger.astype(jnp.int32),
        top_token_ids=tokens,
        top_logprobs=values - largest[:, None] - log_total[:, None],
    )


def top_tokens(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k largest of values `f32[..., N]` and their indices, as `jax.lax.top_k` does.

    What is returned for a row with NaN means nothing. `k` is static, at most N. Long rows are
    divided into blocks. The largest values are in the k blocks with the largest maxima, so that
    only these are compared.
    """
    if k == 0:
        return values[..., :0], _indices(values)[..., :0]
    size = values.shape[-1]
    most = max(math.isqrt(_MAX_PAIRS * size // values.size), 4 * k)
    block = -(-size // most)
    if block == 1:
        return _compare(values, _indices(values), k)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -size % block)]
    values = jnp.pad(values, padding, constant_values=-jnp.inf)
    values = values.reshape(*values.shape[:-1], -1, block)
    chosen = _rising(top_tokens(jnp.max(values, axis=-1), k)[1])  # so that indices stay in order
    values = jnp.take_along_axis(values, chosen[..., None], axis=-2, mode="clip")
    # Computed: XLA would make an array of the indices of all values a constant of the program.
    indices = chosen[..., None] * block + _indices(values)
    values, indices = (x.reshape(*x.shape[:-2], -1) for x in (values, indices))
    values, places = top_tokens(values, k)
    return values, jnp.take_along_axis(indices, places, axis=-1, mode="clip")


def _rising(values: jax.Array) -> jax.Array:
    """Return different integers `[..., k]` in rising order."""
    place = jnp.sum(values[..., None, :] < values[..., :, None], axis=-1, dtype=jnp.int32)
    is_placed = place[..., None, :] == _indices(values)[..., :, None]
    return jnp.sum(jnp.where(is_placed, values[..., None, :], 0), axis=-1)


def _compare(values: jax.Array, tokens: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return what `top_tokens` does, with tokens in place of indices, by comparing all values."""
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
