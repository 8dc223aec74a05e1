"""The engine: many requests at once over one paged pool, by continuous batching.

Each step the scheduler says who computes what, that is packed into a batch, and one jitted call
runs it (`engine_step.py`). The next step is dispatched before the tokens of the last are read, for
rows that decode take their last token on the device; so what a token ends is seen one step late,
and that step's token is dropped. Continuous batching is from Orca (Yu et al., OSDI 2022), chunked
prefill beside decoding from Sarathi-Serve (Agrawal et al., OSDI 2024), preemption by recomputing
from vLLM (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from flax import nnx
from tqdm import tqdm

import pallas_paged as pp
from models.batch import Drawing
from models.beam import Ranked
from models.decoder import Decoder
from models.engine_config import EngineConfig, check_request
from models.engine_stats import Counters, EngineStats
from models.engine_worker import Flight, Worker, drawing_of
from models.group import Group
from models.request import Completion, News, Request, SamplingParams, token_ids
from models.scheduler import Plan, Scheduler
from models.seq import Seq
from models.tokenizer import Tokenizer


class EngineDeadError(RuntimeError):
    """A step of the engine failed and took its state with it; what failed is the cause."""


class Engine:
    """Serves requests: `submit` them, and `step` until they are finished, or `stream` one.

    For one thread. A request's tokens do not depend on what else runs, up to the rounding of other
    batch sizes, which in bf16 and f16 can tip a token between near-equals.
    """

    def __init__(
        self,
        model: Decoder,
        params: nnx.State | None,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
    ):
        """Allocates the pool.

        Args:
            model: the network.
            params: its weights, as `nnx.state(model)`; None takes those in the model.
            tokenizer: of the model, for prompts that are texts, for `Completion.text` and for stop
                texts; None works with token ids only.
            config: sizes.

        Raises:
            ValueError: a size is out of range for this model.
        """
        positions = model.config.max_position_embeddings
        capacity = config.num_pages * config.page_size
        self._max_len = config.max_len or min(positions, capacity)
        if self._max_len > positions:
            raise ValueError(f"max_len={self._max_len} must be at most {positions} positions")
        self.config = config
        self._model = model.config
        self._tokenizer = tokenizer
        self._worker = Worker(
            model, params, config, pages_per_seq=-(-self._max_len // config.page_size)
        )
        caching = config.prefix_caching
        self._cache = pp.PrefixCache(page_size=config.page_size) if caching else None
        self._scheduler = Scheduler(
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_seqs=config.max_seqs,
            token_budget=config.token_budget,
            max_chunks=self._worker.shapes.max_chunks(config.token_budget),
            watermark=int(config.watermark * config.num_pages),
            cache=self._cache,
        )
        self._counters = Counters(num_free_pages=config.num_pages)
        # With what held after their plans: the ledger, cached pages, and slots held and not used.
        self._flights: deque[tuple[Flight, int, int, int]] = deque()
        self._num_requests = 0
        self._groups: dict[Request, Group] = {}  # of requests that are not finished
        # What has changed since the last step, and how long it was before.
        self._changed: dict[Completion, tuple[Request, int, int]] = {}
        self._error: BaseException | None = None

    @property
    def table(self) -> pp.PageTable:
        """The page table as of the newest step; the next one takes its buffers."""
        return self._worker.table

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
        return not (self._groups or self._flights or self._changed)

    def submit(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        """Puts a request at the end of the queue.

        Args:
            prompt: a text, or token ids.
            params: how to go on.

        Returns:
            The request, which fills up as the engine steps.

        Raises:
            ValueError: the request can never be served; the message says why. Others go on.
            EngineDeadError: an earlier step failed.
        """
        self._check_alive()
        tokens = token_ids(prompt, self._tokenizer)
        check_request(
            tokens,
            params,
            config=self.config,
            max_len=self._max_len,
            vocab_size=self._model.vocab_size,
            has_tokenizer=self._tokenizer is not None,
        )
        request = Request(
            number=self._num_requests,
            prompt=tokens,
            params=params,
            seed=self._num_requests if params.seed is None else params.seed,
        )
        group = Group(request, tokenizer=self._tokenizer, eos_tokens=self._model.eos_token_ids)
        self._num_requests += 1
        self._groups[request] = group
        self._scheduler.add(group.first)
        return request

    def step(self) -> list[News]:
        """Dispatches one step for all that can go on, and reads the one before.

        Returns:
            What has come of it since the last step: one entry for each completion with news. Those
            of `best_of` and `beam_width` are news when they are ranked, at the end.

        Raises:
            EngineDeadError: this step failed, or an earlier one. What was unfinished is "failed".
                Ctrl-C in a step also ends the engine.
        """
        self._check_alive()
        try:
            dispatched = self._dispatch(self._plan())
            while len(self._flights) > (dispatched if self._groups else 0):
                self._read()
        except BaseException as error:
            self._die(error)
            if not isinstance(error, Exception):  # Ctrl-C stays what it is
                raise
            raise EngineDeadError(f"a step failed: {error}") from error
        changed, self._changed = self._changed, {}
        return [News.since(completion, *before) for completion, before in changed.items()]

    def stream(self, request: Request) -> Iterator[News]:
        """Steps until a request is finished, and tells what comes of it from its beginning on."""
        self._check_mine(request)
        told: dict[Completion, tuple[int, int, str | None]] = {}
        while True:
            finished = request.finished  # before a pause, in which others may step to its end
            for completion in request.completions:
                before = told.get(completion, (0, 0, None))
                now = len(completion.tokens), len(completion.text), completion.finish_reason
                if now != before:
                    told[completion] = now
                    yield News.since(completion, request, *before[:2])
            if finished:
                return
            if not request.finished:
                self.step()

    def abort(self, request: Request) -> None:
        """Ends a request as it stands; its pages are free with the next step."""
        self._check_alive()
        self._check_mine(request)
        if request in self._groups:
            for seq in [*self._groups[request].live]:
                self._finish(seq, "aborted")

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: bool = True,
    ) -> list[Request]:
        """Serves prompts to their ends, other requests along with them.

        Args:
            prompts: texts or token ids.
            params: for all, or one for each.
            progress: whether to show a bar on stderr.

        Returns:
            The finished requests, in the order of the prompts.

        Raises:
            ValueError: a prompt or its parameters can't be served; none has been started.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
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
        left = set(requests)
        with tqdm(total=len(requests), unit="request", disable=not progress) as bar:
            while left:
                finished = left & {news.request for news in self.step() if news.request.finished}
                left -= finished
                bar.update(len(finished))
        return requests

    def warmup(self, params: Sequence[SamplingParams] | None = None) -> None:
        """Compiles every shape that a step may have.

        Args:
            params: what requests will ask for; None is prepared for anything.

        Raises:
            ValueError: the engine is not idle.
        """
        self._check_alive()
        if not self.idle:
            raise ValueError("warmup must run while the engine is idle")
        asked = {Drawing.FULL} if params is None else {drawing_of(one) for one in params}
        # Rows of several requests share a step, which then draws as the most demanding wants.
        self._worker.warmup([x for x in Drawing if x <= max(asked, default=-1)])

    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self._counters.snapshot(
            num_queued=len(self._scheduler.queue),
            num_running=len(self._scheduler.running),
            num_preemptions=self._scheduler.num_preemptions,
            compilations=self._worker.num_compiled,
            num_pages=self.config.num_pages,
            pool=self._worker.pool,
        )

    def check(self) -> None:
        """Waits for the device and checks every invariant of the page table.

        Raises:
            ValueError: names the first that is broken.
        """
        self._check_alive()
        self._worker.settle(self._scheduler.take_settlement())
        cached = self._cache.pages if self._cache is not None else ()
        pp.check_page_table(self.table, retained=np.asarray(cached, np.int32))

    def _plan(self) -> Plan:
        while (plan := self._scheduler.plan(in_flight=bool(self._flights))) is None:
            # Pages are short: for once the host waits, to know how many there really are.
            if self._flights:
                self._read()
                continue
            self._worker.settle(self._scheduler.take_settlement())
            self._scheduler.resync(int(self.table.num_free))
        return plan

    def _dispatch(self, plan: Plan) -> int:
        """Starts a step, and returns how many that were: 0 or 1."""
        self._worker.settle(self._scheduler.take_settlement(), plan.adoptions)
        flight = self._worker.dispatch(plan)
        if flight is None:
            return 0
        scheduler = self._scheduler
        num_empty = sum(-seq.num_computed % self.config.page_size for seq in scheduler.running)
        self._flights.append((flight, scheduler.ledger, scheduler.num_evictable, num_empty))
        self._counters.num_steps += 1
        self._counters.computed_tokens += len(plan.decodes)
        self._counters.computed_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        return 1

    def _read(self) -> None:
        """Waits for the oldest step that is in flight, and takes its tokens."""
        flight, ledger, num_cached, num_empty = self._flights.popleft()
        outcome = self._worker.read(flight)
        self._scheduler.observe(outcome.num_free, ledger)
        self._counters.count_pages(
            num_pages=self.config.num_pages,
            num_free=outcome.num_free,
            num_cached=num_cached,
            num_empty=num_empty,
            page_size=self.config.page_size,
        )
        now = time.perf_counter()
        for seq, token, ranked in outcome.tokens:
            seq.num_pending -= 1
            if not seq.finished:
                self._take(seq, token, ranked, now)
        for chunk in flight.plan.chunks:
            if chunk.seq.row is not None:
                self._scheduler.index(chunk.seq)

    def _take(self, seq: Seq, token: int, ranked: Ranked | None, now: float) -> None:
        """Gives a sequence its next token, or a beam what it could go on with."""
        request = seq.request
        if request.first_token_time is None:
            request.first_token_time = now
        if seq.steered:
            self._steer(seq, token, ranked)
            return
        group = self._groups[request]
        self._note(group, seq)
        before = len(seq.tokens)
        reason = group.accept(seq, token, ranked)
        self._counters.generated_tokens += len(seq.tokens) - before
        if reason is not None:
            self._finish(seq, reason)

    def _steer(self, seq: Seq, token: int, ranked: Ranked | None) -> None:
        group = self._groups[seq.request]
        if token < 0 or ranked is None:
            for beam in [*group.live]:
                self._finish(beam, "bad_logits")
            return
        advance = group.steer(seq, ranked[1:])
        if advance is None:
            return
        for beam in advance.ended:
            self._scheduler.remove(beam)
        for parent, child in advance.branches:
            self._scheduler.branch(parent, child)
        for beam, token in advance.goes_on:
            beam.tokens.append(token)
            self._scheduler.unpark(beam)
            beam.num_spare_rows = 0  # the branches have them
        if not group.live:
            self._conclude(group)

    def _finish(self, seq: Seq, reason: str) -> None:
        """Ends a sequence, and its request with the last of them."""
        group = self._groups[seq.request]
        self._note(group, seq)
        group.finish(seq, reason)
        self._scheduler.remove(seq)
        if not group.live:
            self._conclude(group)

    def _conclude(self, group: Group) -> None:
        request = group.request
        group.conclude()
        if group.ranks:
            for completion in request.completions:
                self._changed[completion] = (request, 0, 0)
        if request.params.beam_width:
            self._counters.generated_tokens += sum(len(one.tokens) for one in request.completions)
        self._counters.count_request(request)
        del self._groups[request]

    def _note(self, group: Group, seq: Seq) -> None:
        """Takes note of how long a completion is that is about to change, for the news."""
        if not group.ranks:
            completion = seq.completion
            before = (group.request, len(completion.tokens), len(completion.text))
            self._changed.setdefault(completion, before)

    def _check_mine(self, request: Request) -> None:
        if request not in self._groups and not request.finished:
            raise ValueError(f"request {request.number} is of another engine")

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(f"the engine is dead: {self._error}") from self._error

    def _die(self, error: BaseException) -> None:
        """Ends everything: the state's buffers may be gone with the step that failed."""
        self._error = error
        groups, self._groups = self._groups, {}
        self._flights.clear()
        for group in groups.values():
            group.abandon(error)
            self._counters.count_request(group.request)
