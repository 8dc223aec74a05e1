"""The engine: many requests at once over one paged pool, by continuous batching.

The scheduler decides what each call computes, the runner packs that into a batch, and one jitted
call runs it: a step of decoding sequences and chunks of prompts, or up to `num_scheduler_steps`
decode steps in a loop on the device. The next call is dispatched before the last one's tokens are
read. Continuous batching is from Orca (Yu et al., OSDI 2022), chunked prefill from Sarathi-Serve
(Agrawal et al., OSDI 2024), preemption by recomputing from vLLM (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import jax
import numpy as np

from pallas_paged.checks import check_has
from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.device.compilation import progress_bar
from pallas_paged.engine.device.processes import interrupts_held
from pallas_paged.engine.model import Model, check_model
from pallas_paged.engine.outputs import RequestOutput
from pallas_paged.engine.replica.replica import stats_of
from pallas_paged.engine.replica.replicas import Replicas
from pallas_paged.engine.requests import input_processor as inputs
from pallas_paged.engine.requests.detokenizer import Tokenizer
from pallas_paged.engine.requests.request import Request, UnreadOutputs
from pallas_paged.engine.sampling_params import PoolingParams, SamplingParams, WarmupParams
from pallas_paged.engine.stats import EngineStats, PoolMap
from pallas_paged.pages.table import PageTable


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
        *,
        devices: Sequence[jax.Device] | None = None,
        draft_params: Any = None,
    ):
        """Put the weights on the devices and allocate the pools.

        Args:
            model, params: the model and its weights, a pytree of arrays.
            config: sizes; None takes the defaults.
            tokenizer: for prompts, outputs and stop strings as texts; None works with token ids.
            devices: those to use. Replica r takes `tensor_parallel_size` devices from index
                `r * tensor_parallel_size` on. None takes JAX's default device if one is enough,
                else the first of this process or, if these are too few, of all processes.
            draft_params: weights of the "model" of `config.speculative_config`; else None.

        Raises:
            ValueError: an argument has a wrong type, or does not fit the model or the devices.
        """
        check_model(model)
        if not isinstance(config, EngineConfig | None):
            raise ValueError(f"{config=} must be an EngineConfig")
        if tokenizer is not None:
            check_has("tokenizer", tokenizer, "encode", "decode")
        self.model, self.tokenizer, self.config = model, tokenizer, config or EngineConfig()
        self.replicas = Replicas(model, params, self.config, devices, tokenizer, draft_params)
        self.num_pages, self.max_model_len = self.replicas.num_pages, self.replicas.max_model_len
        pages = self.replicas[0].scheduler.pages
        self._inputs = inputs.InputProcessor(tokenizer, pages, model, self.max_model_len)
        self.is_sleeping = False

    @property
    def table(self) -> PageTable:
        """The first replica's page table after all dispatched calls; the next takes its buffers."""
        return self.replicas[0].runner.table

    @property
    def idle(self) -> bool:
        """Whether no request is unfinished and no output is left to return."""
        return self.replicas.idle

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Put a request into the waiting queue; its outputs grow as the engine steps.

        Args:
            prompt: a text, or token ids.
            params: how to continue it, or how it becomes a vector; None takes the defaults.
            request_id: for the outputs; None takes the number of the request.
            priority: requests with smaller values are served first, and preempted last.

        Raises:
            ValueError: the request can never be served, or its id is in use. Others go on.
        """
        self.replicas.check_usable()
        request = self._inputs.request(prompt, params, request_id=request_id, priority=priority)
        with interrupts_held():
            self.replicas.add(request)
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
        return self.replicas.take_outputs()

    def stream(self, request: Request) -> Iterator[RequestOutput]:
        """Step until a request is finished; yield what is new of it. Closing this aborts it."""
        self.replicas.find(request)
        unread = UnreadOutputs(request)
        try:
            while True:
                finished = request.finished  # before a pause, in which others may step to its end
                if (output := unread.take()) is not None:
                    yield output
                if finished:
                    return
                if not request.finished:
                    self._step()
                    self.replicas.drop_outputs([request])
        finally:
            if not request.finished and self.replicas.error is None:
                self.abort(request)

    def abort(self, request: Request | str) -> None:
        """End a request as it stands, given itself or its id; nothing happens if it is finished.

        Its pages are free with the next step.

        Raises:
            ValueError: it is not a request of this engine.
        """
        self.replicas.check_usable()
        with interrupts_held():
            self.replicas.abort(self.replicas.find(request))

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
            Complete outputs, in the order of the prompts.

        Raises:
            ValueError: a prompt or its parameters can't be served; none has been started.
        """
        self._check_awake()
        requests = self._inputs.requests(prompts, params)
        self._run(requests, progress)
        return [request.output() for request in requests]

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        routed_experts: Sequence[np.ndarray] | None = None,
    ) -> np.ndarray:
        """Return the log-probabilities of given completions under the current weights.

        The prompts run in chunks beside whatever else runs; equal prefixes are computed once, but
        not with given experts, which neither read nor fill the prefix cache.

        Args:
            prompts: token ids of B prompts, at least one token each.
            completions: token ids of a completion for each.
            routed_experts: integers `[P + T - 1, L, k]` for each, experts to use in place of the
                router's: of each token but the last, and of each of the model's L layers with
                experts, as `CompletionOutput.routed_experts` has them. Rows below 0 may follow, as
                padding. Their weights are those of this model's router. Below 0, and with None, the
                router chooses. `models/` computes no expert for an index out of range.

        Returns:
            `f32[B, T]`, log-probability of each token of each completion under the raw logits,
            padded on the right with 0. T is the length of the longest completion.

        Raises:
            ValueError: the lists differ in length, a sequence can't be served, or the experts are
                not of as many tokens and of this model; none was started.
            RuntimeError: the engine sleeps, or a sequence has no scores (bad logits).
        """
        self._check_awake()
        shape = None if routed_experts is None else self.replicas[0].runner.routed_experts_shape
        requests = inputs.score_requests(self._inputs, prompts, completions, routed_experts, shape)
        self._run([request for request in requests if request is not None], progress=False)
        return inputs.scores_of(requests)

    def embed(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        pooling: Literal["last", "mean"] = "last",
        normalize: bool = True,
    ) -> np.ndarray:
        """Return a vector of each prompt, `f32[B, E]`, of the model's hidden states `[T, E]`.

        Prompts are texts or token ids; the other arguments are as in `PoolingParams`.

        Raises:
            ValueError: an argument is not of these, or a prompt can't be served; none has started.
            RuntimeError: the engine sleeps, or the hidden states of a prompt are NaN or infinite.
        """
        self._check_awake()
        params = PoolingParams(pooling=pooling, normalize=normalize)
        self._run(requests := self._inputs.requests(prompts, params), progress=False)
        return inputs.embeddings_of(requests)

    def update_params(
        self,
        params: Any,
        *,
        reset_prefix_cache: bool = True,
        restart_running: bool = False,
        draft_params: Any = None,
    ) -> None:
        """Use new weights from the next step on. Nothing compiles; device arrays are not copied.

        Args:
            params: same structure, shapes and dtypes as before. The engine reads these arrays until
                the next update: do not donate them to another function.
            reset_prefix_cache: whether to forget the K/V of the old weights. Running requests keep
                theirs, but others will not find them.
            restart_running: whether unfinished requests begin again from their prompts; otherwise
                they go on, with the K/V of the old weights for the tokens that they have.
            draft_params: likewise, of the draft model; None keeps its weights.

        Raises:
            ValueError: the parameters do not fit; nothing has changed.
        """
        self.replicas.update_params(params, draft_params, reset_prefix_cache, restart_running)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.replicas.check_usable()
        with interrupts_held():
            self.replicas.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the pool's memory. Unfinished requests wait, and are recomputed after `wake_up`."""
        self.replicas.check_usable()
        if not self.is_sleeping:
            with self.replicas.fatal():
                self.replicas.sleep()
                self.is_sleeping = True

    def wake_up(self) -> None:
        """Allocate the pool again after `sleep`."""
        self.replicas.check_usable()
        if self.is_sleeping:
            with self.replicas.fatal(only_if_multi_process=True):
                for replica in self.replicas:
                    replica.runner.executor.wake_up()
                self.is_sleeping = False

    def warmup(self, params: WarmupParams = None, *, progress: bool = False) -> None:
        """Compile every shape that a step may have, so that nothing compiles later.

        Args:
            params: of the requests to come. None: any, but without grammars, experts and pooling.
            progress: whether to show a bar on stderr (with tqdm, on a terminal).

        Raises:
            ValueError: the engine is not idle.
            RuntimeError: it sleeps.
        """
        self._check_awake()
        self.replicas.warmup(params, progress)

    def start_warmup(self, params: WarmupParams = None, *, progress: bool = False) -> Future[None]:
        """Compile what can serve such requests, and the rest in threads while the engine serves.

        A batch whose own step is not compiled yet runs in a larger one: it takes longer, and its
        tokens may differ by the rounding of other batch sizes. Where other processes compute too,
        all is compiled at once. The arguments are those of `warmup`.

        Returns:
            Done when all is compiled. If a step can't be compiled, the log says so, its batches run
            in a larger one, and the future has the error. `close` or the end of the process cancels
            it, and waits for programs that compile.

        Raises:
            ValueError: the engine is not idle.
            RuntimeError: it sleeps.
        """
        self._check_awake()
        return self.replicas.start_warmup(params, progress)

    def stats(self) -> EngineStats:
        """Return the counters of the engine so far; `replicas[i].stats()` has those of one."""
        return stats_of([*self.replicas])

    def pool_map(self) -> list[PoolMap]:
        """Return which request holds which page, for each replica; no device is asked."""
        return [replica.pool_map() for replica in self.replicas]

    def check(self) -> None:
        """Wait for the devices; raise ValueError if an invariant of a page table is broken."""
        self.replicas.check_usable()
        with self.replicas.fatal():
            for replica in self.replicas:
                replica.update_table()
        for replica in self.replicas:
            replica.check()

    def follow(self) -> bool:
        """Make the device calls of process 0, in the other processes of an engine on several.

        Returns:
            True when process 0 calls `release` or `update_params`; then this process must call
            `update_params` too, and `follow` again. False when process 0 has closed the engine.

        Raises:
            EngineDeadError: process 0 has failed or ended, or a call has failed here.
            RuntimeError: this is process 0, or the only one.
        """
        return self.replicas.follow()

    def release(self) -> None:
        """Let the other processes return from `follow`, to train on all devices, for example."""
        self.replicas.check_usable()
        with self.replicas.fatal():
            self.replicas.drain()
            if self.replicas.followers is not None:
                self.replicas.followers.send("release")

    def close(self) -> None:
        """Abort all requests, free the pools, and let the other processes return from `follow`."""
        if self.replicas.error is not None:
            return
        self.replicas.check_usable()
        with self.replicas.fatal():
            self.replicas.drain()
            for replica in self.replicas:
                replica.abort_all()
            self.sleep()
            self.replicas.close("it has been closed")

    def _run(self, requests: list[Request], progress: bool) -> None:
        """Add requests and step until they are finished; outputs of others wait for `step`."""

        def ends() -> Iterator[Request]:
            running = {*requests}
            while running:
                self._step()
                finished = self.replicas.drop_outputs(running)
                running.difference_update(finished)
                yield from finished

        try:
            with interrupts_held():
                for request in requests:
                    self.replicas.add(request)
            for _ in progress_bar(ends(), len(requests), "request", progress):
                pass
        except BaseException:  # Ctrl-C
            with interrupts_held():
                for request in requests:
                    self.replicas.abort(request)
            raise

    def _step(self) -> None:
        self._check_awake()
        with self.replicas.fatal():
            self.replicas.step()

    def _check_awake(self) -> None:
        self.replicas.check_usable()
        if self.is_sleeping:
            raise RuntimeError("the engine sleeps: call wake_up() first")
