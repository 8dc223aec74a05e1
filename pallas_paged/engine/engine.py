"""The engine: many requests at once over one paged pool, by continuous batching.

The scheduler decides what each call computes, the runner packs that into a batch, and one jitted
call runs it: a step of decoding sequences and chunks of prompts, or up to `num_scheduler_steps`
decode steps in a loop on the device. The next call is dispatched before the tokens of the last are
read. Continuous batching is from Orca (Yu et al., OSDI 2022), chunked prefill beside decoding from
Sarathi-Serve (Agrawal et al., OSDI 2024), preemption by recomputing from vLLM (Kwon et al., SOSP
2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.core import EngineCore
from pallas_paged.engine.errors import EngineDeadError
from pallas_paged.engine.input_processor import InputProcessor, check_lists
from pallas_paged.engine.interrupt import interrupts_held
from pallas_paged.engine.kv_cache import pool_bytes
from pallas_paged.engine.model import Model
from pallas_paged.engine.output_processor import OutputProcessor
from pallas_paged.engine.outputs import CompletionOutput, FinishReasonName, RequestOutput
from pallas_paged.engine.progress import progress_bar
from pallas_paged.engine.request import Request
from pallas_paged.engine.runner import ModelRunner, modes_for
from pallas_paged.engine.sampling_params import SamplingParams
from pallas_paged.engine.scheduler import Scheduler
from pallas_paged.engine.scoring import score_requests, scores_of
from pallas_paged.engine.stats import Counters, EngineStats
from pallas_paged.engine.tokenizer import Tokenizer
from pallas_paged.page_check import check_page_table
from pallas_paged.page_table import PageTable
from pallas_paged.prefix_cache import PrefixCache


class Engine:
    """Serves requests: `submit` them and `step` until they are finished, or `generate`.

    For one thread; `AsyncEngine` is for several. A request's tokens do not depend on what else
    runs, up to the rounding of other batch sizes, which in bf16 and f16 can decide between
    near-equal tokens. Ctrl-C in a step takes effect at its end and leaves the engine usable. After
    a step has failed, methods raise EngineDeadError.
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
            model, params: the model and its weights, a pytree of arrays.
            config: sizes; None takes the defaults.
            tokenizer: for prompts, outputs and stop strings as texts; None works with token ids.

        Raises:
            ValueError: a size is out of range for this model.
        """
        self.config = config = config or EngineConfig()
        num_pages, max_len = config.sizes(model)
        self.num_pages, self.max_model_len = num_pages, max_len
        self._runner = ModelRunner(model, params, config, num_pages=num_pages, max_len=max_len)
        caching, page_size = config.enable_prefix_caching, config.page_size
        self._cache = PrefixCache(page_size=page_size) if caching else None
        self._scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            watermark=int(config.watermark * num_pages),
            cache=self._cache,
            sliding_window=model.kv_cache_spec.sliding_window,
        )
        self._counters = Counters(num_free_pages=num_pages)
        pages = self._scheduler.pages
        self._inputs = InputProcessor(model, tokenizer, pages, max_model_len=max_len)
        scheduler, counters = self._scheduler, self._counters
        self._outputs = OutputProcessor(scheduler, counters, tokenizer, model.eos_token_ids)
        process, num_steps = self._outputs.process_outputs, config.num_scheduler_steps
        self._core = EngineCore(scheduler, self._runner, counters, process, num_steps)
        self.is_sleeping = False
        self._error: BaseException | None = None

    @property
    def table(self) -> PageTable:
        """The page table after all dispatched calls; the next one takes its buffers."""
        return self._runner.table

    @property
    def idle(self) -> bool:
        """Whether no request is unfinished and no output is left to return."""
        return self._outputs.idle and not self._core.in_flight

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Put a request into the waiting queue; its outputs grow as the engine steps.

        Args:
            prompt: a text, or token ids.
            params: how to continue it; None takes the defaults.
            request_id: for the outputs; None takes the number of the request.
            priority: requests with smaller values are served first, and preempted last.

        Raises:
            ValueError: the request can never be served, or its id is in use. Others go on.
        """
        self._check_alive()
        request = self._inputs.request(prompt, params, request_id=request_id, priority=priority)
        with interrupts_held():
            self._outputs.add([request])
        return request

    def step(self) -> list[RequestOutput]:
        """Dispatch one call for all that can go on, and read the one before.

        Returns:
            For each request with news, what is new of its completions since the last step. Those of
            `best_of` and beams come when they are ranked, at the end.

        Raises:
            EngineDeadError: a step failed. Unfinished requests have ended with "error".
            RuntimeError: the engine sleeps.
        """
        self._step()
        return self._outputs.take_outputs()

    def stream(self, request: Request) -> Iterator[RequestOutput]:
        """Step until a request is finished; yield what is new of it, from its beginning on.

        Other requests go on meanwhile. Closing the iterator before its end aborts the request.
        """
        self._check_mine(request)
        seen: dict[CompletionOutput, tuple[int, int, FinishReasonName | None]] = {}
        try:
            while True:
                finished = request.finished  # before a pause, in which others may step to its end
                now = {x: (len(x.token_ids), len(x.text), x.finish_reason) for x in request.outputs}
                before = {output: seen.get(output, (0, 0, None)) for output in now}
                new = [x.since(*before[x][:2]) for x in now if now[x] != before[x]]
                if new or finished:
                    restarted, seen = not seen.keys() <= now.keys(), now
                    yield request.output(new, restarted=restarted)
                if finished:
                    return
                if not request.finished:
                    self._step()
                    self._outputs.drop_outputs([request])
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
            if (found := self._outputs.requests.get(request)) is None:
                raise ValueError(f"{request=} is not the id of a request")
            request = found
        self._check_mine(request)
        if request in self._outputs.groups:
            with interrupts_held():
                self._outputs.abort(request)

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
        check_lists(prompts=prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        check_lists(params=params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params must be one, or one for each of {len(prompts)}")
        self._check_awake()
        requests: list[Request] = []
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self._inputs.request(prompt, one))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
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
            RuntimeError: the engine sleeps, or a sequence has no scores (bad logits).
        """
        self._check_awake()
        requests = score_requests(self._inputs, prompts, completions)
        self._run([request for request in requests if request is not None], progress=False)
        return scores_of(requests)

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
        with self._dead_on_error():
            self._core.drain()
        with interrupts_held():
            self._runner.update_params(params)
            if restart_running:
                self._outputs.restart()
            if reset_prefix_cache:
                self._scheduler.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._check_alive()
        with interrupts_held():
            self._scheduler.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the pool's memory. Unfinished requests wait, and are recomputed after `wake`."""
        self._check_alive()
        if self.is_sleeping:
            return
        with self._dead_on_error():
            self._core.drain()
            self._scheduler.preempt_all()
            self._scheduler.reset_prefix_cache()
            self._runner.update_table(self._scheduler.pages.take_update(), [])
            self._scheduler.resync(self.num_pages)
            self._runner.sleep()
            self.is_sleeping = True

    def wake(self) -> None:
        """Allocate the pool again after `sleep`."""
        self._check_alive()
        if self.is_sleeping:
            with interrupts_held():
                self._runner.wake()
                self.is_sleeping = False

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
        if not self.idle or self.is_sleeping:
            raise ValueError("warmup must run while the engine is awake and idle")
        if params is not None:
            check_lists(params=params)
        self._runner.warmup(
            modes_for(params), partial(progress_bar, unit="compilation", show=progress)
        )

    def stats(self) -> EngineStats:
        """Return the counters of the engine so far."""
        scheduler, pool = self._scheduler, self._runner.pool_shape
        if not scheduler.running:  # the newest report may be older than an abort
            counters, num_cached = self._counters, scheduler.pages.num_evictable
            counters.num_cached_pages = num_cached
            counters.num_free_pages = self.num_pages - num_cached
        return self._counters.snapshot(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_preemptions=scheduler.num_preemptions,
            compilations=self._runner.num_compiled,
            num_pages=self.num_pages,
            num_shared_pages=self._cache.num_shared if self._cache is not None else 0,
            kv_cache_dtype=pool.layers[0].k_pages.dtype.name,
            pool_bytes=pool_bytes(pool),
        )

    def check(self) -> None:
        """Wait for the device; raise ValueError if an invariant of the page table is broken."""
        self._check_alive()
        with self._dead_on_error():
            self._runner.update_table(self._scheduler.pages.take_update(), [])
        cached = self._cache.pages if self._cache is not None else ()
        check_page_table(self.table, retained=np.asarray(cached, np.int32))

    def _run(self, requests: list[Request], progress: bool) -> None:
        """Add requests and step until they are finished; outputs of others wait for `step`."""

        def ends() -> Iterator[Request]:
            running = requests
            while running:
                self._step()
                self._outputs.drop_outputs(running)
                yield from [request for request in running if request.finished]
                running = [request for request in running if not request.finished]

        try:
            with interrupts_held():
                self._outputs.add(requests)
            for _ in progress_bar(ends(), len(requests), "request", progress):
                pass
        except BaseException:  # Ctrl-C
            for request in requests:
                if request in self._outputs.groups:
                    self.abort(request)
            raise

    def _step(self) -> None:
        self._check_awake()
        with self._dead_on_error():
            self._core.step()

    @contextmanager
    def _dead_on_error(self) -> Iterator[None]:
        """Hold back Ctrl-C in this block; end everything if it fails, with the state lost."""
        completed = False
        try:
            with interrupts_held():
                yield
                completed = True
        except BaseException as error:
            if completed:  # Ctrl-C, which was held back
                raise
            self._error = error
            self._core.discard()
            self._outputs.fail_all(error)
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError("a step failed", error) from error

    def _check_awake(self) -> None:
        self._check_alive()
        if self.is_sleeping:
            raise RuntimeError("the engine sleeps: call wake() first")

    def _check_mine(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise ValueError(f"{request=} must be a Request or its id")
        if request not in self._outputs.groups and not request.finished:
            raise ValueError(f"request {request.request_id!r} is of another engine")

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError("the engine is dead", self._error)
