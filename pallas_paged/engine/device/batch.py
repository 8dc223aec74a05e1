"""The packed batch of one call: decoding slots, then chunks of prompts, in few shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from pallas_paged.checks import pytree
from pallas_paged.engine.sampling.sampler import SamplingMode
from pallas_paged.engine.schedule.scheduler_output import Chunk, Decode

_MIN_SLOTS = 8
_MIN_TOKENS = 128  # fewer take as long, because a step reads all weights

Array = Any  # of NumPy on the host, of JAX in the compiled step


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
    """

    decode_slots: Array
    num_steps: Array
    chunks: ChunkBatch | None
    mode: SamplingMode = field(metadata=dict(static=True))
    max_num_steps: int = field(metadata=dict(static=True))


@dataclass(frozen=True, kw_only=True)
class BatchBuckets:
    """The shapes that batches have, so that all of them can be compiled before they are needed.

    A batch that only decodes has a power of two of slots. One with chunks has all slots and room
    for a power of two of tokens in chunks; the number of chunks does not matter.
    """

    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def decode_slots(self) -> list[int]:
        return _powers(min(_MIN_SLOTS, self.max_num_seqs), self.max_num_seqs)

    @property
    def chunk_tokens(self) -> list[int]:
        return _powers(min(_MIN_TOKENS, self.max_num_batched_tokens), self.max_num_batched_tokens)

    def all(self) -> list[tuple[int, int]]:
        """(decoding slots, tokens in chunks) of every shape, the largest first."""
        decoding = [(slots, 0) for slots in self.decode_slots]
        return [*decoding, *((self.max_num_seqs, tokens) for tokens in self.chunk_tokens)][::-1]

    def fit(self, num_decodes: int, num_tokens: int) -> tuple[int, int]:
        """The smallest shape with room for these decoding slots and tokens in chunks."""
        if not num_tokens:
            return next(slots for slots in self.decode_slots if slots >= num_decodes), 0
        return self.max_num_seqs, next(x for x in self.chunk_tokens if x >= num_tokens)


def pack(
    decodes: Sequence[Decode],
    chunks: Sequence[Chunk],
    *,
    shape: tuple[int, int],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    mode: SamplingMode,
    max_num_steps: int,
) -> Batch:
    """Pack a schedule into a batch, of one of the shapes of `BatchBuckets` that has room for it."""
    num_slots, num_tokens = shape
    first = num_slots - len(decodes) if num_tokens else 0
    place = slice(first, first + len(decodes))
    decoding = np.full(num_slots, max_num_seqs, np.int32)
    decoding[place] = [decode.sequence.running_slot for decode in decodes]
    steps = np.zeros(num_slots, np.int32)
    steps[place] = [decode.num_tokens for decode in decodes]
    packed = None
    if num_tokens:
        num_tokens = min(num_tokens + num_slots, max_num_batched_tokens)
        lens = [len(chunk.token_ids) for chunk in chunks]
        total, count = sum(lens), len(chunks)
        token_ids = np.zeros(num_tokens, np.int32)
        token_ids[:total] = np.fromiter(chain.from_iterable(x.token_ids for x in chunks), np.int32)
        cu_q_lens = np.full(max_num_seqs + 1, total, np.int32)
        cu_q_lens[: count + 1] = np.cumsum([0, *lens])
        slots = np.full(max_num_seqs, max_num_seqs, np.int32)
        slots[:count] = [chunk.sequence.running_slot for chunk in chunks]
        is_last = np.zeros(max_num_seqs, bool)
        is_last[:count] = [chunk.is_last for chunk in chunks]
        targets = None
        if mode.prompt_logprobs >= 0:
            targets = np.full(num_tokens, -1, np.int32)
            for chunk, start in zip(chunks, cu_q_lens.tolist(), strict=False):
                if (wanted := chunk.targets) is not None:
                    targets[start : start + len(wanted)] = wanted
        packed = ChunkBatch(
            token_ids=token_ids, cu_q_lens=cu_q_lens, slots=slots, is_last=is_last, targets=targets
        )
    return Batch(
        decode_slots=decoding,
        num_steps=steps,
        chunks=packed,
        mode=mode,
        max_num_steps=1 if num_tokens else max_num_steps,
    )


def _powers(least: int, most: int) -> list[int]:
    """Powers of two times least, and most as the last."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return [*sizes, most]
