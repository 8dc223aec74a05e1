"""The model runner: packs scheduled calls for the executor and reads back their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, reduce
from itertools import zip_longest
from operator import or_
from typing import Any

import jax
import numpy as np

from pallas_paged.checks import INT32_MAX
from pallas_paged.engine.device.batch import Batch, BatchBuckets, Shape, StepOutput, read_output
from pallas_paged.engine.device.compilation import Compilation
from pallas_paged.engine.device.compiled_steps import CompiledSteps, Step
from pallas_paged.engine.device.executor import Executor
from pallas_paged.engine.device.program import fit_mode
from pallas_paged.engine.device.state import TableArrays, create_history, set_slot, slot_states
from pallas_paged.engine.requests.grammar import empty_masks, fill_masks
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.engine.schedule.calls import (
    Attachment,
    Chunk,
    Decode,
    RunnerOutput,
    SchedulerOutput,
)
from pallas_paged.engine.schedule.kv_cache_manager import TableUpdate
from pallas_paged.pages.table import PageTable

_MAX_PAGES = 1024  # pages that one update retains or releases
_MAX_ATTACHMENTS = 16  # slots that one update fills
_MAX_SET = 16  # slots that one call sets
_MAX_HISTORY = 1 << 18  # tokens that one call sets for drafts: 1 MiB
_COUNTED_TOKENS = 1024  # tokens that one call counts for penalties

WarmupStep = tuple[Compilation, Callable[[], object]]


class ModelRunner:
    """Packs what is scheduled for the executor, and unpacks what it has computed.

    Attributes:
        buckets: shapes of the batches.
        executor: the state on the devices, and the calls on it.
        steps: that are compiled.
    """

    def __init__(self, executor: Executor):
        config = executor.config
        self.executor = executor
        self.buckets = BatchBuckets(config)
        self.steps = CompiledSteps(self.buckets, self._compilation)
        self._undrawn: Batch | None = None  # of the newest call, if it waits for masks
        self._masks = empty_masks(0, executor.model.vocab_size)  # of the newest draw
        if config.implementation is not None or executor.placement.mesh is not None:
            executor.trace(self.empty_batch(self.buckets.all()[0], SamplingMode()))

    @cached_property
    def routed_experts_shape(self) -> tuple[int, int] | None:
        """Layers with experts and experts of a token (L, k) that the model reports, or None.

        Traces the model, and compiles nothing.

        Raises:
            ValueError: it reports experts, and does not use given ones.
        """
        batch = self.empty_batch(self.buckets.all()[0], SamplingMode(routed_experts=True))
        if (reported := self.executor.trace(batch).routed_experts) is None:
            return None
        assert batch.chunks is not None
        given = np.full(reported.shape, -1, np.int16)
        self.executor.trace(replace(batch, chunks=replace(batch.chunks, routed_experts=given)))
        _, num_layers, k = reported.shape
        return num_layers, k

    @property
    def table(self) -> PageTable:
        """The page table after all dispatched calls; the next call takes its buffers."""
        return self.executor.state.table

    def empty_batch(self, shape: Shape, mode: SamplingMode) -> Batch:
        """Return a batch that computes nothing."""
        return self._pack([], [], shape, mode)

    def warmup(self, modes: list[SamplingMode], progress: bool = False) -> None:
        """Compile the steps of every shape in these modes, in threads, and run each on nothing."""
        self._compile(self.steps.all(modes), progress)

    def start_warmup(self, modes: list[SamplingMode], progress: bool = False) -> list[WarmupStep]:
        """Compile the fewest steps that serve any batch of these modes, and run them on nothing.

        Returns:
            The others, for other threads to compile, and a function to call when each is compiled.
            Until then its batches run in a larger one.
        """
        first, rest = self.steps.first(modes)
        self._compile(first, progress)
        return [(self._compilation(step), self.steps.expect(step)) for step in rest]

    def _compile(self, steps: list[Step], progress: bool) -> None:
        """Compile steps and the changes of the state, and run them on nothing."""
        with self.executor.collecting_changes():
            self._change_nothing()
        self.executor.compile([self.empty_batch(*step) for step in steps], progress=progress)
        for step in steps:
            self.steps.add(step)
        # Twice: a CUDA graph is made by the second execution.
        for shape, mode in steps * 2:
            self.draw([], self._run([], [], shape, mode))
        self._change_nothing()
        if any(mode.penalties for _, mode in steps):
            self._count_tokens(self.executor.config.max_num_seqs, [0], [])  # of no slot
        self.executor.wait()

    def _compilation(self, step: Step) -> Compilation:
        return self.executor.compilation(self.empty_batch(*step))

    def _change_nothing(self) -> None:
        """Make each change of the state, to no effect."""
        self.update_table(TableUpdate(), [])
        self._fork([])
        self._set_slots([], [])
        self._set_history([])

    def dispatch(self, scheduled: SchedulerOutput) -> StepOutput | None:
        """Start a call; return what `read` waits for, or None if there is nothing to compute."""
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
        if drafting := [one for one in starting if one.takes_drafts]:
            self._set_history(drafting)
        sequences = [x.sequence for x in decodes] + [x.sequence for x in chunks]
        mode = reduce(or_, {id(one.mode): one.mode for one in sequences}.values())
        wanted = (x.sequence.mode.prompt_logprobs for x in chunks if x.targets is not None)
        mode = replace(mode, prompt_logprobs=max(wanted, default=-1))
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        shape = self.buckets.fit(len(decodes), num_tokens, scheduled.num_drafts)
        has_experts = any(chunk.routed_experts is not None for chunk in chunks)
        is_last = scheduled.nothing_waits and all(one.is_last for one in chunks)
        is_alone = self.executor.placement.num_processes == 1  # others compile what they are sent
        if chunks and is_last and is_alone and not has_experts:
            self.steps.compile((shape, mode), self._step_after(sequences))
        return self._run(decodes, chunks, shape, mode, scheduled.num_verifications)

    def draw(
        self, decodes: list[Decode], output: StepOutput, before: RunnerOutput | None = None
    ) -> StepOutput:
        """Let the newest call draw its tokens, if it waits for that; all before must be read.

        Args:
            decodes, output: of that call.
            before: what the call before has computed, if its tokens are not processed yet.

        Returns:
            What `read` waits for.
        """
        if self._undrawn is not None:
            batch, self._undrawn = self._undrawn, None
            for one in before.sequences if before is not None else ():
                if (grammar := one.scheduled.sequence.grammar) is not None:
                    for token_id in one.token_ids:
                        grammar.look_ahead(token_id)
            # The draw before has read its masks. New memory would take longer than to fill this.
            if len(self._masks) < (num_rows := batch.decode_slots.size):
                self._masks = empty_masks(num_rows, self.executor.model.vocab_size)
            self._masks.fill(-1)
            batch = self._with_masks(batch, self._masks[:num_rows], decodes, [])
            output = self.executor.draw(batch, output)
            _copy_to_host(output)
        return output

    def read(self, scheduled: SchedulerOutput, output: StepOutput) -> RunnerOutput:
        """Wait for a call, and return what it has computed, sequence by sequence.

        Raises:
            RuntimeError: the page table did not have what the host counted on.
        """
        output = self.executor.read(output)
        return read_output(scheduled, output, self.executor.config.page_size)

    def _run(
        self,
        decodes: list[Decode],
        chunks: list[Chunk],
        shape: Shape,
        mode: SamplingMode,
        num_verifications: int = 0,
    ) -> StepOutput:
        """Dispatch a batch."""
        has_experts = any(chunk.routed_experts is not None for chunk in chunks)
        shape, mode = self.steps.choose(shape, mode, has_experts)
        batch = self._pack(decodes, chunks, shape, mode, num_verifications)
        output = self.executor.step(batch)
        if output.undrawn is None:
            _copy_to_host(output)
        else:
            self._undrawn = batch
        return output

    def _pack(
        self,
        decodes: list[Decode],
        chunks: list[Chunk],
        shape: Shape,
        mode: SamplingMode,
        num_verifications: int = 0,
    ) -> Batch:
        """Pack a batch, with the masks that its mode has unless its draw is to wait for them."""
        draws_apart = mode.masks and not shape[1] and self.executor.draws_apart
        steps = 1 if draws_apart else None
        batch = self.buckets.pack(
            decodes, chunks, shape, mode, num_verifications, max_num_steps=steps
        )
        if not mode.masks or draws_apart:
            return batch
        masks = empty_masks(batch.decode_slots.size, self.executor.model.vocab_size)
        return self._with_masks(batch, masks, decodes, chunks)

    def _step_after(self, sequences: list[Sequence]) -> Step | None:
        """Return the step of the decode steps that follow the last chunks, or None."""
        params = [one.request.params for one in sequences]
        if not all(x.num_seqs == 1 and x.max_tokens not in (0, 1) for x in params):
            return None
        shape = self.buckets.fit(len(sequences), 0)
        return shape, fit_mode(reduce(or_, (one.mode for one in sequences)), shape)

    @staticmethod
    def _with_masks(
        batch: Batch, masks: np.ndarray, decodes: list[Decode], chunks: list[Chunk]
    ) -> Batch:
        """Return a batch with masks that allow all, but for rows with a grammar, which fill them.

        One that has ended does not.
        """
        sampling = [x.sequence for x in decodes] + [x.sequence for x in chunks if x.is_last]
        fill_masks(
            [
                (row if batch.chunks is None else sequence.running_slot, sequence.grammar)
                for row, sequence in enumerate(sampling)
                if sequence.grammar is not None and not sequence.finished
            ],
            masks,
        )
        return replace(batch, masks=masks)

    def _set_slots(self, starting: list[Sequence], resumed: list[Sequence]) -> None:
        """Set the slots of sequences that begin to sample; resumed ones also need their token."""
        values = slot_states(_MAX_SET, len(self.executor.model.eos_token_ids))
        for entry, one in enumerate(starting):
            set_slot(values, entry, one, one.token_ids[-1] if one in resumed else -1)
        slots = [one.running_slot for one in starting]
        self.executor.set_slots(_padded(slots, _MAX_SET, self.executor.config.max_num_seqs), values)

    def _set_history(self, starting: list[Sequence]) -> None:
        """Set the tokens in which drafts for sequences are looked for, if the engine does that."""
        if (history := self.executor.state.history) is None:
            return
        num_slots, length = history.token_ids.shape
        size = max(1, min(_MAX_SET, _MAX_HISTORY // length))
        for some in _split(starting, size):
            values = create_history(size, length)
            for entry, one in enumerate(some):
                values.token_ids[entry, : len(one.token_ids)] = one.token_ids
                values.groups[entry] = one.request.number % INT32_MAX
            slots = _padded([one.running_slot for one in some], size, num_slots)
            self.executor.set_history(slots, values)

    def _count_tokens(
        self, slot: int, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> None:
        for first in range(0, max(len(prompt_token_ids), len(output_token_ids)), _COUNTED_TOKENS):
            piece = slice(first, first + _COUNTED_TOKENS)
            self.executor.count_tokens(
                np.int32(slot),
                _padded(prompt_token_ids[piece], _COUNTED_TOKENS, -1),
                _padded(output_token_ids[piece], _COUNTED_TOKENS, -1),
                np.bool_(first == 0),
            )

    def update_table(
        self,
        update: TableUpdate,
        attachments: list[Attachment],
        window_attachments: list[Attachment] | None = None,
    ) -> None:
        """Retain all, then free, release and attach, in as few calls of one shape as possible."""
        pieces = [_pieces(update.retained, update.freed, update.released, attachments)]
        if len(tables := self.executor.state.tables) > 1:
            pages = update.window_retained, update.freed, update.window_released
            pieces.append(_pieces(*pages, window_attachments or []))
        for each in zip_longest(*pieces, fillvalue=([], [], [], [])):
            self.executor.update_table(*map(_table_arrays, tables, each, (False, True)))

    def _fork(self, forks: list[tuple[int, int]]) -> None:
        num_slots = self.executor.config.max_num_seqs
        src, dst = (_padded([x[i] for x in forks], num_slots, num_slots) for i in (0, 1))
        self.executor.fork(src, dst)


def _copy_to_host(output: StepOutput) -> None:
    for leaf in jax.tree.leaves(output):
        leaf.copy_to_host_async()


Piece = tuple[list[int], list[int], list[int], list[Attachment]]


def _pieces(
    retained: list[int], freed: list[int], released: list[int], attachments: list[Attachment]
) -> Iterator[Piece]:
    """Yield what each call of `ModelRunner.update_table` does, of arguments as there."""
    *earlier, retained = _split(retained, _MAX_PAGES)
    for one in earlier:
        yield one, [], [], []
    attached = _split(attachments, _MAX_ATTACHMENTS)
    for one, entries in zip_longest(_split(released, _MAX_PAGES), attached):
        yield retained, freed, one or [], entries or []
        retained, freed = [], []


def _table_arrays(table: PageTable, piece: Piece, has_holes: bool) -> TableArrays:
    """Return the arrays of a piece; with holes, attachments may begin with pages of -1."""
    retained, freed, released, attachments = piece
    is_freed = np.zeros(table.max_seqs, bool)
    is_freed[freed] = True
    pages = np.full((_MAX_ATTACHMENTS, table.pages_per_seq), table.num_pages, np.int32)
    first_blocks = np.zeros(_MAX_ATTACHMENTS, np.int32)
    for entry, (_, attached) in enumerate(attachments):
        first_blocks[entry] = first = attached.count(-1)
        pages[entry, : len(attached) - first] = attached[first:]
    return TableArrays(
        retained=_padded(retained, _MAX_PAGES, table.num_pages),
        freed=is_freed,
        released=_padded(released, _MAX_PAGES, table.num_pages),
        slots=_padded([slot for slot, _ in attachments], _MAX_ATTACHMENTS, table.max_seqs),
        pages=pages,
        first_blocks=first_blocks if has_holes else None,
    )


def _split(entries: list[Any], size: int) -> list[list[Any]]:
    """Entries in as many pieces as calls take, at least one."""
    return [entries[start : start + size] for start in range(0, max(len(entries), 1), size)]


def _padded(values: list[int], size: int, padding: int) -> np.ndarray:
    padded = np.full(size, padding, np.int32)
    padded[: len(values)] = values
    return padded
