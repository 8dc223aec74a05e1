"""What a dispatched call has computed, sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_paged.engine.logprobs import Logprobs
from pallas_paged.engine.outputs import Logprob, TokenLogprobs
from pallas_paged.engine.sampling_params import MAX_LOGPROBS
from pallas_paged.engine.scheduler_output import Chunk, Decode, SchedulerOutput
from pallas_paged.engine.sequence import Sequence
from pallas_paged.engine.step import NOT_SAMPLED, StepOutput

_RANKS = range(1, MAX_LOGPROBS + 1)


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A call that is dispatched and not read.

    Attributes:
        scheduled: what it computes.
        num_decodes: rows of the batch before those of the chunks.
        output: what it returns, on the device or on its way to the host.
    """

    scheduled: SchedulerOutput
    num_decodes: int
    output: StepOutput


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Tokens that a call sampled for one sequence.

    Attributes:
        sequence: the sequence, which has a slot.
        token_ids: the tokens, in order; -1 for bad logits.
        logprobs: of each, or None.
        decode: what was scheduled; None for a chunk.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    decode: Decode | None


@dataclass(frozen=True, kw_only=True)
class RunnerOutput:
    """What a call has computed.

    Attributes:
        num_free: free pages after it.
        sampled: sequences with their new tokens.
        prompt_logprobs: chunks, with the log-probabilities of the tokens after each of theirs.
    """

    num_free: int
    sampled: list[Sampled]
    prompt_logprobs: list[tuple[Chunk, list[TokenLogprobs]]]


def read_output(in_flight: InFlight, output: StepOutput, page_size: int) -> RunnerOutput:
    """Read what a call returned, and note where the K/V of its sequences are.

    Args:
        in_flight: the call.
        output: what it returned, as NumPy arrays.
        page_size: of the page table.

    Raises:
        RuntimeError: the page table did not have what the host counted on.
    """
    if not output.valid:
        raise RuntimeError("the page table lacks pages or slots that the scheduler counts on")
    decodes, chunks = in_flight.scheduled.decodes, in_flight.scheduled.chunks
    num_steps = in_flight.scheduled.num_steps
    tokens: list[list[int]] = output.token_ids[:num_steps].T.tolist()  # of each row
    mapping = output.slot_mapping if chunks else output.slot_mapping[:num_steps]
    pages = (mapping // page_size).T.tolist()
    sampled: list[Sampled] = []
    prompt_logprobs: list[tuple[Chunk, list[TokenLogprobs]]] = []
    sequences = [x.sequence for x in decodes] + [x.sequence for x in chunks]
    wanted = [sequence.request.params.num_logprobs for sequence in sequences]
    most = max((x for x in wanted if x is not None), default=None)
    by_row = None
    if most is not None:
        assert output.logprobs is not None
        steps = jax.tree.map(lambda x: np.swapaxes(x[:num_steps], 0, 1), output.logprobs)
        by_row = _Lists.of(steps, most)

    def add(sequence: Sequence, row: int, decode: Decode | None) -> int:
        token_ids = tokens[row]
        if token_ids[-1] == NOT_SAMPLED:
            token_ids = token_ids[: token_ids.index(NOT_SAMPLED)]
        logprobs, num_logprobs = None, sequence.request.params.num_logprobs
        if num_logprobs is not None:
            assert by_row is not None
            logprobs = by_row.row(row).entries(token_ids, num_logprobs)
        sampled.append(
            Sampled(sequence=sequence, token_ids=token_ids, logprobs=logprobs, decode=decode)
        )
        return len(token_ids)

    # Sequences that have ended meanwhile have no slot; none has another, because pages are
    # taken from a sequence only while nothing is in flight.
    for row, decode in enumerate(decodes):
        sequence = decode.sequence
        if sequence.slot is None:
            continue
        if chunks:
            count, new = add(sequence, sequence.slot, decode), pages[row : row + 1]
        else:
            count, new = add(sequence, row, decode), pages[row]
        sequence.store(new[:count], page_size)
    start = in_flight.num_decodes
    for chunk in chunks:
        end = start + len(chunk.token_ids)
        if chunk.sequence.slot is not None:
            chunk.sequence.store(pages[start:end], page_size)
            if chunk.is_last:
                add(chunk.sequence, chunk.sequence.slot, None)
            if (targets := chunk.targets) is not None:
                assert output.prompt_logprobs is not None
                first = start - in_flight.num_decodes
                of_chunk = jax.tree.map(
                    lambda x: x[first : first + len(targets)],  # noqa: B023
                    output.prompt_logprobs,
                )
                most = chunk.sequence.request.params.prompt_logprobs or 0
                lists = _Lists.of(of_chunk, most)
                prompt_logprobs.append((chunk, lists.entries(targets, most)))
        start = end
    return RunnerOutput(
        num_free=int(output.num_free), sampled=sampled, prompt_logprobs=prompt_logprobs
    )


class _Lists(NamedTuple):
    """Log-probabilities as lists: NumPy's numbers take long to read one by one."""

    logprob: list[Any]
    rank: list[Any]
    top_token_ids: list[Any]
    top_logprobs: list[Any]

    @classmethod
    def of(cls, logprobs: Logprobs, num_logprobs: int) -> _Lists:
        """Return the lists of arrays, with so many of the best tokens."""
        return cls(
            logprobs.logprob.tolist(),
            logprobs.rank.tolist(),
            logprobs.top_token_ids[..., :num_logprobs].tolist(),
            logprobs.top_logprobs[..., :num_logprobs].tolist(),
        )

    def row(self, index: int) -> _Lists:
        """Return the lists of one row."""
        return _Lists(*(values[index] for values in self))

    def entries(self, token_ids: list[int], num_logprobs: int) -> list[TokenLogprobs]:
        """Return each token and the best ones, with their log-probabilities and ranks."""
        found: list[TokenLogprobs] = []
        for token_id, logprob, rank, tokens, values in zip(token_ids, *self, strict=False):
            best = map(Logprob._make, zip(values, _RANKS, strict=False))
            own = (token_id, Logprob(logprob, rank))
            found.append([own, *zip(tokens[:num_logprobs], best, strict=False)])
        return found
