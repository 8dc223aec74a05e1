"""Multi-head latent attention over paged latents, a Pallas Mosaic GPU kernel for Hopper.

The query rows of a sequence, token after token and within a token head after head, are divided into
tiles of 64. A program attends one work item of `ragged_plan`, a tile and blocks of keys, see
`latent_program`; pages of q's dtype and those of one byte have a form each. Each block of latents
is copied once by TMA, and is K and V. Split tiles leave partial states for `latent_merge`. With
more than 64 heads a tile has 128 rows and a cluster of two programs, each with half of the rows:
TMA copies a block to both, so that L2 is read once.

As in FlashMLA (DeepSeek-AI, 2025) and FlashInfer, warpgroups divide the columns of the result,
whose 512 columns are too many for the registers of one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.latent_merge import merge_latent
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic.ragged_work import RaggedOutputs, packed_plan
from pallas_paged.kernels.mosaic_sm80.ragged_rows import RowInputs, RowOperands
from pallas_paged.kernels.mosaic_sm90.latent_one_byte import ONE_BYTE
from pallas_paged.kernels.mosaic_sm90.latent_program import Program
from pallas_paged.kernels.mosaic_sm90.latent_scratch import (
    CLUSTER,
    HEADS_MULTIPLE,
    NUM_CONSUMERS,
    ROWS,
    ScratchShape,
)
from pallas_paged.kernels.mosaic_sm90.latent_two_byte import TWO_BYTE
from pallas_paged.kernels.ragged_plan import PlanShape

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
)
_DESCRIPTOR_WORDS = 16  # i32 of a packed work item


def mla_attention(
    arrays: Arrays,
    *,
    options: LogitOptions,
    num_programs: int,
    fixed_split_size: int | None = None,
    with_lse: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Attend to latents; return `(out [T, Hq, D], lse f32[T, Hq])`.

    `arrays.q_positions` are the positions of the queries, if given; all keys are older then.
    Without `with_lse` the second result is None. Without `cu_q_lens` a row has one query.
    """
    if arrays.num_q_heads % HEADS_MULTIPLE:
        return _with_more_heads(
            arrays,
            functools.partial(
                mla_attention,
                options=options,
                num_programs=num_programs,
                fixed_split_size=fixed_split_size,
                with_lse=with_lse,
                interpret=interpret,
            ),
        )
    num_tokens, num_q_heads, head_dim = arrays.q.shape
    form = TWO_BYTE if arrays.k_pages.dtype == arrays.q.dtype else ONE_BYTE
    cluster_size = 2 if num_q_heads > ROWS else 1
    most_rows = block_q = cluster_size * ROWS
    if arrays.cu_q_lens is None:
        most_rows = min(block_q, num_q_heads)
        offsets = jnp.arange(arrays.num_seqs + 1, dtype=jnp.int32)
        arrays = dataclasses.replace(arrays, cu_q_lens=offsets)
    with jax.named_scope("ragged_plan"):
        shape = PlanShape(
            num_seqs=arrays.num_seqs,
            num_tokens=num_tokens,
            max_kv_len=arrays.max_kv_len,
            group=num_q_heads,
            block_q=block_q,
            block_k=form.block_k,
            options=options,
            has_tree=arrays.tree_mask is not None,
            num_programs=num_programs // cluster_size,
            fixed_split_size=fixed_split_size,
        )
        plan = packed_plan(arrays, shape, words=_DESCRIPTOR_WORDS, interpret=interpret)
    assert arrays.q_pe is not None
    inputs = RowInputs(
        q=[_flat(q, block_q, interpret=interpret) for q in (arrays.q, arrays.q_pe)],
        pages=Pages.of(arrays),
        items=plan.items,
        of_rows=RowOperands.of(arrays, options, num_tiles=1, count=block_q),
    )
    partials = (1, shape.num_partials, block_q)
    num_rows = num_tokens * num_q_heads
    outputs = RaggedOutputs.types((num_rows, head_dim), partials, arrays.q.dtype, with_lse=with_lse)
    scratch_shape = ScratchShape(
        head_dim=head_dim,
        rope_dim=arrays.rope_dim,
        page_size=arrays.page_size,
        dtype=arrays.q.dtype,
        kv_dtype=arrays.k_pages.dtype,
        cluster_size=cluster_size,
        interpret=interpret,
    )

    def body(inputs, outputs, scratch):
        Program(
            form=form,
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            options=options,
            group=num_q_heads,
            causal=options.causal and arrays.q_positions is None and arrays.tree_mask is None,
            interpret=interpret,
        ).run()

    outputs = ops.run_kernel(
        body,
        inputs,
        outputs,
        form.types(scratch_shape),
        name="mla_attention",
        params=COMPILER_PARAMS,
        interpret=interpret,
        grid=(len(plan.items),),
        grid_names=("program",),
        cluster=(cluster_size,),
        cluster_names=(CLUSTER,),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="wg",
    )
    return merge_latent(
        outputs, plan.merges, shape, arrays, most_rows=most_rows, interpret=interpret
    )


def _with_more_heads(
    arrays: Arrays, attend: Callable[[Arrays], tuple[jax.Array, jax.Array | None]]
) -> tuple[jax.Array, jax.Array | None]:
    """Return `attend(arrays)` with more heads, so that tokens begin at multiples of 8 rows."""
    num_heads = arrays.num_q_heads
    more = -num_heads % HEADS_MULTIPLE

    def pad(name, axis):
        x = getattr(arrays, name)
        return None if x is None else jnp.pad(x, [(0, more * (i == axis)) for i in range(x.ndim)])

    names = {"q": 1, "q_pe": 1, "alibi_slopes": 0, "sinks": 0}
    padded = dataclasses.replace(arrays, **{name: pad(name, axis) for name, axis in names.items()})
    out, lse = attend(padded)
    return out[:, :num_heads], None if lse is None else lse[:, :num_heads]


def _flat(q: jax.Array, block_q: int, *, interpret: bool) -> jax.Array:
    """Return queries `[T, Hq, D]` as rows `[T * Hq, D]`, at least 64."""
    q = q.reshape(-1, q.shape[-1])
    # TMA takes 0 for rows past the end. The interpreter does not.
    missing = block_q if interpret else max(ROWS - len(q), 0)
    return jnp.pad(q, ((0, missing), (0, 0))) if missing else q
