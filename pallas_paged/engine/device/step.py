"""A call of the engine: a step of decoding slots and chunks, or several decode steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.decoder.peers import Peers
from pallas_paged.engine.device.attend import decode_places
from pallas_paged.engine.device.batch import (
    NOT_SAMPLED,
    Batch,
    ChunkBatch,
    StepOutput,
    Undrawn,
    output_of,
)
from pallas_paged.engine.device.call import Call, follow
from pallas_paged.engine.device.state import EngineState, extend_all
from pallas_paged.engine.sampling.logprobs import Logprobs, gather_logprobs
from pallas_paged.engine.sampling.sampler import (
    SamplingImplementation,
    add_output_tokens,
    process_logits,
    sample,
)
from pallas_paged.pages.table import PageTable, free_before

_LOGPROBS_BLOCK = 128  # prompt tokens whose logits are in memory at a time


Result = tuple[EngineState, StepOutput]


def decode(call: Call, state: EngineState) -> Result:
    """Run up to `num_steps` steps of each row; stop early if all have ended or one has no page."""
    batch = call.batch
    if batch.mode.masks and batch.masks is None:
        return _leave_undrawn(call, state)

    def step(index: jax.Array, state: EngineState) -> tuple[EngineState, Any, jax.Array]:
        state, rows, ok = _extend(call, state, index < batch.num_steps)
        lens = _seq_lens(state.table, rows)
        tokens = state.slots.last_token_ids.at[rows].get(mode="fill", fill_value=0)
        new = tokens, rows, lens - 1
        state, hidden, mappings, experts = call.hidden(state, *new, decode_rows=rows, chunks=None)
        logits = call.logits(hidden)
        where = batch.decode_slots, rows, lens
        state, drawn, logprobs = _sample(batch, state, logits, *where, peers=call.peers)
        after = drawn if logprobs is None else logprobs.rank
        state = follow(call, state, *new, hidden=hidden, decode_rows=rows, chunks=None, after=after)
        goes_on = ~state.slots.finished.at[rows].get(mode="fill", fill_value=True)
        goes_on &= index + 1 < batch.num_steps
        return state, (drawn, mappings, logprobs, experts), jnp.all(ok) & jnp.any(goes_on)

    def body(carry: Any) -> Any:
        index, state, outputs, _ = carry
        state, new, goes_on = step(index, state)
        outputs = jax.tree.map(lambda all_, one: all_.at[index].set(one), outputs, new)
        return index + 1, state, outputs, goes_on

    index, most = jnp.int32(0), jnp.max(batch.num_steps)
    if batch.max_num_steps == 1:
        state, outputs, _ = step(index, state)
        return state, output_of(state, *jax.tree.map(lambda x: x[None], outputs))
    step = jax.jit(step)  # traced once for the shapes of its outputs and for the loop
    one = jax.eval_shape(step, index, state)[1]
    outputs = jax.tree.map(lambda x: jnp.zeros((batch.max_num_steps, *x.shape), x.dtype), one)
    outputs = jnp.full_like(outputs[0], NOT_SAMPLED), *outputs[1:]
    carry = index, state, outputs, jnp.bool_(True)
    # The condition computes something, although the body says all: in a CUDA graph XLA orders a
    # loop by the kernels of its condition, and without one it starts before its inputs are there.
    carry = jax.lax.while_loop(lambda c: (c[0] < most) & c[3], body, carry)
    _, state, outputs, _ = carry
    return state, output_of(state, *outputs)


def _leave_undrawn(call: Call, state: EngineState) -> Result:
    """Run a decode step up to its logits, which `draw_later` takes."""
    state, rows, _ = _extend(call, state, call.batch.num_steps > 0)
    lens = _seq_lens(state.table, rows)
    tokens = state.slots.last_token_ids.at[rows].get(mode="fill", fill_value=0)
    new = tokens, rows, lens - 1
    state, hidden, mappings, experts = call.hidden(state, *new, decode_rows=rows, chunks=None)
    undrawn = Undrawn(logits=call.logits(hidden), rows_and_lens=jnp.stack([rows, lens]))
    mappings, experts = jax.tree.map(lambda x: x[None], (mappings, experts))
    token_ids = jnp.full((1, rows.size), NOT_SAMPLED)
    output = output_of(state, token_ids, mappings, None, experts)
    return state, replace(output, undrawn=undrawn)


def draw_later(
    state: EngineState, batch: Batch, undrawn: Undrawn
) -> tuple[EngineState, jax.Array, Logprobs | None]:
    """Draw what a step has left, now that the batch has masks.

    Args:
        state: its `slots` and `counts`; other arrays may be None.
        batch: of that step, with masks.
        undrawn: of its output.

    Returns:
        The state, and of the output `token_ids` and `logprobs`.
    """
    where = batch.decode_slots, *undrawn.rows_and_lens
    state, *drawn = _sample(batch, state, undrawn.logits, *where)
    return state, *jax.tree.map(lambda x: x[None], drawn)


def prefill_and_decode(call: Call, state: EngineState) -> Result:
    """Run one step of chunks and, behind their tokens, decoding rows."""
    chunks = call.batch.chunks
    assert chunks is not None
    num_slots, num_tokens = state.table.max_seqs, chunks.token_ids.size
    state, rows, ok = _extend(call, state, call.batch.num_steps > 0)
    state = replace(state, valid=state.valid & jnp.all(ok))
    chunks = replace(chunks, slots=_rows_with_pages(chunks.slots, ok, num_slots))
    places = decode_places(rows, num_tokens, num_slots)
    token_rows, positions = _chunk_positions(chunks, state.table)
    token_rows = token_rows.at[places].set(rows, mode="drop")
    positions = positions.at[places].set(_seq_lens(state.table, rows) - 1, mode="drop")
    tokens = state.slots.last_token_ids.at[rows].get(mode="fill", fill_value=0)
    tokens = chunks.token_ids.at[places].set(tokens, mode="drop")
    new = tokens, token_rows, positions
    state, hidden, mappings, experts = call.hidden(state, *new, decode_rows=rows, chunks=chunks)
    # A slot decodes or has a chunk: its logits come from the last of its tokens.
    ends = jnp.maximum(chunks.cu_q_lens[1:] - 1, 0)
    last = jnp.zeros(num_slots, jnp.int32).at[chunks.slots].set(ends, mode="drop")
    last = last.at[rows].set(places, mode="drop")
    sampled = jnp.zeros(num_slots, bool).at[rows].set(True, mode="drop")
    sampled = sampled.at[chunks.slots].set(chunks.is_last, mode="drop")
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    sampled = jnp.where(sampled, slots, num_slots)
    logits = call.logits(hidden[last])
    where = slots, sampled, state.table.seq_lens
    state, drawn, logprobs = _sample(call.batch, state, logits, *where, peers=call.peers)
    prompt_logprobs, after = None, drawn if logprobs is None else logprobs.rank
    if chunks.targets is not None:
        # Devices add up one thing at a time: this, after what they have added up for the samples.
        targets = jnp.where(jnp.any(after < NOT_SAMPLED), -1, chunks.targets)
        prompt_logprobs = _prompt_logprobs(call, hidden, targets)
        after = prompt_logprobs.rank
    state = follow(call, state, *new, hidden=hidden, decode_rows=rows, chunks=chunks, after=after)
    logprobs = jax.tree.map(lambda x: x[None], logprobs)
    output = output_of(state, drawn[None], mappings, logprobs, experts, prompt_logprobs)
    return state, replace(output, pooled=_pooled(chunks, hidden))


def _sample(
    batch: Batch,
    state: EngineState,
    logits: jax.Array,
    indices: jax.Array,
    sampled: jax.Array,
    lens: jax.Array,
    *,
    peers: Peers | None = None,
) -> tuple[EngineState, jax.Array, Logprobs | None]:
    """Draw the next tokens of R rows, and end the slots that have all of theirs.

    Args:
        batch, state, logits, indices, lens, peers: as in `draw`.
        sampled: `i32[R]`, slots of the rows, or out of range for rows that do not sample.

    Returns:
        The state, the tokens `i32[R]`, and log-probabilities as of `draw`.
    """
    slots = state.slots
    is_sampled = sampled < slots.finished.size
    drawn, ended, logprobs = draw(batch, state, logits, indices, is_sampled, lens, peers=peers)
    if state.counts is not None:
        state = replace(state, counts=add_output_tokens(state.counts, sampled, drawn))
    slots = replace(
        slots,
        last_token_ids=slots.last_token_ids.at[sampled].set(jnp.maximum(drawn, 0), mode="drop"),
        finished=slots.finished.at[sampled].set(ended, mode="drop"),
    )
    return replace(state, slots=slots), jnp.where(is_sampled, drawn, NOT_SAMPLED), logprobs


def draw(
    batch: Batch,
    state: EngineState,
    logits: jax.Array,
    indices: jax.Array,
    is_sampled: jax.Array,
    lens: jax.Array,
    *,
    peers: Peers | None = None,
) -> tuple[jax.Array, jax.Array, Logprobs | None]:
    """Draw the next tokens of R rows.

    Args:
        batch: its mode and masks.
        state: of all slots.
        logits: `f32[R, V]`
        indices: `i32[R]`, slots of the rows; one may stand several times.
        is_sampled: `bool[R]`, false for rows whose results nothing uses.
        lens: `i32[R]`, tokens of the rows.
        peers: of the devices over which the vocabulary is sharded.

    Returns:
        Tokens `i32[R]`, -1 for bad logits; whether each ends its slot, `bool[R]`; and the
        log-probabilities that the mode wants.
    """
    mode = batch.mode
    metadata, row_counts, max_lens = jax.tree.map(
        lambda x: x.at[indices].get(mode="clip"),
        (state.slots.sampling, state.counts, state.slots.max_lens),
    )
    temperature = jnp.where(is_sampled, metadata.temperature, 0.0)  # greedy rows cost the least
    metadata = replace(metadata, temperature=temperature)
    processed = process_logits(logits, metadata, row_counts, lens, mode)
    # The kernels need all of a row on one device.
    by: SamplingImplementation | None = None if peers is None else "xla"
    how: Any = dict(implementation=by, peers=peers, masks=batch.masks)
    drawn = sample(processed, metadata, lens, mode, **how)
    logprobs = None
    if mode.logprobs >= 0:
        token_ids = jnp.maximum(drawn, 0)
        logprobs = gather_logprobs(logits, token_ids, mode.logprobs, peers)
    stops = jnp.any(drawn[:, None] == metadata.stop_token_ids, axis=1)
    return drawn, (drawn < 0) | stops | (lens + 1 >= max_lens), logprobs


def _prompt_logprobs(call: Call, hidden: jax.Array, targets: jax.Array) -> Logprobs:
    """Log-probabilities of the token after each of T, in blocks: logits of all are too large."""
    num_tokens, num_logprobs = targets.size, call.batch.mode.prompt_logprobs
    block = min(_LOGPROBS_BLOCK, num_tokens)
    padding = -num_tokens % block
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[-1])
    targets = jnp.pad(jnp.maximum(targets, 0), (0, padding)).reshape(-1, block)
    found = jax.lax.map(
        lambda x: gather_logprobs(call.logits(x[0]), x[1], num_logprobs, call.peers),
        (hidden, targets),
    )
    return jax.tree.map(lambda x: x.reshape(num_tokens + padding, *x.shape[2:])[:num_tokens], found)


def _pooled(chunks: ChunkBatch, hidden: jax.Array) -> jax.Array | None:
    """Add up hidden states `[T, E]` for each chunk, `f32[max_num_seqs, E]`, if a chunk asks for it.

    The sum of a chunk with a NaN or an infinity is NaN; others do not depend on it.
    """
    if chunks.num_pooled is None:
        return None
    place, ends = jnp.arange(len(hidden), dtype=jnp.int32), chunks.cu_q_lens[1:, None]
    is_pooled = (place < ends) & (place >= ends - chunks.num_pooled[:, None])
    is_finite = jnp.all(jnp.isfinite(hidden), axis=1)
    sums = jax.lax.dot(
        is_pooled.astype(hidden.dtype),
        jnp.where(is_finite[:, None], hidden, 0),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    is_bad = jnp.any(is_pooled & ~is_finite, axis=1)
    return jnp.where(is_bad[:, None], jnp.nan, sums)


def _extend(
    call: Call, state: EngineState, active: jax.Array
) -> tuple[EngineState, jax.Array, jax.Array]:
    """Take pages for the next token of active rows `bool[D]` and for the chunks.

    Returns:
        The state with these tables; slots of the rows that compute, `i32[D]`, out of range for the
        others; and whether each slot has its pages, `bool[S]`.
    """
    batch, chunks, num_slots = call.batch, call.batch.chunks, state.table.max_seqs
    active &= ~state.slots.finished.at[batch.decode_slots].get(mode="fill", fill_value=True)
    rows = jnp.where(active, batch.decode_slots, num_slots)
    num_new = jnp.any(rows == jnp.arange(num_slots)[:, None], axis=1).astype(jnp.int32)
    if chunks is not None:
        num_new = num_new.at[chunks.slots].set(jnp.diff(chunks.cu_q_lens), mode="drop")
    most = 1 if chunks is None else chunks.token_ids.size
    state, ok = reserve(call, state, num_new, most, max_pages=1 if chunks is None else None)
    return state, _rows_with_pages(rows, ok, num_slots), ok


def reserve(
    call: Call,
    state: EngineState,
    num_new: jax.Array,
    max_new_tokens: int,
    *,
    max_pages: int | None,
) -> tuple[EngineState, jax.Array]:
    """Free what no window sees any more, and take pages for new tokens `i32[S]` of all slots.

    Args:
        call: its model.
        state: of all slots.
        num_new: at most `max_new_tokens` each.
        max_new_tokens: static, as in `extend`.
        max_pages: static, as in `free_before`.

    Returns:
        The state with these tables, and whether each slot has its pages, `bool[S]`.
    """
    table, *windows = state.tables
    if (window := call.model.kv_cache_spec.sliding_window) is not None:
        # Pages that neither the new tokens nor later ones see.
        first = jnp.where(num_new > 0, table.seq_lens - window + 1, 0)
        table = free_before(table, first, max_pages=max_pages)
    tables = [table]
    for one in windows:  # of all rows, those that rest too: the size of the pool counts on it
        first = one.seq_lens - state.kept_tokens + 1
        tables.append(free_before(one, first, max_pages=max_pages))
    extended, ok = extend_all(tables, num_new, max_new_tokens=max_new_tokens)
    return state.with_tables(extended), ok


def _rows_with_pages(rows: jax.Array, ok: jax.Array, num_slots: int) -> jax.Array:
    return jnp.where(ok.at[rows].get(mode="fill", fill_value=False), rows, num_slots)


def _seq_lens(table: PageTable, rows: jax.Array) -> jax.Array:
    return table.seq_lens.at[rows].get(mode="fill", fill_value=0)


def _chunk_positions(chunks: ChunkBatch, table: PageTable) -> tuple[jax.Array, jax.Array]:
    """Row and position of each token of the chunks; the row of padding is max_num_seqs."""
    place = jnp.arange(chunks.token_ids.size, dtype=jnp.int32)
    chunk = jnp.searchsorted(chunks.cu_q_lens[1:], place, side="right", method="compare_all")
    ends = _seq_lens(table, chunks.slots) - chunks.cu_q_lens[1:]
    rows = chunks.slots.at[chunk].get(mode="fill", fill_value=table.max_seqs)
    return rows, place + ends.at[chunk].get(mode="fill", fill_value=0)
