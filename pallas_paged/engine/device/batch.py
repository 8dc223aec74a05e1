"""What a call takes and gives: the batch, in one of few shapes, and what the host reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.checks import pytree
from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.device.state import Array, EngineState
from pallas_paged.engine.outputs import LogprobSequence
from pallas_paged.engine.sampling.logprobs import Logprobs
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.engine.schedule.calls import (
    Chunk,
    Decode,
    DraftOutput,
    RunnerOutput,
    SchedulerOutput,
    SequenceOutput,
)
from pallas_paged.engine.speculative_config import SpeculativeConfig

_MIN_SLOTS = 8
_MIN_TOKENS = 128  # fewer take as long, because a step reads all weights

NOT_SAMPLED = -2  # in place of the token of a slot that did not take part in a step

Shape = tuple[int, ...]  # of a batch, see `BatchBuckets`
Mappings = tuple[jax.Array, ...]  # pool slots of new tokens, of each of `EngineState.tables`


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
        routed_experts: `i16[T, L, k]`, experts to use in place of the router's, -1 where requests
            give none; None if no chunk has any, so that the programs of other batches lack it.
        num_pooled: `i32[max_num_seqs]`, tokens at the end of each chunk whose hidden states are
            added up; None unless `mode.pooling`.
    """

    token_ids: Array
    cu_q_lens: Array
    slots: Array
    is_last: Array
    targets: Array | None
    routed_experts: Array | None = None
    num_pooled: Array | None = None


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
        masks: of the rows that sample, `i32[D, V // 32 + 1]`, or of all slots with chunks: token
            `32 i + j` may be drawn where bit j of entry i is set. None unless `mode.masks`, and
            where a step is to leave its logits `Undrawn`.
    """

    decode_slots: Array
    num_steps: Array
    chunks: ChunkBatch | None
    mode: SamplingMode = field(metadata=dict(static=True))
    max_num_steps: int = field(metadata=dict(static=True))
    speculation: SpeculativeConfig | None = field(default=None, metadata=dict(static=True))
    num_verifications: Array | None = None
    masks: Array | None = None


@dataclass(frozen=True)
class BatchBuckets:
    """The shapes that batches have, so that all of them can be compiled before they are needed.

    A batch that only decodes has a power of two of slots, or one, for which kernels are fastest.
    One with chunks has all slots and room for a power of two of tokens in chunks; the number of
    chunks does not matter. One that verifies drafts has their number behind these two.

    Attributes:
        config: sizes of the engine.
    """

    config: EngineConfig

    @property
    def decode_slots(self) -> list[int]:
        most = self.config.max_num_seqs
        return [*([1] if most >= _MIN_SLOTS else []), *_powers(_MIN_SLOTS, most)]

    @property
    def chunk_tokens(self) -> list[int]:
        return _powers(_MIN_TOKENS, self.config.max_num_batched_tokens)

    def all(self) -> list[Shape]:
        """(decoding slots, tokens in chunks) of every shape, the largest first."""
        decoding: list[Shape] = [(slots, 0) for slots in self.decode_slots]
        if (speculation := self.config.speculation) is not None:
            drafts = speculation.num_speculative_tokens
            decoding += [(slots, 0, drafts) for slots in self.decode_slots]
        with_chunks = [(self.config.max_num_seqs, tokens) for tokens in self.chunk_tokens]
        return [*decoding, *with_chunks][::-1]

    def fit(self, num_decodes: int, num_tokens: int, num_drafts: int = 0) -> Shape:
        """The smallest shape with room for these decoding slots and tokens in chunks."""
        if not num_tokens:
            drafts = (num_drafts,) if num_drafts else ()
            return next(slots for slots in self.decode_slots if slots >= num_decodes), 0, *drafts
        return self.config.max_num_seqs, next(x for x in self.chunk_tokens if x >= num_tokens)

    def from_(self, shape: Shape) -> list[Shape]:
        """Return the shapes that serve a batch of this one, which is the first."""
        kind = kind_of(shape)
        return [x for x in self.all()[::-1] if kind_of(x) == kind and x >= shape]

    def pack(
        self,
        decodes: list[Decode],
        chunks: list[Chunk],
        shape: Shape,
        mode: SamplingMode,
        num_verifications: int = 0,
        *,
        max_num_steps: int | None = None,
    ) -> Batch:
        """Pack a schedule into a batch of a shape that has room for it.

        `max_num_steps` is that of the config by default; with chunks it is 1.
        """
        num_slots, num_tokens, *drafts = shape
        config = self.config
        if max_num_steps is None:
            max_num_steps = config.max_tokens_of_call if drafts else config.num_scheduler_steps
        first = num_slots - len(decodes) if num_tokens else 0
        place = slice(first, first + len(decodes))
        decoding = np.full(num_slots, config.max_num_seqs, np.int32)
        decoding[place] = [decode.sequence.running_slot for decode in decodes]
        steps = np.zeros(num_slots, np.int32)
        steps[place] = [decode.num_tokens for decode in decodes]
        packed = None
        if num_tokens:
            num_tokens = min(num_tokens + num_slots, config.max_num_batched_tokens)
            lens = [len(chunk.token_ids) for chunk in chunks]
            total, count = sum(lens), len(chunks)
            token_ids = np.zeros(num_tokens, np.int32)
            token_ids[:total] = np.fromiter(
                chain.from_iterable(x.token_ids for x in chunks), np.int32
            )
            cu_q_lens = np.full(config.max_num_seqs + 1, total, np.int32)
            cu_q_lens[: count + 1] = np.cumsum([0, *lens])
            slots = np.full(config.max_num_seqs, config.max_num_seqs, np.int32)
            slots[:count] = [chunk.sequence.running_slot for chunk in chunks]
            is_last = np.zeros(config.max_num_seqs, bool)
            is_last[:count] = [chunk.is_last for chunk in chunks]
            targets = None
            if mode.prompt_logprobs >= 0:
                targets = np.full(num_tokens, -1, np.int32)
                for chunk, start in zip(chunks, cu_q_lens.tolist(), strict=False):
                    if (wanted := chunk.targets) is not None:
                        targets[start : start + len(wanted)] = wanted
            pooled = None
            if mode.pooling:
                pooled = np.zeros(config.max_num_seqs, np.int32)
                pooled[:count] = [chunk.num_pooled for chunk in chunks]
            packed = ChunkBatch(
                token_ids=token_ids,
                cu_q_lens=cu_q_lens,
                slots=slots,
                is_last=is_last,
                targets=targets,
                routed_experts=_routed_experts(chunks, num_tokens),
                num_pooled=pooled,
            )
        return Batch(
            decode_slots=decoding,
            num_steps=steps,
            chunks=packed,
            mode=mode,
            max_num_steps=1 if num_tokens else max_num_steps,
            speculation=config.speculation if drafts else None,
            num_verifications=np.int32(num_verifications) if drafts else None,
        )


def kind_of(shape: Shape) -> tuple[bool, ...]:
    """Return whether batches of a shape have chunks, and whether they verify drafts."""
    return shape[1] > 0, len(shape) > 2


def _routed_experts(chunks: list[Chunk], num_tokens: int) -> np.ndarray | None:
    """Return the given experts of this many tokens, which begin with those of the chunks."""
    given = [chunk.routed_experts for chunk in chunks]
    shape = next((one.shape[1:] for one in given if one is not None), None)
    if shape is None:
        return None
    packed, start = np.full((num_tokens, *shape), -1, np.int16), 0
    for chunk, one in zip(chunks, given, strict=True):
        if one is not None:
            packed[start : start + len(one)] = one
        start += len(chunk.token_ids)
    return packed


def _powers(least: int, most: int) -> list[int]:
    """Powers of two times least that are below most, and most as the last."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return [*sizes, most]


@pytree
class StepOutput:
    """What the host reads of a call.

    A call that only decodes has R = the batch's D rows and K = its `max_num_steps`. One with chunks
    has R = all slots and K = 1. The tokens of a row are its first ones, one after another.

    Attributes:
        token_ids: `i32[K, R]`, sampled tokens; -1 if the logits were NaN or infinite, NOT_SAMPLED
            where the row did not take part in the step.
        packed: `i32[tables * (N + 1) + 1]`, for each of `EngineState.tables` the pool slots of the
            new K/V, N = K x R in the order of `token_ids`, or T with chunks, and its free pages
            after the call; at the end whether the state is valid. In one array, as copies to the
            host take time; and what many kernels read is no output itself, because XLA updates each
            kernel of a CUDA graph that touches one.
        num_tables: static.
        logprobs: of `token_ids`, leaves `[K, R, ...]`, or None.
        prompt_logprobs: of the chunks' targets, leaves `[T, ...]`, or None.
        drafts: of a call that verifies drafts, in arrays, or None.
        routed_experts: of each token that was computed, `i32[K, R, L, k]`, or `i32[T, L, k]` with
            chunks; None if the mode does not ask for them, or the model reports none.
        pooled: `f32[max_num_seqs, E]`, of each chunk the sum of hidden states, or None.
        undrawn: of a step without tokens, in which no row took part so far; else None.
    """

    token_ids: jax.Array
    packed: jax.Array
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    num_tables: int = field(default=1, metadata=dict(static=True))
    drafts: DraftOutput | None = None
    routed_experts: jax.Array | None = None
    pooled: jax.Array | None = None
    undrawn: Undrawn | None = None


@pytree
class Undrawn:
    """What a step leaves to draw from, once the host knows the masks.

    Attributes:
        logits: `f32[D, V]`.
        rows_and_lens: `i32[2, D]`, slots that draw, out of range for the others, and their tokens.
    """

    logits: jax.Array
    rows_and_lens: jax.Array


def output_of(
    state: EngineState,
    token_ids: jax.Array,
    mappings: Mappings,
    logprobs: Logprobs | None,
    routed_experts: jax.Array | None = None,
    prompt_logprobs: Logprobs | None = None,
    drafts: DraftOutput | None = None,
) -> StepOutput:
    """Return the output of a call, given the state after it."""
    pairs = zip(mappings, (table.num_free for table in state.tables), strict=True)
    packed = [jnp.ravel(x) for pair in pairs for x in pair]
    return StepOutput(
        token_ids=token_ids,
        packed=jnp.concatenate([*packed, state.valid.astype(jnp.int32)[None]]),
        num_tables=len(mappings),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        routed_experts=routed_experts,
        drafts=drafts,
    )


def read_output(scheduled: SchedulerOutput, output: StepOutput, page_size: int) -> RunnerOutput:
    """Return what a call has computed, of its output as NumPy arrays; errors as of `read`."""
    if not output.packed[-1]:
        raise RuntimeError("the page table lacks pages or slots that the scheduler counts on")
    decodes, chunks, num_steps = scheduled.decodes, scheduled.chunks, scheduled.num_steps
    tokens: list[list[int]] = output.token_ids[:num_steps].T.tolist()  # of each row

    def pages_of(mapping: Any) -> list[Any]:
        """Return the page of each new token: of each row, or with chunks of all in one list."""
        if not chunks:
            mapping = mapping.reshape(output.token_ids.shape)[:num_steps]
        return (mapping // page_size).T.tolist()

    tables = np.reshape(output.packed[:-1], (output.num_tables, -1))
    pages, *windows = [pages_of(one[:-1]) for one in tables]
    window_pages = windows[0] if windows else [] if chunks else [[]] * len(decodes)
    # With chunks, the tokens of these come first, and those of decoding rows last.
    starts = [0] * len(decodes)
    if chunks:
        starts = [*range(len(pages) - len(decodes), len(pages))]
        starts += accumulate([len(chunk.token_ids) for chunk in chunks[:-1]], initial=0)
    sequences: list[SequenceOutput] = []
    computed: list[Decode | Chunk] = [*decodes, *chunks]
    for index, (one, start) in enumerate(zip(computed, starts, strict=True)):
        sequence = one.sequence
        # Sequences that have ended meanwhile have no slot; none has another, because pages are
        # taken from a sequence only while nothing is in flight.
        if sequence.slot is None:
            continue
        row = sequence.slot if chunks else index
        token_ids = tokens[row]
        if token_ids[-1] == NOT_SAMPLED:
            token_ids = token_ids[: token_ids.index(NOT_SAMPLED)]
        num_tokens, prompt_logprobs, pooled = len(token_ids), None, None
        if isinstance(one, Chunk):
            num_tokens = len(one.token_ids)
            if not one.is_last:
                token_ids = []
            if (targets := one.targets) is not None:
                wanted = slice(start, start + len(targets))
                most = sequence.request.params.prompt_logprobs or 0
                prompt_logprobs = _read_logprobs(output.prompt_logprobs, wanted, targets, most)
            if sequence.mode.pooling and output.pooled is not None:
                pooled = np.array(output.pooled[index - len(decodes)])
        end = start + num_tokens
        logprobs = experts = None
        if token_ids and sequence.mode.logprobs >= 0:
            sampled, most = (slice(len(token_ids)), row), sequence.request.params.num_logprobs or 0
            logprobs = _read_logprobs(output.logprobs, sampled, token_ids, most)
        if sequence.mode.routed_experts and output.routed_experts is not None:
            place: Any = slice(start, end) if chunks else (slice(end), row)
            experts = np.asarray(output.routed_experts[place], np.int16)
        sequences.append(
            SequenceOutput(
                scheduled=one,
                pages=(pages if chunks else pages[index])[start:end],
                window_pages=(window_pages if chunks else window_pages[index])[start:end],
                token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                routed_experts=experts,
                pooled=pooled,
            )
        )
    drafts = output.drafts
    return RunnerOutput(
        drafts=None if drafts is None else DraftOutput(*(x.tolist() for x in drafts)),
        num_free=int(tables[0, -1]),
        num_free_window_pages=int(tables[1, -1]) if windows else 0,
        sequences=sequences,
    )


def _read_logprobs(
    logprobs: Logprobs | None, place: Any, token_ids: list[int], num_logprobs: int
) -> LogprobSequence:
    """Return what arrays have of tokens at a place, with this number of the most probable."""
    assert logprobs is not None
    return LogprobSequence(
        token_ids,
        logprobs.logprob[place].tolist(),
        logprobs.rank[place].tolist(),
        logprobs.top_token_ids[place][:, :num_logprobs].ravel().tolist(),
        logprobs.top_logprobs[place][:, :num_logprobs].ravel().tolist(),
    )
