"""One call of the device: whether it drafts, what it runs, and what it has computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pallas_paged.engine.outputs import LogprobSequence
from pallas_paged.engine.requests.sequence import Sequence

# A slot, and the cached pages that it begins with: those of layers with a window are -1 left of it.
Attachment = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The next known tokens of a sequence that is not decoding.

    Attributes:
        start: index of the first token.
        is_last: whether its last known token is among them, so that the next one is sampled.
    """

    sequence: Sequence
    start: int
    token_ids: list[int]
    is_last: bool

    @property
    def targets(self) -> list[int] | None:
        """The prompt tokens after each of these, if their log-probabilities are wanted."""
        if self.sequence.request.score_start is None or self.sequence.max_cached_tokens is None:
            return None
        first = self.start + 1
        return self.sequence.request.prompt_token_ids[first : first + len(self.token_ids)]

    @property
    def num_pooled(self) -> int:
        """Tokens at its end whose hidden states become a part of the prompt's vector."""
        if (pooling := self.sequence.request.pooling) is None:
            return 0
        return len(self.token_ids) if pooling.pooling == "mean" else int(self.is_last)

    @property
    def routed_experts(self) -> np.ndarray | None:
        """The experts that these tokens must use, `i16[N, L, k]`; None if none are given."""
        given = self.sequence.request.given_experts
        return None if given is None else given[self.start : self.start + len(self.token_ids)]


@dataclass(kw_only=True, slots=True)  # not frozen: that takes longer to make for each row
class Decode:
    """Tokens of a sequence that goes on from its last one."""

    sequence: Sequence
    num_tokens: int  # that it computes, at most; it samples as many


@dataclass(frozen=True, kw_only=True)
class SchedulerOutput:
    """What one call runs: first slots attach cached pages, then slots are forked, then the batch.

    Attributes:
        attachments: slots and the pages that they begin with.
        window_attachments: likewise, of layers with a window.
        forks: slots, and empty slots that become like them.
        decodes: sequences that go on from their last token.
        resumed: of those, the ones whose last token the host must send.
        chunks: tokens of sequences that have more to compute than their last one.
        num_steps: most tokens of a decoding sequence, which are the steps of a call without drafts;
            1 if there are chunks.
        num_drafts: that the call verifies for each sequence in a step, at most; 0: none.
        num_verifications: most steps of a call with drafts.
        nothing_waits: whether the next call is of these sequences, unless a request comes.
    """

    attachments: list[Attachment] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    num_steps: int = 1
    window_attachments: list[Attachment] = field(default_factory=list)
    num_drafts: int = 0
    num_verifications: int = 0
    nothing_waits: bool = field(default=False, compare=False)


class DraftOutput(NamedTuple):
    """What a call with drafts has verified, of all sequences together; arrays on the device.

    Attributes:
        num_steps: of the model.
        num_rows: sequences, one for each of those steps that it took part in.
        num_drafts: of those, the ones that had drafts.
        num_draft_tokens: drafts.
        num_accepted_per_pos: `i32[num_speculative_tokens]`, drafts that were right, by their place
            behind the newest token; on the host a list.
    """

    num_steps: Any
    num_rows: Any
    num_drafts: Any
    num_draft_tokens: Any
    num_accepted_per_pos: Any


@dataclass(kw_only=True, slots=True)
class SequenceOutput:
    """What a call has computed of one sequence, which has a slot.

    Attributes:
        pages: of the pool, one for each token whose K/V the call has written.
        window_pages: likewise, of layers with a window.
        token_ids: that it sampled, in order; -1 for bad logits.
        logprobs: of each, or None.
        prompt_logprobs: of the tokens after each of a chunk, or None.
        routed_experts: `i16[N, L, k]`, of each of the N tokens that it computed, or None.
        pooled: `f32[E]`, sum of the hidden states that become a part of the prompt's vector, or
            None.
    """

    scheduled: Decode | Chunk
    pages: list[int]
    token_ids: list[int]
    logprobs: LogprobSequence | None = None
    prompt_logprobs: LogprobSequence | None = None
    window_pages: list[int] = field(default_factory=list)
    routed_experts: np.ndarray | None = None
    pooled: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class RunnerOutput:
    """What a call has computed.

    Attributes:
        num_free: free pages after it.
        sequences: those that have not ended meanwhile.
        num_free_window_pages: those of layers with a window, if they have a pool of their own.
    """

    num_free: int
    sequences: list[SequenceOutput]
    num_free_window_pages: int = 0
    drafts: DraftOutput | None = None


_MEMORY = 0.98  # of the average of tokens a step, for each step of a row; ...
_MOST_ROWS = 32  # ... of a call as many count
_GUESS = 1.1  # times that a step with drafts takes longer where more tokens cost nothing
_NOISE = 1.02  # of measured times
_SLOWER = 1.1  # by which a measured time may grow from one call to the next
# One call in as many is made the other way, so that both times and the drafts that are right stay
# known. Drafts of 4 tokens that bring 2, or cost half a step, make that 1% of the time.
_TRIAL = 64


class DraftPolicy:
    """Decides call by call, from the drafts that were right lately and what a step takes.

    Drafts are verified if the tokens that a row has of a step are more than the times that the step
    takes longer, on average. Both kinds of steps are timed, for each power of two of rows. Until
    both are known, the card decides: a step reads the weights once, and computes as much for each
    of its tokens. Below `free_tokens` the reads take longer, so more tokens cost little; above, the
    time grows with them.

    Attributes:
        num_drafts: of a row.
    """

    def __init__(
        self,
        num_drafts: int,
        free_tokens: float,
        *,
        draft_share: float = 0.0,
        adaptive: bool = True,
    ):
        """Start with the hope that half of the drafts are right; always draft if not `adaptive`.

        `free_tokens` of a step take as long to compute as the weights to read; it may be infinite.
        A step of the draft model, if there is one, takes `draft_share` of a step of the model. It
        makes one in each step, and as many as there are drafts in a step with drafts.
        """
        self.num_drafts, self._adaptive = num_drafts, adaptive
        self._free_tokens, self._draft_share = free_tokens, draft_share
        self._tokens_of_step = 1 + num_drafts / 2
        self._seconds: dict[tuple[int, bool], float] = {}  # by the bits of rows, and with drafts
        self._num_calls = 0

    def num_for(self, num_rows: int) -> int:
        """Return the drafts of each row in the next call: all or none."""
        if not self._adaptive:
            return self.num_drafts
        longer = self._times_longer(num_rows)
        pays = self._tokens_of_step > longer
        self._num_calls += 1
        if self._num_calls % _TRIAL == 0 and 1 + self.num_drafts > longer:
            pays = not pays
        return self.num_drafts if pays else 0

    def observe_drafts(self, num_rows: int, num_accepted: int) -> None:
        """Note how many drafts were right in a call, of rows counted once for each step."""
        if num_rows:
            kept = _MEMORY ** min(num_rows, _MOST_ROWS)
            self._tokens_of_step *= kept
            self._tokens_of_step += (1 - kept) * (1 + num_accepted / num_rows)

    def observe_step(self, num_rows: int, has_drafts: bool, seconds: float) -> None:
        """Note what a step took; a pause such as a compilation is forgotten with the next one."""
        key = num_rows.bit_length(), has_drafts
        self._seconds[key] = min(seconds, _SLOWER * self._seconds.get(key, seconds))

    def _times_longer(self, num_rows: int) -> float:
        """Return how many times longer a step with drafts takes."""
        without, longer = (self._seconds.get((num_rows.bit_length(), x)) for x in (False, True))
        if without and longer:
            return _NOISE * longer / without
        tokens = num_rows, num_rows * (1 + self.num_drafts)
        few, many = (max(1.0, num_tokens / self._free_tokens) for num_tokens in tokens)
        share = self._draft_share
        return (_GUESS * many / few + self.num_drafts * share) / (1 + share)
