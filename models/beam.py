"""Beam search over the reports of a request's sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from models.request import Completion, Request, SamplingParams
from models.seq import Seq

Ranked = list[tuple[int, float]]  # tokens with their log-probabilities, best first


@dataclass(frozen=True, kw_only=True)
class Advance:
    """What becomes of the beams: each goes on with a token, or ends; some are doubled.

    Attributes:
        goes_on: sequences and their next tokens.
        branches: parents, and the sequences that have all tokens but the last in common with them.
        ended: sequences that nothing goes on from.
    """

    goes_on: list[tuple[Seq, int]]
    branches: list[tuple[Seq, Seq]]
    ended: list[Seq]


@dataclass(kw_only=True)
class BeamSearch:
    """The beams of one request, and what has ended.

    Of all continuations of all beams the best `beam_width` that do not end go on. One that ends is
    finished if it is among the best `beam_width`. The search is over when so many are finished and
    no beam can still become better than the worst of them, or at the longest length.

    Attributes:
        request: whose beams these are.
        live: sequences that go on.
        finished: completions, any order.
    """

    request: Request
    live: list[Seq]
    finished: list[Completion] = field(default_factory=list)
    _reports: dict[Seq, Ranked] = field(default_factory=dict)
    _num_named: int = 1

    def report(self, sequence: Seq, ranked: Ranked) -> Advance | None:
        """Takes what the device tells of a beam; once all have told, says how they go on."""
        sequence.parked = True
        self._reports[sequence] = ranked
        if len(self._reports) < len(self.live):
            return None
        continuations = sorted(
            (
                (beam.completion.cumulative_logprob + logprob, -rank, beam, token)
                for rank, beam in enumerate(self.live)
                for token, logprob in self._reports[beam]
            ),
            key=lambda x: x[:2],
            reverse=True,
        )
        self._reports.clear()
        width = self._params.beam_width or 1
        chosen: list[tuple[float, Seq, int]] = []
        for rank, (score, _, beam, token) in enumerate(continuations):
            if len(chosen) == width:
                break
            if token in beam.stop_tokens:
                if rank < width:
                    self._finish(beam, score, "stopped")
            else:
                chosen.append((score, beam, token))
        return self._advance(chosen)

    def _advance(self, chosen: list[tuple[float, Seq, int]]) -> Advance:
        beams = self.live
        goes_on: list[tuple[Seq, int]] = []
        branches: list[tuple[Seq, Seq]] = []
        self.live = []
        # Branches are made before the parents' own scores and tokens change.
        parents: dict[Seq, tuple[float, int]] = {}
        for score, beam, token in chosen:
            if beam not in parents:
                parents[beam] = (score, token)
            else:
                child = self._branch(beam, score, token)
                branches.append((beam, child))
                self.live.append(child)
        for beam, (score, token) in parents.items():
            beam.completion.cumulative_logprob = score
            beam.completion.tokens.append(token)
            goes_on.append((beam, token))
            self.live.append(beam)
        if self._is_over():
            return Advance(goes_on=[], branches=[], ended=beams)
        ended = [beam for beam in beams if beam not in parents]
        return Advance(goes_on=goes_on, branches=branches, ended=ended)

    def end(self, beam: Seq, reason: str) -> None:
        """Ends a beam as it stands."""
        self._finish(beam, beam.completion.cumulative_logprob, reason)

    def ranked(self) -> list[Completion]:
        """The best `n` completions, best first."""
        best = sorted(self.finished, key=self._score, reverse=True)[: self._params.n]
        for index, completion in enumerate(best):
            completion.index = index
        return best

    @property
    def _params(self) -> SamplingParams:
        return self.request.params

    def _is_over(self) -> bool:
        width = self._params.beam_width or 1
        num_tokens = len(self.live[0].completion.tokens) if self.live else 0
        if not self.live or num_tokens >= self._params.max_tokens:
            for beam in self.live:
                self.end(beam, "max_tokens")
            return True
        if len(self.finished) < width:
            return False
        # Log-probabilities only fall. With a positive penalty length is worth something, so a beam
        # might yet get the most of it.
        penalty = self._params.length_penalty
        length = self._params.max_tokens if penalty > 0 else num_tokens
        best = max(beam.completion.cumulative_logprob for beam in self.live) / length**penalty
        worst = sorted(map(self._score, self.finished), reverse=True)[width - 1]
        return best <= worst

    def _finish(self, beam: Seq, score: float, reason: str) -> None:
        self.finished.append(
            Completion(
                index=len(self.finished),
                tokens=list(beam.completion.tokens),
                cumulative_logprob=score,
                finish_reason=reason,
            )
        )

    def _score(self, completion: Completion) -> float:
        length = max(len(completion.tokens) + (completion.finish_reason == "stopped"), 1)
        return completion.cumulative_logprob / length**self._params.length_penalty

    def _branch(self, beam: Seq, score: float, token: int) -> Seq:
        completion = Completion(
            index=self._num_named,
            tokens=[*beam.completion.tokens, token],
            cumulative_logprob=score,
        )
        self._num_named += 1
        return Seq(
            request=self.request,
            completion=completion,
            tokens=[*beam.tokens, token],
            limit=beam.limit,
            stop_tokens=beam.stop_tokens,
            steered=True,
        )
