"""Attention of ragged queries over paged K/V, a Pallas Mosaic GPU kernel for Hopper.

The queries of a sequence are divided into tiles of some tokens times the query heads of one KV
head. A program holds one tile at a time. A producer warpgroup streams the blocks of keys that the
tile sees through a ring in shared memory, and each consumer warpgroup attends to them with 64 of
its rows:

    producer     k0 v0 k1 v1 k2 v2 ...                       (ring)
    consumer 0   q.k0  softmax     p.v0 q.k1  softmax        rows  0 to  63
    consumer 1         q.k0  softmax     p.v0 q.k1  ...      rows 64 to 127

Two consumers take turns at the tensor cores, so the softmax of one runs under the products of the
other. Three, for small heads, need no turns. The grid has as many programs as run at once. They
take work tiles one after another, longest first (`ragged_work`), and the producer starts on the
next one while the consumers finish.

The rows of a tile are head after head, in chunks of 8 tokens of one head (`ragged_tile`).
`ragged_plan` orders the tiles and splits the keys of few or long ones; their partial states go to
`ragged_merge`.

FlashAttention-3 (Shah 2024), with the heads of a group packed into the tile and K/V from pages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import Arrays, varying_by_device
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.ragged_work import RaggedOutputs, WorkDescriptor, unpack
from pallas_paged.kernels.mosaic.softmax_state import finish
from pallas_paged.kernels.mosaic_sm90.config import MosaicSm90RaggedConfig
from pallas_paged.kernels.mosaic_sm90.converted_rows import convert_rows
from pallas_paged.kernels.mosaic_sm90.ragged_consumer import ScheduleBarrier, attend
from pallas_paged.kernels.mosaic_sm90.ragged_converter import Converter, end_of_pages
from pallas_paged.kernels.mosaic_sm90.ragged_merge import merge_ragged
from pallas_paged.kernels.mosaic_sm90.ragged_operands import store_permuted, unpermute_columns
from pallas_paged.kernels.mosaic_sm90.ragged_scratch import (
    RaggedInputs,
    RaggedScratch,
    q_arrivals,
    registers_of,
    scratch_types,
)
from pallas_paged.kernels.mosaic_sm90.ragged_tile import (
    CHUNK,
    WG_ROWS,
    TileRows,
    TileShape,
    store_rows,
)
from pallas_paged.kernels.mosaic_sm90.ring import Ring, drain, stream
from pallas_paged.kernels.mosaic_sm90.tile_scheduler import TileScheduler, WorkTile, plan_work

# Any reduction would reserve scratch memory. None here goes across warps, and there is no room.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """One program of the kernel, a producer and some consumers; `run` runs it."""

    inputs: RaggedInputs
    outputs: RaggedOutputs  # partials [head tiles, partials, warpgroups, 64, ..]
    scratch: RaggedScratch
    schedule: ScheduleBarrier
    options: LogitOptions
    config: MosaicSm90RaggedConfig
    tile: TileShape
    causal: bool  # whether a query sees no later key
    interpret: bool

    def run(self) -> None:
        """Attend to the work tiles of the program."""
        config, interpret = self.config, self.interpret
        wg = lax.axis_index("wg")
        registers = registers_of(config.num_consumers, converts=self.converts)

        @pl.when(wg == config.num_consumers)
        def _():
            ops.set_max_registers(registers["producer"], action="decrease", interpret=interpret)
            self.produce()
            ops.let_next_kernel_start(interpret=interpret)

        @pl.when(wg < config.num_consumers)
        def _():
            ops.set_max_registers(registers["consumer"], action="increase", interpret=interpret)
            self.schedule.begin(wg)
            self.for_each_work_tile(functools.partial(self.consume, wg), jnp.int32(0))
            self.schedule.end(wg)
            plgpu.wait_smem_to_gmem(0)

        if self.converts:

            @pl.when(wg == config.num_consumers + 1)
            def _():
                ops.set_max_registers(
                    registers["converter"], action="decrease", interpret=interpret
                )
                iters = jnp.int32(0), jnp.int32(0)
                drain(self.scratch.ring, self.for_each_work_tile(self.convert, iters)[0])

    def for_each_work_tile(self, function: Callable[..., Any], iters: Any) -> Any:
        """Call a function of stage, work id and counts of blocks, which returns the next counts."""

        def do_next(state):
            i, work_id, iters = state
            iters = function(lax.rem(i, self.config.num_q_stages), work_id, iters)
            return i + 1, self.receive(i + 1), iters

        state = jnp.int32(0), self.receive(jnp.int32(0)), iters
        return lax.while_loop(lambda state: state[1] >= 0, do_next, state)[2]

    def unpack(self, work_id: jax.Array) -> WorkTile:
        """Return the work tile with this id."""
        return WorkTile.unpack(work_id, self.tile, self.inputs.pages.num_kv_heads)

    def receive(self, i: jax.Array) -> jax.Array:
        """Wait for work tile `i` of the program; return its work id, or -1 after the last."""
        stage = lax.rem(i, self.config.num_q_stages)
        plgpu.barrier_wait(self.scratch.q_full.at[stage])
        return self.scratch.mailbox.work_ids[stage]

    def produce(self) -> None:
        """Send one work tile after another, until none is left; then send -1."""
        scratch, num_q_stages = self.scratch, self.config.num_q_stages
        scheduler = TileScheduler(
            counter=self.inputs.counter,
            mailbox=scratch.mailbox,
            num_programs=self.config.num_programs,
            interpret=self.interpret,
        )

        def produce_next(state):
            i, work_id, kv_iter = state
            kv_iter = self.send(ops.free_stage(scratch.q_free, i), work_id, kv_iter)
            return *scheduler.advance(i, work_id), kv_iter

        program = lax.axis_index("program")
        count = self.inputs.work.count[0]
        state = jnp.int32(0), program, jnp.int32(0)
        i, _, kv_iter = lax.while_loop(lambda state: state[1] < count, produce_next, state)
        stage = ops.free_stage(scratch.q_free, i)
        scratch.mailbox.work_ids[stage] = -1
        for _ in range(q_arrivals(self.tile)):
            plgpu.barrier_arrive(scratch.q_full.at[stage])
        drain(self.copied, kv_iter)

        @pl.loop(jnp.maximum(i + 1 - num_q_stages, 0), i)
        def wait_until_free(i):
            plgpu.barrier_wait(scratch.q_free.at[lax.rem(i, num_q_stages)])

    def send(self, stage: jax.Array, work_id: jax.Array, kv_iter: jax.Array) -> jax.Array:
        """Send a work tile: its id, its descriptor, its queries, then the blocks of keys."""
        inputs, scratch, tile = self.inputs, self.scratch, self.tile
        work_tile = self.unpack(work_id)
        work = unpack(WorkDescriptor, inputs.work.items, work_tile.item)
        full = scratch.q_full.at[stage]
        scratch.mailbox.work_ids[stage] = work_id
        plgpu.barrier_arrive(full)
        plgpu.copy_gmem_to_smem(
            inputs.work.items.at[work_tile.item], scratch.mailbox.buffer.at[stage], full
        )
        for h in range(tile.num_heads):
            head = work_tile.first_head + jnp.minimum(h, work_tile.num_heads - 1)
            for first, num_rows in tile.runs(h):
                token = work.q_start + work.offset + first - h * tile.num_tokens
                plgpu.copy_gmem_to_smem(
                    inputs.q.at[pl.ds(pl.multiple_of(token, CHUNK), num_rows), head],
                    self.q.at[stage, first // WG_ROWS, pl.ds(first % WG_ROWS, num_rows)],
                    full,
                )
        return stream(
            self.copied,
            inputs.pages,
            work.row,
            work_tile.kv_head,
            lo=work.lo,
            hi=end_of_pages(work, inputs.converted),
            kv_len=jnp.maximum(work.kv_len, 1),
            first_key=None if self.options.sliding_window is None else work.first_key,
            kv_iter=kv_iter,
        )

    @property
    def converts(self) -> bool:
        """Whether pages are int8 or fp8, and a converter follows the producer."""
        return self.scratch.bytes is not None

    @property
    def results_follow_queries(self) -> bool:
        """Whether the results of a work tile take the place of its queries."""
        return self.scratch.out is None

    @property
    def q(self) -> Any:
        """The stages of queries."""
        return self.scratch.q[0] if self.results_follow_queries else self.scratch.q

    @property
    def copied(self) -> Ring:
        """The ring that the producer copies pages to."""
        return self.scratch.bytes if self.converts else self.scratch.ring

    @property
    def logit_scales(self) -> Any:
        """Scales of K: a ref to the scales of the blocks in the ring, one for all keys, or None."""
        pages, is_one = self.inputs.pages, self.converts and not self.inputs.pages.scales_by_token
        return pages.k_scales[0] if is_one else self.scratch.k_scales

    def convert(self, stage: jax.Array, work_id: jax.Array, iters: Any) -> Any:
        """Send the keys and values of a work tile to the consumers, in q's dtype."""
        inputs, scratch = self.inputs, self.scratch
        k_factor = self.options.only_factor(inputs.alibi_slopes)
        converter = Converter(
            source=scratch.bytes,
            target=scratch.ring,
            k_scales=scratch.k_scales,
            k_factor=1.0 if k_factor is None else k_factor,
            pages=inputs.pages,
            converted=inputs.converted,
            interpret=self.interpret,
        )
        work = unpack(WorkDescriptor, scratch.mailbox.buffer, stage)
        iters = converter.send(work, self.unpack(work_id).kv_head, *iters)
        plgpu.barrier_arrive(scratch.q_free.at[stage])
        return iters

    def consume(
        self, wg: jax.Array, stage: jax.Array, work_id: jax.Array, kv_iter: jax.Array
    ) -> jax.Array:
        """Attend to the keys of a work tile with 64 rows, and store their results."""
        inputs, outputs, scratch = self.inputs, self.outputs, self.scratch
        work_tile = self.unpack(work_id)
        work = unpack(WorkDescriptor, scratch.mailbox.buffer, stage)
        rows = TileRows(
            tile=self.tile,
            wg=wg,
            q_start=work.q_start,
            q_len=work.q_len,
            offset=work.offset,
            first_head=work_tile.first_head,
            num_heads=work_tile.num_heads,
        )

        def of_rows(ref):
            return None if ref is None else ref.at[work_tile.item, wg]

        q_smem = self.q.at[stage, wg]
        if self.converts:
            store_permuted(q_smem, interpret=self.interpret)
        k_scales = self.logit_scales
        queries = rows.in_logits(
            work,
            self.options,
            causal=self.causal,
            alibi_slopes=inputs.alibi_slopes,
            given_positions=of_rows(inputs.work.positions),
            tree_words=of_rows(inputs.work.tree_words),
        )
        state = attend(
            q_smem,
            scratch.ring,
            work,
            rows,
            kv_iter,
            schedule=self.schedule,
            queries=queries,
            values_are_zeroed=self.converts,
            k_scales=k_scales,
            interpret=self.interpret,
        )
        shared = self.results_follow_queries
        results = scratch.q[1].at[stage] if shared else scratch.out
        buffer = results.at[wg, pl.ds(0, WG_ROWS)]
        if not shared:
            plgpu.barrier_arrive(scratch.q_free.at[stage])

        def finished(sinks):
            out, lse = finish(state, sinks)
            return unpermute_columns(out, interpret=self.interpret) if self.converts else out, lse

        @pl.when(work.partial < 0)
        def _():
            sinks = None if inputs.sinks is None else rows.per_head(inputs.sinks)
            store_rows(outputs, buffer, rows, *finished(sinks), interpret=self.interpret)

        @pl.when(work.partial >= 0)
        def _():
            out, lse = finished(None)
            index = (work_tile.head_tile, work.partial, wg)
            ops.store(outputs.partials.out.at[index], out)
            ops.store(outputs.partials.lse.at[index], lse)

        if shared:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(scratch.q_free.at[stage])
        pl.when(wg == 0)(self.schedule.wait)
        return kv_iter + work.hi - work.lo


def ragged_paged_attention(
    arrays: Arrays,
    *,
    options: LogitOptions,
    config: MosaicSm90RaggedConfig,
    with_lse: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attend with the newest tokens of each sequence; return `(out [T, Hq, Dv], lse f32[T, Hq])`.

    `arrays.q_positions` are the positions of the queries, if given; all keys are older then.
    Without `with_lse` the second result is None.
    """
    tile = TileShape.of(arrays.group, config.block_q)
    with jax.named_scope("ragged_plan"):
        work, merges, num_partials = plan_work(
            arrays, options=options, config=config, tile=tile, interpret=interpret
        )
    converted = None
    if arrays.k_scales is not None:
        converted = convert_rows(arrays, options=options, config=config, interpret=interpret)
    inputs = RaggedInputs.of(arrays, work, converted)
    head_tiles = arrays.num_kv_heads * tile.num_head_tiles
    rows = (head_tiles, num_partials, config.num_consumers, WG_ROWS)
    shape = (*arrays.q.shape[:2], arrays.v_head_dim)
    outputs = RaggedOutputs.types(shape, rows, arrays.q.dtype, with_lse=with_lse)
    scratch = scratch_types(
        config,
        group=arrays.group,
        head_dim=arrays.head_dim,
        v_head_dim=arrays.v_head_dim,
        page_size=arrays.page_size,
        dtype=arrays.q.dtype,
        kv_dtype=arrays.k_pages.dtype,
        scaled_logits=inputs.pages.scales_by_token,
        converted=converted,
        interpret=interpret,
    )

    def body(inputs, outputs, scratch):
        _Program(
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            schedule=ScheduleBarrier(barrier=scratch.turn, num_consumers=config.num_consumers),
            options=options,
            config=config,
            tile=tile,
            causal=(options.causal and arrays.q_positions is None and arrays.tree_mask is None),
            interpret=interpret,
        ).run()

    outputs = ops.run_kernel(
        body,
        inputs,
        outputs,
        scratch,
        name="ragged_paged_attention",
        params=COMPILER_PARAMS,
        interpret=interpret,
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=config.num_consumers + (1 if scratch.bytes is None else 2),
        thread_name="wg",
    )
    out, lse = merge_ragged(outputs, merges, arrays.sinks, tile=tile, interpret=interpret)
    return varying_by_device(out), None if lse is None else varying_by_device(lse)
