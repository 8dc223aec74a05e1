"""Logits to tokens and log-probabilities, on the device; every row has its own sampling parameters.

All functions are pure and may run inside `jax.jit` or a `lax.while_loop`. What a row draws depends
on its own logits, parameters and length only, not on the other rows of its batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_paged.checks import check_interpret, pytree
from pallas_paged.decoder.peers import DevicePeers, Peers
from pallas_paged.engine.sampling.logprobs import check_logits
from pallas_paged.engine.sampling.passes import divisor, draw, find_limits, largest, min_p_limit
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.triton.family import TRITON

# How to sample; the kernels are for one GPU, the other two give their tokens on any device.
SamplingImplementation = Literal["triton", "xla"]
Array = Any  # a NumPy array on the host, a JAX array in a jitted step


@pytree
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


@pytree
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


def mask_logits(logits: jax.Array, masks: Array) -> jax.Array:
    """Return logits `f32[S, V]`, -inf where a bit of the masks is 0, as of `sample`.

    XLA computes this within what reads the result, if that is one reduction.
    """
    bits = (masks[:, :, None] >> jnp.arange(32)[None, None]) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(allowed == 1, logits, -jnp.inf)


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
    *,
    implementation: SamplingImplementation | None = None,
    interpret: bool = False,
    peers: Peers | None = None,
    masks: Array | None = None,
) -> jax.Array:
    """Choose the next token of each row.

    The filters run in the order temperature, top_k, top_p, min_p, each on what the one before left.
    At least one token is kept, and so are all that tie with the last one kept. Of equal greedy
    logits the lowest token wins. A draw is a race: a token arrives after an exponential time whose
    rate is its probability, and the first is drawn. The key of the times is made of the row's seeds
    and its length.

    Args:
        logits: `f32[S, V]`
        metadata: of the S rows.
        lens: `i32[S]`, tokens of each row before the one that it draws.
        mode: static.
        implementation: `"triton"`, kernels that need all logits of a row on one device; `"xla"`,
            where the vocabulary may be sharded; None chooses. Static.
        interpret: run the kernels of `"triton"` interpreted, on any device. Static.
        peers: of these devices.
        masks: `i32[S, W]`, W >= V / 32: token `32 i + j` may be drawn where bit j of entry i is
            set. None: all may be. The kernels read bits; nothing else of size `[S, V]` is made.

    Returns:
        `i32[S]` tokens; -1 for a row whose largest logit is NaN or infinite.

    Raises:
        ValueError: the logits are not `f32[S, V]`.
        NotImplementedError: the kernels can't run here; the message says why.
    """
    check_logits(logits)
    check_interpret(interpret, implementation)
    if peers is not None and logits.shape[1] % peers.mesh.size == 0:
        sharded, replicated = PartitionSpec(None, peers.axis), PartitionSpec()

        def local(
            group: DevicePeers, logits: jax.Array, metadata: Any, lens: jax.Array
        ) -> jax.Array:
            return _sample(logits, None, metadata, lens, mode, "xla", False, group)

        if masks is not None:
            logits = mask_logits(logits, masks)
        tokens: jax.Array = peers.run(
            local, (sharded, replicated, replicated), logits, metadata, lens
        )
        return tokens
    return _sample(logits, masks, metadata, lens, mode, implementation, interpret, None)


def _sample(
    logits: jax.Array,
    masks: Array | None,
    metadata: SamplingMetadata,
    lens: jax.Array,
    mode: SamplingMode,
    implementation: SamplingImplementation | None,
    interpret: bool,
    group: DevicePeers | None,
) -> jax.Array:
    """Return what `sample` does, of a device's part of the logits if there is a group."""
    if mode.draws:
        metadata = jax.tree.map(jnp.asarray, metadata)
        if implementation is None:
            implementation = "xla" if kernel_refusal() else "triton"
        if implementation != "xla":
            if reason := TRITON.why_not_jax() if interpret else kernel_refusal():
                raise NotImplementedError(f"{implementation=} {reason}")
            return _sample_by_kernels(logits, masks, metadata, lens, mode, interpret=interpret)
    if masks is not None:
        logits = mask_logits(logits, masks)
    places = jnp.arange(logits.shape[1])[None]
    if group is not None:
        places += group.index * logits.shape[1]
    best, tokens = largest(logits, places, group)
    if mode.draws:
        temperature = metadata.temperature
        limit = min_p_limit(metadata.min_p, temperature)
        if mode.filters:
            filters = metadata.top_k, metadata.top_p, divisor(temperature)
            total = () if group is None else (group.sum,)
            found = find_limits(best[:, None] - logits, *filters, mode.filters, *total)
            limit = jnp.minimum(limit, found)
        drawn = draw(logits, best, limit, temperature, metadata.seeds, lens, group)
        tokens = jnp.where(temperature > 0, drawn, tokens)
    return jnp.where(jnp.isfinite(best), tokens, -1)


def _sample_by_kernels(
    logits: jax.Array,
    masks: Array | None,
    metadata: SamplingMetadata,
    lens: jax.Array,
    mode: SamplingMode,
    *,
    interpret: bool,
) -> jax.Array:
    """Return what `sample` does, for a mode that draws."""
    from pallas_paged.engine.sampling import draw_kernel
    from pallas_paged.engine.sampling.search_kernel import search

    temperature, limit = metadata.temperature, None
    maxima, sums = draw_kernel.weigh(logits, masks, temperature, interpret=interpret)
    if mode.filters:
        filters = metadata.top_k, metadata.top_p
        limit = search(logits, masks, maxima, temperature, *filters, interpret=interpret)
    rows = limit, temperature, metadata.min_p, metadata.seeds, lens
    return draw_kernel.draw(logits, masks, maxima, sums, *rows, interpret=interpret)


def kernel_refusal() -> str | None:
    """Return why the device that is traced for can't sample by kernels; None if it can."""
    return TRITON.why_not_device(Device.here()) or TRITON.why_not_jax()


def hash_prompt(tokens: Sequence[int]) -> int:
    """Return a 32-bit hash of a prompt's tokens, for `SamplingMetadata.seeds`."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())


def _drop_negative(indices: jax.Array, size: int) -> jax.Array:
    """Replace negative indices, which JAX counts from the end, by one that is out of range."""
    return jnp.where(indices < 0, size, indices)
