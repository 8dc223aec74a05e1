"""Beam search over the reports of a request's sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pallas_paged.engine.outputs import CompletionOutput, FinishReasonName, TokenLogprobs
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Advance:
    """How beams go on: each takes a token or ends; some are branched.

    Attributes:
        chosen: sequences and their next tokens.
        branches: parents, and new sequences with all of their tokens but the last.
        ended: sequences that have no continuation.
    """

    chosen: list[tuple[Sequence, int]]
    branches: list[tuple[Sequence, Sequence]]
    ended: list[Sequence]


@dataclass(kw_only=True)
class BeamSearch:
    """The beams of one request, live and finished.

    Of all continuations of all beams the best `beam_width` that do not end go on. One that ends is
    finished if it is among the best `beam_width`. The search is over when `beam_width` are finished
    and no beam can become better than the worst of them, or at the maximum length.

    Attributes:
        request: the request that is searched.
        live: sequences that go on.
        finished: completions, in any order.
    """

    request: Request
    live: list[Sequence]
    finished: list[CompletionOutput] = field(default_factory=list)
    _reports: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    _num_beams: int = 1

    def report(self, beam: Sequence, candidates: TokenLogprobs) -> Advance | None:
        """Take the candidates of a beam; once all beams have reported, return how they go on."""
        beam.awaiting_choice = True
        self._reports[beam] = candidates
        if len(self._reports) < len(self.live):
            return None
        continuations = sorted(
            (
                (_score(beam.output) + logprob, -rank, beam, token)
                for rank, beam in enumerate(self.live)
                for token, logprob in self._reports[beam].top
            ),
            key=lambda x: x[:2],
            reverse=True,
        )
        self._reports.clear()
        width = self._params.beam_width or 1
        chosen: list[tuple[float, Sequence, int]] = []
        for rank, (score, _, beam, token) in enumerate(continuations):
            if len(chosen) == width:
                break
            if token in beam.stop_token_ids:
                if rank < width:
                    self._finish(beam, score, "stop", [token])
            else:
                chosen.append((score, beam, token))
        return self._advance(chosen)

    def end(self, beam: Sequence, reason: FinishReasonName) -> None:
        """End a beam as it stands."""
        self._finish(beam, _score(beam.output), reason)

    def ranked(self) -> list[CompletionOutput]:
        """Return the best `n` completions, best first."""
        best = sorted(self.finished, key=self._normalized, reverse=True)[: self._params.n]
        for index, output in enumerate(best):
            output.index = index
        return best

    @property
    def _params(self) -> SamplingParams:
        return self.request.params

    @property
    def _max_tokens(self) -> int:
        return self.request.max_len - len(self.request.prompt_token_ids)

    def _advance(self, continuations: list[tuple[float, Sequence, int]]) -> Advance:
        beams = self.live
        chosen: list[tuple[Sequence, int]] = []
        branches: list[tuple[Sequence, Sequence]] = []
        self.live = []
        # Branches are made before the scores and tokens of their parents change.
        parents: dict[Sequence, tuple[float, int]] = {}
        for score, beam, token in continuations:
            if beam not in parents:
                parents[beam] = (score, token)
            else:
                child = self._branch(beam, score, token)
                branches.append((beam, child))
                self.live.append(child)
        for beam, (score, token) in parents.items():
            beam.output.cumulative_logprob = score
            beam.output.token_ids.append(token)
            chosen.append((beam, token))
            self.live.append(beam)
        if self._is_over():
            return Advance(chosen=[], branches=[], ended=beams)
        ended = [beam for beam in beams if beam not in parents]
        return Advance(chosen=chosen, branches=branches, ended=ended)

    def _is_over(self) -> bool:
        width = self._params.beam_width or 1
        num_tokens = len(self.live[0].output.token_ids) if self.live else 0
        if not self.live or num_tokens >= self._max_tokens:
            for beam in self.live:
                self.end(beam, "length")
            return True
        if len(self.finished) < width:
            return False
        # Log-probabilities only fall. With a positive penalty length is worth something, so a beam
        # might yet get the most of it.
        penalty = self._params.length_penalty
        length = self._max_tokens if penalty > 0 else num_tokens
        best = max(_score(beam.output) for beam in self.live) / length**penalty
        worst = sorted(map(self._normalized, self.finished), reverse=True)[width - 1]
        return best <= worst

    def _finish(
        self, beam: Sequence, score: float, reason: FinishReasonName, token_ids: Iterable[int] = ()
    ) -> None:
        self.finished.append(
            CompletionOutput(
                index=len(self.finished),
                token_ids=[*beam.output.token_ids, *token_ids],
                cumulative_logprob=score,
                finish_reason=reason,
            )
        )

    def _normalized(self, output: CompletionOutput) -> float:
        return _score(output) / max(len(output.token_ids), 1) ** self._params.length_penalty

    def _branch(self, beam: Sequence, score: float, token: int) -> Sequence:
        output = CompletionOutput(
            index=self._num_beams,
            token_ids=[*beam.output.token_ids, token],
            cumulative_logprob=score,
        )
        self._num_beams += 1
        return Sequence(
            request=self.request,
            output=output,
            token_ids=[*beam.token_ids, token],
            max_len=beam.max_len,
            mode=beam.mode,
            stop_token_ids=beam.stop_token_ids,
            is_beam=True,
        )


def _score(output: CompletionOutput) -> float:
    return output.cumulative_logprob or 0.0
