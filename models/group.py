"""The sequences of one request: how they begin, take tokens and end, and which are returned."""

from __future__ import annotations

import time
from collections.abc import Sequence

from models.beam import Advance, BeamSearch, Ranked
from models.request import Completion, Logprobs, Request
from models.seq import Seq
from models.text_stream import TextStream
from models.tokenizer import Tokenizer


class Group:
    """What is going on for a request.

    Attributes:
        request: whose completions this fills, as they grow or, where they are ranked, at the end.
        first: the sequence that the others are forked from.
        live: sequences that have not ended.
    """

    def __init__(self, request: Request, *, tokenizer: Tokenizer | None, eos_tokens: Sequence[int]):
        """Makes the sequences that the request begins with.

        Args:
            request: new.
            tokenizer: None tells no texts.
            eos_tokens: what ends a sequence if the request does not say.
        """
        params = request.params
        self.request = request
        self._tokenizer = tokenizer
        stop_tokens = frozenset(eos_tokens if params.stop_tokens is None else params.stop_tokens)
        self.live = [
            Seq(
                request=request,
                completion=Completion(
                    index=index, logprobs=None if params.logprobs is None else []
                ),
                tokens=list(request.prompt),
                limit=len(request.prompt) + params.max_tokens,
                stop_tokens=stop_tokens,
                stream=None if params.beam_width else self._stream(),
                steered=params.beam_width is not None,
            )
            for index in range(1 if params.beam_width else params.num_rows)
        ]
        self.first, *others = self.live
        for other in others:
            other.leader = self.first
            self.first.followers.append(other)
        self._search: BeamSearch | None = None
        if params.beam_width:
            self.first.num_spare_rows = params.beam_width - 1
            self._search = BeamSearch(request=request, live=[self.first])
        self._drawn = [*self.live] if params.best_of else []
        if not self.ranks:
            request.completions = [seq.completion for seq in self.live]

    @property
    def ranks(self) -> bool:
        """Whether the completions are chosen at the end."""
        return self._search is not None or bool(self._drawn)

    def accept(self, seq: Seq, token: int, ranked: Ranked | None) -> str | None:
        """Gives a sequence its next token; returns why that ends it, if it does.

        Args:
            seq: not steered.
            token: -1 if the model gave no numbers.
            ranked: the token and the best ones with their log-probabilities, if the step told any.
        """
        logprobs = None
        if ranked is not None and self.request.params.wants_logprobs:
            (_, logprob), *top = ranked
            logprobs = Logprobs(token=logprob, top=dict(top[: self.request.params.logprobs or 0]))
        try:
            return seq.accept(token, logprobs)
        except Exception as error:  # of the tokenizer: one text must not end everybody's
            return self._fail(error)

    def steer(self, seq: Seq, ranked: Ranked) -> Advance | None:
        """Tells the search what a beam could go on with; once all beams have, how they do."""
        assert self._search is not None
        advance = self._search.report(seq, ranked)
        if advance is not None:
            for beam in advance.ended:
                self.live.remove(beam)
            self.live += [child for _, child in advance.branches]
        return advance

    def finish(self, seq: Seq, reason: str) -> None:
        """Ends a live sequence."""
        self.live.remove(seq)
        try:
            seq.finish(reason)
        except Exception as error:
            reason = seq.completion.finish_reason = self._fail(error)
        if self._search is not None:
            self._search.end(seq, reason)

    def conclude(self) -> None:
        """Finishes the request, none of whose sequences is live."""
        params = self.request.params
        if self._search is not None:
            self.request.completions = self._search.ranked()
            for completion in self.request.completions:
                self._tell(completion)
        elif self._drawn:
            ranked = sorted(self._drawn, key=lambda seq: seq.mean_logprob, reverse=True)
            self.request.completions = [seq.completion for seq in ranked[: params.n]]
            for index, completion in enumerate(self.request.completions):
                completion.index = index
        self.request.finish_time = time.perf_counter()

    def abandon(self, error: BaseException) -> None:
        """Ends all of it, as it stands, because the engine is dead."""
        self.request.error = str(error) or type(error).__name__
        for seq in [*self.live]:
            seq.stream = None  # what it holds back stays there
            self.finish(seq, "failed")
        self.conclude()

    def _tell(self, completion: Completion) -> None:
        try:
            if (stream := self._stream()) is not None:
                completion.text = stream.push(completion.tokens) + stream.finish()
        except Exception as error:
            completion.finish_reason = self._fail(error)

    def _stream(self) -> TextStream | None:
        if self._tokenizer is None:
            return None
        return TextStream(self._tokenizer, self.request.prompt, self.request.params.stop or ())

    def _fail(self, error: Exception) -> str:
        self.request.error = f"{type(error).__name__}: {error}"
        return "failed"
