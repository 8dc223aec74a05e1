"""The engine: many requests at once over one paged pool, by continuous batching.

The scheduler decides what each call computes, the runner packs that into a batch, and one jitted
call runs it: a step of decoding sequences and chunks of prompts, or up to `num_scheduler_steps`
decode steps in a loop on the device. The next call is dispatched before the tokens of the last are
read. Continuous batching is from Orca (Yu et al., OSDI 2022), chunked prefill beside decoding from
Sarathi-Serve (Agrawal et al., OSDI 2024), preemption by recomputing from vLLM (Kwon et al., SOSP
2023).
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_paged.checks import check_integer
from pallas_paged.engine.beam import Candidates
from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.interrupt import interrupts_held
from pallas_paged.engine.kv_cache import pages_that_fit, pool_dtype
from pallas_paged.engine.model import Model
from pallas_paged.engine.outputs import CompletionOutput, RequestOutput
from pallas_paged.engine.request import Request
from pallas_paged.engine.runner import ModelRunner, modes_for
from pallas_paged.engine.runner_output import InFlight, Sampled
from pallas_paged.engine.sampling_params import SamplingParams
from pallas_paged.engine.scheduler import Scheduler
from pallas_paged.engine.scheduler_output import Chunk, SchedulerOutput
from pallas_paged.engine.sequence import Sequence as EngineSequence
from pallas_paged.engine.sequence_group import SequenceGroup
from pallas_paged.engine.stats import Counters, EngineStats
from pallas_paged.engine.tokenizer import Tokenizer
from pallas_paged.page_check import check_page_table
from pallas_paged.page_table import PageTable
from pallas_paged.prefix_cache import PrefixCache

_CALL_SECONDS = 0.01  # of a call of several steps: how long a new request may have to wait for it


class EngineDeadError(RuntimeError):
    """A step failed and took the engine's state with it; the cause is what failed."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call in flight, with the host's counts after its schedule."""

    in_flight: InFlight
    ledger: int
    num_cached: int
    num_empty: int


class Engine:
    """Serves requests: `submit` them and `step` until they are finished, or `generate`.

    For one thread; `AsyncEngine` is for several. A request's tokens do not depend on what else
    runs, up to the rounding of other batch sizes, which in bf16 and f16 can decide between
    near-equal tokens. Ctrl-C in a step takes effect at its end and leaves the engine usable.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        """Allocate the pool.

        Args:
            model: the model.
            params: its weights, a pytree of arrays; `update_params` replaces them.
            config: sizes; None takes the defaults.
            tokenizer: for prompts, outputs and stop strings as texts; None works with token ids.

        Raises:
            ValueError: a size is out of range for this model.
        """
        self.config = config = config or EngineConfig()
        self._model, self._tokenizer = model, tokenizer
        spec, page_size = model.kv_cache_spec, config.page_size
        max_len = config.max_model_len or model.max_model_len
        if max_len > model.max_model_len:
            raise ValueError(
                f"max_model_len={max_len} must be at most the model's {model.max_model_len}"
            )
        num_pages = config.num_pages
        if num_pages is None:
            dtype = pool_dtype(spec, config.kv_cache_dtype)
            fraction = config.memory_fraction
            num_pages = min(
                pages_that_fit(spec, page_size=page_size, dtype=dtype, memory_fraction=fraction),
                config.max_num_seqs * -(-max_len // page_size),
            )
        if config.max_model_len is None and spec.sliding_window is None:
            max_len = min(max_len, num_pages * page_size)
        self.max_model_len, self.num_pages = max_len, num_pages
        self._runner = ModelRunner(model, params, config, num_pages=num_pages, max_len=max_len)
        caching = config.enable_prefix_caching
        self._cache = PrefixCache(page_size=page_size) if caching else None
        self._scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            watermark=int(config.watermark * num_pages),
            cache=self._cache,
            sliding_window=spec.sliding_window,
        )
        self._counters = Counters(num_free_pages=num_pages)
        self._calls: deque[_Call] = deque()
        self._num_requests = 0
        self._groups: dict[Request, SequenceGroup] = {}  # of requests that are not finished
        # What has changed since the last step: the lengths of tokens and text before.
        self._changed: dict[Request, dict[CompletionOutput, tuple[int, int]]] = {}
        self._restarted: set[Request] = set()
        self._last_read: tuple[float, float] | None = None  # time, seconds of a decode step
        self._asleep = False
        self._error: BaseException | None = None

    @property
    def table(self) -> PageTable:
        """The page table after all dispatched calls; the next one takes its buffers."""
        return self._runner.table

    @property
    def idle(self) -> bool:
        """Whether no request is unfinished and no output is left to return."""
        return not (self._groups or self._calls or self._changed)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Put a request into the waiting queue.

        Args:
            prompt: a text, or token ids.
            params: how to continue it; None takes the defaults.
            request_id: for the outputs; None takes the number of the request.
            priority: requests with smaller values are served first, and preempted last.

        Returns:
            The request, whose outputs grow as the engine steps.

        Raises:
            ValueError: the request can never be served, or its id is in use. Others go on.
            EngineDeadError: an earlier step failed.
        """
        self._check_alive()
        token_ids = self._token_ids(prompt)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{params=} must be SamplingParams")
        start = None if params.prompt_logprobs is None else 1
        text = prompt if isinstance(prompt, str) else None
        return self._submit(text, token_ids, params, request_id, priority, start)

    def step(self) -> list[RequestOutput]:
        """Dispatch one call for all that can go on, and read the one before.

        Returns:
            For each request with news, what is new of its completions since the last step. Those of
            `best_of` and beams come when they are ranked, at the end.

        Raises:
            EngineDeadError: this step failed, or an earlier one did. Unfinished requests end with
                "error".
            RuntimeError: the engine sleeps.
        """
        self._step()
        changed, self._changed = self._changed, {}
        restarted, self._restarted = self._restarted, set()
        return [
            request.output(
                [_delta(output, *before) for output, before in outputs.items()],
                restarted=request in restarted,
            )
            for request, outputs in changed.items()
        ]

    def stream(self, request: Request) -> Iterator[RequestOutput]:
        """Step until a request is finished; yield what is new of it, from its beginning on.

        Other requests go on meanwhile. Closing the iterator before its end aborts the request.
        """
        self._check_mine(request)
        seen: dict[CompletionOutput, tuple[int, int, str | None]] = {}
        try:
            while True:
                finished = request.finished  # before a pause, in which others may step to its end
                new = []
                for output in request.outputs:
                    before = seen.get(output, (0, 0, None))
                    now = len(output.token_ids), len(output.text), output.finish_reason
                    if now != before:
                        seen[output] = now
                        new.append(_delta(output, *before[:2]))
                if new or finished:
                    void = bool(seen.keys() - {*request.outputs})
                    seen = {one: counts for one, counts in seen.items() if one in request.outputs}
                    yield request.output(new, restarted=void)
                if finished:
                    return
                if not request.finished:
                    self.step()
        finally:
            if not request.finished and self._error is None:
                self.abort(request)

    def abort(self, request: Request | str) -> None:
        """End a request as it stands; its pages are free with the next step.

        Args:
            request: the request or its id; one that is finished stays as it is.

        Raises:
            ValueError: it is not a request of this engine.
        """
        self._check_alive()
        if isinstance(request, str):
            ids = [one for one in self._groups if one.request_id == request]
            if not ids:
                raise ValueError(f"{request=} is not the id of an unfinished request")
            request = ids[0]
        self._check_mine(request)
        if request in self._groups:
            for sequence in [*self._groups[request].live]:
                self._finish(sequence, "abort")

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Serve prompts to their ends; other requests go on meanwhile.

        Args:
            prompts: texts or token ids.
            params: for all, or one for each.
            progress: whether to show a bar on stderr (with tqdm, on a terminal).

        Returns:
            Whole outputs, in the order of the prompts.

        Raises:
            ValueError: a prompt or its parameters can't be served; none has been started.
        """
        if isinstance(prompts, str | bytes):
            raise ValueError(f"{prompts=} must be a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            each = [params] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params must be one, or one for each of {len(prompts)}")
        requests: list[Request] = []
        try:
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                try:
                    requests.append(self.submit(prompt, one))
                except ValueError as error:
                    raise ValueError(f"prompt {index}: {error}") from error
        except BaseException:
            for request in requests:
                self.abort(request)
            raise
        self._run(requests, progress)
        return [request.output() for request in requests]

    def score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Return the log-probabilities of given completions under the current weights.

        The prompts run in chunks beside whatever else runs; equal prefixes are computed once.

        Args:
            prompts: token ids of B prompts, at least one token each.
            completions: token ids of a completion for each.

        Returns:
            `f32[B, T]`, log-probability of each token of each completion under the raw logits,
            padded on the right with 0. T is the length of the longest completion.

        Raises:
            ValueError: the lists differ in length, or a sequence can't be served; none was started.
        """
        if len(prompts) != len(completions):
            raise ValueError(
                f"{len(prompts)} prompts must have as many completions, not {len(completions)}"
            )
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, detokenize=False)
        pairs = []
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            try:
                pairs.append((self._token_ids(prompt), self._token_ids(completion, empty=True)))
                self._max_len([*pairs[-1][0], *pairs[-1][1]], params)
            except ValueError as error:
                raise ValueError(f"sequence {index}: {error}") from error
        longest = max((len(completion) for _, completion in pairs), default=0)
        scores = np.zeros((len(pairs), longest), np.float32)
        requests = {
            row: self._submit(None, prompt + completion, params, None, 0, len(prompt))
            for row, (prompt, completion) in enumerate(pairs)
            if completion
        }
        self._run(list(requests.values()), progress=False)
        for row, request in requests.items():
            prompt, completion = pairs[row]
            found = (request.prompt_logprobs or [])[len(prompt) :]
            for column, (token, logprobs) in enumerate(zip(completion, found, strict=True)):
                scores[row, column] = logprobs[token].logprob if logprobs else np.nan
        return scores

    def update_params(
        self, params: Any, *, reset_prefix_cache: bool = True, restart_running: bool = False
    ) -> None:
        """Use new weights from the next step on. Nothing compiles; device arrays are not copied.

        Args:
            params: same structure, shapes and dtypes as before. The engine reads these arrays until
                the next update: do not donate them to another function.
            reset_prefix_cache: whether to forget the K/V of the old weights. Running requests keep
                theirs, but others will not find them.
            restart_running: whether unfinished requests begin again from their prompts; otherwise
                they go on, with the K/V of the old weights for the tokens that they have.

        Raises:
            ValueError: the parameters do not fit; nothing has changed.
        """
        self._check_alive()
        if not self._asleep:
            self._drain()
        self._runner.update_params(params)
        if restart_running:
            for request, group in self._groups.items():
                for sequence in [*group.live]:
                    self._scheduler.remove(sequence)
                group.start()
                request.first_token_time = None
                self._scheduler.add(group.live[0])
                self._changed[request] = {}
                self._restarted.add(request)
        if reset_prefix_cache:
            self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._check_alive()
        self._scheduler.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the pool's memory. Unfinished requests wait, and are recomputed after `wake`."""
        self._check_alive()
        if self._asleep:
            return
        self._drain()
        self._scheduler.preempt_all()
        self._scheduler.reset_prefix_cache()
        self._runner.update_table(self._scheduler.pages.take_update(), [])
        self._scheduler.resync(self.num_pages)
        self._runner.sleep()
        self._asleep = True

    def wake(self) -> None:
        """Allocate the pool again after `sleep`."""
        self._check_alive()
        if self._asleep:
            self._runner.wake()
            self._asleep = False

    def warmup(
        self, params: Sequence[SamplingParams] | None = None, *, progress: bool = False
    ) -> None:
        """Compile every shape that a step may have, so that nothing compiles later.

        Args:
            params: parameters like those of the requests to come; None is prepared for any.
            progress: whether to show a bar on stderr (with tqdm, on a terminal).

        Raises:
            ValueError: the engine is not idle.
        """
        self._check_alive()
        if not self.idle or self._asleep:
            raise ValueError("warmup must run while the engine is awake and idle")
        modes = modes_for(None if params is None else list(params))
        self._runner.warmup(modes, lambda steps, total: _bar(steps, total, "compilation", progress))

    def stats(self) -> EngineStats:
        """Return the counters of the engine so far."""
        return self._counters.snapshot(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_preemptions=self._scheduler.num_preemptions,
            compilations=self._runner.num_compiled,
            num_pages=self.num_pages,
            pool=self._runner.pool_shape,
        )

    def check(self) -> None:
        """Wait for the device and check every invariant of the page table.

        Raises:
            ValueError: names the first that is broken.
        """
        self._check_alive()
        self._runner.update_table(self._scheduler.pages.take_update(), [])
        cached = self._cache.pages if self._cache is not None else ()
        check_page_table(self.table, retained=np.asarray(cached, np.int32))

    def _submit(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        score_start: int | None,
    ) -> Request:
        check_integer("priority", priority, -(2**31))
        max_len = self._max_len(token_ids, params)
        if request_id is None:
            request_id = str(self._num_requests)
        if any(request_id == one.request_id for one in self._groups):
            raise ValueError(f"{request_id=} is the id of an unfinished request")
        request = Request(
            request_id=request_id,
            number=self._num_requests,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            priority=priority,
            max_len=max_len,
            score_start=score_start,
        )
        if score_start is not None:
            request.prompt_logprobs = [None] * len(token_ids)
        group = SequenceGroup(
            request, tokenizer=self._tokenizer, eos_token_ids=self._model.eos_token_ids
        )
        self._num_requests += 1
        self._groups[request] = group
        self._scheduler.add(group.live[0])
        return request

    def _token_ids(self, prompt: object, *, empty: bool = False) -> list[int]:
        """Return the token ids of a prompt, checked against the vocabulary."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("a prompt that is a text needs a tokenizer")
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError("the prompt must be valid UTF-8; it has surrogates")
            prompt = self._tokenizer.encode(prompt)
        is_array = hasattr(prompt, "dtype") and getattr(prompt, "ndim", None) == 1
        if not is_array and not isinstance(prompt, list | tuple | range):
            raise ValueError(f"a prompt must be a text or a list of token ids, not {prompt!r:.80}")
        token_ids = np.asarray(prompt).tolist() if is_array else list(prompt)  # type: ignore[call-overload]
        last = self._model.vocab_size - 1
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id <= last:
                check_integer("token id of the prompt", token_id, 0, last)
        if not token_ids and not empty:
            raise ValueError("the prompt is empty")
        return [int(token_id) for token_id in token_ids]

    def _max_len(self, token_ids: list[int], params: SamplingParams) -> int:
        """Return the tokens at which sequences of a request end; refuse what can't be served."""
        length, limit = len(token_ids), self.max_model_len
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer; stop_token_ids does not")
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids or ()),
            ("logit_bias", dict(params.logit_bias or ())),
        ):
            for token_id in ids:
                check_integer(f"token id of {name}", token_id, 0, self._model.vocab_size - 1)
        beams = params.beam_width or 1
        if 2 * beams > max(self._model.vocab_size, 2):
            raise ValueError(
                f"beam_width={beams} is more than half of vocab_size={self._model.vocab_size}"
            )
        most = self._scheduler.pages.pages_of(limit - 1)
        if most * beams > self.num_pages:  # the pool is smaller than a sequence of full length
            limit = self.num_pages // beams * self.config.page_size + 1
        max_tokens = params.max_tokens
        if max_tokens is None:
            if length >= limit:
                raise ValueError(
                    f"a prompt of {length} tokens leaves no room for more: a sequence has at most "
                    f"{limit} tokens (max_model_len={self.max_model_len}, "
                    f"num_pages={self.num_pages})"
                )
            return min(limit, self.max_model_len)
        if length + max_tokens > min(limit, self.max_model_len):
            raise ValueError(
                f"a prompt of {length} tokens and {max_tokens=} are more than the "
                f"{min(limit, self.max_model_len)} tokens of a sequence "
                f"(max_model_len={self.max_model_len}, num_pages={self.num_pages})"
            )
        return length + max_tokens

    def _run(self, requests: list[Request], progress: bool) -> None:
        """Step until these requests are finished."""
        finished = 0

        def ends() -> Iterator[None]:
            nonlocal finished
            while finished < len(requests):
                self._step()
                self._changed, self._restarted = {}, set()  # the outputs are read at the end
                now = sum(request.finished for request in requests)
                yield from [None] * (now - finished)
                finished = now

        for _ in _bar(ends(), len(requests), "request", progress):
            pass

    def _step(self) -> None:
        """Do the work of `step`."""
        self._check_alive()
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake() before step()")
        try:
            with interrupts_held():
                dispatched = self._dispatch(self._schedule())
                while len(self._calls) > (dispatched if self._groups else 0):
                    self._read()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._die(error)
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"a step failed: {_message(error)}") from error

    def _schedule(self) -> SchedulerOutput:
        def schedule() -> SchedulerOutput | None:
            steps = [call.in_flight.scheduled.num_steps for call in self._calls]
            return self._scheduler.schedule(
                in_flight=bool(steps), uncertain=max(steps, default=1) > 1, num_steps=self._steps()
            )

        while (scheduled := schedule()) is None:
            # The host waits for once, to know how many pages are free.
            if self._calls:
                self._read()
                continue
            self._runner.update_table(self._scheduler.pages.take_update(), [])
            self._scheduler.resync(int(self.table.num_free))
        return scheduled

    def _steps(self) -> int:
        """Decode steps of the next call, by the time that a step took."""
        if self._last_read is None:
            return 1
        steps = int(_CALL_SECONDS / max(self._last_read[1], 1e-6))
        return max(1, min(steps, self.config.num_scheduler_steps))

    def _dispatch(self, scheduled: SchedulerOutput) -> int:
        """Start a call; return how many that were, 0 or 1."""
        self._runner.update_table(self._scheduler.pages.take_update(), scheduled.attachments)
        in_flight = self._runner.dispatch(scheduled)
        if in_flight is None:
            return 0
        scheduler, page_size = self._scheduler, self.config.page_size
        self._calls.append(
            _Call(
                in_flight=in_flight,
                ledger=scheduler.pages.ledger,
                num_cached=scheduler.pages.num_evictable,
                num_empty=sum(-one.num_computed % page_size for one in scheduler.running),
            )
        )
        self._counters.num_calls += 1
        return 1

    def _drain(self) -> None:
        """Read all calls in flight."""
        with interrupts_held():
            while self._calls:
                self._read()

    def _read(self) -> None:
        """Wait for the oldest call in flight, and take its tokens."""
        call = self._calls.popleft()
        output = self._runner.read(call.in_flight)
        self._scheduler.pages.observe(output.num_free, call.ledger)
        self._counters.count_pages(
            num_pages=self.num_pages,
            num_free=output.num_free,
            num_cached=call.num_cached,
            num_empty=call.num_empty,
            page_size=self.config.page_size,
        )
        now = time.perf_counter()
        scheduled = call.in_flight.scheduled
        num_steps = max((len(one.token_ids) for one in output.sampled), default=1)
        self._counters.num_steps += max(num_steps, 1)
        self._counters.computed_tokens += sum(len(chunk.token_ids) for chunk in scheduled.chunks)
        for chunk, ranked in output.prompt_logprobs:
            self._take_prompt_logprobs(chunk, ranked)
        for sampled in output.sampled:
            self._take(sampled, now)
        for chunk in scheduled.chunks:
            if chunk.sequence.slot is not None:
                self._scheduler.pages.cache_full_pages(chunk.sequence)
        if not scheduled.chunks and self._last_read is not None:
            # Calls are read one after another, so this is the time of the device, or the host's.
            seconds = (now - self._last_read[0]) / max(num_steps, 1)
        else:
            seconds = self._last_read[1] if self._last_read is not None else _CALL_SECONDS
        self._last_read = now, seconds

    def _take(self, sampled: Sampled, now: float) -> None:
        """Give a sequence its next tokens, or a beam its candidates."""
        sequence, decode, token_ids = sampled.sequence, sampled.decode, sampled.token_ids
        request = sequence.request
        sequence.num_pending -= decode.num_tokens if decode is not None else 1
        if decode is not None:
            self._counters.computed_tokens += len(token_ids)
            if len(token_ids) < decode.num_tokens:
                self._scheduler.pages.rewind(decode, len(token_ids))
        if not token_ids:
            return
        if request.first_token_time is None:
            request.first_token_time = now
        group = self._groups[request]
        ranked = sampled.ranked
        if sequence.is_beam:
            assert ranked is not None
            self._advance(group, sequence, token_ids[0], ranked[0])
            return
        self._note(group, sequence)
        if len(sequence.token_ids) >= sequence.max_len:  # only the prompt was wanted
            self._finish(sequence, "length")
            return
        for index, token_id in enumerate(token_ids):
            reason = group.append(sequence, token_id, ranked[index] if ranked else None)
            self._counters.generated_tokens += token_id >= 0
            if reason is not None:
                self._finish(sequence, reason)
                return

    def _take_prompt_logprobs(self, chunk: Chunk, ranked: list[Candidates]) -> None:
        request = chunk.sequence.request
        assert request.prompt_logprobs is not None
        count = 1 + (request.params.prompt_logprobs or 0)
        for index, one in enumerate(ranked, chunk.start + 1):
            request.prompt_logprobs[index] = dict(one[:count])

    def _advance(
        self, group: SequenceGroup, beam: EngineSequence, token_id: int, ranked: Candidates
    ) -> None:
        if token_id < 0:
            group.request.error = "the model returned NaN or infinite logits"
            for live in [*group.live]:
                self._finish(live, "error")
            return
        advance = group.advance(beam, ranked[1:])
        if advance is None:
            return
        for ended in advance.ended:
            self._scheduler.remove(ended)
        for parent, child in advance.branches:
            self._scheduler.branch(parent, child)
        for chosen, token in advance.chosen:
            chosen.token_ids.append(token)
            self._scheduler.resume(chosen)
        if not group.live:
            self._conclude(group)

    def _finish(self, sequence: EngineSequence, reason: str) -> None:
        """End a sequence, and its request with the last of them."""
        group = self._groups[sequence.request]
        self._note(group, sequence)
        group.finish(sequence, reason)
        self._scheduler.remove(sequence)
        if not group.live:
            self._conclude(group)

    def _conclude(self, group: SequenceGroup) -> None:
        request = group.request
        group.conclude()
        changed = self._changed.setdefault(request, {})
        if group.ranks:
            changed.update((output, (0, 0)) for output in request.outputs)
        if request.params.beam_width:
            self._counters.generated_tokens += sum(len(x.token_ids) for x in request.outputs)
        self._counters.count_request(request)
        del self._groups[request]

    def _note(self, group: SequenceGroup, sequence: EngineSequence) -> None:
        """Note how long an output is that is about to change."""
        if not group.ranks:
            output = sequence.output
            before = len(output.token_ids), len(output.text)
            self._changed.setdefault(group.request, {}).setdefault(output, before)

    def _check_mine(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise ValueError(f"{request=} must be a Request or its id")
        if request not in self._groups and not request.finished:
            raise ValueError(f"request {request.request_id!r} is of another engine")

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(f"the engine is dead: {_message(self._error)}") from self._error

    def _die(self, error: BaseException) -> None:
        """End everything: the state's buffers may be gone with the call that failed."""
        self._error = error
        groups, self._groups = self._groups, {}
        self._calls.clear()
        for group in groups.values():
            group.abandon(error)
            self._counters.count_request(group.request)


def _delta(output: CompletionOutput, num_tokens: int, num_characters: int) -> CompletionOutput:
    """What is new of an output since it had these numbers of tokens and characters."""
    return CompletionOutput(
        index=output.index,
        text=output.text[num_characters:],
        token_ids=output.token_ids[num_tokens:],
        cumulative_logprob=output.cumulative_logprob,
        logprobs=None if output.logprobs is None else output.logprobs[num_tokens:],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _bar(steps: Iterable[Any], total: int, unit: str, show: bool) -> Iterable[Any]:
    """Show a bar on stderr as the steps are taken, where that is a terminal and tqdm is there."""
    if not show:
        return steps
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, total=total, unit=unit, disable=None)
