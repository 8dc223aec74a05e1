"""Sampled tokens to the outputs of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReasonName,
    LogprobSequence,
    RequestOutput,
    TokenLogprobs,
)
from pallas_paged.engine.replica.replica import Replica
from pallas_paged.engine.requests.beam import Advance, BeamSearch
from pallas_paged.engine.requests.detokenizer import IncrementalDetokenizer, Tokenizer
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.engine.schedule.calls import RunnerOutput, Sampled


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

    def add(self, requests: Iterable[Request]) -> None:
        """Accept new requests: number them, and put their sequences into the waiting queue.

        Raises:
            ValueError: the id of a request is in use.
        """
        groups = [
            SequenceGroup(request, tokenizer=self._tokenizer, eos_token_ids=self._eos_token_ids)
            for request in requests
        ]
        for group in groups:
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
            replica = self._replicas[request] = self._choose(group.live[0])
            replica.load += request.load
            replica.scheduler.add(group.live[0])

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
                group.start()
            except Exception as error:  # of the tokenizer
                group.fail(error)
                self._finish_request(group)
                continue
            changed.clear()
            request.first_token_time = None
            self._restarted.add(request)
            scheduler.add(group.live[0])

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
        """Give a sequence its next tokens, or a beam its candidates."""
        sequence, token_ids, logprobs = sampled.sequence, sampled.token_ids, sampled.logprobs
        request = sequence.request
        if not token_ids:
            return
        request.first_token_time = request.first_token_time or now
        group = self.groups[request]
        if sequence.is_beam:
            assert logprobs is not None
            self._advance(group, token_ids[0], sequence, logprobs.token(0))
            return
        self._mark_changed(group, sequence)
        if len(sequence.token_ids) >= sequence.max_len:  # only the prompt was wanted
            self._finish(sequence, "length")
            return
        counters = self._replicas[request].counters
        for index, token_id in enumerate(token_ids):
            reason = sequence.append(token_id, logprobs.token(index) if logprobs else None)
            counters.generated_tokens += token_id >= 0
            if reason is not None:
                self._finish(sequence, reason)
                return

    def _advance(
        self, group: SequenceGroup, token_id: int, beam: Sequence, logprobs: TokenLogprobs
    ) -> None:
        if token_id < 0:
            group.request.error = "the model returned NaN or infinite logits"
            for live in [*group.live]:
                self._finish(live, "error")
            return
        advance = group.advance(beam, logprobs)
        if advance is None:
            return
        scheduler = self._replicas[group.request].scheduler
        for ended in advance.ended:
            scheduler.remove(ended)
        for parent, child in advance.branches:
            scheduler.branch(parent, child)
        for chosen, token in advance.chosen:
            chosen.token_ids.append(token)
            scheduler.resume(chosen)
        if not group.live:
            self._finish_request(group)

    def _finish(self, sequence: Sequence, reason: FinishReasonName) -> None:
        """End a sequence, and its request with the last of them."""
        group = self.groups[sequence.request]
        self._mark_changed(group, sequence)
        group.finish(sequence, reason)
        self._replicas[sequence.request].scheduler.remove(sequence)
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
