"""Sampled tokens to the outputs of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReasonName,
    RequestOutput,
)
from pallas_paged.engine.replica.replica import Replica
from pallas_paged.engine.requests.beam_search import BeamSearch
from pallas_paged.engine.requests.detokenizer import Tokenizer
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.requests.sequence import Sequence, SequenceGroup
from pallas_paged.engine.schedule.calls import RunnerOutput, Sampled


class OutputProcessor:
    """Gives sequences their tokens, ends them, and reports what is new.

    Attributes:
        groups: sequences of the requests that are not finished.
        requests: by id, while a reference to them exists.
    """

    def __init__(
        self,
        choose: Callable[[Sequence], Replica],
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
    ):
        """Start without requests; `choose` returns the replica of a request's first sequence."""
        self.groups: dict[Request, SequenceGroup] = {}
        self.requests: WeakValueDictionary[str, Request] = WeakValueDictionary()
        self._num_requests = 0
        self._choose, self._replicas = choose, dict[Request, Replica]()
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        # What has changed since it was taken: the lengths of tokens and text before.
        self._changed: dict[Request, dict[CompletionOutput, tuple[int, int]]] = {}
        self._restarted: set[Request] = set()

    @property
    def idle(self) -> bool:
        """Whether no request is unfinished and no output is left to take."""
        return not (self.groups or self._changed)

    def add(self, requests: list[Request]) -> None:
        """Accept new requests: number them, and put their sequences into the waiting queue.

        Raises:
            ValueError: the id of a request is in use.
        """
        kinds = [BeamSearch if one.params.beam_width else SequenceGroup for one in requests]
        groups = [
            kind(request, self._tokenizer, self._eos_token_ids)
            for kind, request in zip(kinds, requests, strict=True)
        ]
        for group, (first,) in [(group, group.start()) for group in groups]:
            request, request_id = group.request, group.request.request_id
            other = self.requests.get(request_id)
            if other is not None and not other.finished:
                raise ValueError(f"{request_id=} is that of another request")
            if not request_id:
                request_id = str(self._num_requests)
                while request_id in self.requests:
                    request_id += "-"
            request.number, request.request_id = self._num_requests, request_id
            self.groups[request], self.requests[request_id] = group, request
            self._num_requests += 1
            replica = self._replicas[request] = self._choose(first)
            replica.load += request.load
            replica.scheduler.add(first)

    def find(self, request: Request | str) -> Request:
        """Return a request, given itself or its id.

        Raises:
            ValueError: it is not a request of this engine.
        """
        if isinstance(request, str):
            if (found := self.requests.get(request)) is None:
                raise ValueError(f"{request=} is not the id of a request")
            request = found
        if not isinstance(request, Request):
            raise ValueError(f"{request=} must be a Request or its id")
        if request not in self.groups and not request.finished:
            raise ValueError(f"request {request.request_id!r} is of another engine")
        return request

    def process_outputs(self, output: RunnerOutput, now: float) -> None:
        """Take what a call has computed, read at a time of `time.perf_counter`."""
        for chunk, logprobs in output.prompt_logprobs:
            request = chunk.sequence.request
            assert request.prompt_logprobs is not None
            for index, one in enumerate(logprobs, chunk.start + 1):
                request.prompt_logprobs[index] = one
        for sampled in output.sampled:
            self._process(sampled, now)

    def abort(self, request: Request) -> None:
        """End a request as it stands."""
        for sequence in [*self.groups[request].live]:
            self._finish(sequence, "abort")

    def restart(self) -> None:
        """Begin all unfinished requests again from their prompts; nothing may be in flight."""
        for request, group in [*self.groups.items()]:
            live, changed = [*group.live], self._changed.setdefault(request, {})
            scheduler = self._replicas[request].scheduler
            for sequence in live:
                scheduler.remove(sequence)
            try:
                started = group.start()
            except Exception as error:  # of the tokenizer
                group.fail(error)
                self._finish_request(group)
                continue
            changed.clear()
            self._restarted.add(request)
            for one in started:
                scheduler.add(one)

    def fail_all(self, error: BaseException) -> None:
        """End all requests with an error."""
        groups, self.groups = self.groups, {}
        for group in groups.values():
            group.fail(error)
            group.finish_request()
            self._replicas.pop(group.request).counters.count_request(group.request)

    def take_outputs(self) -> list[RequestOutput]:
        """Return what is new of each request since the last time."""
        changed, self._changed = self._changed, {}
        restarted, self._restarted = self._restarted, set()
        return [
            request.output(
                [output.since(*before) for output, before in outputs.items()],
                restarted=request in restarted,
            )
            for request, outputs in changed.items()
        ]

    def drop_outputs(self, requests: Iterable[Request]) -> None:
        """Report nothing of these requests, whose outputs are read as a whole."""
        for request in requests:
            self._changed.pop(request, None)
            self._restarted.discard(request)

    def _process(self, sampled: Sampled, now: float) -> None:
        """Give a sequence its next tokens."""
        sequence, token_ids, logprobs = sampled.sequence, sampled.token_ids, sampled.logprobs
        request = sequence.request
        if not token_ids:
            return
        request.first_token_time = request.first_token_time or now
        self._mark_changed(self.groups[request], sequence)
        if len(sequence.token_ids) >= sequence.max_len:  # only the prompt was wanted
            self._finish(sequence, "length")
            return
        counters = self._replicas[request].counters
        for index, token_id in enumerate(token_ids):
            reason = sequence.append(token_id, logprobs.token(index) if logprobs else None)
            if not request.params.beam_width:
                counters.generated_tokens += token_id >= 0
            if reason is not None:
                self._finish(sequence, reason)
                return

    def _finish(self, sequence: Sequence, reason: FinishReasonName) -> None:
        """End a sequence, and its request with the last of them."""
        group, scheduler = self.groups[sequence.request], self._replicas[sequence.request].scheduler
        self._mark_changed(group, sequence)
        started = group.finish(sequence, reason)
        scheduler.remove(sequence)
        for one in started:
            scheduler.add(one)
        if not group.live:
            self._finish_request(group)

    def _finish_request(self, group: SequenceGroup) -> None:
        group.finish_request()
        request = group.request
        changed = self._changed.setdefault(request, {})
        if group.ranks:
            changed.update((output, (0, 0)) for output in request.outputs)
        replica = self._replicas.pop(request)
        replica.load -= request.load
        if request.params.beam_width:
            replica.counters.generated_tokens += sum(len(x.token_ids) for x in request.outputs)
        replica.counters.count_request(request)
        del self.groups[request]

    def _mark_changed(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Note how long an output is that is about to change."""
        if not group.ranks:
            output = sequence.output
            before = len(output.token_ids), len(output.text)
            self._changed.setdefault(group.request, {}).setdefault(output, before)
