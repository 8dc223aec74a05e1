"""Multi-head latent attention over paged latents for Ampere and later, a Mosaic GPU kernel.

The query rows of a sequence, token after token and within a token head after head, are divided into
tiles of 16 or 32. A program of four warps attends one work item of `ragged_plan`, a tile and blocks
of latents. A block is copied to shared memory once, and both products read it there:

    S [R, block_k] = Q [R, 576] K^T [576, block_k]          softmax over the columns
    O [R, 512]    += P [R, block_k] K[:, :512]

The warps divide the rows into sixteens, and the keys of S and the columns of O among them, so the
maximum of a row goes across warps, and P goes through shared memory. The tiles of a token's heads
are neighbours in the grid: the first to read a block brings it to the L2 cache for the others.
Split tiles leave partial states for `latent_merge`.

Decoding with up to 16 heads has shares of its own, see `latent_decode`.

FlashAttention-2 (Dao 2023) over the latents of DeepSeek-V2 (2024), absorbed as there in 2.1.2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.decode_plan import programs_per_kv_head
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops as mosaic_ops
from pallas_paged.kernels.mosaic.latent_merge import merge_latent
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic.ragged_work import RaggedOutputs, packed_plan
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import CallTypes, LatentConfig, head_tiles
from pallas_paged.kernels.mosaic_sm80.latent_decode import MOST_DECODE_HEADS, latent_decode
from pallas_paged.kernels.mosaic_sm80.latent_program import (
    RaggedProgram,
    query_operands,
    scratch_types,
)
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RowInputs, RowOperands
from pallas_paged.kernels.ragged_plan import PlanShape

_DESCRIPTOR_WORDS = 16  # i32 of a packed work item


def latent_attention(
    arrays: Arrays,
    *,
    options: LogitOptions,
    config: LatentConfig,
    with_lse: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attend to latents with the newest tokens of each sequence, one each without `cu_q_lens`.

    Returns:
        `(out [T, Hq, D], lse f32[T, Hq])`; without `with_lse` the second is None.
    """
    is_decode = arrays.cu_q_lens is None
    needs_plan = arrays.q_positions is not None or arrays.tree_mask is not None
    if is_decode and not needs_plan and arrays.num_q_heads <= MOST_DECODE_HEADS:
        return latent_decode(arrays, options=options, config=config, interpret=interpret)
    if is_decode:
        one_each = jnp.arange(arrays.num_seqs + 1, dtype=jnp.int32)
        arrays = dataclasses.replace(arrays, cu_q_lens=one_each)
    num_tokens, num_q_heads, head_dim = arrays.q.shape
    block_q, num_tiles = config.block_q, head_tiles(num_q_heads, config.block_q)
    group = num_q_heads // num_tiles
    with jax.named_scope("ragged_plan"):
        num_programs = programs_per_kv_head(config.num_programs, num_tiles)
        shape = PlanShape.of(arrays, config, options, group=group, num_programs=num_programs)
        plan = packed_plan(arrays, shape, words=_DESCRIPTOR_WORDS, interpret=interpret)

    inputs = RowInputs(
        q=query_operands(arrays),
        pages=Pages.of(arrays, words=True),
        items=plan.items,
        of_rows=RowOperands.of(arrays, options, num_tiles=num_tiles, count=block_q),
    )
    partials = (num_tiles, shape.num_partials, block_q)
    num_rows = num_tokens * num_q_heads
    outputs = RaggedOutputs.types((num_rows, head_dim), partials, arrays.q.dtype, with_lse=with_lse)

    def body(inputs, outputs, scratch):
        RaggedProgram(
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            options=options,
            num_q_heads=num_q_heads,
            q_dtype=arrays.q.dtype,
            kv_dtype=arrays.k_pages.dtype,
            num_tiles=num_tiles,
            causal=(options.causal and arrays.q_positions is None and arrays.tree_mask is None),
            interpret=interpret,
        ).run()

    outputs = mosaic_ops.run_kernel(
        body,
        inputs,
        outputs,
        scratch_types(config, CallTypes.of(arrays)),
        name="mla_attention",
        params=ops.COMPILER_PARAMS,
        interpret=interpret,
        grid=(plan.items.shape[0] * num_tiles,),
        grid_names=("program",),
    )
    most_rows = min(block_q, group) if is_decode else block_q
    return merge_latent(
        outputs, plan.merges, shape, arrays, most_rows=most_rows, interpret=interpret
    )
