"""Sampling of the next token: greedy, temperature, top-k, top-p, min-p, all per row."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class RowSampling:
    """How to sample each row; a filter that is None costs nothing in the compiled program.

    Attributes:
        temperature: f32[B], 0 = greedy, which also ignores the filters.
        top_k: i32[B] or None, 0 = off for that row.
        top_p: f32[B] or None, 1 = off for that row.
        min_p: f32[B] or None, 0 = off for that row.
    """

    temperature: jax.Array
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None

    @classmethod
    def create(
        cls,
        batch_size: int,
        *,
        temperature: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] | None = None,
        top_p: float | Sequence[float] | None = None,
        min_p: float | Sequence[float] | None = None,
    ) -> RowSampling:
        """Checks values on the host and gives every one of batch_size rows its own.

        Args:
            batch_size: number of rows B.
            temperature: one value for all rows or one a row, >= 0; 0 is greedy.
            top_k: keep the k most probable tokens, >= 0; 0 is off.
            top_p: keep the smallest set of probability top_p, in (0, 1]; 1 is off.
            min_p: keep tokens of min_p times the highest probability, in [0, 1); 0 is off.

        Returns:
            RowSampling with leaves of shape [B].

        Raises:
            ValueError: a value is out of its range, or the number of values is not B.
        """
        temperatures = _rows("temperature", temperature, batch_size, np.float32)
        if not np.all(np.isfinite(temperatures) & (temperatures >= 0)):
            raise ValueError(f"{temperature=} must be finite and not negative")
        fields: dict[str, jax.Array | None] = {"temperature": jnp.asarray(temperatures)}
        if top_k is not None:
            ks = _rows("top_k", top_k, batch_size, np.int32)
            if not np.all(ks >= 0):
                raise ValueError(f"{top_k=} must not be negative")
            fields["top_k"] = jnp.asarray(ks)
        if top_p is not None:
            ps = _rows("top_p", top_p, batch_size, np.float32)
            if not np.all((ps > 0) & (ps <= 1)):
                raise ValueError(f"{top_p=} must be above 0 and at most 1")
            fields["top_p"] = jnp.asarray(ps)
        if min_p is not None:
            ps = _rows("min_p", min_p, batch_size, np.float32)
            if not np.all((ps >= 0) & (ps < 1)):
                raise ValueError(f"{min_p=} must be at least 0 and below 1")
            fields["min_p"] = jnp.asarray(ps)
        return cls(**fields)  # type: ignore[arg-type]


def sample(logits: jax.Array, keys: jax.Array | None, params: RowSampling | None) -> jax.Array:
    """Chooses one token a row.

    The filters run in the order of Hugging Face: temperature, top_k, top_p, min_p, each on what the
    one before left. At least one token is always kept, and so are all that tie with the last one
    kept. Among equal greedy logits the lowest token wins. Draws by the Gumbel-max trick with noise
    per token, so that a row's choice depends on its own logits, key and values only.

    Args:
        logits: f32[B, V]
        keys: key[B], one for each row and step; unused (may be None) when params is None.
        params: leaves of shape [B], or None for greedy in all rows.

    Returns:
        i32[B] tokens; -1 for a row whose largest logit is NaN or infinite, which has no next token.

    Raises:
        ValueError: logits are not [B, V], keys or params do not fit them.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"{logits.shape=} {logits.dtype=} must be f32[B, V]")
    if params is None:
        return _argmax(logits)
    if keys is None:
        raise ValueError("keys=None must be one key a row when params are given")
    batch_size, vocab_size = logits.shape
    for name, leaf in (("keys", keys), *vars(params).items()):
        if leaf is not None and leaf.shape != (batch_size,):
            raise ValueError(f"{name}.shape={leaf.shape} must be ({batch_size},), one value a row")

    temperature = params.temperature[:, None]  # [B, 1]
    # Less the maximum before the division: a tiny temperature must not push several logits to +inf.
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.maximum(temperature, 1e-30)  # [B, V]
    threshold = jnp.full((batch_size, 1), -jnp.inf)
    if params.top_k is not None or params.top_p is not None:
        ordered = jnp.sort(scaled, axis=-1, descending=True)  # [B, V]
        if params.top_k is not None:
            top_k = params.top_k[:, None]
            last = jnp.clip(top_k - 1, 0, vocab_size - 1)
            kth = jnp.take_along_axis(ordered, last, axis=-1)
            threshold = jnp.where(top_k > 0, kth, threshold)
        if params.top_p is not None:
            top_p = params.top_p[:, None]
            left = jnp.where(ordered < threshold, -jnp.inf, ordered)
            probs = jax.nn.softmax(left, axis=-1)
            before = jnp.cumsum(probs, axis=-1) - probs
            least = jnp.min(jnp.where(before < top_p, left, jnp.inf), axis=-1, keepdims=True)
            threshold = jnp.where(top_p < 1, jnp.maximum(threshold, least), threshold)
    if params.min_p is not None:
        threshold = jnp.maximum(threshold, jnp.log(params.min_p)[:, None])
    noise = jax.vmap(partial(jax.random.gumbel, shape=(vocab_size,)))(keys)  # [B, V]
    noisy = jnp.where(scaled < threshold, -jnp.inf, scaled) + noise
    return _argmax(jnp.where(temperature > 0, noisy, logits))


def hash_prompt(tokens: Sequence[int]) -> int:
    """Of a prompt's contents, 32 bits, for `sample_key`."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())


def sample_key(key: jax.Array, prompt: jax.Array, number: jax.Array) -> jax.Array:
    """The key that a sample draws with: it depends on its prompt's contents and on its number.

    Args:
        key: key[] of a seed.
        prompt: u32[], from `hash_prompt`.
        number: u32[], which of the prompt's samples.
    """
    return jax.random.fold_in(jax.random.fold_in(key, prompt), number)


def _argmax(scores: jax.Array) -> jax.Array:
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)  # NaN counts as the largest
    best = jnp.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(best), tokens, -1)


def _rows(name: str, values: object, batch_size: int, dtype: type) -> np.ndarray:
    given = np.asarray(values)
    if dtype is np.int32:
        # Integers beyond 64 bits make an array of objects; those beyond 32 would wrap around.
        if given.dtype.kind not in "iu" or np.any((given < -(2**31)) | (given >= 2**31)):
            raise ValueError(f"{name}={values!r} must be integers of 32 bits")
    elif given.dtype.kind not in "iuf":
        raise ValueError(f"{name}={values!r} must be numbers")
    if given.shape not in ((), (batch_size,)):
        raise ValueError(f"{name}={values!r} must be one value or {batch_size} values")
    return np.broadcast_to(given.astype(dtype), (batch_size,))
