"""Logits to tokens and log-probabilities, on the device; every row has its own sampling parameters.

All functions are pure and may run inside `jax.jit` or a `lax.while_loop`. What a row draws depends
on its own logits, parameters and length only, not on the other rows of its batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_paged.engine.logprobs import check_logits
from pallas_paged.engine.sampling_filters import (
    MAX_FEW,
    limit_count,
    limit_few,
    limit_mass,
)
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_FEW_ROWS = 8  # that draw are taken out of a batch of greedy rows
# Values of `SamplingMode.draws` and of `SamplingMode.filters`; each serves what those before do.
FEW_DRAW, ALL_DRAW = 1, 2
MIN_P, FEW_TOP_K, TOP_P, ANY_TOP_K = 1, 2, 3, 4

Array = Any  # a NumPy array on the host, a JAX array in a jitted step


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingMetadata:
    """Sampling parameters of S rows, which `SamplingParams` has checked.

    Attributes:
        seeds: `u32[S, 3]`, seed, `hash_prompt` of the prompt and index of the sample.
        temperature: `f32[S]`, 0 = greedy, which ignores the filters.
        top_k: `i32[S]`, 0 = off.
        top_p: `f32[S]`, 1 = off.
        min_p: `f32[S]`, 0 = off.
        presence_penalty, frequency_penalty: `f32[S]`, 0 = off.
        repetition_penalty: `f32[S]`, 1 = off.
        min_lens: `i32[S]`, the prompt's length + `min_tokens`. Rows with fewer tokens than this
            cannot draw a stop token.
        stop_token_ids: `i32[S, N]`, all tokens that end a row, padded with -1.
        bias_token_ids: `i32[S, M]`, without duplicates, padded with -1 or the vocabulary's size.
        bias: `f32[S, M]`, what is added to the logits of those tokens.
    """

    seeds: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    presence_penalty: Array
    frequency_penalty: Array
    repetition_penalty: Array
    min_lens: Array
    stop_token_ids: Array
    bias_token_ids: Array
    bias: Array


@dataclass(frozen=True, kw_only=True, order=True)
class SamplingMode:
    """What a compiled step can sample; hashable, for a static argument.

    A parameter that the mode leaves out is ignored, and costs nothing in the compiled program. The
    costliest parts come first, so that the smallest of several modes is the cheapest.

    Attributes:
        prompt_logprobs: as `logprobs`, of the tokens of prompts.
        penalties: rows may have penalties.
        filters: 0 = none, MIN_P = rows may have that, FEW_TOP_K = and a top_k of up to `MAX_FEW`,
            with a top_p or without, TOP_P = and that alone, ANY_TOP_K = all of them.
        logprobs: -1 = none, 0 = those of the tokens, `MAX_LOGPROBS` = those of the best tokens too.
        processors: rows may have a logit_bias or min_tokens.
        draws: 0 = none, FEW_DRAW = up to `MAX_FEW_ROWS` rows may have a temperature, ALL_DRAW = all
            may.
    """

    prompt_logprobs: int = -1
    penalties: bool = False
    filters: int = 0
    logprobs: int = -1
    processors: bool = False
    draws: int = 0

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingMode:
        """Return the smallest mode that serves these parameters."""
        ranked, prompt = params.beam_width or params.logprobs, params.prompt_logprobs
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        return cls(
            prompt_logprobs=-1 if prompt is None else MAX_LOGPROBS * (prompt > 0),
            penalties=penalties != (0, 0, 1),
            filters=_filters(params),
            logprobs=MAX_LOGPROBS if ranked else 0 if params.needs_logprobs else -1,
            processors=bool(params.logit_bias or params.min_tokens),
            draws=0 if params.greedy else FEW_DRAW,
        )

    def __or__(self, other: SamplingMode) -> SamplingMode:
        """Return the smallest mode that covers both."""
        return SamplingMode(**{name: max(x, vars(other)[name]) for name, x in vars(self).items()})

    def covers(self, other: SamplingMode) -> bool:
        """Return whether a step of this mode serves all that one of the other mode serves."""
        return self | other == self


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class TokenCounts:
    """The tokens that penalties look at, of S rows.

    Attributes:
        prompt: `bool[S, V]`, whether the token occurs in the prompt.
        output: `i32[S, V]`, how often the token occurs in the output.
    """

    prompt: jax.Array
    output: jax.Array


def create_token_counts(num_rows: int, vocab_size: int) -> TokenCounts:
    """Return counts of rows without tokens."""
    shape = (num_rows, vocab_size)
    return TokenCounts(prompt=jnp.zeros(shape, bool), output=jnp.zeros(shape, jnp.int32))


def set_token_counts(
    counts: TokenCounts,
    row: jax.Array,
    prompt_token_ids: jax.Array,
    output_token_ids: jax.Array,
    first: jax.Array,
) -> TokenCounts:
    """Count a piece of a row's tokens. A long row takes several calls, all of one shape.

    Args:
        counts: of all rows.
        row: `i32[]`; nothing happens where it is out of range.
        prompt_token_ids: `i32[N]`, padded with -1.
        output_token_ids: `i32[M]`, padded with -1.
        first: `bool[]`, whether the row's earlier tokens are dropped.
    """
    num_rows, vocab_size = counts.output.shape
    row = _drop_negative(row, num_rows)
    prompt = counts.prompt.at[row].get(mode="clip") & ~first  # [V]
    prompt = prompt.at[_drop_negative(prompt_token_ids, vocab_size)].set(True, mode="drop")
    output = jnp.where(first, 0, counts.output.at[row].get(mode="clip"))
    output = output.at[_drop_negative(output_token_ids, vocab_size)].add(1, mode="drop")
    return TokenCounts(
        prompt=counts.prompt.at[row].set(prompt, mode="drop"),
        output=counts.output.at[row].set(output, mode="drop"),
    )


def add_output_tokens(counts: TokenCounts, rows: jax.Array, tokens: jax.Array) -> TokenCounts:
    """Count one more output token of each of S rows.

    Args:
        counts: of all rows.
        rows: `i32[S]`; those out of range are dropped.
        tokens: `i32[S]`; those out of range, such as -1, are dropped.
    """
    num_rows, vocab_size = counts.output.shape
    where = _drop_negative(rows, num_rows), _drop_negative(tokens, vocab_size)
    return TokenCounts(prompt=counts.prompt, output=counts.output.at[where].add(1, mode="drop"))


def process_logits(
    logits: jax.Array,
    metadata: SamplingMetadata,
    counts: TokenCounts | None,
    lens: jax.Array,
    mode: SamplingMode,
) -> jax.Array:
    """Apply logit_bias, min_tokens and then the penalties, with vLLM's formulas and in its order.

    Args:
        logits: `f32[S, V]`
        metadata: of the S rows.
        counts: tokens of the S rows; unused (may be None) unless `mode.penalties`.
        lens: `i32[S]`, tokens of each row before the one that it draws.
        mode: static.

    Returns:
        `f32[S, V]`; greedy rows choose from these too.

    Raises:
        ValueError: the logits are not `f32[S, V]`, or the mode has penalties and counts is None.
    """
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    if mode.processors:
        rows = jnp.arange(num_rows)[:, None]
        biased = _drop_negative(metadata.bias_token_ids, vocab_size)
        logits = logits.at[rows, biased].add(metadata.bias, mode="drop")
        short = (lens < metadata.min_lens)[:, None]
        masked = jnp.where(short, _drop_negative(metadata.stop_token_ids, vocab_size), vocab_size)
        logits = logits.at[rows, masked].set(-jnp.inf, mode="drop")
    if mode.penalties:
        if counts is None:
            raise ValueError("counts=None must be the tokens of the rows: the mode has penalties")
        repetition = metadata.repetition_penalty[:, None]
        in_output = counts.output > 0
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(counts.prompt | in_output, repeated, logits)
        logits -= metadata.frequency_penalty[:, None] * counts.output.astype(jnp.float32)
        logits -= metadata.presence_penalty[:, None] * in_output.astype(jnp.float32)
    return logits


def sample(
    logits: jax.Array,
    metadata: SamplingMetadata,
    lens: jax.Array,
    mode: SamplingMode,
    num_devices: int = 1,
) -> jax.Array:
    """Choose the next token of each row.

    The filters run in the order temperature, top_k, top_p, min_p, each on what the one before left.
    At least one token is kept, and so are all that tie with the last one kept. Of equal greedy
    logits the lowest token wins. A draw takes the largest logit plus Gumbel noise per token; its
    key is made of the row's seeds and its length.

    Args:
        logits: `f32[S, V]`
        metadata: of the S rows.
        lens: `i32[S]`, tokens of each row before the one that it draws.
        mode: static.
        num_devices: static, over which the vocabulary is cut.

    Returns:
        `i32[S]` tokens; -1 for a row whose largest logit is NaN or infinite.

    Raises:
        ValueError: the logits are not `f32[S, V]`.
    """
    check_logits(logits)
    if not mode.draws:
        return _argmax(logits)
    metadata = jax.tree.map(jnp.asarray, metadata)
    if mode.draws == ALL_DRAW or logits.shape[0] <= MAX_FEW_ROWS:
        return _draw(logits, metadata, lens, mode, num_devices)
    rows = _places(metadata.temperature > 0, MAX_FEW_ROWS)
    taken = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), (logits, metadata, lens))
    few_logits, few_metadata, few_lens = taken
    drawn = _draw(few_logits, few_metadata, few_lens, mode, num_devices)
    return _argmax(logits).at[rows].set(drawn, mode="drop")


def hash_prompt(tokens: Sequence[int]) -> int:
    """Return a 32-bit hash of a prompt's tokens, for `SamplingMetadata.seeds`."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())


def _filters(params: SamplingParams) -> int:
    """Return the value of `SamplingMode.filters` that these parameters need."""
    if not params.filters:
        return 0
    if params.top_k > MAX_FEW:
        return ANY_TOP_K
    return FEW_TOP_K if params.top_k else TOP_P if params.top_p < 1 else MIN_P


def _key(seeds: jax.Array, length: jax.Array) -> jax.Array:
    """Return the key of a row's draw, the same whatever else the batch holds."""
    seed, prompt, index = seeds
    key = jax.random.fold_in(jax.random.key(seed), prompt)
    return jax.random.fold_in(jax.random.fold_in(key, index), length)


def _draw(
    logits: jax.Array,
    metadata: SamplingMetadata,
    lens: jax.Array,
    mode: SamplingMode,
    num_devices: int,
) -> jax.Array:
    """Draw from the tokens that the filters keep; rows with temperature 0 take the best."""
    depth = _depth(logits, metadata)
    scores = _noise(logits, metadata, lens) - depth
    if not mode.filters:
        return _argmax(scores)
    draws = metadata.temperature > 0
    # A token of probability min_p times the best one's is as deep as this, and is kept.
    deepest = jnp.where(draws, -jnp.log(metadata.min_p), jnp.inf)
    is_kept = depth <= deepest[:, None]
    if mode.filters > MIN_P:
        top_k = jnp.where(draws, metadata.top_k, 0)
        top_p = jnp.where(draws, metadata.top_p, 1.0)
        limit = limit_few(depth, top_k, top_p, num_devices)
        if mode.filters > FEW_TOP_K:
            is_few = (top_k > 0) & (top_k <= MAX_FEW)
            if mode.filters > TOP_P:
                limit = jnp.minimum(limit, limit_count(depth, jnp.where(is_few, 0, top_k)))
            limit = limit_mass(depth, jnp.where(is_few, 1.0, top_p), limit)
        is_kept &= depth < limit[:, None]
    return _argmax(jnp.where(is_kept, scores, -jnp.inf))


def _depth(logits: jax.Array, metadata: SamplingMetadata) -> jax.Array:
    """Return how far each logit lies below the row's largest, divided by the temperature."""
    temperature = metadata.temperature[:, None]
    # Less the maximum before the division: a tiny temperature must not push several logits to +inf.
    depth = jnp.max(logits, axis=-1, keepdims=True) - logits
    return depth / jnp.where(temperature > 0, jnp.maximum(temperature, 1e-30), 1.0)


def _noise(logits: jax.Array, metadata: SamplingMetadata, lens: jax.Array) -> jax.Array:
    """Return Gumbel noise `f32[S, V]`; 0 for rows with temperature 0."""
    keys = jax.vmap(_key)(metadata.seeds, lens)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.where(metadata.temperature[:, None] > 0, noise, 0.0)


def _argmax(values: jax.Array) -> jax.Array:
    """Return where the largest of values `[S, V]` is, the first of equal ones; -1 if not finite."""

    def larger(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        is_x = (x[0] > y[0]) | (x[0] != x[0]) | ((x[0] == y[0]) & (x[1] < y[1]))  # NaN is largest
        return tuple(lax.select(is_x, a, b) for a, b in zip(x, y, strict=True))

    # One reduction finds both, where argmax and a look at its place would be two.
    places = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    best, place = lax.reduce((values, places), (np.float32(-np.inf), np.int32(0)), larger, (1,))
    return jnp.where(jnp.isfinite(best), place, -1)


def _places(flags: jax.Array, count: int) -> jax.Array:
    """Return where the first flags of `bool[S]` are that are set, padded with S."""
    index = jnp.arange(flags.size)
    earlier = jnp.sum(flags[None] & (index[None] < index[:, None]), axis=1)
    is_nth = flags[None] & (earlier[None] == jnp.arange(count)[:, None])
    return jnp.min(jnp.where(is_nth, index[None], flags.size), axis=1)


def _drop_negative(indices: jax.Array, size: int) -> jax.Array:
    """Replace negative indices, which JAX counts from the end, by one that is out of range."""
    return jnp.where(indices < 0, size, indices)
