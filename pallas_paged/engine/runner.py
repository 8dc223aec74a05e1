"""The model runner: dispatches scheduled calls to the device and reads back their tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.engine.batch import Batch, BatchBuckets, ChunkTokens, pack
from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.input_batch import set_slot, slot_states
from pallas_paged.engine.kv_cache import create_pool, pool_dtype
from pallas_paged.engine.kv_cache_manager import TableUpdate
from pallas_paged.engine.model import Model
from pallas_paged.engine.runner_output import InFlight, RunnerOutput, read_output, targets_of
from pallas_paged.engine.sampler import (
    SamplingMode,
    TokenCounts,
    create_token_counts,
    set_token_counts,
)
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from pallas_paged.engine.scheduler_output import Attachment, SchedulerOutput
from pallas_paged.engine.sequence import Sequence
from pallas_paged.engine.state import EngineState, TableArrays, fork, set_slots, update_table
from pallas_paged.engine.step import StepOutput, make_step
from pallas_paged.kv_pool import KVPool
from pallas_paged.page_table import PageTable, create_page_table

_MAX_PAGES = 1024  # pages that one update retains or releases
_MAX_ATTACHMENTS = 16  # slots that one update fills
_MAX_SET = 16  # slots that one call sets
_COUNTED_TOKENS = 1024  # tokens that one call counts for penalties
_COMPILE_THREADS = 16


class ModelRunner:
    """Holds the state on the device; packs what is scheduled, unpacks what is computed.

    Attributes:
        buckets: shapes of the batches.
        pool_shape: shapes and dtypes of the pool.
    """

    def __init__(
        self, model: Model, params: Any, config: EngineConfig, *, num_pages: int, max_len: int
    ):
        """See `Engine`; num_pages and max_len are those that the config leaves open."""
        self.buckets = BatchBuckets(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._model, self._config, self._num_pages = model, config, num_pages
        self._dtype = pool_dtype(model.kv_cache_spec, config.kv_cache_dtype)
        leaves, self._structure = jax.tree.flatten(params)
        self._leaves = tuple(map(jnp.asarray, leaves))
        self._step = make_step(model, self._structure, config.implementation)
        num_slots = config.max_num_seqs
        self._state = EngineState(
            table=create_page_table(
                num_pages=num_pages,
                page_size=config.page_size,
                max_seqs=num_slots,
                pages_per_seq=-(-max_len // config.page_size),
            ),
            pool=self._create_pool(),
            slots=jax.tree.map(jnp.asarray, slot_states(num_slots, len(model.eos_token_ids))),
            sound=jnp.asarray(True),
        )
        self.pool_shape = jax.eval_shape(self._create_pool)
        self._counts: TokenCounts | None = None
        self._num_logprobs = min(MAX_LOGPROBS, model.vocab_size)
        self._compiled: dict[tuple[int, int], set[SamplingMode]] = {}
        if config.implementation is not None:
            # Traces a step, so that one that can't do the model's attention fails now.
            shape = self.buckets.all()[0]
            batch = self._pack([], [], [], shape=shape, mode=SamplingMode())
            jax.eval_shape(self._step, self._leaves, self._state, None, batch)

    @property
    def num_compiled(self) -> int:
        """Number of steps compiled: shapes times sampling modes."""
        return sum(map(len, self._compiled.values()))

    @property
    def table(self) -> PageTable:
        """The page table after all dispatched calls; the next call takes its buffers."""
        return self._state.table

    def update_params(self, params: Any) -> None:
        """Use other parameters from the next call on. Arrays on the device are not copied.

        Raises:
            ValueError: structure, shapes or dtypes differ; the message names the first leaf.
        """
        leaves, structure = jax.tree.flatten(params)
        if structure != self._structure:  # type: ignore[operator]
            raise ValueError(f"params have the structure {structure}, not {self._structure}")
        paths = jax.tree_util.tree_flatten_with_path(params)[0]
        for (path, new), old in zip(paths, self._leaves, strict=True):
            if (np.shape(new), jnp.result_type(new)) != (old.shape, old.dtype):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is {jnp.result_type(new)}{np.shape(new)}, "
                    f"but {old.dtype}{old.shape} was compiled"
                )
        self._leaves = tuple(map(jnp.asarray, leaves))

    def sleep(self) -> None:
        """Free the memory of the pool."""
        for leaf in jax.tree.leaves((self._state.pool, self._counts)):
            leaf.delete()
        self._counts = None

    def wake(self) -> None:
        """Allocate the pool again."""
        self._state = replace(self._state, pool=self._create_pool())

    def warmup(
        self,
        modes: list[SamplingMode],
        progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda steps, _: steps,
    ) -> None:
        """Compile the steps of every shape in these modes, in threads, and run each on nothing.

        Args:
            modes: what to compile.
            progress: wraps the compiled steps, given their number, to show how far it has come.
        """
        steps = [
            (shape, mode if shape[1] else replace(mode, prompt_logprobs=-1))
            for shape in self.buckets.all()
            for mode in modes
        ]
        steps = list(dict.fromkeys(steps))
        if any(mode.penalties for mode in modes):
            self._make_counts()

        def compile_step(step: tuple[tuple[int, int], SamplingMode]) -> None:
            batch = self._pack([], [], [], shape=step[0], mode=step[1])
            counts = self._counts if step[1].penalties else None
            self._step.lower(self._leaves, self._state, counts, batch).compile()  # type: ignore[attr-defined]

        with ThreadPoolExecutor(min(_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            for _ in progress(pool.map(compile_step, steps), len(steps)):
                pass
        # Twice: a CUDA graph is made by the second execution.
        for shape, mode in steps * 2:
            self._run([], [], [], mode, shape=shape)
        self._update(TableUpdate(), [])
        self._fork([])
        self._set([], [])
        if self._counts is not None:
            self._count_tokens(self._config.max_num_seqs, [0], [])  # a slot that is not there
        jax.block_until_ready(self._state)

    def update_table(self, update: TableUpdate, attachments: list[Attachment]) -> None:
        """Apply what the scheduler has decided to the page table."""
        if update or attachments:
            self._update(update, attachments)

    def dispatch(self, scheduled: SchedulerOutput) -> InFlight | None:
        """Start a call; return None if there is nothing to compute."""
        if scheduled.forks:
            self._fork(scheduled.forks)
        decodes, chunks = scheduled.decodes, scheduled.chunks
        if not decodes and not chunks:
            return None
        starting = [*scheduled.resumed, *(chunk.sequence for chunk in chunks if chunk.is_last)]
        if starting:
            self._start(starting, num_resumed=len(scheduled.resumed))
        modes = {decode.sequence.mode for decode in decodes}
        mode = reduce(or_, modes.union(chunk.sequence.mode for chunk in chunks))
        wanted = (x.sequence.mode.prompt_logprobs for x in chunks if targets_of(x) is not None)
        mode = replace(mode, prompt_logprobs=max(wanted, default=-1))
        packed = [
            ChunkTokens(
                slot=chunk.sequence.running_slot,
                token_ids=chunk.token_ids,
                is_last=chunk.is_last,
                targets=targets_of(chunk),
            )
            for chunk in chunks
        ]
        num_decodes, output = self._run(
            [decode.sequence.running_slot for decode in decodes],
            [decode.num_tokens for decode in decodes],
            packed,
            mode,
        )
        return InFlight(scheduled=scheduled, num_decodes=num_decodes, output=output)

    def read(self, in_flight: InFlight) -> RunnerOutput:
        """Wait for a call, and note where the K/V of its sequences are.

        Raises:
            RuntimeError: the page table did not have what the host counted on.
        """
        return read_output(in_flight, jax.device_get(in_flight.output), self._config.page_size)

    def _run(
        self,
        decode_slots: list[int],
        num_steps: list[int],
        chunks: list[ChunkTokens],
        mode: SamplingMode,
        *,
        shape: tuple[int, int] | None = None,
    ) -> tuple[int, StepOutput]:
        """Dispatch a batch; return its number of decoding rows too."""
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        shape = shape or self.buckets.fit(len(decode_slots), num_tokens)
        compiled = self._compiled.setdefault(shape, set())
        if mode not in compiled:  # a larger one serves as well, if it is there
            larger = [other for other in compiled if other.covers(mode)]
            mode = min(larger, key=_cost, default=mode)
            compiled.add(mode)
        batch = self._pack(
            decode_slots,
            num_steps,
            chunks,
            shape=shape,
            mode=mode,
        )
        counts = self._make_counts() if mode.penalties else None
        self._state, counts, output = self._step(self._leaves, self._state, counts, batch)
        if counts is not None:
            self._counts = counts
        for leaf in jax.tree.leaves(output):
            leaf.copy_to_host_async()
        return shape[0], output

    def _pack(
        self,
        decode_slots: list[int],
        num_steps: list[int],
        chunks: list[ChunkTokens],
        *,
        shape: tuple[int, int],
        mode: SamplingMode,
    ) -> Batch:
        most = self._num_logprobs
        mode = replace(
            mode,
            logprobs=min(mode.logprobs, most),
            prompt_logprobs=min(mode.prompt_logprobs, most),
        )
        return pack(
            decode_slots,
            num_steps,
            chunks,
            shape=shape,
            max_num_seqs=self._config.max_num_seqs,
            mode=mode,
            max_num_steps=self._config.num_scheduler_steps,
        )

    def _create_pool(self) -> KVPool:
        return create_pool(
            self._model.kv_cache_spec,
            num_pages=self._num_pages,
            page_size=self._config.page_size,
            dtype=self._dtype,
        )

    def _make_counts(self) -> TokenCounts:
        if self._counts is None:
            self._counts = create_token_counts(self._config.max_num_seqs, self._model.vocab_size)
        return self._counts

    def _start(self, starting: list[Sequence], *, num_resumed: int) -> None:
        """Set the slots of sequences that sample for the first time since they have them.

        Args:
            starting: the sequences.
            num_resumed: how many of them, the first ones, also need their last token.
        """
        for first in range(0, len(starting), _MAX_SET):
            some = starting[first : first + _MAX_SET]
            tokens = [
                one.token_ids[-1] if first + i < num_resumed else -1 for i, one in enumerate(some)
            ]
            self._set(some, tokens)
        for one in starting:
            if one.mode.penalties:
                num_prompt = len(one.request.prompt_token_ids)
                prompt, output = one.token_ids[:num_prompt], one.token_ids[num_prompt:]
                self._count_tokens(one.running_slot, prompt, output)

    def _set(self, starting: list[Sequence], last_token_ids: list[int]) -> None:
        num_eos = len(self._model.eos_token_ids)
        num_slots, values = self._config.max_num_seqs, slot_states(_MAX_SET, num_eos)
        for entry, one in enumerate(starting):
            set_slot(values, entry, one, last_token_ids[entry])
        indices = _padded([one.running_slot for one in starting], _MAX_SET, num_slots)
        slots = set_slots(self._state.slots, indices, values)
        self._state = replace(self._state, slots=slots)

    def _count_tokens(
        self, slot: int, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> None:
        for first in range(0, max(len(prompt_token_ids), len(output_token_ids)), _COUNTED_TOKENS):
            piece = slice(first, first + _COUNTED_TOKENS)
            self._counts = _set_token_counts(
                self._make_counts(),
                np.int32(slot),
                _padded(prompt_token_ids[piece], _COUNTED_TOKENS, -1),
                _padded(output_token_ids[piece], _COUNTED_TOKENS, -1),
                np.bool_(first == 0),
            )

    def _update(self, update: TableUpdate, attachments: list[Attachment]) -> None:
        """Retain, then free, release and attach, in as few calls of one shape as possible."""
        retained = _split(update.retained, _MAX_PAGES)
        released = _split(update.released, _MAX_PAGES)
        attached = _split(attachments, _MAX_ATTACHMENTS)
        for pages in retained[:-1]:
            self._change(retained=pages)
        first = attached.pop(0) if len(released) == 1 else []
        self._change(
            retained=retained[-1], freed=update.freed, released=released[0], attachments=first
        )
        for pages in released[1:]:
            self._change(released=pages)
        for entries in attached:
            self._change(attachments=entries)

    def _change(
        self,
        *,
        retained: Iterable[int] = (),
        freed: Iterable[int] = (),
        released: Iterable[int] = (),
        attachments: Iterable[Attachment] = (),
    ) -> None:
        table = self.table
        is_freed = np.zeros(table.max_seqs, bool)
        is_freed[list(freed)] = True
        pages = np.full((_MAX_ATTACHMENTS, table.pages_per_seq), table.num_pages, np.int32)
        slots = [slot for slot, _ in attachments]
        for entry, (_, attached) in enumerate(attachments):
            pages[entry, : len(attached)] = attached
        arrays = TableArrays(
            retained=_padded(retained, _MAX_PAGES, table.num_pages),
            freed=is_freed,
            released=_padded(released, _MAX_PAGES, table.num_pages),
            slots=_padded(slots, _MAX_ATTACHMENTS, table.max_seqs),
            pages=pages,
        )
        table, sound = update_table(table, self._state.sound, arrays)
        self._state = replace(self._state, table=table, sound=sound)

    def _fork(self, forks: list[tuple[int, int]]) -> None:
        num_slots = self._config.max_num_seqs
        src, dst = (_padded([x[i] for x in forks], num_slots, num_slots) for i in (0, 1))
        self._state = fork(self._state, src, dst)


def modes_for(params: list[SamplingParams] | None) -> list[SamplingMode]:
    """Return the sampling modes to compile for requests with these parameters.

    Steps without draws, or with draws only, have a mode of their own, because filters and
    log-probabilities cost time in every row. None is for any request.
    """
    full = SamplingMode(
        draws=True, filters=True, processors=True, penalties=True, logprobs=MAX_LOGPROBS
    )
    if params is None:
        scores = replace(full, prompt_logprobs=MAX_LOGPROBS)
        return [SamplingMode(), SamplingMode(draws=True), full, scores]
    modes = {SamplingMode.of(one) for one in params}
    everything = reduce(or_, modes, SamplingMode())
    return sorted({*modes, everything, replace(everything, prompt_logprobs=-1)}, key=_cost)


_set_token_counts = jax.jit(set_token_counts, donate_argnums=0)


def _cost(mode: SamplingMode) -> tuple[int, ...]:
    return (
        mode.prompt_logprobs,
        mode.penalties,
        mode.filters,
        mode.logprobs,
        mode.processors,
        mode.draws,
    )


def _split(entries: list[Any], size: int) -> list[list[Any]]:
    """Entries in as many pieces as calls take, at least one."""
    return [entries[start : start + size] for start in range(0, max(len(entries), 1), size)]


def _padded(values: Iterable[int], size: int, padding: int) -> np.ndarray:
    values, padded = list(values), np.full(size, padding, np.int32)
    padded[: len(values)] = values
    return padded
