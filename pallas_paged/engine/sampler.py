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
from pallas_paged.engine.sampling_filters import narrow, start_bracket
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingParams

_FEW_ROWS = 8  # that sample in another way than the rest are taken out of a batch
_TOLERANCE = 2**-10  # probability that a draw needs the exact thresholds

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
        filters: rows may have top_k, top_p or min_p.
        logprobs: -1 = none, 0 = those of the tokens, `MAX_LOGPROBS` = those of the best tokens too.
        processors: rows may have a logit_bias or min_tokens.
        draws: rows may have a temperature.
    """

    prompt_logprobs: int = -1
    penalties: bool = False
    filters: bool = False
    logprobs: int = -1
    processors: bool = False
    draws: bool = False

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingMode:
        """Return the smallest mode that serves these parameters."""
        ranked, prompt = params.beam_width or params.logprobs, params.prompt_logprobs
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        return cls(
            prompt_logprobs=-1 if prompt is None else MAX_LOGPROBS * (prompt > 0),
            penalties=penalties != (0, 0, 1),
            filters=params.filters,
            logprobs=MAX_LOGPROBS if ranked else 0 if params.needs_logprobs else -1,
            processors=bool(params.logit_bias or params.min_tokens),
            draws=not params.greedy,
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
    logits: jax.Array, metadata: SamplingMetadata, lens: jax.Array, mode: SamplingMode
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

    Returns:
        `i32[S]` tokens; -1 for a row whose largest logit is NaN or infinite.

    Raises:
        ValueError: the logits are not `f32[S, V]`.
    """
    check_logits(logits)
    if not mode.draws:
        return _argmax(logits)[0]
    metadata = jax.tree.map(jnp.asarray, metadata)
    if not mode.filters:
        return _draw(logits, metadata, lens)
    if logits.shape[0] <= _FEW_ROWS:
        return _draw_filtered(logits, metadata, lens)
    # A few rows that draw, or that filter, are taken out of the batch, so that they don't cost as
    # much as if all rows did.
    draws = metadata.temperature > 0
    filters = (metadata.top_k > 0) | (metadata.top_p < 1) | (metadata.min_p > 0)
    few_draw, few_filter = (
        jnp.sum(x, dtype=jnp.int32) <= _FEW_ROWS for x in (draws, draws & filters)
    )
    case = jnp.where(few_draw, 0, jnp.where(few_filter, 1, 2))
    branches = (lambda logits, *_: _argmax(logits)[0], _draw, _draw_filtered)
    tokens = lax.switch(case, branches, logits, metadata, lens)
    some = draws & (filters | few_draw)

    def with_some(tokens: jax.Array) -> jax.Array:
        rows = _places(some, _FEW_ROWS)
        taken = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), (logits, metadata, lens))
        return tokens.at[rows].set(_draw_filtered(*taken), mode="drop")

    return lax.cond((case < 2) & jnp.any(some), with_some, lambda tokens: tokens, tokens)


def hash_prompt(tokens: Sequence[int]) -> int:
    """Return a 32-bit hash of a prompt's tokens, for `SamplingMetadata.seeds`."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())


def _key(seeds: jax.Array, length: jax.Array) -> jax.Array:
    """Return the key of a row's draw, the same whatever else the batch holds."""
    seed, prompt, index = seeds
    key = jax.random.fold_in(jax.random.key(seed), prompt)
    return jax.random.fold_in(jax.random.fold_in(key, index), length)


def _draw(logits: jax.Array, metadata: SamplingMetadata, lens: jax.Array) -> jax.Array:
    """Draw from all tokens; rows with temperature 0 take the best."""
    depth, _ = _depth(logits, metadata)
    return _argmax(_noise(logits, metadata, lens) - depth)[0]


def _draw_filtered(logits: jax.Array, metadata: SamplingMetadata, lens: jax.Array) -> jax.Array:
    """Draw from the tokens that the filters keep; rows with temperature 0 take the best."""
    depth, is_finite = _depth(logits, metadata)
    draws = metadata.temperature > 0
    top_k, top_p = metadata.top_k, metadata.top_p
    bracket = start_bracket(logits.shape[1], top_k, top_p, is_finite & draws)
    # A token of probability min_p times the best one's is as deep as this, and is kept.
    deepest = jnp.where(draws, -jnp.log(metadata.min_p), jnp.inf)

    def body(carry: Any) -> Any:
        bracket, _, is_first = carry
        bracket = narrow(depth, bracket, jnp.where(is_first, _TOLERANCE, 0.0))
        is_kept = (depth < bracket.far[:, None]) & (depth <= deepest[:, None])
        scores = jnp.where(is_kept, _noise(logits, metadata, lens) - depth, -jnp.inf)
        tokens, drawn = _argmax(scores, depth)
        # A drawn token that is not known to be kept is rare. Any other is the one that exact
        # thresholds give: it is kept, and the best of no fewer tokens than are kept.
        return bracket, tokens, jnp.any((drawn > bracket.near) & (tokens >= 0))

    tokens = jnp.zeros(logits.shape[0], jnp.int32)
    carry = lax.while_loop(lambda carry: carry[2], body, (bracket, tokens, jnp.bool_(True)))
    return carry[1]


def _depth(logits: jax.Array, metadata: SamplingMetadata) -> tuple[jax.Array, jax.Array]:
    """Return how far each logit lies below the row's largest, divided by the temperature.

    Returns:
        `f32[S, V]`, and whether the row's largest logit is finite, `bool[S]`.
    """
    temperature, best = metadata.temperature[:, None], jnp.max(logits, axis=-1, keepdims=True)
    # Less the maximum before the division: a tiny temperature must not push several logits to +inf.
    depth = (best - logits) / jnp.where(temperature > 0, jnp.maximum(temperature, 1e-30), 1.0)
    return depth, jnp.isfinite(best[:, 0])


def _noise(logits: jax.Array, metadata: SamplingMetadata, lens: jax.Array) -> jax.Array:
    """Return Gumbel noise `f32[S, V]`; 0 for rows with temperature 0."""
    keys = jax.vmap(_key)(metadata.seeds, lens)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.where(metadata.temperature[:, None] > 0, noise, 0.0)


def _argmax(values: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """Return the place of the largest of values `[S, V]`, and what the others have there.

    Of equal values the first counts; a largest value that is not finite has the place -1. One
    reduction of all is one message between devices.
    """
    places = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    operands = (values, places, *others)

    def larger(x: tuple[jax.Array, ...], y: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        is_x = (x[0] > y[0]) | (x[0] != x[0]) | ((x[0] == y[0]) & (x[1] < y[1]))  # NaN is largest
        return tuple(lax.select(is_x, a, b) for a, b in zip(x, y, strict=True))

    inits = (np.float32(-np.inf), *(np.zeros((), x.dtype) for x in operands[1:]))
    best, place, *found = lax.reduce(operands, inits, larger, (1,))
    return jnp.where(jnp.isfinite(best), place, -1), *found


def _places(flags: jax.Array, count: int) -> jax.Array:
    """Return where the first flags of `bool[S]` are that are set, padded with S."""
    index = jnp.arange(flags.size)
    earlier = jnp.sum(flags[None] & (index[None] < index[:, None]), axis=1)
    is_nth = flags[None] & (earlier[None] == jnp.arange(count)[:, None])
    return jnp.min(jnp.where(is_nth, index[None], flags.size), axis=1)


def _drop_negative(indices: jax.Array, size: int) -> jax.Array:
    """Replace negative indices, which JAX counts from the end, by one that is out of range."""
    return jnp.where(indices < 0, size, indices)
