"""Drafts of the next tokens of rows, and a call that verifies them.

Drafts are what followed the newest tokens of a row where these stood before: Saxena, "Prompt Lookup
Decoding", 2023. A call is a loop of steps, each of several tokens of every row. A draw is a
function of the seeds, the position and the logits. So a step computes the newest token of a row and
its drafts, draws after each of them, and keeps what it drew as long as the drafts are that: these
are the tokens that come without drafts, sampled ones too. Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", ICML 2023, whose sampler is for draws that nothing ties
together.

Pages are taken once, for the most tokens that the host has asked for. How many there are is a part
of the loop's state, and in the end the pages of the others are free again: nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.checks import INT32_MAX, pytree
from pallas_paged.engine.config import SpeculativeConfig
from pallas_paged.engine.device.batch import NOT_SAMPLED, Batch, ChunkBatch, output_of
from pallas_paged.engine.device.state import EngineState, History
from pallas_paged.engine.device.step import Call, Result, draw, reserve
from pallas_paged.engine.schedule.calls import DraftOutput
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.pool import KVPool
from pallas_paged.pages.table import PageTable, slot_mapping, truncate


def add_tokens(
    history: History, slots: jax.Array, places: jax.Array, token_ids: jax.Array
) -> History:
    """Add new tokens of R rows.

    Args:
        history: of all slots.
        slots: `i32[R]` or `i32[R, 1]`, out of range for padding.
        places: `i32[..., R]` or `i32[R, W]`, of the tokens; out of range for those that are none.
        token_ids: likewise.
    """
    tokens = jnp.maximum(token_ids, 0)  # -1 is of bad logits, which end a row
    return replace(history, token_ids=history.token_ids.at[slots, places].set(tokens, mode="drop"))


def add_sampled(state: EngineState, batch: Batch, token_ids: jax.Array) -> EngineState:
    """Add the tokens `i32[K, R]` that a call without drafts has sampled, if there is a history."""
    if state.history is None:
        return state
    rows = batch.decode_slots
    if batch.chunks is not None:
        rows = jnp.arange(state.table.max_seqs, dtype=jnp.int32)
    # The K/V of all but the last one sampled are in the pages after the call.
    lens = state.table.seq_lens.at[rows].get(mode="fill", fill_value=0)
    is_sampled = token_ids != NOT_SAMPLED  # of each row the first ones
    steps = jnp.arange(len(token_ids), dtype=jnp.int32)[:, None]
    places = lens + 1 - jnp.sum(is_sampled, axis=0) + steps
    places = jnp.where(is_sampled, places, INT32_MAX)
    return replace(state, history=add_tokens(state.history, rows, places, token_ids))


def find_drafts(
    history: History, slots: jax.Array, num_tokens: jax.Array, config: SpeculativeConfig
) -> tuple[jax.Array, jax.Array]:
    """Draft what followed the newest tokens of each row where these stood before.

    The longest of them that stood before count; of several such places one in the row itself, and
    then the latest. Drafts from the row that would come from beyond its newest token go on with
    what was drafted first, so that a text with a short period is drafted to its end.

    Args:
        history: of S slots.
        slots: `i32[R]`, of the rows; what is returned for one out of range means nothing.
        num_tokens: `i32[R]`, how many tokens rows have.
        config: static. "suffix" looks in all slots of a row's group, and drafts no more tokens
            than have matched times its factor.

    Returns:
        Drafts `i32[R, num_speculative_tokens]`, and how many of them there are, `i32[R]`.
    """
    own = history.token_ids.at[slots].get(mode="clip")  # [R, L]
    newest = num_tokens[:, None] - 1
    if config.method == "suffix":
        # [R, S, L]: XLA does not store it, but computes it within the two maxima.
        texts = history.token_ids[None]
        groups = history.groups.at[slots].get(mode="clip")
        searched = (groups[:, None] == history.groups)[:, :, None]
        is_own = slots[:, None] == jnp.arange(history.groups.size)
    else:
        texts = own[:, None]
        searched, is_own = jnp.bool_(True), jnp.ones((slots.size, 1), bool)
    _, num_texts, length = texts.shape
    # Where earlier tokens end, which another follows.
    following = jnp.pad(texts[:, :, 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1)
    goes_on = searched & (following >= 0)
    matched = jnp.zeros(1, jnp.int32)
    for age in range(config.longest_match):
        wanted = jnp.take_along_axis(own, jnp.maximum(newest - age, 0), axis=1)[:, :, None]
        earlier = jnp.pad(
            texts[:, :, : length - age], ((0, 0), (0, 0), (age, 0)), constant_values=-1
        )
        goes_on &= (earlier == wanted) & (newest >= age)[:, :, None]
        matched = matched + goes_on
    longest = jnp.max(matched, axis=(1, 2))
    end = jnp.arange(length, dtype=jnp.int32)
    order = jnp.where(is_own[:, :, None], length, 0) + end
    order = order * num_texts + jnp.arange(num_texts, dtype=jnp.int32)[:, None]
    place = jnp.max(jnp.where(matched == longest[:, None, None], order, -1), axis=(1, 2))
    text, found = place % num_texts, place // num_texts
    is_own_place = (found >= length)[:, None]
    found = (found % length)[:, None]
    period = jnp.maximum(newest - found, 1)
    ahead = jnp.arange(config.num_speculative_tokens, dtype=jnp.int32)
    places = found + 1 + jnp.where(is_own_place, ahead % period, ahead)
    rows = text if config.method == "suffix" else jnp.arange(slots.size)
    source = history.token_ids if config.method == "suffix" else own
    drafts = source.at[rows[:, None], places].get(mode="fill", fill_value=-1)
    counts = jnp.min(jnp.where(drafts < 0, ahead, ahead.size), axis=1)
    counts = jnp.minimum(counts, (config.drafts_of_a_token * longest).astype(jnp.int32))
    return jnp.maximum(drafts, 0), jnp.where(longest >= config.shortest_match, counts, 0)


@pytree
class _Rows:
    """Where the R rows of a call are, between two steps.

    Attributes:
        lens: `i32[R]`, tokens whose K/V are stored; one more is known.
        last: `i32[R]`, that one.
        live: `bool[R]`, whether the row goes on in this call.
        ended: `bool[R]`, whether it has all of its tokens.
    """

    lens: jax.Array
    last: jax.Array
    live: jax.Array
    ended: jax.Array


@dataclass(frozen=True, kw_only=True)
class _Verification:
    """What the steps of a call have in common, while it is traced.

    Attributes:
        call, config: of the batch.
        state: with the pages of the most tokens that the call may compute.
        slots: `i32[R]`, of the rows, out of range for those that do not compute.
        limits: `i32[R]`, most tokens whose K/V the call may store.
    """

    call: Call
    config: SpeculativeConfig
    state: EngineState
    slots: jax.Array
    limits: jax.Array

    @property
    def ahead(self) -> jax.Array:
        """Places behind the newest token, that one included: `i32[tokens_of_step]`."""
        return jnp.arange(self.config.tokens_of_step, dtype=jnp.int32)

    def with_lens(self, table: PageTable, lens: jax.Array) -> jax.Array:
        """Return the lengths of all slots of a table, where these are those of the rows."""
        return table.seq_lens.at[self.slots].set(lens, mode="drop")

    def step(
        self, rows: _Rows, history: History, layers: tuple[LayerKV, ...]
    ) -> tuple[_Rows, History, tuple[LayerKV, ...], tuple[Any, ...], DraftOutput]:
        """Draft, compute and draw.

        Returns:
            The rows, the history and the cache after the step; the tokens `i32[R, W]` and their
            log-probabilities; and the counts. Of the tokens those are new that `rows.lens` counts.
        """
        found, num_found = find_drafts(history, self.slots, rows.lens + 1, self.config)
        num_drafts = jnp.clip(self.limits - rows.lens - 1, 0, num_found)
        num_drafts = jnp.where(rows.live, num_drafts, 0)
        drawn, ended, logprobs, layers = self._compute(rows, found, num_drafts, layers)
        ahead = self.ahead
        fits = (drawn[:, :-1] == found) & (ahead[:-1] < num_drafts[:, None])
        accepted = jnp.min(jnp.where(fits, ahead.size - 1, ahead[:-1]), axis=1)
        first_end = jnp.min(jnp.where(ended, ahead, ahead.size), axis=1)
        num_new = jnp.where(rows.live, jnp.minimum(accepted, first_end) + 1, 0)
        places = jnp.where(ahead < num_new[:, None], rows.lens[:, None] + 1 + ahead, INT32_MAX)
        history = add_tokens(history, self.slots[:, None], places, drawn)
        newest = jnp.take_along_axis(drawn, jnp.maximum(num_new - 1, 0)[:, None], axis=1)[:, 0]
        right = ahead[:-1] < jnp.minimum(accepted, num_new)[:, None]
        counts = DraftOutput(
            num_steps=jnp.int32(1),
            num_rows=jnp.sum(rows.live, dtype=jnp.int32),
            num_drafts=jnp.sum(num_drafts > 0, dtype=jnp.int32),
            num_draft_tokens=jnp.sum(num_drafts, dtype=jnp.int32),
            num_accepted_per_pos=jnp.sum(right, axis=0, dtype=jnp.int32),
        )
        ends = rows.live & (first_end <= accepted)
        rows = _Rows(
            lens=rows.lens + num_new,
            last=jnp.where(rows.live, jnp.maximum(newest, 0), rows.last),
            live=rows.live & ~ends,
            ended=rows.ended | ends,
        )
        return rows, history, layers, (drawn, logprobs), counts

    def _compute(
        self, rows: _Rows, drafts: jax.Array, num_drafts: jax.Array, layers: tuple[LayerKV, ...]
    ) -> tuple[jax.Array, jax.Array, Any, tuple[LayerKV, ...]]:
        """Run the model on the newest token of each live row and its drafts; draw after each.

        Returns:
            Tokens `i32[R, W]`, whether each ends its row, and their log-probabilities; and the
            cache. Those beyond a row's drafts mean nothing.
        """
        call, state = self.call, self.state
        num_rows, width = rows.lens.size, self.config.tokens_of_step
        q_lens = jnp.where(rows.live, 1 + num_drafts, 0)
        ends = jnp.cumsum(q_lens, dtype=jnp.int32)
        starts = ends - q_lens
        # Tokens stand one row after another; those behind the last are padding.
        place = jnp.arange(num_rows * width, dtype=jnp.int32)
        row = jnp.searchsorted(ends, place, side="right", method="compare_all").astype(jnp.int32)
        is_token, offset = row < num_rows, place - starts.at[row].get(mode="clip")
        draft = drafts.at[row, jnp.maximum(offset - 1, 0)].get(mode="clip")
        tokens = jnp.where(offset == 0, rows.last.at[row].get(mode="clip"), draft)
        tokens = jnp.where(is_token, tokens, 0)
        slots = self.slots.at[row].get(mode="fill", fill_value=state.table.max_seqs)
        positions = jnp.where(is_token, rows.lens.at[row].get(mode="clip") + offset, 0)
        lens = rows.lens + q_lens
        tables = [replace(x, seq_lens=self.with_lens(x, lens)) for x in state.tables]
        chunks = ChunkBatch(
            token_ids=tokens,
            cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
            slots=self.slots,
            is_last=rows.live,
            targets=None,
        )
        seen = replace(state.with_tables(tables), pool=KVPool(layers=layers))
        seen, hidden, *_ = call.hidden(
            seen, tokens, slots, positions, decode_rows=self.slots[:0], chunks=chunks
        )
        logits = call.logits(hidden)
        drawn = draw(call, state, logits, slots, is_token, positions + 1)
        grid = jnp.minimum(starts[:, None] + self.ahead, place.size - 1)
        tokens, ended, logprobs = jax.tree.map(lambda x: x[grid], drawn)
        return tokens, ended, logprobs, seen.pool.layers


def speculate(call: Call, state: EngineState) -> Result:
    """Run up to `num_steps` tokens of each row, in up to `num_verifications` steps.

    It stops early when all rows have ended, or when one has the most tokens that any may have in
    this call and could go on in the next.
    """
    batch, config = call.batch, call.batch.speculation
    assert config is not None and state.history is not None
    num_slots, num_rows, most = state.table.max_seqs, batch.decode_slots.size, batch.max_num_steps
    ended = state.slots.finished.at[batch.decode_slots].get(mode="fill", fill_value=True)
    asked = jnp.where(ended, 0, batch.num_steps)
    start = state.table.seq_lens.at[batch.decode_slots].get(mode="fill", fill_value=0)
    num_new = jnp.zeros(num_slots, jnp.int32).at[batch.decode_slots].set(asked, mode="drop")
    state, ok = reserve(call, state, num_new, most, max_pages=None)
    live = ok.at[batch.decode_slots].get(mode="fill", fill_value=False) & (asked > 0)
    slots = jnp.where(live, batch.decode_slots, num_slots)
    verification = _Verification(
        call=call, config=config, state=state, slots=slots, limits=start + asked
    )

    def body(carry: Any) -> Any:
        index, old, history, layers, outputs, counted, _ = carry
        rows, history, layers, new, more = verification.step(old, history, layers)
        places = (old.lens - start)[:, None] + verification.ahead
        places = jnp.where(places < (rows.lens - start)[:, None], places, most)
        row_ids = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        outputs = jax.tree.map(
            lambda all_, one: all_.at[places, row_ids].set(one, mode="drop"), outputs, new
        )
        is_full = rows.live & (rows.lens >= verification.limits)
        goes_on = jnp.any(rows.live) & ~jnp.any(is_full & (asked == jnp.max(asked)))
        rows = replace(rows, live=rows.live & ~is_full)
        counted = jax.tree.map(jnp.add, counted, more)
        return index + 1, rows, history, layers, outputs, counted, goes_on & jnp.any(rows.live)

    last = state.slots.last_token_ids.at[slots].get(mode="fill", fill_value=0)
    rows = _Rows(lens=start, last=last, live=live, ended=ended)
    shapes = jax.eval_shape(verification.step, rows, state.history, state.pool.layers)
    outputs, counted = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[3:])
    outputs = jax.tree.map(lambda x: jnp.zeros((most, num_rows, *x.shape[2:]), x.dtype), outputs)
    outputs = jnp.full((most, num_rows), NOT_SAMPLED, jnp.int32), outputs[1]
    carry = jnp.int32(0), rows, state.history, state.pool.layers, outputs, counted, jnp.any(live)
    # As in `decode`, the condition computes something for the order of a CUDA graph.
    _, rows, history, layers, outputs, counted, _ = jax.lax.while_loop(
        lambda c: (c[0] < batch.num_verifications) & c[-1], body, carry
    )

    # Pages without a token are free again. The last page of a row is its own, so nothing is copied.
    tables = [truncate(x, verification.with_lens(x, rows.lens))[0] for x in state.tables]
    places = start + jnp.arange(most, dtype=jnp.int32)[:, None]
    every = jnp.broadcast_to(slots, places.shape).ravel()
    mappings = tuple(
        slot_mapping(table, every, places.ravel()).reshape(places.shape) for table in tables
    )
    old = state.slots
    last_token_ids = old.last_token_ids.at[slots].set(rows.last, mode="drop")
    finished = old.finished.at[slots].set(rows.ended, mode="drop")
    state = replace(
        state.with_tables(tables),
        pool=KVPool(layers=layers),
        history=history,
        slots=replace(old, last_token_ids=last_token_ids, finished=finished),
    )
    return state, output_of(state, outputs[0], mappings, outputs[1], drafts=counted)
