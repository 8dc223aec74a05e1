"""What a dispatched call has computed, sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pallas_paged.engine.device.step import NOT_SAMPLED, StepOutput
from pallas_paged.engine.outputs import LogprobSequence
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling.logprobs import Logprobs
from pallas_paged.engine.schedule.scheduler_output import Chunk, Decode, SchedulerOutput


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A call that is dispatched and not read.

    Attributes:
        scheduled: what it computes.
        output: what it returns, on the device or on its way to the host.
    """

    scheduled: SchedulerOutput
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
    logprobs: LogprobSequence | None
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
    prompt_logprobs: list[tuple[Chunk, LogprobSequence]]


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
    prompt_logprobs: list[tuple[Chunk, LogprobSequence]] = []

    def add(sequence: Sequence, row: int, decode: Decode | None) -> int:
        token_ids = tokens[row]
        if token_ids[-1] == NOT_SAMPLED:
            token_ids = token_ids[: token_ids.index(NOT_SAMPLED)]
        logprobs, num_logprobs = None, sequence.request.params.num_logprobs
        if num_logprobs is not None:
            place = slice(len(token_ids)), row
            logprobs = _read_logprobs(output.logprobs, place, token_ids, num_logprobs)
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
            count, new = add(sequence, sequence.slot, decode), [pages[row - len(decodes)]]
        else:
            count, new = add(sequence, row, decode), pages[row]
        sequence.store(new[:count], page_size)
    start = 0
    for chunk in chunks:
        end = start + len(chunk.token_ids)
        if chunk.sequence.slot is not None:
            chunk.sequence.store(pages[start:end], page_size)
            if chunk.is_last:
                add(chunk.sequence, chunk.sequence.slot, None)
            if (targets := chunk.targets) is not None:
                place = slice(start, start + len(targets))
                most = chunk.sequence.request.params.prompt_logprobs or 0
                found = _read_logprobs(output.prompt_logprobs, place, targets, most)
                prompt_logprobs.append((chunk, found))
        start = end
    return RunnerOutput(
        num_free=int(output.num_free), sampled=sampled, prompt_logprobs=prompt_logprobs
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
