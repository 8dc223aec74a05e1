"""Sampled tokens to the outputs of requests; beam search, which asks for them as a client does."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReasonName,
    LogprobSequence,
    RequestOutput,
)
from pallas_paged.engine.requests.detokenizer import Tokenizer
from pallas_paged.engine.requests.request import Request, enqueue
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
        """Start without requests; without a tokenizer there is no text."""
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
        enqueue(self.queue, request)
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
        """Return sequences that the scheduler must remove, and then lists of those to add."""
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
        """Report nothing new of these requests; return those that have finished meanwhile."""
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
        start = len(sequence.token_ids) - 1  # of what it has computed
        if isinstance(one.scheduled, Chunk):
            start = one.scheduled.start
            if one.prompt_logprobs is not None:
                assert request.prompt_logprobs is not None
                for index, entry in enumerate(one.prompt_logprobs, start + 1):
                    request.prompt_logprobs[index] = entry
            if one.pooled is not None:
                request.add_pooled(start, one.pooled)
        if one.routed_experts is not None:
            sequence.add_routed_experts(start, one.routed_experts)
        if not token_ids:
            return
        if request.first_token_time is None:
            request.first_token_time = now
            self._counters.prompt_tokens += len(request.prompt_token_ids)
        self._mark_changed(sequence)
        if len(sequence.token_ids) >= sequence.max_len:  # only the prompt was wanted
            self._finish(sequence, sequence.end_of_prompt())
            return
        for index, token_id in enumerate(token_ids):
            num_before = len(sequence.output.token_ids)
            reason = sequence.append(token_id, logprobs.token(index) if logprobs else None)
            reason = reason or sequence.append_forced()
            if not request.params.beam_width:
                self._counters.generated_tokens += len(sequence.output.token_ids) - num_before
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
