"""The sequences of one request: how they begin, take tokens and end, and which are returned."""

from __future__ import annotations

import time

from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReasonName,
    LogprobSequence,
    TokenLogprobs,
)
from pallas_paged.engine.requests.beam import Advance, BeamSearch
from pallas_paged.engine.requests.detokenizer import IncrementalDetokenizer
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling.sampler import SamplingMode
from pallas_paged.engine.tokenizer import Tokenizer


class SequenceGroup:
    """The sequences of a request.

    Attributes:
        request: its outputs are filled as they grow or, where they are ranked, at the end.
        live: sequences that have not ended; the first is the leader of the others.
    """

    def __init__(
        self, request: Request, *, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]
    ):
        """Make the sequences that the request starts with.

        Args:
            request: new.
            tokenizer: None if there is no text.
            eos_token_ids: of the model.
        """
        self.request = request
        self.live: list[Sequence] = []
        params = request.params
        self._tokenizer = tokenizer if params.detokenize else None
        self._stop_token_ids = frozenset(
            (*(() if params.ignore_eos else eos_token_ids), *(params.stop_token_ids or ()))
        )
        self.start()

    @property
    def ranks(self) -> bool:
        """Whether the completions are chosen at the end."""
        return self._search is not None or bool(self._drawn)

    def start(self) -> None:
        """Begin from the prompt; sequences from before are void."""
        request, params = self.request, self.request.params
        is_beam = params.beam_width is not None
        mode = SamplingMode.of(params)
        self.live = [
            Sequence(
                request=request,
                output=CompletionOutput(
                    index=index, logprobs=None if params.logprobs is None else LogprobSequence()
                ),
                token_ids=list(request.prompt_token_ids),
                max_len=request.max_len,
                mode=mode,
                stop_token_ids=self._stop_token_ids,
                detokenizer=None if is_beam else self._detokenizer(),
                is_beam=is_beam,
            )
            for index in range(1 if is_beam else params.num_seqs)
        ]
        leader, *followers = self.live
        leader.followers = followers
        for follower in followers:
            follower.leader = leader
        self._search = BeamSearch(request=request, live=[leader]) if is_beam else None
        self._drawn = [*self.live] if params.best_of is not None else []
        request.outputs = [] if self.ranks else [sequence.output for sequence in self.live]

    def advance(self, beam: Sequence, candidates: TokenLogprobs) -> Advance | None:
        """Report the candidates of a beam; once all beams have reported, return how they go on."""
        assert self._search is not None
        advance = self._search.report(beam, candidates)
        if advance is not None:
            for ended in advance.ended:
                self.live.remove(ended)
            self.live += [child for _, child in advance.branches]
        return advance

    def finish(self, sequence: Sequence, reason: FinishReasonName) -> None:
        """End a live sequence."""
        self.live.remove(sequence)
        try:
            if sequence.detokenizer is not None:
                sequence.output.text += sequence.detokenizer.finish()
        except Exception as error:
            reason = self.request.fail(error)
        sequence.output.finish_reason = reason
        if self._search is not None:
            self._search.end(sequence, reason)

    def finish_request(self) -> None:
        """End the request, none of whose sequences is live, and choose what it returns."""
        request = self.request
        if self._search is not None:
            request.outputs = self._search.ranked()
            for output in request.outputs:
                self._detokenize(output)
        elif self._drawn:
            ranked = sorted(self._drawn, key=lambda one: one.mean_logprob, reverse=True)
            request.outputs = [one.output for one in ranked[: request.params.n]]
            for index, output in enumerate(request.outputs):
                output.index = index
        request.finish_time = time.perf_counter()

    def fail(self, error: BaseException) -> None:
        """End all sequences as they stand, with an error."""
        self.request.error = str(error) or type(error).__name__
        for sequence in [*self.live]:
            sequence.detokenizer = None  # text that it holds back is lost
            self.finish(sequence, "error")

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        prompt, params = self.request.prompt_token_ids, self.request.params
        return IncrementalDetokenizer(
            self._tokenizer, prompt, params.stop or (), min_tokens=params.min_tokens
        )

    def _detokenize(self, output: CompletionOutput) -> None:
        try:
            if (detokenizer := self._detokenizer()) is not None:
                token_ids = output.token_ids
                if output.finish_reason == "stop":
                    token_ids = token_ids[:-1]
                output.text = detokenizer.push(token_ids) + detokenizer.finish()
        except Exception as error:
            output.finish_reason = self.request.fail(error)
