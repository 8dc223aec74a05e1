"""The engine's hands: turns plans into dispatched batches, and reports into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

import pallas_paged as pp
from models.batch import Batch, Drawing, RowValues, Shapes, pack
from models.decoder import Decoder
from models.engine_config import EngineConfig
from models.engine_step import (
    Changes,
    Report,
    create_engine_state,
    fork,
    give,
    make_step,
    settle,
)
from models.kv_cache import pool_dtype
from models.request import MAX_LOGPROBS, SamplingParams
from models.sampling import hash_prompt
from models.scheduler import Adoption, Plan, Settlement
from models.seq import Seq

_MAX_ENTRIES = 1024  # pages that one call retains or releases
_MAX_ADOPTIONS = 16  # rows that one call fills


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A step that is dispatched and not read.

    Attributes:
        plan: what it computes.
        num_decodes: rows of the batch before those of the chunks.
        report: what came of it, on the device or on its way to the host.
    """

    plan: Plan
    num_decodes: int
    report: Report


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a flight has brought.

    Attributes:
        num_free: free pages after it.
        tokens: sequences that have sampled, with their tokens, and with that token and the best
            ones and their log-probabilities, if the step told any.
    """

    num_free: int
    tokens: list[tuple[Seq, int, list[tuple[int, float]] | None]]


class Worker:
    """Packs what the scheduler plans, and unpacks what the device reports."""

    def __init__(
        self,
        model: Decoder,
        params: nnx.State | None,
        config: EngineConfig,
        *,
        pages_per_seq: int,
    ):
        """See `Engine`; pages_per_seq is how many one row can hold."""
        graphdef, own = nnx.split(model)
        leaves, structure = jax.tree.flatten(own if params is None else params)
        self.shapes = Shapes(max_seqs=config.max_seqs, token_budget=config.token_budget)
        self._state = create_engine_state(
            model.config,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_seqs=config.max_seqs,
            pages_per_seq=pages_per_seq,
            dtype=pool_dtype(config.kv_dtype, leaves[0].dtype),
        )
        self._leaves = tuple(leaves)
        self._step = make_step(graphdef, structure, config.implementation)
        self._values = RowValues(config.max_seqs)
        self._num_ranked = min(MAX_LOGPROBS, model.config.vocab_size)
        self._compiled: set[tuple[int, int, Drawing]] = set()
        if config.implementation is not None:
            # Traces a step, so that one that can't do the model's attention says so now.
            shape = self.shapes.all()[-1]
            jax.eval_shape(self._step, self._leaves, self._state, self._pack([], [], shape))

    @property
    def num_compiled(self) -> int:
        """Shapes of steps that have been compiled."""
        return len(self._compiled)

    @property
    def pool(self) -> pp.KVPool:
        """The pool after all that was dispatched; the next call takes its buffers."""
        return self._state.pool

    @property
    def table(self) -> pp.PageTable:
        """The page table after all that was dispatched; the next call takes its buffers."""
        return self._state.table

    def warmup(self, drawings: Sequence[Drawing]) -> None:
        """Compiles all that may be needed, by running it on nothing."""
        for drawing in drawings:
            for shape in self.shapes.all():
                self._run([], [], drawing, shape)
        self._settle(Settlement(), [])
        self._fork([])
        self._give([])
        jax.block_until_ready(self._state)

    def settle(self, settlement: Settlement, adoptions: Sequence[Adoption] = ()) -> None:
        """Tells the page table what the scheduler has decided, if that is anything."""
        if settlement or adoptions:
            self._settle(settlement, adoptions)

    def dispatch(self, plan: Plan) -> Flight | None:
        """Starts a step; None if there is nothing to compute."""
        if plan.forks:
            self._fork(plan.forks)
        seqs = [*plan.decodes, *(chunk.seq for chunk in plan.chunks)]
        if not seqs:
            return None
        drawing = max(drawing_of(seq.request.params) for seq in seqs)
        for seq in [*plan.given, *(chunk.seq for chunk in plan.chunks if chunk.ends)]:
            self._set_values(seq)  # it draws for the first time
        if plan.given:
            self._give([(seq.seat, seq.tokens[-1]) for seq in plan.given])
        decode_rows = [seq.seat for seq in plan.decodes]
        chunks = [(chunk.seq.seat, chunk.tokens) for chunk in plan.chunks]
        num_decodes, report = self._run(decode_rows, chunks, drawing)
        return Flight(plan=plan, num_decodes=num_decodes, report=report)

    def read(self, flight: Flight) -> Outcome:
        """Waits for a step, and takes note of where it has put the K/V of its sequences.

        Raises:
            RuntimeError: the page table did not have what the host was sure of.
        """
        report: Report = jax.device_get(flight.report)
        if not report.sound:
            raise RuntimeError("the page table lacks pages or rows that the scheduler counts on")
        plan, page_size = flight.plan, self.table.page_size
        pages = (report.slots // page_size).tolist()
        tokens = report.tokens.tolist()
        outcome = []
        # Sequences that have ended meanwhile have no row; none has another, for pages are taken
        # from a sequence only while nothing is in flight.
        for index, seq in enumerate(plan.decodes):
            if seq.row is not None:
                seq.store(pages[index : index + 1], page_size)
            outcome.append((seq, tokens[index], _ranked(report, index)))
        start = flight.num_decodes
        for index, chunk in enumerate(plan.chunks, flight.num_decodes):
            end = start + len(chunk.tokens)
            if chunk.seq.row is not None:
                chunk.seq.store(pages[start:end], page_size)
            start = end
            if chunk.ends:
                outcome.append((chunk.seq, tokens[index], _ranked(report, index)))
        return Outcome(num_free=int(report.num_free), tokens=outcome)

    def _run(
        self,
        decode_rows: list[int],
        chunks: list[tuple[int, list[int]]],
        drawing: Drawing,
        shape: tuple[int, int] | None = None,
    ) -> tuple[int, Report]:
        """Dispatches a batch; returns its number of decoding rows too."""
        shape = shape or self.shapes.fit(len(decode_rows), [len(tokens) for _, tokens in chunks])
        batch = self._pack(decode_rows, chunks, shape, drawing)
        self._compiled.add((*shape, drawing))
        self._state, report = self._step(self._leaves, self._state, batch)
        for leaf in jax.tree.leaves(report):
            leaf.copy_to_host_async()
        return shape[0], report

    def _pack(
        self,
        decode_rows: list[int],
        chunks: list[tuple[int, list[int]]],
        shape: tuple[int, int],
        drawing: Drawing = Drawing.GREEDY,
    ) -> Batch:
        return pack(
            decode_rows,
            chunks,
            shape=shape,
            shapes=self.shapes,
            values=self._values,
            drawing=drawing,
            num_ranked=self._num_ranked,
        )

    def _set_values(self, seq: Seq) -> None:
        request, params = seq.request, seq.request.params
        prompt = hash_prompt(request.prompt) if params.temperature > 0 else 0
        self._values.set(
            seq.seat,
            seeds=(request.seed, prompt, seq.completion.index),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )

    def _settle(self, settlement: Settlement, adoptions: Sequence[Adoption]) -> None:
        """Retains, then frees, releases and adopts, in as few calls of one shape as do."""
        retained = _split(settlement.retained, _MAX_ENTRIES)
        released = _split(settlement.released, _MAX_ENTRIES)
        adopted = _split(adoptions, _MAX_ADOPTIONS)
        for pages in retained[:-1]:
            self._change(retained=pages)
        first = adopted.pop(0) if len(released) == 1 else ()
        self._change(
            retained=retained[-1], freed=settlement.freed, released=released[0], adoptions=first
        )
        for pages in released[1:]:
            self._change(released=pages)
        for entries in adopted:
            self._change(adoptions=entries)

    def _change(
        self,
        *,
        retained: Sequence[int] = (),
        freed: Sequence[int] = (),
        released: Sequence[int] = (),
        adoptions: Sequence[Adoption] = (),
    ) -> None:
        table = self.table
        is_freed = np.zeros(table.max_seqs, bool)
        is_freed[list(freed)] = True
        pages = np.full((_MAX_ADOPTIONS, table.pages_per_seq), table.num_pages, np.int32)
        for entry, (_, adopted) in enumerate(adoptions):
            pages[entry, : len(adopted)] = adopted
        changes = Changes(
            retained=_padded(retained, _MAX_ENTRIES, table.num_pages),
            freed=is_freed,
            released=_padded(released, _MAX_ENTRIES, table.num_pages),
            rows=_padded([row for row, _ in adoptions], _MAX_ADOPTIONS, table.max_seqs),
            pages=pages,
        )
        table, sound = settle(table, self._state.sound, changes)
        self._state = replace(self._state, table=table, sound=sound)

    def _give(self, tokens: list[tuple[int, int]]) -> None:
        max_seqs = self.table.max_seqs
        rows, values = (_padded([x[i] for x in tokens], max_seqs, max_seqs) for i in (0, 1))
        last_tokens = give(self._state.last_tokens, rows, values)
        self._state = replace(self._state, last_tokens=last_tokens)

    def _fork(self, forks: list[tuple[int, int]]) -> None:
        max_seqs = self.table.max_seqs
        src, dst = (_padded([fork[i] for fork in forks], max_seqs, max_seqs) for i in (0, 1))
        self._state = fork(self._state, src, dst)


def drawing_of(params: SamplingParams) -> Drawing:
    """What sampling a request needs."""
    if params.filtered or params.wants_logprobs:
        return Drawing.FULL
    return Drawing.TEMPERATURE if params.temperature > 0 else Drawing.GREEDY


def _ranked(report: Report, index: int) -> list[tuple[int, float]] | None:
    """A token and the best ones, each with its log-probability."""
    if report.logprobs is None or report.top_tokens is None or report.top_logprobs is None:
        return None
    first = int(report.tokens[index]), float(report.logprobs[index])
    top = zip(report.top_tokens[index].tolist(), report.top_logprobs[index].tolist(), strict=True)
    return [first, *top]


def _split(entries: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Entries in as many pieces as calls take, at least one."""
    return [entries[start : start + size] for start in range(0, max(len(entries), 1), size)]


def _padded(values: Sequence[int], size: int, padding: int) -> np.ndarray:
    padded = np.full(size, padding, np.int32)
    padded[: len(values)] = values
    return padded
