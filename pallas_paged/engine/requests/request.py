"""A prompt that the engine serves, as its user sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReasonName,
    Logprob,
    RequestOutput,
)
from pallas_paged.engine.sampling_params import SamplingParams


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt that the engine serves; its outputs grow as the engine steps.

    Attributes:
        request_id: as submitted, or the number of the request.
        prompt: text of the prompt, if it was submitted as text.
        prompt_token_ids: token ids of the prompt.
        params: as submitted.
        seed: that of `params`, or the one that was drawn.
        priority: smaller values are served first.
        max_len: tokens at which a sequence ends, prompt included.
        score_start: of a scored prompt, the index of the first token whose log-probability is
            wanted; None if none is.
        number: how many requests the engine accepted before.
        outputs: completions; those of `best_of` and beams once they are ranked, at the end.
        prompt_logprobs: for each token of the prompt, None where it was not computed (the first);
            None if they were not asked for.
        error: what went wrong, where a finish reason is "error".
        num_cached_tokens: prompt tokens that the prefix cache had when the request first started.
        num_preemptions: times that a sequence of it lost its pages.
        arrival_time, start_time, first_token_time, finish_time: when it was submitted, first got a
            slot, had its first token, and ended; of `time.perf_counter`, in seconds, or None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    priority: int
    max_len: int
    score_start: int | None = None
    number: int = -1
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = field(default_factory=time.perf_counter)
    start_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_time is not None

    @property
    def load(self) -> int:
        """Tokens that its sequences may have in all."""
        return self.max_len * self.params.num_seqs

    def fail(self, error: Exception) -> Literal["error"]:
        """Note an error, of the tokenizer for example, and return its finish reason."""
        self.error = f"{type(error).__name__}: {error}"
        return "error"

    def output(
        self, outputs: Sequence[CompletionOutput] | None = None, *, restarted: bool = False
    ) -> RequestOutput:
        """Return the state of the request.

        Args:
            outputs: what to report of the completions; None reports all of them so far.
            restarted: whether earlier outputs are void.
        """
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=list(self.outputs if outputs is None else outputs),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            seed=self.seed,
            error=self.error,
            restarted=restarted,
        )


class UnreadOutputs:
    """What one reader has not seen of a request's outputs."""

    def __init__(self, request: Request):
        self._request = request
        self._seen: dict[CompletionOutput, tuple[int, int, FinishReasonName | None]] = {}

    def take(self) -> RequestOutput | None:
        """Return what is new since the last time; None if nothing is, and it has not finished."""
        request, seen = self._request, self._seen
        now = {x: (len(x.token_ids), len(x.text), x.finish_reason) for x in request.outputs}
        before = {output: seen.get(output, (0, 0, None)) for output in now}
        new = [x.since(*before[x][:2]) for x in now if now[x] != before[x]]
        if not (new or request.finished):
            return None
        self._seen = now
        return request.output(new, restarted=not seen.keys() <= now.keys())
