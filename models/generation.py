"""A running generation: the host's part, which rows hold which samples and what is dispatched."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.decoder import Decoder
from models.generate_state import (
    GenerateState,
    Progress,
    Status,
    decode,
    progress,
    release,
    resume,
)
from models.kv_cache import pool_bytes
from models.prefill import Requests, pack, prefill, reserve
from models.sampling import RowSampling, hash_prompt, sample_key

_PREFILL_CHUNK = 2048  # bounds the activations of a step; enough to keep a large GPU busy
_LOOK_SECONDS = 0.05  # between two looks of the host, where the caller does not say
_MAX_CHUNK = 128


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """News of one sample: tokens since the last news, and why it ended once it has."""

    prompt: int
    sample: int
    tokens: list[int]
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """All of one sample; finish_reason is the lower-case name of a `Status`."""

    prompt: int
    sample: int
    tokens: list[int]
    finish_reason: str


@dataclass(kw_only=True)
class Stats:
    """What a generation cost.

    Attributes:
        prompt_tokens: tokens run through prefill.
        prefill_tokens: new tokens that came out of prefill, the first of each sample.
        decode_tokens: new tokens that came out of the decode loop.
        compile_seconds: tracing and compiling; part of neither of the next two.
        prefill_seconds: prompts to first tokens.
        decode_seconds: everything else from the first prefill to the last token.
        page_size: tokens of a page.
        num_pages: pages of the pool.
        kv_dtype: of the pool.
        pool_bytes: of its K, V and their scales.
        pages_used: most pages in use at a time, seen once a chunk.
        pool_utilization: at that time, tokens held per slot of the pages in use.
    """

    prompt_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    page_size: int
    num_pages: int
    kv_dtype: str
    pool_bytes: int
    pages_used: int = 0
    pool_utilization: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """Completions in the order of prompts and samples, and what they cost."""

    completions: list[Completion]
    stats: Stats


@dataclass(kw_only=True, eq=False)
class _Sample:
    prompt: int
    sample: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    waiting: bool = False  # in a row, for a page
    seen: int = 0  # tokens of its row that the host has read


class Generation:
    """A running generation: iterate for `NewTokens`, or ask for the `result` of all of it.

    The next chunk is dispatched before the host looks at the last one, so that the device does not
    wait for the host, except where the host must free, start or resume rows in between.

    Attributes:
        stats: so far; complete once the iteration has ended.
        state: the newest state on the device; the next step takes its buffers.
    """

    def __init__(
        self,
        model: Decoder,
        state: GenerateState,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        num_samples: int,
        sampling: RowSampling | None,
        seed: int,
        stop_tokens: Sequence[int],
        chunk: int | None,
        prefill_chunk: int | None,
        implementation: str | None,
    ):
        """See `generate`, which checks the values and makes the state."""
        self.stats = Stats(
            page_size=state.table.page_size,
            num_pages=state.table.num_pages,
            kv_dtype=state.pool.layers[0].k_pages.dtype.name,
            pool_bytes=pool_bytes(state.pool),
        )
        self._model = nnx.split(model)
        self.state = state
        self._prompts = [list(prompt) for prompt in prompts]
        self._max_new_tokens = max_new_tokens
        self._num_samples = num_samples
        self._sampling = jax.device_get(sampling)  # [num_prompts]
        self._key = jax.random.key(seed)
        self._stop_tokens = np.asarray(stop_tokens, np.int32)
        self._chunk = chunk
        self._prefill_chunk = prefill_chunk or _PREFILL_CHUNK
        self._how = {"implementation": implementation}
        self._samples = [
            _Sample(prompt=prompt, sample=sample)
            for prompt in range(len(prompts))
            for sample in range(num_samples)
        ]
        self._queue = deque(self._samples)
        self._rows: list[_Sample | None] = [None] * state.table.max_seqs
        self._ended = True  # rows have ended (or none was taken yet) since the queue was served
        self._events = self._run()

    def __iter__(self) -> Iterator[NewTokens]:
        return self._events

    def stop(self, prompt: int, sample: int) -> None:
        """Ends one sample as "stopped", for a reason that only the caller can see."""
        stopped = self._samples[prompt * self._num_samples + sample]
        if stopped.finish_reason is None:
            stopped.finish_reason = "stopped"
            self._ended = True

    def result(self) -> Result:
        """Runs to the end and returns everything."""
        for _ in self._events:
            pass
        completions = [
            Completion(
                prompt=sample.prompt,
                sample=sample.sample,
                tokens=sample.tokens,
                finish_reason=sample.finish_reason or "",
            )
            for sample in self._samples
        ]
        return Result(completions=completions, stats=self.stats)

    def _run(self) -> Iterator[NewTokens]:
        start = time.perf_counter()
        self._compile(decode, *self._model, self.state, 1, **self._how)
        self._compile(progress, self.state)
        pending: Progress | None = None
        num_steps, last_look = self._chunk or 1, time.perf_counter()
        while any(sample.finish_reason is None for sample in self._samples):
            if self._host_needed():
                if pending is not None:
                    yield from self._read(pending)
                    pending = None
                yield from self._reassign_rows()
            self.state = decode(*self._model, self.state, num_steps, **self._how)
            latest = progress(self.state)
            if pending is not None:
                yield from self._read(pending)
            pending = latest
            if self._chunk is None:
                look, last_look = last_look, time.perf_counter()
                num_steps = _next_chunk(num_steps, last_look - look)
        elapsed = time.perf_counter() - start
        stats = self.stats
        stats.decode_seconds = elapsed - stats.prefill_seconds - stats.compile_seconds

    def _host_needed(self) -> bool:
        held = [sample for sample in self._rows if sample and sample.finish_reason is None]
        stuck = all(sample.waiting for sample in held)
        waiting = bool(self._queue) or any(sample.waiting for sample in held)
        return waiting and (self._ended or stuck)

    def _reassign_rows(self) -> Iterator[NewTokens]:
        """Frees rows that ended, and gives their pages to waiting rows first, then to the queue."""
        held = [sample for sample in self._rows if sample and sample.finish_reason is None]
        ended = len(held) < len(self._rows) - self._rows.count(None)
        if held and not ended and all(sample.waiting for sample in held):
            # Nobody is left to free a page. The least work is lost with the shortest sample.
            shortest = min(reversed(held), key=lambda sample: len(sample.tokens))
            held.remove(shortest)
            if held:
                self._queue.appendleft(shortest)
            else:
                yield self._finish(shortest, "out_of_pages")
        released = [sample is not None and sample not in held for sample in self._rows]
        self._rows = [sample if sample in held else None for sample in self._rows]
        if any(released):
            self.state = self._call(release, self.state, np.asarray(released))
        waiting = [sample for sample in held if sample.waiting]
        if waiting:
            self.state = self._call(resume, self.state)
            for sample in waiting:
                sample.waiting = False
            self._ended = ended
        else:
            self._ended = False
            yield from self._start_queued()

    def _start_queued(self) -> Iterator[NewTokens]:
        """Prefills as many samples of the queue as there are rows; the others come back."""
        groups: list[list[_Sample]] = []  # new samples of one prompt share its prefill
        for row, holder in enumerate(self._rows):
            sample = None if holder else (yield from self._next_queued())
            if sample is None:
                continue
            self._rows[row] = sample
            sample.seen, sample.waiting = 0, False
            leader = groups[-1][0] if groups else None
            if leader and leader.prompt == sample.prompt and not (leader.tokens or sample.tokens):
                groups[-1].append(sample)
            else:
                groups.append([sample])
        if not groups:
            return
        self.state, reserved = self._call(reserve, self.state, self._requests(groups))
        rows = np.asarray(reserved)  # waits for the device
        started = np.flatnonzero(rows[:, 0] < len(self._rows))
        contexts = [self._context(groups[index][0]) for index in started]
        chunks = pack(
            contexts, rows[started], size=self._prefill_chunk, max_prompts=len(self._rows)
        )
        for chunk in chunks[:1]:  # the others have its shape
            self._compile(prefill, *self._model, self.state, chunk, **self._how)
        start = time.perf_counter()
        report = progress(self.state)
        for chunk in chunks:
            self.state = prefill(*self._model, self.state, chunk, **self._how)
            # One chunk ahead of the device, so that it need not wait, and no more: Ctrl-C is heard
            # in between.
            last, report = report, progress(self.state)
            jax.block_until_ready(last)
        report = jax.device_get(report)
        self.stats.prompt_tokens += sum(map(len, contexts))
        self.stats.prefill_seconds += time.perf_counter() - start
        yield from self._read(report)

    def _next_queued(self) -> Generator[NewTokens, None, _Sample | None]:
        while self._queue:
            sample = self._queue.popleft()
            if sample.finish_reason is not None:
                continue
            if len(self._context(sample)) <= self.stats.num_pages * self.stats.page_size:
                return sample
            yield self._finish(sample, "out_of_pages")
        return None

    def _context(self, sample: _Sample) -> list[int]:
        return [*self._prompts[sample.prompt], *sample.tokens]

    def _requests(self, groups: list[list[_Sample]]) -> Requests:
        size = len(self._rows)  # not len(groups): one shape for all
        lens, limits, prompts = np.zeros((3, size), np.int32)
        rows = np.full((size, self._num_samples), len(self._rows), np.int32)
        seeds = np.zeros((2, size, self._num_samples), np.uint32)
        for index, group in enumerate(groups):
            lens[index] = len(self._context(group[0]))
            limits[index] = self._max_new_tokens - len(group[0].tokens)
            prompts[index] = group[0].prompt
            seeds[0, index] = hash_prompt(self._prompts[group[0].prompt])
            for column, sample in enumerate(group):
                rows[index, column] = self._rows.index(sample)
                seeds[1, index, column] = sample.sample
        return Requests(
            lens=jnp.asarray(lens),
            rows=jnp.asarray(rows),
            keys=self._call(_sample_keys, self._key, *seeds),
            max_new_tokens=jnp.asarray(limits),
            stop_tokens=jnp.asarray(np.tile(self._stop_tokens, (size, 1))),
            sampling=jax.tree.map(lambda values: values[prompts], self._sampling),
        )

    def _read(self, report: Progress) -> Iterator[NewTokens]:
        """Waits for a report and tells its news; the rows must still be those of its dispatch."""
        report = jax.device_get(report)
        self._measure(report)
        unstarted = []
        for row, sample in enumerate(self._rows):
            if sample is None or sample.finish_reason is not None:
                continue
            status = Status(int(report.status[row]))
            if status is Status.OUT_OF_PAGES and report.seq_lens[row] == 0:
                self._rows[row] = None
                unstarted.append(sample)
                continue
            tokens = report.tokens[row, sample.seen : report.num_tokens[row]].tolist()
            first = 1 if tokens and sample.seen == 0 else 0
            self.stats.prefill_tokens += first
            self.stats.decode_tokens += len(tokens) - first
            sample.seen += len(tokens)
            sample.tokens += tokens
            sample.waiting = status is Status.OUT_OF_PAGES
            if status not in (Status.RUNNING, Status.OUT_OF_PAGES):
                yield self._finish(sample, status.name.lower(), tokens)
            elif tokens:
                yield NewTokens(
                    prompt=sample.prompt, sample=sample.sample, tokens=tokens, finish_reason=None
                )
        self._queue.extendleft(reversed(unstarted))

    def _finish(self, sample: _Sample, reason: str, tokens: Sequence[int] = ()) -> NewTokens:
        sample.finish_reason = reason
        self._ended = True
        return NewTokens(
            prompt=sample.prompt, sample=sample.sample, tokens=list(tokens), finish_reason=reason
        )

    def _measure(self, report: Progress) -> None:
        stats = self.stats
        pages = stats.num_pages - int(report.num_free)
        if pages >= max(stats.pages_used, 1):
            # Only full pages are shared, so every reference beyond the first hides a full page.
            references = int(np.sum(-(-report.seq_lens // stats.page_size)))
            held = int(np.sum(report.seq_lens)) - (references - pages) * stats.page_size
            stats.pages_used = pages
            stats.pool_utilization = held / (pages * stats.page_size)

    def _compile(self, function: Any, *args: Any, **kwargs: Any) -> None:
        """Fills the cache of a jitted function, so that its first call is not a slow one."""
        start = time.perf_counter()
        function.lower(*args, **kwargs).compile()
        self.stats.compile_seconds += time.perf_counter() - start

    def _call(self, function: Any, *args: Any) -> Any:
        self._compile(function, *args)
        return function(*args)


def _next_chunk(num_steps: int, seconds: float) -> int:
    """Steps of the next chunk, so that looking costs little and text still seems to flow."""
    if seconds < 0.5 * _LOOK_SECONDS:
        return min(2 * num_steps, _MAX_CHUNK)
    return max(num_steps // 2, 1) if seconds > 2 * _LOOK_SECONDS else num_steps


@jax.jit
def _sample_keys(key: jax.Array, hashes: jax.Array, numbers: jax.Array) -> jax.Array:
    """Keys [P, S] of samples by the contents of their prompt and their number."""
    return jax.vmap(jax.vmap(partial(sample_key, key)))(hashes, numbers)
