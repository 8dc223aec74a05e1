"""The model runner: dispatches scheduled calls to the device and reads back their tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from itertools import zip_longest
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.engine.batch import Batch, BatchBuckets, pack
from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.input_batch import set_slot, slot_states
from pallas_paged.engine.kv_cache import create_pool, pool_dtype
from pallas_paged.engine.kv_cache_manager import TableUpdate
from pallas_paged.engine.model import Model
from pallas_paged.engine.runner_output import InFlight, RunnerOutput, read_output
from pallas_paged.engine.sampler import (
    SamplingMode,
    TokenCounts,
    create_token_counts,
    set_token_counts,
)
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from pallas_paged.engine.scheduler_output import Attachment, Chunk, Decode, SchedulerOutput
from pallas_paged.engine.sequence import Sequence
from pallas_paged.engine.state import EngineState, TableArrays, fork, set_slots, update_table
from pallas_paged.engine.step import StepOutput, make_step
from pallas_paged.kv_pool import KVPool
from pallas_paged.page_table import PageTable, create_page_table

_MAX_PAGES = 1024  # pages that one update retains or releases
_MAX_ATTACHMENTS = 16  # slots that one update fills
_MAX_SET = 16  # slots that one call sets
_COUNTED_TOKENS = 1024  # tokens that one call counts for penalties
_COMPILE_THREADS = 6


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
            valid=jnp.asarray(True),
        )
        self.pool_shape = jax.eval_shape(self._create_pool)
        self._counts: TokenCounts | None = None
        self._compiled: dict[tuple[int, int], set[SamplingMode]] = {}
        if config.implementation is not None:
            # Traces a step, so that one that can't do the model's attention fails now.
            shape = self.buckets.all()[0]
            batch = self._pack([], [], shape, SamplingMode())
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
            batch = self._pack([], [], *step)
            counts = self._counts if step[1].penalties else None
            self._step.lower(self._leaves, self._state, counts, batch).compile()  # type: ignore[attr-defined]

        with ThreadPoolExecutor(min(_COMPILE_THREADS, os.cpu_count() or 1)) as pool:
            for _ in progress(pool.map(compile_step, steps), len(steps)):
                pass
        # Twice: a CUDA graph is made by the second execution.
        for shape, mode in steps * 2:
            self._run([], [], shape, mode)
        self._update(TableUpdate(), [])
        self._fork([])
        self._set_slots([], [])
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
        for some in _split(starting, _MAX_SET) if starting else []:
            self._set_slots(some, scheduled.resumed)
        for one in starting:
            if one.mode.penalties:
                num_prompt = len(one.request.prompt_token_ids)
                prompt, new = one.token_ids[:num_prompt], one.token_ids[num_prompt:]
                self._count_tokens(one.running_slot, prompt, new)
        sequences = [x.sequence for x in decodes] + [x.sequence for x in chunks]
        mode = reduce(or_, {one.mode for one in sequences})
        wanted = (x.sequence.mode.prompt_logprobs for x in chunks if x.targets is not None)
        mode = replace(mode, prompt_logprobs=max(wanted, default=-1))
        shape = self.buckets.fit(len(decodes), sum(len(chunk.token_ids) for chunk in chunks))
        output = self._run(decodes, chunks, shape, mode)
        return InFlight(scheduled=scheduled, num_decodes=shape[0], output=output)

    def read(self, in_flight: InFlight) -> RunnerOutput:
        """Wait for a call, and note where the K/V of its sequences are.

        Raises:
            RuntimeError: the page table did not have what the host counted on.
        """
        return read_output(in_flight, jax.device_get(in_flight.output), self._config.page_size)

    def _run(
        self, decodes: list[Decode], chunks: list[Chunk], shape: tuple[int, int], mode: SamplingMode
    ) -> StepOutput:
        """Dispatch a batch."""
        compiled = self._compiled.setdefault(shape, set())
        if mode not in compiled:  # a larger one serves as well, but for a sort in each decode step
            larger = (x for x in compiled if x.covers(mode) and (chunks or x.sorts == mode.sorts))
            mode = min(larger, default=mode)
            compiled.add(mode)
        batch = self._pack(decodes, chunks, shape, mode)
        counts = self._make_counts() if mode.penalties else None
        self._state, counts, output = self._step(self._leaves, self._state, counts, batch)
        if counts is not None:
            self._counts = counts
        for leaf in jax.tree.leaves(output):
            leaf.copy_to_host_async()
        return output

    def _pack(
        self, decodes: list[Decode], chunks: list[Chunk], shape: tuple[int, int], mode: SamplingMode
    ) -> Batch:
        return pack(
            decodes,
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

    def _set_slots(self, starting: list[Sequence], resumed: list[Sequence]) -> None:
        """Set the slots of sequences that begin to sample; resumed ones also need their token."""
        values = slot_states(_MAX_SET, len(self._model.eos_token_ids))
        for entry, one in enumerate(starting):
            set_slot(values, entry, one, one.token_ids[-1] if one in resumed else -1)
        slots = [one.running_slot for one in starting]
        indices = _padded(slots, _MAX_SET, self._config.max_num_seqs)
        states = set_slots(self._state.slots, indices, values)
        self._state = replace(self._state, slots=states)

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
        """Retain all, then free, release and attach, in as few calls of one shape as possible."""
        *earlier, retained = _split(update.retained, _MAX_PAGES)
        for pages in earlier:
            self._change(pages, [], [], [])
        freed = update.freed
        released = _split(update.released, _MAX_PAGES)
        attached = _split(attachments, _MAX_ATTACHMENTS)
        for pages, entries in zip_longest(released, attached):
            self._change(retained, freed, pages or [], entries or [])
            retained, freed = [], []

    def _change(
        self,
        retained: list[int],
        freed: list[int],
        released: list[int],
        attachments: list[Attachment],
    ) -> None:
        table = self.table
        is_freed = np.zeros(table.max_seqs, bool)
        is_freed[freed] = True
        pages = np.full((_MAX_ATTACHMENTS, table.pages_per_seq), table.num_pages, np.int32)
        for entry, (_, attached) in enumerate(attachments):
            pages[entry, : len(attached)] = attached
        arrays = TableArrays(
            retained=_padded(retained, _MAX_PAGES, table.num_pages),
            freed=is_freed,
            released=_padded(released, _MAX_PAGES, table.num_pages),
            slots=_padded([slot for slot, _ in attachments], _MAX_ATTACHMENTS, table.max_seqs),
            pages=pages,
        )
        table, valid = update_table(table, self._state.valid, arrays)
        self._state = replace(self._state, table=table, valid=valid)

    def _fork(self, forks: list[tuple[int, int]]) -> None:
        num_slots = self._config.max_num_seqs
        src, dst = (_padded([x[i] for x in forks], num_slots, num_slots) for i in (0, 1))
        self._state = fork(self._state, src, dst)


def modes_for(params: Iterable[SamplingParams] | None) -> list[SamplingMode]:
    """Return the sampling modes to compile for requests with these parameters.

    Steps without draws, or with draws only, have a mode of their own, because filters and
    log-probabilities cost time in every row. So have steps without a sort, which run in a loop.
    None is for any request.
    """
    if params is None:
        loop = SamplingMode(draws=True, processors=True, penalties=True, logprobs=0)
        full = replace(loop, filters=True, logprobs=MAX_LOGPROBS)
        scores = replace(full, prompt_logprobs=MAX_LOGPROBS)
        return [SamplingMode(), SamplingMode(draws=True), loop, full, scores]
    for one in params:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"params has {one!r}, which must be SamplingParams")
    modes = {SamplingMode.of(one) for one in params}
    everything = reduce(or_, modes, SamplingMode())
    modes |= {everything, replace(everything, prompt_logprobs=-1)}
    if in_loop := [mode for mode in modes if not mode.sorts]:
        modes.add(reduce(or_, in_loop))
    return sorted(modes)


_set_token_counts = jax.jit(set_token_counts, donate_argnums=0)


def _split(entries: list[Any], size: int) -> list[list[Any]]:
    """Entries in as many pieces as calls take, at least one."""
    return [entries[start : start + size] for start in range(0, max(len(entries), 1), size)]


def _padded(values: list[int], size: int, padding: int) -> np.ndarray:
    padded = np.full(size, padding, np.int32)
    padded[: len(values)] = values
    return padded
