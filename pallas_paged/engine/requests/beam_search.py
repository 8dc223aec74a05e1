"""Beam search: asks for the next token of each beam as a client asks for completions."""

from __future__ import annotations

from pallas_paged.engine.outputs import CompletionOutput, FinishReasonName, LogprobSequence
from pallas_paged.engine.requests.sequence import Sequence, SequenceGroup


class BeamSearch(SequenceGroup):
    """The beams of one request, live and finished.

    A beam goes on by a sequence of one token, as if its tokens were the prompt of a request with
    `max_tokens=1` and `logprobs=2 * beam_width`: the rest of the engine knows of no beams, and the
    prefix cache has their full pages. Of all continuations of all beams the best `beam_width` that
    do not end go on. One that ends is finished if it is among the best `beam_width`. The search is
    over when `beam_width` are finished and no beam can become better than the worst of them, or at
    the maximum length.
    """

    def start(self) -> list[list[Sequence]]:
        self._finished: list[CompletionOutput] = []
        self._reason: FinishReasonName | None = None  # of an end before the search is over
        return self._ask([CompletionOutput(index=0)])

    def finish(self, sequence: Sequence, reason: FinishReasonName) -> list[list[Sequence]]:
        self.live.remove(sequence)
        if reason != "length":  # which it has with its token
            self._reason = reason
        if self.live:
            return []
        if self._reason is not None:
            for beam in self._beams.values():
                self._end(beam, self._reason)
            return []
        beams = self._best_continuations()
        return [] if self._is_over(beams) else self._ask(beams)

    def finish_request(self) -> None:
        super().finish_request()
        for output in self.request.outputs:
            self._detokenize(output)

    def _ask(self, beams: list[CompletionOutput]) -> list[list[Sequence]]:
        """Return a sequence for the next token of each beam."""
        prompt = self.request.prompt_token_ids
        self._beams = {
            Sequence(
                request=self.request,
                output=CompletionOutput(index=index, logprobs=LogprobSequence()),
                token_ids=[*prompt, *beam.token_ids],
                block_hashes=list(self.request.block_hashes),
                max_len=len(prompt) + len(beam.token_ids) + 1,
                mode=self._mode,
            ): beam
            for index, beam in enumerate(beams)
        }
        self.live = [*self._beams]
        return [[one] for one in self._beams]

    def _best_continuations(self) -> list[CompletionOutput]:
        """Return the beams that go on, the best first; finish those that end."""
        continuations = [
            (_score(beam) + logprob, beam, token)
            for sequence, beam in self._beams.items()
            if sequence.output.logprobs is not None
            for token, logprob in sequence.output.logprobs.token(0).top
        ]
        continuations.sort(key=lambda x: x[0], reverse=True)
        width = self.request.params.num_seqs
        beams: list[CompletionOutput] = []
        for rank, (score, beam, token) in enumerate(continuations):
            if len(beams) == width:
                break
            longer = CompletionOutput(
                index=0, token_ids=[*beam.token_ids, token], cumulative_logprob=score
            )
            if token not in self._stop_token_ids:
                beams.append(longer)
            elif rank < width:
                self._end(longer, "stop")
        return beams

    def _is_over(self, beams: list[CompletionOutput]) -> bool:
        params, max_tokens = self.request.params, self._max_tokens
        num_tokens = len(beams[0].token_ids) if beams else max_tokens
        if num_tokens >= max_tokens:
            for beam in beams:
                self._end(beam, "length")
            return True
        if len(self._finished) < params.num_seqs:
            return False
        # Log-probabilities only fall. With a positive penalty length is worth something, so a beam
        # might yet get the most of it.
        length = max_tokens if params.length_penalty > 0 else num_tokens
        best = max(map(_score, beams)) / length**params.length_penalty
        return best <= self._normalized(self._ranked()[params.num_seqs - 1])

    def _end(self, beam: CompletionOutput, reason: FinishReasonName) -> None:
        beam.finish_reason = reason
        self._finished.append(beam)

    def _ranked(self) -> list[CompletionOutput]:
        return sorted(self._finished, key=self._normalized, reverse=True)

    def _normalized(self, output: CompletionOutput) -> float:
        length = max(len(output.token_ids), 1)
        return _score(output) / length**self.request.params.length_penalty

    @property
    def _max_tokens(self) -> int:
        return self.request.max_len - len(self.request.prompt_token_ids)

    def _detokenize(self, output: CompletionOutput) -> None:
        try:
            if (detokenizer := self._detokenizer()) is not None:
                token_ids = output.token_ids
                if output.finish_reason == "stop":
                    token_ids = token_ids[:-1]
                output.text = detokenizer.push(token_ids) + detokenizer.finish()
        except Exception as error:
            output.finish_reason = self.request.fail(error)


def _score(output: CompletionOutput) -> float:
    return output.cumulative_logprob or 0.0
