"""A call that drafts the next tokens of rows, and verifies the drafts.

A call is a loop of steps, each of several tokens of every row. A draw is a function of the seeds,
the position and the logits. So a step computes the newest token of a row and its drafts, draws
after each of them, and keeps what it drew as long as the drafts are that: these are the tokens that
come without drafts, sampled ones too. Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", ICML 2023, whose sampler is for draws that nothing ties together.

A draft model draws with the same keys and filters, so that its tokens are those of the model as
often as the two think alike. It stores K and V of its own in the same pages: `call.follow`.

Pages are taken once, for the most tokens that the host has asked for. How many there are is a part
of the loop's state, and in the end the pages of the others are free again: nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.checks import INT32_MAX, pytree
from pallas_paged.engine.device.batch import NOT_SAMPLED, ChunkBatch, output_of
from pallas_paged.engine.device.call import Call, Packed, read_hidden
from pallas_paged.engine.device.lookup import add_tokens, find_drafts
from pallas_paged.engine.device.state import EngineState, History
from pallas_paged.engine.device.step import Result, draw, reserve
from pallas_paged.engine.schedule.calls import DraftOutput
from pallas_paged.engine.speculative_config import SpeculativeConfig
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.pool import KVPool
from pallas_paged.pages.table import PageTable, slot_mapping, truncate


@pytree
class _Recent:
    """The newest tokens of R rows, whose K and V the draft model stores next.

    Of a draft model it is the newest, and the one before if the last draft was right. A head stores
    those of all drafts that were right anew: now the model's hidden states before them are known.

    Attributes:
        tokens: `i32[R, W]`, the first `counts` of each row; others mean nothing.
        counts: `i32[R]`.
        before: `[R, W, D]`, what a `DraftHead` takes of the token before each; None without one.
    """

    tokens: jax.Array
    counts: jax.Array
    before: jax.Array | None


@pytree
class _Rows:
    """Where the R rows of a call are, between two steps.

    Attributes:
        lens: `i32[R]`, tokens whose K/V are stored; one more is known.
        last: `i32[R]`, that one.
        live: `bool[R]`, whether the row goes on in this call.
        ended: `bool[R]`, whether it has all of its tokens.
        recent: what the draft model computes first in the next step; None without one.
    """

    lens: jax.Array
    last: jax.Array
    live: jax.Array
    ended: jax.Array
    recent: _Recent | None


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
        self, rows: _Rows, history: History | None, layers: tuple[LayerKV, ...]
    ) -> tuple[_Rows, History | None, tuple[LayerKV, ...], tuple[Any, ...], DraftOutput]:
        """Draft, compute and draw.

        Returns:
            The rows, the history and the cache after the step; the tokens `i32[R, W]` and their
            log-probabilities; and the counts. Of the tokens those are new that `rows.lens` counts.
        """
        most = self.limits
        if (draft := self.call.draft) is not None:  # longer rows go on without drafts
            most = jnp.minimum(most, draft.model.max_model_len)
        room = jnp.where(rows.live, most - rows.lens - 1, 0)
        if history is not None:
            found, num_found = find_drafts(history, self.slots, rows.lens + 1, self.config)
            num_drafts = jnp.clip(room, 0, num_found)
        else:
            num_drafts = jnp.clip(room, 0, self.config.num_speculative_tokens)
            found, layers = self._draw_drafts(rows, num_drafts, layers)
        drawn, ended, logprobs, before, layers = self._compute(rows, found, num_drafts, layers)
        ahead = self.ahead
        fits = (drawn[:, :-1] == found) & (ahead[:-1] < num_drafts[:, None])
        accepted = jnp.min(jnp.where(fits, ahead.size - 1, ahead[:-1]), axis=1)
        first_end = jnp.min(jnp.where(ended, ahead, ahead.size), axis=1)
        num_new = jnp.where(rows.live, jnp.minimum(accepted, first_end) + 1, 0)
        if history is not None:
            places = jnp.where(ahead < num_new[:, None], rows.lens[:, None] + 1 + ahead, INT32_MAX)
            history = add_tokens(history, self.slots[:, None], places, drawn)
        newest = jnp.take_along_axis(drawn, jnp.maximum(num_new - 1, 0)[:, None], axis=1)[:, 0]
        recent = rows.recent
        if recent is not None:
            counts = num_new if before is not None else 1 + (num_new > jnp.maximum(num_drafts, 1))
            place = (num_new - counts)[:, None] + jnp.arange(recent.tokens.shape[1])
            place = jnp.clip(place, 0, ahead.size - 1)
            tokens = jnp.maximum(jnp.take_along_axis(drawn, place, axis=1), 0)
            new = _Recent(tokens=tokens, counts=counts.astype(jnp.int32), before=before)
            recent = jax.tree.map(
                lambda x, old: jnp.where(rows.live.reshape(-1, *[1] * (x.ndim - 1)), x, old),
                new,
                recent,
            )
        right = ahead[:-1] < jnp.minimum(accepted, num_new)[:, None]
        counted = DraftOutput(
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
            recent=recent,
        )
        return rows, history, layers, (drawn, logprobs), counted

    def _compute(
        self, rows: _Rows, drafts: jax.Array, num_drafts: jax.Array, layers: tuple[LayerKV, ...]
    ) -> tuple[jax.Array, jax.Array, Any, jax.Array | None, tuple[LayerKV, ...]]:
        """Run the model on the newest token of each live row and its drafts; draw after each.

        Returns:
            Tokens `i32[R, W]`, whether each ends its row, and their log-probabilities; what a
            head takes of the tokens before them, `[R, W, D]`, or None; and the cache. Those beyond
            a row's drafts mean nothing.
        """
        tokens = jnp.concatenate([rows.last[:, None], drafts], axis=1)
        q_lens = jnp.where(rows.live, 1 + num_drafts, 0)
        packed, hidden, layers = self._run(self.call, layers, tokens, rows.lens, q_lens)
        logits, lens = self.call.logits(hidden), packed.positions + 1
        where = packed.slots, packed.is_token, lens
        drawn = draw(self.call.batch, self.state, logits, *where, peers=self.call.peers)
        grid = jnp.minimum(packed.starts[:, None] + self.ahead, packed.slots.size - 1)
        tokens, ended, logprobs = jax.tree.map(lambda x: x[grid], drawn)
        before = None
        if (last_hidden := self.state.last_hidden) is not None:
            before = read_hidden(self.call, hidden, last_hidden.dtype)[grid]
        return tokens, ended, logprobs, before, layers

    def _run(
        self,
        call: Call,
        layers: tuple[LayerKV, ...],
        tokens: jax.Array,
        lens: jax.Array,
        q_lens: jax.Array,
        before: jax.Array | None = None,
    ) -> tuple[Packed, jax.Array, tuple[LayerKV, ...]]:
        """Run a model on the next tokens of rows.

        Args:
            call: of the model.
            layers: the cache.
            tokens: `i32[R, W]`, the first `q_lens` of each row; others mean nothing.
            lens, q_lens: `i32[R]`, tokens before those, and their number.
            before: `[R, W, D]`, for a head.

        Returns:
            Where the tokens are, their hidden states `[T, E]`, and the cache.
        """
        packed = Packed.of(self.slots, lens, q_lens, tokens.shape[1], self.state.table.max_seqs)
        token_ids = jnp.where(packed.is_token, packed.take(tokens), 0)
        chunks = ChunkBatch(
            token_ids=token_ids,
            cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), packed.ends]),
            slots=self.slots,
            is_last=q_lens > 0,
            targets=None,
        )
        seen, hidden, *_ = call.hidden(
            self._seen(call, layers, lens + q_lens),
            token_ids,
            packed.slots,
            packed.positions,
            decode_rows=self.slots[:0],
            chunks=chunks,
            before=None if before is None else packed.take(before),
        )
        return packed, hidden, seen.pool.layers

    def _seen(self, call: Call, layers: tuple[LayerKV, ...], lens: jax.Array) -> EngineState:
        """Return the state with these lengths of the rows, and the tables of a model's layers."""
        tables = self.state.tables if call is self.call else self.state.tables[:1]
        tables = tuple(replace(x, seq_lens=self.with_lens(x, lens)) for x in tables)
        return replace(self.state.with_tables(tables), pool=KVPool(layers=layers))

    def _draw_drafts(
        self, rows: _Rows, num_drafts: jax.Array, layers: tuple[LayerKV, ...]
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """Draw drafts with the draft model, which first computes the recent tokens.

        Returns:
            Drafts `i32[R, num_speculative_tokens]`, and the cache. Those beyond `num_drafts` of a
            row mean nothing.
        """
        draft, recent = self.call.draft, rows.recent
        assert draft is not None and recent is not None
        lens, q_lens = rows.lens + 1 - recent.counts, jnp.where(rows.live, recent.counts, 0)
        packed, hidden, layers = self._run(
            draft, layers, recent.tokens, lens, q_lens, recent.before
        )
        hidden = hidden[jnp.maximum(packed.ends - 1, 0)]
        drafts: list[jax.Array] = []
        for index in range(self.config.num_speculative_tokens):
            is_drawn = index < num_drafts  # of live rows only
            lens = rows.lens + 1 + index
            if index:  # the draft before is computed as the token of a decoding row
                slots = jnp.where(is_drawn, self.slots, self.state.table.max_seqs)
                new = drafts[-1], slots, jnp.where(is_drawn, lens - 1, 0)
                before = None if self.state.last_hidden is None else hidden
                seen = self._seen(draft, layers, lens)
                seen, hidden, *_ = draft.hidden(
                    seen, *new, decode_rows=slots, chunks=None, before=before
                )
                layers = seen.pool.layers
            where = self.slots, is_drawn, lens
            logits = draft.logits(hidden)
            drawn, *_ = draw(draft.batch, self.state, logits, *where, peers=draft.peers)
            drafts.append(jnp.maximum(drawn, 0))  # -1 is of bad logits
        return jnp.stack(drafts, axis=1), layers

    def recent_at_start(self, last: jax.Array) -> _Recent | None:
        """Return what the draft model computes first: the newest token of each row `i32[R]`."""
        if self.call.draft is None:
            return None
        size, before = (last.size, 2), None
        if (last_hidden := self.state.last_hidden) is not None:
            size = last.size, self.config.tokens_of_step
            first = last_hidden.at[self.slots].get(mode="fill", fill_value=0)
            before = jnp.zeros((*size, first.shape[1]), first.dtype).at[:, 0].set(first)
        tokens = jnp.zeros(size, jnp.int32).at[:, 0].set(last)
        return _Recent(tokens=tokens, counts=jnp.ones_like(last), before=before)

    def finish_drafts(
        self, rows: _Rows, layers: tuple[LayerKV, ...]
    ) -> tuple[jax.Array | None, tuple[LayerKV, ...]]:
        """Store what the draft model, if there is one, has not stored at the end of a call.

        Returns:
            The new `EngineState.last_hidden`, and the cache.
        """
        last_hidden, recent = self.state.last_hidden, rows.recent
        if (draft := self.call.draft) is None or recent is None:
            return last_hidden, layers
        earlier, lens = recent.counts - 1, rows.lens + 1 - recent.counts  # all but the newest
        *_, layers = self._run(draft, layers, recent.tokens, lens, earlier, recent.before)
        if last_hidden is not None and recent.before is not None:
            new = jnp.take_along_axis(recent.before, earlier[:, None, None], axis=1)[:, 0]
            last_hidden = last_hidden.at[self.slots].set(new, mode="drop")
        return last_hidden, layers


def speculate(call: Call, state: EngineState) -> Result:
    """Run up to `num_steps` tokens of each row, in up to `num_verifications` steps.

    It stops early when all rows have ended, or when one has the most tokens that any may have in
    this call and could go on in the next.
    """
    batch, config = call.batch, call.batch.speculation
    assert config is not None
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
    rows = _Rows(
        lens=start,
        last=last,
        live=live,
        ended=ended,
        recent=verification.recent_at_start(last),
    )
    shapes = jax.eval_shape(verification.step, rows, state.history, state.pool.layers)
    outputs, counted = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[3:])
    outputs = jax.tree.map(lambda x: jnp.zeros((most, num_rows, *x.shape[2:]), x.dtype), outputs)
    outputs = jnp.full((most, num_rows), NOT_SAMPLED, jnp.int32), outputs[1]
    carry = jnp.int32(0), rows, state.history, state.pool.layers, outputs, counted, jnp.any(live)
    # As in `decode`, the condition computes something for the order of a CUDA graph.
    _, rows, history, layers, outputs, counted, _ = jax.lax.while_loop(
        lambda c: (c[0] < batch.num_verifications) & c[-1], body, carry
    )

    last_hidden, layers = verification.finish_drafts(rows, layers)
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
        last_hidden=last_hidden,
        slots=replace(old, last_token_ids=last_token_ids, finished=finished),
    )
    return state, output_of(state, outputs[0], mappings, outputs[1], drafts=counted)
