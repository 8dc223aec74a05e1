"""The batch of one call, and the state of an engine between calls, on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from inspect import unwrap
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.checks import pytree
from pallas_paged.engine.config import SpeculativeConfig
from pallas_paged.engine.device.drafts import History
from pallas_paged.engine.device.placement import Shardings
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling.sampler import SamplingMetadata, hash_prompt
from pallas_paged.engine.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingMode,
    SamplingParams,
)
from pallas_paged.engine.schedule.calls import Chunk, Decode
from pallas_paged.pages.pool import KVPool, copy_pages
from pallas_paged.pages.sharing import attach, release, retain
from pallas_paged.pages.table import PageTable, extend
from pallas_paged.pages.table import fork as fork_rows
from pallas_paged.pages.table import free as free_rows

_MIN_SLOTS = 8
_MIN_TOKENS = 128  # fewer take as long, because a step reads all weights

Array = Any  # of NumPy on the host, of JAX in the compiled step
Shape = tuple[int, ...]  # of a batch, see `BatchBuckets`


@pytree
class ChunkBatch:
    """The next tokens of slots that are not decoding, one slot after another.

    Attributes:
        token_ids: `i32[T]`, padded at the end, with room for the tokens of the decoding slots.
        cu_q_lens: `i32[max_num_seqs + 1]`, rising from 0: where the tokens of each chunk begin and
            end.
        slots: `i32[max_num_seqs]`, padded with max_num_seqs.
        is_last: `bool[max_num_seqs]`, whether the chunk ends with the slot's last known token.
        targets: `i32[T]`, the token after each, -1 where its log-probability is not wanted; None
            if none is.
    """

    token_ids: Array
    cu_q_lens: Array
    slots: Array
    is_last: Array
    targets: Array | None


@pytree
class Batch:
    """What one call computes.

    Attributes:
        decode_slots: `i32[D]`, slots that go on from their last token; padded with max_num_seqs,
            at the end, or before chunks at the beginning. The last D of the T tokens are theirs;
            where a slot is padding, that token is one of the chunks or padding.
        num_steps: `i32[D]`, most steps of each of those slots; 1 with chunks.
        chunks: None in a call that only decodes.
        mode: static, what the call can sample.
        max_num_steps: static, bound of num_steps.
        speculation: static, of a call that verifies drafts; None: it has none. `num_steps` and
            `max_num_steps` are then tokens of a row.
        num_verifications: `i32[]`, most steps of that call; else None.
        masks: of the rows that sample, `i32[D, ceil(V / 32)]`, or of all slots with chunks: token
            `32 i + j` may be drawn where bit j of entry i is set. None unless `mode.masks`.
    """

    decode_slots: Array
    num_steps: Array
    chunks: ChunkBatch | None
    mode: SamplingMode = field(metadata=dict(static=True))
    max_num_steps: int = field(metadata=dict(static=True))
    speculation: SpeculativeConfig | None = field(default=None, metadata=dict(static=True))
    num_verifications: Array | None = None
    masks: Array | None = None


@dataclass(frozen=True, kw_only=True)
class BatchBuckets:
    """The shapes that batches have, so that all of them can be compiled before they are needed.

    A batch that only decodes has a power of two of slots. One with chunks has all slots and room
    for a power of two of tokens in chunks; the number of chunks does not matter. One that verifies
    drafts has their number behind these two.

    Attributes:
        max_num_seqs, max_num_batched_tokens: as in `EngineConfig`.
        max_num_steps: of a call that only decodes.
        max_tokens_of_call, speculation: of a call that verifies drafts; None: there are none.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_steps: int
    max_tokens_of_call: int = 1
    speculation: SpeculativeConfig | None = None

    @property
    def decode_slots(self) -> list[int]:
        return _powers(min(_MIN_SLOTS, self.max_num_seqs), self.max_num_seqs)

    @property
    def chunk_tokens(self) -> list[int]:
        return _powers(min(_MIN_TOKENS, self.max_num_batched_tokens), self.max_num_batched_tokens)

    def all(self) -> list[Shape]:
        """(decoding slots, tokens in chunks) of every shape, the largest first."""
        decoding: list[Shape] = [(slots, 0) for slots in self.decode_slots]
        if (speculation := self.speculation) is not None:
            drafts = speculation.num_speculative_tokens
            decoding += [(slots, 0, drafts) for slots in self.decode_slots]
        return [*decoding, *((self.max_num_seqs, tokens) for tokens in self.chunk_tokens)][::-1]

    def fit(self, num_decodes: int, num_tokens: int, num_drafts: int = 0) -> Shape:
        """The smallest shape with room for these decoding slots and tokens in chunks."""
        if not num_tokens:
            drafts = (num_drafts,) if num_drafts else ()
            return next(slots for slots in self.decode_slots if slots >= num_decodes), 0, *drafts
        return self.max_num_seqs, next(x for x in self.chunk_tokens if x >= num_tokens)

    def pack(
        self,
        decodes: list[Decode],
        chunks: list[Chunk],
        shape: Shape,
        mode: SamplingMode,
        num_verifications: int = 0,
    ) -> Batch:
        """Pack a schedule into a batch of a shape that has room for it."""
        num_slots, num_tokens, *drafts = shape
        max_num_steps = self.max_tokens_of_call if drafts else self.max_num_steps
        first = num_slots - len(decodes) if num_tokens else 0
        place = slice(first, first + len(decodes))
        decoding = np.full(num_slots, self.max_num_seqs, np.int32)
        decoding[place] = [decode.sequence.running_slot for decode in decodes]
        steps = np.zeros(num_slots, np.int32)
        steps[place] = [decode.num_tokens for decode in decodes]
        packed = None
        if num_tokens:
            num_tokens = min(num_tokens + num_slots, self.max_num_batched_tokens)
            lens = [len(chunk.token_ids) for chunk in chunks]
            total, count = sum(lens), len(chunks)
            token_ids = np.zeros(num_tokens, np.int32)
            token_ids[:total] = np.fromiter(
                chain.from_iterable(x.token_ids for x in chunks), np.int32
            )
            cu_q_lens = np.full(self.max_num_seqs + 1, total, np.int32)
            cu_q_lens[: count + 1] = np.cumsum([0, *lens])
            slots = np.full(self.max_num_seqs, self.max_num_seqs, np.int32)
            slots[:count] = [chunk.sequence.running_slot for chunk in chunks]
            is_last = np.zeros(self.max_num_seqs, bool)
            is_last[:count] = [chunk.is_last for chunk in chunks]
            targets = None
            if mode.prompt_logprobs >= 0:
                targets = np.full(num_tokens, -1, np.int32)
                for chunk, start in zip(chunks, cu_q_lens.tolist(), strict=False):
                    if (wanted := chunk.targets) is not None:
                        targets[start : start + len(wanted)] = wanted
            packed = ChunkBatch(
                token_ids=token_ids,
                cu_q_lens=cu_q_lens,
                slots=slots,
                is_last=is_last,
                targets=targets,
            )
        return Batch(
            decode_slots=decoding,
            num_steps=steps,
            chunks=packed,
            mode=mode,
            max_num_steps=1 if num_tokens else max_num_steps,
            speculation=self.speculation if drafts else None,
            num_verifications=np.int32(num_verifications) if drafts else None,
        )


def _powers(least: int, most: int) -> list[int]:
    """Powers of two times least, and most as the last."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return [*sizes, most]


@pytree
class SlotStates:
    """What each of S slots needs beside its pages; a slot is a row of the page table.

    Attributes:
        last_token_ids: `i32[S]`, the newest token, whose K/V are yet to be written.
        finished: `bool[S]`, whether it has ended; it does not compute until it is set again.
        max_lens: `i32[S]`, tokens at which it ends.
        sampling: sampling parameters; a token of `stop_token_ids` ends the slot.
    """

    last_token_ids: Array
    finished: Array
    max_lens: Array
    sampling: SamplingMetadata


@pytree
class EngineState:
    """All slots of an engine.

    Attributes:
        table: the page table; with a `window_table`, of the layers that see all tokens.
        pool: K/V of all layers.
        slots: the rest of what slots need.
        valid: `bool[]`, whether every page and slot that the host counted on was there.
        window_table: the page table of the layers with a window, with the same rows and lengths,
            if their part of the pool has pages of its own. It is smaller than the other, so the
            number of a layer's pages says which table is its own.
        kept_tokens: static, newest tokens of a row whose pages that table keeps.
        history: the tokens of the slots, in which drafts are looked for; None if the engine never
            speculates.
    """

    table: PageTable
    pool: KVPool
    slots: SlotStates
    valid: jax.Array
    window_table: PageTable | None = None
    kept_tokens: int = field(default=0, metadata=dict(static=True))
    history: History | None = None


@pytree
class TableArrays:
    """What `update_table` does, in arrays of fixed shapes.

    Attributes:
        retained, released: `i32[P]`, pages, padded with num_pages.
        freed: `bool[S]`, slots.
        slots: `i32[A]`, empty slots that begin with full pages; padded with S.
        pages: `i32[A, pages_per_seq]`, those pages, padded with num_pages.
        first_blocks: `i32[A]`, blocks before those pages; None: 0.
    """

    retained: Array
    freed: Array
    released: Array
    slots: Array
    pages: Array
    first_blocks: Array | None = None


@partial(jax.jit, donate_argnames=("table", "valid"))
def update_table(
    table: PageTable, valid: jax.Array, update: TableArrays
) -> tuple[PageTable, jax.Array]:
    """Retain pages, free slots, release pages and then let slots attach some; all donated."""
    table, retained = retain(table, update.retained)
    table = release(free_rows(table, update.freed), update.released)
    table, attached = attach(table, update.slots, update.pages, first_blocks=update.first_blocks)
    retained |= update.retained >= table.num_pages  # padding
    attached |= update.slots >= table.max_seqs
    return table, valid & jnp.all(retained) & jnp.all(attached)


def extend_all(
    tables: tuple[PageTable, ...], num_new_tokens: jax.Array, *, max_new_tokens: int
) -> tuple[tuple[PageTable, ...], jax.Array]:
    """Extend the same rows of tables: one that lacks a page in any of them takes none in all.

    Arguments and results are those of `extend`.
    """
    ok = jnp.ones(num_new_tokens.shape, bool)
    for table in tables:  # of what these calls return, XLA computes the second result alone
        wanted = jnp.where(ok, num_new_tokens, 0)
        ok &= extend(table, wanted, max_new_tokens=max_new_tokens)[1]
    wanted = jnp.where(ok, num_new_tokens, 0)
    each = (extend(table, wanted, max_new_tokens=max_new_tokens)[0] for table in tables)
    return tuple(each), ok


@partial(jax.jit, donate_argnames="state")
def fork(state: EngineState, src: jax.Array, dst: jax.Array) -> EngineState:
    """Fill empty slots dst `i32[F]` like slots src `i32[F]`, padded with S (state donated)."""
    table, copies, ok = fork_rows(state.table, src, dst)
    of_table, window_table = {table.num_pages: copies}, state.window_table
    if window_table is not None:
        window_table, of_table[window_table.num_pages], fits = fork_rows(window_table, src, dst)
        ok &= fits
    valid = state.valid & jnp.all(ok | (src >= table.max_seqs))
    if window_table is None:
        pool = copy_pages(state.pool, copies)
    else:
        each = (copy_pages(KVPool(layers=(x,)), of_table[x.num_pages]) for x in state.pool.layers)
        pool = KVPool(layers=tuple(chain.from_iterable(one.layers for one in each)))
    return replace(state, table=table, pool=pool, valid=valid, window_table=window_table)


@lru_cache(maxsize=16)
def fork_on(shardings: Shardings) -> Callable[[EngineState, Array, Array], EngineState]:
    """Return `fork` for a state with these shardings."""
    replicated, state = shardings.replicated, shardings.tree
    return jax.jit(
        unwrap(fork),
        in_shardings=(state, replicated, replicated),
        out_shardings=state,
        donate_argnums=0,
    )


@partial(jax.jit, donate_argnames="slots")
def set_slots(slots: SlotStates, indices: jax.Array, values: SlotStates) -> SlotStates:
    """Set slots (donated).

    Args:
        slots: all S slots.
        indices: `i32[N]`, which to set, padded with S.
        values: leaves with N in place of S; a last token below 0 leaves the slot's own.
    """
    old = slots.last_token_ids.at[indices].get(mode="clip")
    tokens = jnp.where(values.last_token_ids < 0, old, values.last_token_ids)
    values = replace(values, last_token_ids=tokens)

    return jax.tree.map(lambda x, new: x.at[indices].set(new, mode="drop"), slots, values)


# Fields of `SamplingParams` that the device has as they are.
_FIELDS = {
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "repetition_penalty": np.float32,
}


def slot_states(num_slots: int, num_eos: int) -> SlotStates:
    """States of slots with greedy default parameters, all finished, as NumPy arrays."""

    def full(value: Any, dtype: Any, *shape: int) -> np.ndarray:
        return np.full((num_slots, *shape), value, dtype)

    return SlotStates(
        last_token_ids=full(0, np.int32),
        finished=full(True, bool),
        max_lens=full(0, np.int32),
        sampling=SamplingMetadata(
            seeds=full(0, np.uint32, 3),
            temperature=full(0, np.float32),
            min_lens=full(0, np.int32),
            stop_token_ids=full(-1, np.int32, MAX_STOP_TOKEN_IDS + num_eos),
            bias_token_ids=full(-1, np.int32, MAX_LOGIT_BIAS),
            bias=full(0, np.float32, MAX_LOGIT_BIAS),
            **{name: full(getattr(SamplingParams, name), x) for name, x in _FIELDS.items()},
        ),
    )


def set_slot(values: SlotStates, entry: int, one: Sequence, last_token_id: int) -> None:
    """Write a sequence's values into an entry of NumPy arrays."""
    request, params, sampling = one.request, one.request.params, values.sampling
    values.last_token_ids[entry] = last_token_id
    values.finished[entry] = False
    values.max_lens[entry] = one.max_len
    if not params.greedy:
        prompt = hash_prompt(request.prompt_token_ids)
        sampling.seeds[entry] = request.seed, prompt, one.output.index
        sampling.temperature[entry] = params.temperature
    for name in _FIELDS:
        getattr(sampling, name)[entry] = getattr(params, name)
    sampling.min_lens[entry] = len(request.prompt_token_ids) + params.min_tokens
    stops = list(one.stop_token_ids)
    sampling.stop_token_ids[entry, : len(stops)] = stops
    if bias := dict(params.logit_bias or ()):
        sampling.bias_token_ids[entry, : len(bias)] = [*bias]
        sampling.bias[entry, : len(bias)] = [*bias.values()]
