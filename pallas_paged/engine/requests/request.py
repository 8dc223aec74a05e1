"""A request as its user sees it, and the stream of its outputs to a client in another thread."""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReasonName,
    Logprob,
    LogprobSequence,
    RequestOutput,
)
from pallas_paged.engine.requests.grammar import Grammar
from pallas_paged.engine.sampling_params import PoolingParams, SamplingParams
from pallas_paged.pages.prefix_cache import Block

Event = threading.Event | asyncio.Event
Waiter = tuple[asyncio.AbstractEventLoop | None, Event]


def enqueue(queue: deque[Any], one: Any) -> None:
    """Put a request or a sequence into a queue in the order of service; most come last."""
    if queue and one.order < queue[-1].order:
        insort(queue, one, key=lambda x: x.order)
    else:
        queue.append(one)


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
        given_experts: `i16[P, L, k]`, experts that the tokens of the prompt must use, -1 for those
            of the router; None if there are none. Their K and V are not those of the prefix cache.
        grammar: that its completions must match, or None.
        pooling: how the prompt becomes a vector, or None.
        number: how many requests the engine accepted before.
        prompt_logprobs: for each token of the prompt, None where it was not computed (the first);
            None if they were not asked for.
        routed_experts: `i16[P, L, k]`, of the tokens of the prompt, -1 where not computed; None
            before any is, or if they were not asked for.
        pooled: `f32[E]`, sum of the hidden states that `pooling` takes, so far; None before any.
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
    given_experts: np.ndarray | None = None
    grammar: Grammar | None = None
    pooling: PoolingParams | None = None
    number: int = -1
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    routed_experts: np.ndarray | None = None
    pooled: np.ndarray | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = field(default_factory=time.perf_counter)
    start_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    @cached_property
    def outputs(self) -> list[CompletionOutput]:
        """The completions; those of `best_of` and beams once they are ranked, at the end."""
        # Made when they are first read: 100,000 requests that wait are few objects each.
        return [] if self.params.ranks else self.new_completions()

    @cached_property
    def block_hashes(self) -> list[Block]:
        """Of full pages of the prompt, where the router has needed them."""
        return []

    def begin(self) -> None:
        """Begin, or begin again, from the prompt."""
        self.start_time = self.first_token_time = self.routed_experts = self.pooled = None
        self.error = None  # of a completion that begins again
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt_token_ids)
        self.outputs = [] if self.params.ranks else self.new_completions()

    def new_completions(self) -> list[CompletionOutput]:
        """Return empty completions, one for each sequence."""
        asks = self.params.logprobs is not None
        return [
            CompletionOutput(index=index, logprobs=LogprobSequence() if asks else None)
            for index in range(self.params.num_seqs)
        ]

    @property
    def order(self) -> tuple[int, int]:
        """By priority, then by arrival; the smallest is served first."""
        return self.priority, self.number

    @property
    def finished(self) -> bool:
        return self.finish_time is not None

    @property
    def load(self) -> int:
        """Tokens that its sequences may have in all."""
        return self.max_len * self.params.num_seqs

    def add_pooled(self, start: int, pooled: np.ndarray) -> None:
        """Take the sum `f32[E]` of a chunk that begins at this index; 0 begins anew."""
        self.pooled = pooled if self.pooled is None or start == 0 else self.pooled + pooled

    @property
    def embedding(self) -> np.ndarray | None:
        """What the prompt became, `f32[E]`; None without `pooling`, or before its last token."""
        if self.pooling is None or self.pooled is None or not self.finished:
            return None
        if self.outputs[0].finish_reason != "length":
            return None
        mean = self.pooled / (len(self.prompt_token_ids) if self.pooling.pooling == "mean" else 1)
        return normalized(mean) if self.pooling.normalize else mean

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
            embedding=self.embedding,
        )


def normalized(vector: np.ndarray) -> np.ndarray:
    """Return a vector with the length 1, but one of zeros as it is."""
    return vector / max(float(np.linalg.norm(vector)), np.finfo(np.float32).tiny)


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


class OutputCollector:
    """Takes outputs from the engine's thread, and merges those that a consumer has not taken yet.

    Attributes:
        request: the request.
        closed: whether nothing more will come.
        drained: whether the consumer has taken the last output.
        takes_complete: whether the consumer wants one output, with all of the request.
    """

    def __init__(self, request: Request):
        self.request = request
        self.closed = self.drained = self.takes_complete = False
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._has_taken = False
        self._waiters: list[Waiter] = []

    def put(self, output: RequestOutput | None, error: BaseException | None = None) -> list[Waiter]:
        """Add an output, or an error to raise after the outputs; return the waiters to wake."""
        with self._lock:
            if self.takes_complete and output is not None:
                if not output.finished:
                    return []
                self._output = self.request.output()
            elif output is not None:
                output = self._output.add(output) if self._output is not None else output
                if output.restarted and not self._has_taken:  # nothing is void
                    output = replace(output, restarted=False)
                self._output = output
            self._error, self.closed = error, output is None or output.finished
            waiters, self._waiters = self._waiters, []
        return waiters

    def take(self, waiter: Waiter) -> RequestOutput | None:
        """Return what is new, or None: the event of the waiter will be set, in its loop."""
        with self._lock:
            output = None if self.takes_complete and not self.closed else self._output
            if output is not None:
                self._output = None
                self._has_taken, self.drained = True, output.finished
            elif self._error is not None:
                raise self._error
            elif self.closed:  # another consumer has taken the last output
                waiter[1].set()
            else:
                self._waiters.append(waiter)
        return output


class RequestStream:
    """The outputs of one request, each what is new since the last one.

    Leaving a loop over it before the end aborts the request, and so does dropping the stream. The
    engine does not wait for a slow consumer, whose next output then has more.

    Attributes:
        request: the request, whose fields change as the engine steps.
        request_id: as submitted, or the number that was taken.
    """

    def __init__(self, collector: OutputCollector, abort: Callable[[], object]):
        self.request, self.request_id = collector.request, collector.request.request_id
        self._collector, self._abort = collector, abort

    def close(self) -> None:
        """Abort the request if it is not finished; do not wait for it."""
        if not self._collector.closed:
            self._abort()

    def __del__(self) -> None:
        self.close()

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield the outputs; wait for them, so not in an event loop.

        Raises:
            EngineDeadError: the engine died before the request was finished.
        """
        try:
            while not self._collector.drained:
                event = threading.Event()
                if (output := self._collector.take((None, event))) is None:
                    event.wait()
                else:
                    yield output
        finally:
            self.close()

    async def complete(self) -> RequestOutput:
        """Wait for the end and return the complete output, in any event loop; wakes up only once.

        Errors are as in `__iter__`.
        """
        self._collector.takes_complete = True
        async for _ in self:
            pass
        return self.request.output()  # of all, also of what others have read

    async def __aiter__(self) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs, in any event loop; errors as in `__iter__`."""
        loop = asyncio.get_running_loop()
        try:
            while not self._collector.drained:
                event = asyncio.Event()
                if (output := self._collector.take((loop, event))) is None:
                    await event.wait()
                else:
                    yield output
        finally:
            self.close()
