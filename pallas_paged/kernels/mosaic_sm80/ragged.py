"""Attention of ragged queries over paged K/V for Ampere and later, a Pallas Mosaic GPU kernel.

The query rows of a sequence, token after token and within a token head after head of one KV head's
group, are divided into tiles. A program of four warps attends one work item of `ragged_plan`, a
tile and blocks of keys. A warp has 16 of every 64 rows. With 128 rows that is 16 twice, which share
the fragments of K and V that the warp reads from shared memory:

    blocks of keys     k0 v0 k1 v1 ...        cp.async of rows, from pages that may be anywhere
    each warp          q.k0 softmax p.v0 q.k1 softmax p.v1 ...         mma.sync, ldmatrix

Two programs on an SM run the softmax of one under the products of the other. Split tiles leave
partial states for `ragged_merge`.

FlashAttention-2 (Dao 2023), with the heads of a group packed into the tile and K/V from pages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.decode_plan import programs_per_kv_head
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops as wgmma_ops
from pallas_paged.kernels.mosaic.ragged_work import RaggedOutputs, of_tokens, packed_plan
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import (
    CallTypes,
    MosaicSm80RaggedConfig,
    result_columns,
)
from pallas_paged.kernels.mosaic_sm80.ragged_blocks import Pool
from pallas_paged.kernels.mosaic_sm80.ragged_merge import merge_ragged
from pallas_paged.kernels.mosaic_sm80.ragged_program import Program, scratch_types
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RowInputs, RowOperands
from pallas_paged.kernels.ragged_plan import PlanShape

# No reduction goes across warps.
COMPILER_PARAMS = dataclasses.replace(ops.COMPILER_PARAMS, reduction_scratch_bytes=0)
_DESCRIPTOR_WORDS = 16  # i32 of a packed work item


def ragged_paged_attention(
    arrays: Arrays,
    *,
    options: LogitOptions,
    config: MosaicSm80RaggedConfig,
    with_lse: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attend with the newest tokens of each sequence; return `(out [T, Hq, Dv], lse f32[T, Hq])`.

    `arrays.q_positions` are the positions of the queries, if given; all keys are older then.
    Without `with_lse` the second result is None.
    """
    num_tokens, num_q_heads, head_dim = arrays.q.shape
    v_head_dim = arrays.v_head_dim
    num_kv_heads, group, block_q = arrays.num_kv_heads, arrays.group, config.block_q
    with jax.named_scope("ragged_plan"):
        num_programs = programs_per_kv_head(config.num_programs, num_kv_heads)
        shape = PlanShape.of(arrays, config, options, num_programs=num_programs)
        plan = packed_plan(arrays, shape, words=_DESCRIPTOR_WORDS, interpret=interpret)

    inputs = RowInputs(
        q=arrays.q.reshape(num_tokens * num_q_heads, head_dim),
        pages=Pool.of(arrays),
        items=plan.items,
        of_rows=RowOperands.of(arrays, options, num_tiles=num_kv_heads, count=block_q),
    )
    partials = (num_kv_heads, shape.num_partials, block_q)
    outputs = RaggedOutputs.types(
        (len(inputs.q), v_head_dim), partials, arrays.q.dtype, with_lse=with_lse
    )
    scratch = scratch_types(config, CallTypes.of(arrays), interpret=interpret)

    def body(inputs, outputs, scratch):
        Program(
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            options=options,
            config=config,
            group=group,
            causal=(options.causal and arrays.q_positions is None and arrays.tree_mask is None),
            wg=lax.axis_index("wg") if config.num_warpgroups == 2 else 0,
            interpret=interpret,
        ).run()

    threads: dict[str, Any] = {}
    if config.num_warpgroups == 2:
        threads = {"num_threads": 2, "thread_name": "wg"}
    outputs = wgmma_ops.run_kernel(
        body,
        inputs,
        outputs,
        scratch,
        name="ragged_paged_attention",
        params=COMPILER_PARAMS,
        interpret=interpret,
        # Parts of a result, and behind them the heads of an item, are neighbours.
        grid=(plan.items.shape[0] * num_kv_heads * result_columns(v_head_dim)[0],),
        grid_names=("program",),
        **threads,
    )
    out, lse = merge_ragged(
        outputs, plan.merges, inputs.of_rows.sinks, group=group, interpret=interpret
    )
    return of_tokens(out, lse, num_tokens, num_q_heads)
