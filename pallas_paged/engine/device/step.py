"""A call of the engine: a step of decoding slots and chunks, or several decode steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.checks import pytree
from pallas_paged.decoder.peers import Peers
from pallas_paged.engine.device.attend import (
    AttentionKernels,
    PagedAttend,
    decode_places,
    hidden_of,
    logits_of,
)
from pallas_paged.engine.device.drafts import DraftCounts
from pallas_paged.engine.device.state import (
    Batch,
    ChunkBatch,
    EngineState,
    SlotStates,
    extend_all,
)
from pallas_paged.engine.model import Model
from pallas_paged.engine.sampling.logprobs import Logprobs, gather_logprobs
from pallas_paged.engine.sampling.sampler import (
    SamplingImplementation,
    TokenCounts,
    add_output_tokens,
    mask_logits,
    process_logits,
    sample,
)
from pallas_paged.pages.pool import KVPool
from pallas_paged.pages.table import PageTable, extend, free_before, slot_mapping

NOT_SAMPLED = -2  # in place of the token of a slot that did not take part in a step
_LOGPROBS_BLOCK = 128  # prompt tokens whose logits are in memory at a time


@pytree
class StepOutput:
    """What the host reads of a call.

    A call that only decodes has R = the batch's D rows and K = its `max_num_steps`. One with chunks
    has R = all slots and K = 1. The tokens of a row are its first ones, one after another.

    Attributes:
        token_ids: `i32[K, R]`, sampled tokens; -1 if the logits were NaN or infinite, NOT_SAMPLED
            where the row did not take part in the step.
        slot_mapping: pool slots of the new K/V: `i32[K, R]`, or `i32[T]` with chunks.
        valid: `bool[]`, of the state.
        num_free: `i32[]`, free pages after the call.
        num_free_window_pages, window_slot_mapping: the same of the window table, or None.
        logprobs: of `token_ids`, leaves `[K, R, ...]`, or None.
        prompt_logprobs: of the chunks' targets, leaves `[T, ...]`, or None.
        drafts: of a call that verifies drafts, or None.
        routed_experts: of each token that was computed, `i32[K, R, L, k]`, or `i32[T, L, k]` with
            chunks; None if the mode does not ask for them, or the model reports none.
    """

    token_ids: jax.Array
    slot_mapping: jax.Array
    valid: jax.Array
    num_free: jax.Array
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    num_free_window_pages: jax.Array | None = None
    window_slot_mapping: jax.Array | None = None
    drafts: DraftCounts | None = None
    routed_experts: jax.Array | None = None


Mappings = tuple[jax.Array, jax.Array | None]  # of the table, and of the window table
Result = tuple[EngineState, TokenCounts | None, StepOutput]


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a call runs, while it is traced."""

    model: Model
    params: Any
    batch: Batch
    kernels: AttentionKernels
    peers: Peers | None

    def attend(
        self,
        state: EngineState,
        token_rows: jax.Array,
        positions: jax.Array,
        rows: jax.Array,
        chunks: ChunkBatch | None,
    ) -> tuple[PagedAttend, Mappings]:
        """Return the attention, and the pool slots of new tokens in these rows and positions."""
        mapping = slot_mapping(state.table, token_rows, positions)
        spec = self.model.kv_cache_spec
        attend = PagedAttend(
            state.table,
            mapping,
            rows,
            chunks,
            num_kv_heads=[spec.of(group).num_kv_heads for group in spec.groups],
            kernels=self.kernels,
            peers=self.peers,
        )
        if (table := state.window_table) is None:
            return attend, (mapping, None)
        window = spec.groups[1].sliding_window
        assert window is not None
        window_mapping = slot_mapping(table, token_rows, positions)
        attend.add_window(table, window_mapping, window)
        return attend, (mapping, window_mapping)

    def routed(self, attend: PagedAttend) -> jax.Array | None:
        """Return the experts that the layers have reported, if the mode asks for them."""
        return attend.recorded if self.batch.mode.routed_experts else None

    def logits(self, hidden: jax.Array) -> jax.Array:
        return logits_of(self.model, self.params, hidden)


def decode(call: Call, state: EngineState, counts: TokenCounts | None) -> Result:
    """Run up to `num_steps` steps of each row; stop early if all have ended or one has no page."""
    batch = call.batch
    shape = batch.max_num_steps, batch.decode_slots.size

    def step(
        index: jax.Array, state: EngineState, counts: TokenCounts | None
    ) -> tuple[EngineState, TokenCounts | None, tuple[Any, ...], jax.Array]:
        slots = state.slots
        state, rows, ok = _extend(call, state, index < batch.num_steps)
        lens = _seq_lens(state.table, rows)
        attend, mappings = call.attend(state, rows, lens - 1, rows, None)
        tokens = slots.last_token_ids.at[rows].get(mode="fill", fill_value=0)
        places = jnp.maximum(lens - 1, 0)
        layers = state.pool.layers
        hidden, layers = hidden_of(call.model, call.params, tokens, places, attend, layers)
        drawn, slots, counts, logprobs = _sample(
            call, call.logits(hidden), slots, counts, batch.decode_slots, rows, lens
        )
        goes_on = ~slots.finished.at[rows].get(mode="fill", fill_value=True)
        goes_on &= index + 1 < batch.num_steps
        state = replace(state, pool=KVPool(layers=layers), slots=slots)
        outputs = drawn, mappings, logprobs, call.routed(attend)
        return state, counts, outputs, jnp.all(ok) & jnp.any(goes_on)

    def body(carry: Any) -> Any:
        index, state, counts, outputs, _ = carry
        state, counts, new, goes_on = step(index, state, counts)
        outputs = jax.tree.map(lambda all_, one: all_.at[index].set(one), outputs, new)
        return index + 1, state, counts, outputs, goes_on

    index, most = jnp.int32(0), jnp.max(batch.num_steps)
    if batch.max_num_steps == 1:
        state, counts, outputs, _ = step(index, state, counts)
        tokens, mappings, logprobs, routed = jax.tree.map(lambda x: x[None], outputs)
        return state, counts, output_of(state, tokens, mappings, logprobs, None, routed)
    one = jax.eval_shape(step, index, state, counts)[2]
    outputs = jax.tree.map(lambda x: jnp.zeros((shape[0], *x.shape), x.dtype), one)
    outputs = (jnp.full(shape, NOT_SAMPLED, jnp.int32), *outputs[1:])
    carry = (index, state, counts, outputs, jnp.bool_(True))
    # The condition computes something, although the body says all: in a CUDA graph XLA orders a
    # loop by the kernels of its condition, and without one it starts before its inputs are there.
    carry = jax.lax.while_loop(lambda c: (c[0] < most) & c[4], body, carry)
    _, state, counts, (tokens, mappings, logprobs, routed), _ = carry
    return state, counts, output_of(state, tokens, mappings, logprobs, None, routed)


def prefill_and_decode(call: Call, state: EngineState, counts: TokenCounts | None) -> Result:
    """Run one step of chunks and, behind their tokens, decoding rows."""
    batch, slots, chunks = call.batch, state.slots, call.batch.chunks
    assert chunks is not None
    num_slots, num_tokens = state.table.max_seqs, chunks.token_ids.size
    state, rows, ok = _extend(call, state, batch.num_steps > 0)
    table = state.table
    chunks = replace(chunks, slots=_rows_with_pages(chunks.slots, ok, num_slots))
    places = decode_places(rows, num_tokens, num_slots)
    token_rows, positions = _chunk_positions(chunks, table)
    token_rows = token_rows.at[places].set(rows, mode="drop")
    positions = positions.at[places].set(_seq_lens(table, rows) - 1, mode="drop")
    tokens = slots.last_token_ids.at[rows].get(mode="fill", fill_value=0)
    tokens = chunks.token_ids.at[places].set(tokens, mode="drop")
    attend, mappings = call.attend(state, token_rows, positions, rows, chunks)
    positions, layers = jnp.maximum(positions, 0), state.pool.layers
    hidden, layers = hidden_of(call.model, call.params, tokens, positions, attend, layers)
    # A slot decodes or has a chunk: its logits come from the last of its tokens.
    ends = jnp.maximum(chunks.cu_q_lens[1:] - 1, 0)
    last = jnp.zeros(num_slots, jnp.int32).at[chunks.slots].set(ends, mode="drop")
    last = last.at[rows].set(places, mode="drop")
    sampled = jnp.zeros(num_slots, bool).at[rows].set(True, mode="drop")
    sampled = sampled.at[chunks.slots].set(chunks.is_last, mode="drop")
    all_slots = jnp.arange(num_slots, dtype=jnp.int32)
    drawn, slots, counts, logprobs = _sample(
        call,
        call.logits(hidden[last]),
        slots,
        counts,
        all_slots,
        jnp.where(sampled, all_slots, num_slots),
        table.seq_lens,
    )
    prompt_logprobs = None
    if chunks.targets is not None:
        # Devices add up one thing at a time: this, after what they have added up for the samples.
        last = drawn if logprobs is None else logprobs.rank
        targets = jnp.where(jnp.any(last < NOT_SAMPLED), -1, chunks.targets)
        prompt_logprobs = _prompt_logprobs(call, hidden, targets)
    valid = state.valid & jnp.all(ok)
    state = replace(state, pool=KVPool(layers=layers), slots=slots, valid=valid)
    one = jax.tree.map(lambda x: x[None], logprobs)
    routed = call.routed(attend)
    return state, counts, output_of(state, drawn[None], mappings, one, prompt_logprobs, routed)


def _sample(
    call: Call,
    logits: jax.Array,
    slots: SlotStates,
    counts: TokenCounts | None,
    indices: jax.Array,
    sampled: jax.Array,
    lens: jax.Array,
) -> tuple[jax.Array, SlotStates, TokenCounts | None, Logprobs | None]:
    """Draw the next tokens of R rows, and end the slots that have all of theirs.

    Args:
        call: its mode, and the devices over which the vocabulary is sharded.
        logits: `f32[R, V]`
        slots: all slots.
        counts: of all slots, or None.
        indices: `i32[R]`, slots of the rows.
        sampled: `i32[R]`, the same, or out of range for rows that do not sample.
        lens: `i32[R]`, tokens of the rows.
    """
    mode = call.batch.mode
    is_sampled = sampled < slots.finished.size
    drawn, ended, logprobs = draw(call, logits, slots, counts, indices, is_sampled, lens)
    if mode.penalties and counts is not None:
        counts = add_output_tokens(counts, sampled, drawn)
    slots = replace(
        slots,
        last_token_ids=slots.last_token_ids.at[sampled].set(jnp.maximum(drawn, 0), mode="drop"),
        finished=slots.finished.at[sampled].set(ended, mode="drop"),
    )
    return jnp.where(is_sampled, drawn, NOT_SAMPLED), slots, counts, logprobs


def draw(
    call: Call,
    logits: jax.Array,
    slots: SlotStates,
    counts: TokenCounts | None,
    indices: jax.Array,
    is_sampled: jax.Array,
    lens: jax.Array,
) -> tuple[jax.Array, jax.Array, Logprobs | None]:
    """Draw the next tokens of R rows.

    Args:
        call, logits, slots, counts, indices, lens: as in `_sample`; slots may stand several times.
        is_sampled: `bool[R]`, false for rows whose results nothing uses.

    Returns:
        Tokens `i32[R]`, -1 for bad logits; whether each ends its slot, `bool[R]`; and the
        log-probabilities that the mode wants.
    """
    mode, peers = call.batch.mode, call.peers
    metadata = jax.tree.map(lambda x: x.at[indices].get(mode="clip"), slots.sampling)
    temperature = jnp.where(is_sampled, metadata.temperature, 0.0)  # greedy rows cost the least
    metadata = replace(metadata, temperature=temperature)
    row_counts = None
    if mode.penalties and counts is not None:
        row_counts = jax.tree.map(lambda x: x.at[indices].get(mode="clip"), counts)
    allowed = mask_logits(logits, call.batch.masks) if mode.masks else logits
    processed = process_logits(allowed, metadata, row_counts, lens, mode)
    # The kernels need all of a row on one device.
    by: SamplingImplementation | None = None if peers is None else "xla"
    drawn = sample(processed, metadata, lens, mode, implementation=by, peers=peers)
    logprobs = None
    if mode.logprobs >= 0:
        token_ids = jnp.maximum(drawn, 0)
        logprobs = gather_logprobs(logits, token_ids, mode.logprobs, peers)
    stops = jnp.any(drawn[:, None] == metadata.stop_token_ids, axis=1)
    ended = (drawn < 0) | stops
    ended |= lens + 1 >= slots.max_lens.at[indices].get(mode="clip")
    return drawn, ended, logprobs


def output_of(
    state: EngineState,
    token_ids: jax.Array,
    mappings: Mappings,
    logprobs: Logprobs | None,
    prompt_logprobs: Logprobs | None,
    routed_experts: jax.Array | None = None,
) -> StepOutput:
    """Return the output of a call, given the state after it."""
    windows = state.window_table
    return StepOutput(
        token_ids=token_ids,
        slot_mapping=mappings[0],
        window_slot_mapping=mappings[1],
        valid=jnp.copy(state.valid),  # buffers of their own: the state's are donated on
        num_free=jnp.copy(state.table.num_free),
        num_free_window_pages=None if windows is None else jnp.copy(windows.num_free),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        routed_experts=routed_experts,
    )


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
    table, window = state.table, call.model.kv_cache_spec.sliding_window
    if window is not None:  # pages that neither the new tokens nor later ones see
        first = jnp.where(num_new > 0, table.seq_lens - window + 1, 0)
        table = free_before(table, first, max_pages=max_pages)
    if (windows := state.window_table) is None:
        table, ok = extend(table, num_new, max_new_tokens=max_new_tokens)
    else:
        # Of all rows, those that rest too: the size of the pool counts on it.
        first = windows.seq_lens - state.kept_tokens + 1
        windows = free_before(windows, first, max_pages=max_pages)
        (table, windows), ok = extend_all((table, windows), num_new, max_new_tokens=max_new_tokens)
    return replace(state, table=table, window_table=windows), ok


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
