"""Sampled tokens to the outputs of requests."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Container

from pallas_paged.engine.outputs import CompletionOutput, FinishReasonName, RequestOutput
from pallas_paged.engine.requests.beam_search import BeamSearch
from pallas_paged.engine.requests.detokenizer import Tokenizer
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.requests.sequence import Sequence, SequenceGroup
from pallas_paged.engine.schedule.calls import Chunk, RunnerOutput, SequenceOutput
from pallas_paged.engine.stats import Counters


class OutputProcessor:
    """Gives the sequences of a replica their tokens, ends them, and reports what is new.

    Attributes:
        queue: requests that have not begun, in the order of service.
        groups: sequences of the requests that are not finished; None of those in the queue.
        load: tokens that these may have in all.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...], counters: Counters
    ):
        """Start without requests.

        Args:
            tokenizer: None if there is no text.
            eos_token_ids: of the model.
            counters: of the replica.
        """
        self.queue: deque[Request] = deque()
        self.groups: dict[Request, SequenceGroup | None] = {}
        self.load = 0
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._counters = counters
        self._started: list[list[Sequence]] = []
        self._ended: list[Sequence] = []
        # What has changed since it was taken: the lengths of tokens and text before.
        self._changed: dict[Request, dict[CompletionOutput, tuple[int, int]]] = {}
        self._restarted: set[Request] = set()

    @property
    def idle(self) -> bool:
        """Whether no request is unfinished and no output is left to take."""
        return not (self.groups or self._changed)

    def add(self, request: Request) -> None:
        """Put a new request into the queue."""
        if self.queue and request.order < self.queue[-1].order:
            insort(self.queue, request, key=lambda one: one.order)
        else:
            self.queue.append(request)
        self.groups[request] = None
        self.load += request.load

    def begin(self) -> None:
        """Begin the first request of the queue."""
        self._started += self._new_group(self.queue.popleft()).start()

    def process(self, output: RunnerOutput, now: float) -> None:
        """Take what a call has computed, read at a time of `time.perf_counter`."""
        for one in output.sequences:
            self._process(one, now)

    def abort(self, request: Request) -> None:
        """End a request as it stands."""
        for sequence in [*self._group(request).live]:
            self._finish(sequence, "abort")

    def restart(self) -> None:
        """Let all that have begun begin again from their prompts; nothing may be in flight."""
        for request, group in self.groups.items():
            if group is not None:
                self._ended += group.live
                request.begin()
                self._started += group.start()
                self._changed[request] = {}
                self._restarted.add(request)

    def fail_all(self, error: BaseException) -> None:
        """End all requests with an error."""
        for request in [*self.groups]:
            group = self._group(request)
            group.fail(error)
            self._finish_request(group)
        self._changed.clear()

    def take_changes(self) -> tuple[list[Sequence], list[list[Sequence]]]:
        """Return what the scheduler has to do since the last time.

        Returns:
            Sequences to remove, and then lists of sequences to add.
        """
        changes = self._ended, self._started
        self._ended, self._started = [], []
        return changes

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

    def drop_outputs(self, requests: Container[Request]) -> list[Request]:
        """Report nothing new of these requests, whose outputs are read as a whole.

        Returns:
            Those that have finished since the last time.
        """
        dropped = [request for request in self._changed if request in requests]
        for request in dropped:
            del self._changed[request]
            self._restarted.discard(request)
        return [request for request in dropped if request.finished]

    def _new_group(self, request: Request) -> SequenceGroup:
        kind = BeamSearch if request.params.beam_width else SequenceGroup
        group = self.groups[request] = kind(request, self._tokenizer, self._eos_token_ids)
        return group

    def _group(self, request: Request) -> SequenceGroup:
        """Return the sequences of a request that is to end; one in the queue leaves it."""
        if (group := self.groups[request]) is None:
            self.queue.remove(request)
            group = self._new_group(request)
            group.start()
        return group

    def _process(self, one: SequenceOutput, now: float) -> None:
        """Give a sequence its next tokens, and log-probabilities to its prompt."""
        sequence, token_ids, logprobs = one.scheduled.sequence, one.token_ids, one.logprobs
        request = sequence.request
        if isinstance(one.scheduled, Chunk) and one.prompt_logprobs is not None:
            assert request.prompt_logprobs is not None
            for index, entry in enumerate(one.prompt_logprobs, one.scheduled.start + 1):
                request.prompt_logprobs[index] = entry
        if one.routed_experts is not None:
            chunk = one.scheduled if isinstance(one.scheduled, Chunk) else None
            start = len(sequence.token_ids) - 1 if chunk is None else chunk.start
            sequence.add_routed_experts(start, one.routed_experts)
        if not token_ids:
            return
        if request.first_token_time is None:
            request.first_token_time = now
            self._counters.prompt_tokens += len(request.prompt_token_ids)
        self._mark_changed(sequence)
        if len(sequence.token_ids) >= sequence.max_len:  # only the prompt was wanted
            self._finish(sequence, "length")
            return
        for index, token_id in enumerate(token_ids):
            reason = sequence.append(token_id, logprobs.token(index) if logprobs else None)
            if not request.params.beam_width:
                self._counters.generated_tokens += token_id >= 0
            if reason is not None:
                self._finish(sequence, reason)
                return

    def _finish(self, sequence: Sequence, reason: FinishReasonName) -> None:
        """End a sequence, and its request with the last of them."""
        group = self._group(sequence.request)
        self._mark_changed(sequence)
        self._started += group.finish(sequence, reason)
        self._ended.append(sequence)
        if not group.live:
            self._finish_request(group)

    def _finish_request(self, group: SequenceGroup) -> None:
        group.finish_request()
        request = group.request
        changed = self._changed.setdefault(request, {})
        if request.params.ranks:
            changed.update((output, (0, 0)) for output in request.outputs)
        if request.params.beam_width:
            self._counters.generated_tokens += sum(len(x.token_ids) for x in request.outputs)
        self._counters.count_request(request)
        self.load -= request.load
        del self.groups[request]

    def _mark_changed(self, sequence: Sequence) -> None:
        """Note how long an output is that is about to change."""
        if not sequence.request.params.ranks:
            output = sequence.output
            before = len(output.token_ids), len(output.text)
            self._changed.setdefault(sequence.request, {}).setdefault(output, before)
