"""The engine for programs with many clients: one thread steps it, requests come from any."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Literal

import numpy as np

from pallas_paged.engine.device.executor import EngineDeadError
from pallas_paged.engine.engine import Engine
from pallas_paged.engine.outputs import RequestOutput
from pallas_paged.engine.requests.input_processor import embeddings_of, score_requests, scores_of
from pallas_paged.engine.requests.request import (
    Event,
    OutputCollector,
    Request,
    RequestStream,
    Waiter,
)
from pallas_paged.engine.requests.structured_outputs import StructuredOutputsParams
from pallas_paged.engine.sampling_params import PoolingParams, SamplingParams, WarmupParams
from pallas_paged.engine.stats import EngineStats, PoolMap


class AsyncEngine:
    """Owns an `Engine` and the thread that steps it; all methods are for any thread or event loop.

    `async with AsyncEngine(engine) as engine:` starts it, and at the end serves what it has
    accepted, or aborts that if the block failed. What must run between two steps (`update_params`,
    for example) runs in the order of the calls. The thread sleeps while nothing is to be done. It
    has JAX's global settings, not those of a caller's context managers. Tokenizers encode in the
    callers' threads. Do not use the `Engine` itself before the end of `shutdown`.
    """

    def __init__(self, engine: Engine):
        """Take an engine; `start` starts the thread.

        Raises:
            ValueError: it is not an Engine.
        """
        if not isinstance(engine, Engine):
            raise ValueError(f"{engine=} must be an Engine")
        self._engine = engine
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
        self._commands = queue.SimpleQueue()  # may be put into by garbage collection, anywhere
        self._lock = threading.Lock()
        self._running = self._stopping = False  # whether calls and new requests are accepted
        self._draining = False  # whether the thread ends as soon as no request is left
        self._ended: Future[None] = Future()
        self._ended.set_result(None)
        self._collectors: dict[str, OutputCollector] = {}  # of unfinished requests, by id
        self._numbers = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine; while this one runs only for what never changes, such as `config`."""
        return self._engine

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.shutdown(drain=error is None)

    def start(self) -> None:
        """Start the thread; also after a shutdown.

        Raises:
            RuntimeError: it runs already.
            EngineDeadError: the engine is dead.
        """
        with self._lock:
            if self._running:
                raise RuntimeError("the engine has been started already")
            self._engine.replicas.check_usable()
            self._running, self._stopping, self._draining = True, False, False
            self._ended = Future()
            self._ended.set_running_or_notify_cancel()  # a waiter that leaves can't cancel it
            self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
            self._thread.start()
        atexit.register(self._stop_at_exit)

    async def shutdown(self, drain: bool = True) -> None:
        """Stop the thread and wait for its end. New requests are refused at once.

        Args:
            drain: whether to serve the requests that were accepted, for which a sleeping engine
                wakes up. Otherwise they are aborted, also those that an earlier call drains.
        """
        self._stop(drain)
        await asyncio.wrap_future(self._ended)
        atexit.unregister(self._stop_at_exit)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Put a request into the waiting queue; do not wait for the engine.

        Arguments are those of `Engine.submit`.

        Returns:
            The stream of its outputs, for `for` or `async for`.

        Raises:
            ValueError: the request can never be served, or its id is in use.
            RuntimeError: the engine is not started, or it is shutting down.
            EngineDeadError: the engine is dead.
        """
        request = self._engine._inputs.request(
            prompt, params, request_id=request_id, priority=priority
        )
        return self._submit([request])[0]

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Submit a request and return its outputs: `async for output in engine.generate(...)`.

        Each output is what is new since the last one. Leaving the loop aborts the request, and so
        does cancelling its task. Arguments and errors are those of `submit`, at this call.
        """
        stream = self.submit(prompt, params, request_id=request_id, priority=priority)
        return stream.__aiter__()

    def compile_grammar(self, structured_outputs: StructuredOutputsParams) -> None:
        """Compile a grammar, so that `submit` finds it; may be called in any thread.

        Raises:
            ValueError: it can't be compiled, or llguidance or a tokenizer is missing.
        """
        self._engine._inputs.grammars.compile(structured_outputs)

    async def abort(self, request_id: str) -> None:
        """End the unfinished request of this id, if there is one; its finish reason is "abort"."""
        if (collector := self._collectors.get(request_id)) is not None:
            await self._call(self._abort, collector)

    async def update_params(
        self,
        params: Any,
        *,
        reset_prefix_cache: bool = True,
        restart_running: bool = False,
        draft_params: Any = None,
    ) -> None:
        """Use new weights from the next step on, as `Engine.update_params`."""
        how = dict(reset_prefix_cache=reset_prefix_cache, restart_running=restart_running)
        await self._call(self._engine.update_params, params, draft_params=draft_params, **how)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self._call(self._engine.reset_prefix_cache)

    async def sleep(self) -> None:
        """Free the pool's memory. Unfinished and new requests wait for `wake_up`."""
        await self._call(self._engine.sleep)

    async def wake_up(self) -> None:
        """Allocate the pool again after `sleep`."""
        await self._call(self._engine.wake_up)

    async def warmup(self, params: WarmupParams = None) -> None:
        """Compile every shape that a step may have, as `Engine.warmup`."""
        await self._call(self._engine.warmup, params)

    async def start_warmup(self, params: WarmupParams = None) -> Future[None]:
        """Compile what can serve such requests, and start the rest, as `Engine.start_warmup`."""
        return await self._call(self._engine.start_warmup, params)

    async def stats(self) -> EngineStats:
        """Return the counters of the engine so far."""
        return await self._call(self._engine.stats)

    async def pool_map(self) -> list[PoolMap]:
        """Return which request holds which page, for each replica, as `Engine.pool_map`."""
        return await self._call(self._engine.pool_map)

    async def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        routed_experts: Sequence[np.ndarray] | None = None,
    ) -> np.ndarray:
        """Return the log-probabilities of given completions, `f32[B, T]`, as `Engine.score`.

        Other requests go on meanwhile. Cancelling it aborts what it has submitted.
        """
        self._engine.replicas.check_usable()
        inputs, shape = self._engine._inputs, None
        if routed_experts is not None:  # its first call traces the model
            shape = await self._call(lambda: self._engine.replicas[0].runner.routed_experts_shape)
        requests = score_requests(inputs, prompts, completions, routed_experts, shape)
        await self._serve_to_end([request for request in requests if request is not None])
        return scores_of(requests)

    async def embed(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        pooling: Literal["last", "mean"] = "last",
        normalize: bool = True,
    ) -> np.ndarray:
        """Return a vector of each prompt, `f32[B, E]`, as `Engine.embed`.

        Other requests go on meanwhile. Cancelling it aborts what it has submitted.
        """
        self._engine.replicas.check_usable()
        params = PoolingParams(pooling=pooling, normalize=normalize)
        requests = self._engine._inputs.requests(prompts, params)
        await self._serve_to_end(requests)
        return embeddings_of(requests)

    async def _serve_to_end(self, requests: Sequence[Request]) -> None:
        """Serve requests to their ends; abort them if this is cancelled."""
        streams = self._submit(requests)
        try:
            for stream in streams:
                async for _ in stream:
                    pass
        finally:
            for stream in streams:
                stream.close()

    def _submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Accept requests, and give an id to those without one."""
        with self._lock:
            self._check_running()
            if self._stopping:
                raise RuntimeError("the engine is shutting down and takes no new requests")
            for request in requests:
                if (request_id := request.request_id) in self._collectors:
                    raise ValueError(f"{request_id=} is that of another request")
                while not request.request_id or request.request_id in self._collectors:
                    request.request_id = f"async-{next(self._numbers)}"
                request.begin()  # outputs that are first read in two threads could be made twice
            collectors = [OutputCollector(request) for request in requests]
            self._collectors |= {one.request.request_id: one for one in collectors}
            self._put(self._add, collectors)
        return [RequestStream(one, partial(self._put, self._abort, one)) for one in collectors]

    def _put(self, function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Let the engine's thread call a function between two steps."""
        future: Future[Any] = Future()
        self._commands.put((partial(function, *args, **options), future))
        return future

    async def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function in the engine's thread, and return its result."""
        with self._lock:
            self._check_running()
            future = self._put(function, *args, **options)
        return await asyncio.wrap_future(future)

    def _check_running(self) -> None:
        self._engine.replicas.check_usable()
        if not self._running:
            raise RuntimeError("the engine is not running: use `async with`, or call start()")

    def _stop(self, drain: bool) -> None:
        with self._lock:
            if self._running:
                self._stopping = True
                self._put(self._drain, drain)

    def _stop_at_exit(self) -> None:
        self._stop(drain=False)
        self._thread.join()  # a thread that still runs JAX can crash the interpreter's end

    # What follows runs in the engine's thread.

    def _serve(self) -> None:
        """Run commands and steps in turn."""
        engine = self._engine
        try:
            while not self._is_done():
                if self._draining and self._collectors and engine.is_sleeping:
                    engine.wake_up()
                # Commands that come meanwhile wait for the next turn: they must not starve steps.
                for _ in range(self._commands.qsize() or (0 if self._can_step() else 1)):
                    _run(*self._commands.get())
                if (error := engine.replicas.error) is not None:
                    raise error  # of a command, which has told its caller only
                if self._can_step():
                    engine._step()
                    self._publish()
        except BaseException as error:
            self._die(error)
        self._ended.set_result(None)

    def _can_step(self) -> bool:
        return not (self._engine.idle or self._engine.is_sleeping)

    def _is_done(self) -> bool:
        """Whether the thread may end; if so, accept no more calls."""
        with self._lock:
            busy = self._collectors or self._can_step() or not self._commands.empty()
            self._running = not self._draining or bool(busy)
            return not self._running

    def _die(self, error: BaseException) -> None:
        """Raise an error at all that wait."""
        # Also if they do not read it, there is a trace of it.
        what = "the engine is dead"
        logging.getLogger("pallas_paged").error(what, exc_info=error)
        with self._lock:
            cause = self._engine.replicas.error = self._engine.replicas.error or error
            self._running = False
            collectors, self._collectors = self._collectors, {}
        for collector in collectors.values():
            self._wake([(collector, collector.put(None, EngineDeadError(what, cause)))])
        while not self._commands.empty():
            _, future = self._commands.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDeadError(what, cause))

    def _add(self, collectors: Sequence[OutputCollector]) -> None:
        for collector in collectors:
            try:
                self._engine.replicas.add(collector.request)
            except Exception as error:  # of the tokenizer, for example
                del self._collectors[collector.request.request_id]
                self._wake([(collector, collector.put(None, error))])

    def _publish(self) -> None:
        """Give the collectors what is new."""
        woken = []
        for output in self._engine.replicas.take_outputs():
            if (collector := self._collectors.get(output.request_id)) is not None:
                woken.append((collector, collector.put(output)))
                if output.finished:
                    del self._collectors[output.request_id]
        self._wake(woken)

    def _wake(self, woken: Iterable[tuple[OutputCollector, list[Waiter]]]) -> None:
        """Set the events of waiters, by one call for each event loop."""
        by_loop = defaultdict(list)
        for collector, waiters in woken:
            for loop, event in waiters:
                by_loop[loop].append((collector, event))
        for loop, entries in by_loop.items():
            events = [event for _, event in entries]
            try:
                if loop is None:
                    _set_all(events)
                else:
                    loop.call_soon_threadsafe(_set_all, events)
            except RuntimeError:  # the loop is closed
                for collector, _ in entries:
                    self._abort(collector)

    def _abort(self, collector: OutputCollector) -> None:
        request = collector.request
        if self._collectors.get(request.request_id) is collector:  # it is not finished
            self._engine.abort(request)
            self._publish()

    def _drain(self, drain: bool) -> None:
        self._draining = True
        for collector in [] if drain else [*self._collectors.values()]:
            self._abort(collector)


def _run(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # the caller has been cancelled
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _set_all(events: Iterable[Event]) -> None:
    for event in events:
        event.set()
