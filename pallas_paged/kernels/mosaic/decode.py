"""Split decode attention over paged K/V, a Pallas Mosaic GPU kernel for Hopper.

The blocks of all rows lie end to end and each of `num_programs` programs per KV head takes the next
share of that line, whatever rows it spans; its partial state of a row goes to slot `program + row`:

    row 0           row 1   row 2 ...
    |--|--|--|--|--||--|--||--|--|--|--|--|--|--|
    [ program 0  ][ program 1  ][ program 2  ]...

A program is two warpgroups that walk the same share. The producer sends each row's queries and K/V
to shared memory (`mosaic_ring`), the consumer attends. The matrix unit takes 64 rows at a time, and
a KV head has fewer query heads than that. So tokens are the rows, and the query heads, padded to N,
a multiple of 8, are the columns:

    S^T [block_k, N] = K [block_k, D] Q^T [D, N]            softmax over the rows
    O^T [D, N]      += V^T [D, block_k] P^T [block_k, N]

What is in the columns past the group's heads is other heads' or nobody's, and nobody reads it.

Under a fixed split size the line is made of splits of a row instead, each of which leaves a partial
state of its own: then no sum depends on where a share happens to end.

Flash-Decoding's split over K/V, made even as in stream-K; the warpgroups' roles are those of
FlashAttention-3 (Shah 2024).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LN_2, LogitOptions, base2_logits
from pallas_paged.kernels.mosaic.config import MosaicDecodeConfig
from pallas_paged.kernels.mosaic.decode_merge import merge_shares
from pallas_paged.kernels.mosaic.decode_shares import Piece, first_key, row_blocks, walk
from pallas_paged.kernels.mosaic.ops import (
    COLUMNS,
    MATRIX,
    TRANSPOSED,
    add_product,
    along,
    full,
    interpreter,
    iota,
    let_next_kernel_start,
    load,
    product,
    store,
)
from pallas_paged.kernels.mosaic.ring import Ring, drain, matrix_transforms, ring_types, stream


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Queries:
    """Refs of one row's queries in shared memory and of what is made of them, or their types.

    Where rows are swizzled, as the matrix unit wants them, a copy can begin at every 8th head only.
    So the queries arrive in plain rows, and the consumer moves them; then the next row's may come.

    Attributes:
      arrived: `[N, D]` in plain rows.
      q: `[N, D]` for the matrix unit.
      p: `[N, block_k]` for the matrix unit: the probabilities of a block.
      full: barrier, complete when the queries have arrived.
      free: barrier, complete when they have been moved.
    """

    arrived: Any
    q: Any
    p: Any
    full: Any
    free: Any


def produce(
    piece: Piece,
    step: jax.Array,
    *,
    ring: Ring,
    queries: Queries,
    q_ref: Any,  # [B * Hq, D]
    k_ref: Any,  # [P, S, D]
    v_ref: Any,  # [P, S, D]
    block_tables_ref: Any,  # i32[B, N]
    first_head: jax.Array,
    num_q_heads: int,
) -> jax.Array:
    """Sends the queries and the K/V of a piece; returns the blocks sent so far."""

    @pl.when(piece.lo < piece.hi)
    def _():
        @pl.when(step > 0)
        def _():
            plgpu.barrier_wait(queries.free)

        # The copy fills rows past the last of all with zeros.
        rows = pl.ds(piece.row * num_q_heads + first_head, queries.arrived.shape[0])
        plgpu.copy_gmem_to_smem(q_ref.at[rows], queries.arrived, queries.full)

    return stream(
        ring,
        k_ref,
        v_ref,
        block_tables_ref.at[piece.row],
        lo=piece.lo,
        hi=piece.hi,
        kv_len=jnp.maximum(piece.seq_len, 1),
        step=step,
    )


def attend(
    piece: Piece,
    step: jax.Array,
    *,
    ring: Ring,
    queries: Queries,
    slopes: jax.Array | None,  # f32[N]
    o_ref: Any,  # f32[slots, N, D]
    lse_ref: Any,  # f32[slots, N]
    options: LogitOptions,
    interpret: bool,
) -> jax.Array:
    """Attends to the K/V of a piece and leaves its state; returns the blocks used so far."""
    num_stages, block_k, head_dim = ring.k.shape
    num_columns = queries.q.shape[0]
    window_start = first_key(piece.seq_len, options)

    def visible(block, shape):
        keys = block * block_k + iota(shape, 0, MATRIX)
        mask = keys < piece.seq_len
        return mask if options.sliding_window is None else mask & (keys >= window_start)

    def attend_block(block, state):
        m_i, l_i, acc = state
        slot = lax.rem(step + block - piece.lo, num_stages)
        plgpu.barrier_wait(ring.k_full.at[slot])
        s = product(ring.k.at[slot], queries.q.transpose((1, 0)))  # [block_k, N]
        plgpu.barrier_arrive(ring.k_free.at[slot])
        distances = None
        if slopes is not None:
            distances = block * block_k + iota(s.shape, 0, MATRIX) - (piece.seq_len - 1)
        s, factor = base2_logits(
            s, options, None if slopes is None else along(slopes, s, 1), distances
        )
        s = jnp.where(visible(block, s.shape), s, -jnp.inf)
        m_new = jnp.maximum(m_i, s.max(axis=0) * factor)
        alpha = jnp.exp2(m_i - m_new)
        p = jnp.exp2(s * factor - along(m_new, s, 1))
        # Summed over tokens at the end only: that goes across warps.
        l_new = l_i * along(alpha, l_i, 1) + p
        p = plgpu.layout_cast(p.astype(ring.v.dtype), TRANSPOSED)
        queries.p.transpose((1, 0))[...] = p
        plgpu.barrier_wait(ring.v_full.at[slot])

        # Slots that the row does not own may hold NaN, and 0 * NaN is NaN.
        @pl.when((block * block_k < window_start) | ((block + 1) * block_k > piece.seq_len))
        def _():
            for i in range(0, head_dim, 64):  # few registers
                v_ref = ring.v.at[slot, :, pl.ds(i, 64)]
                v = plgpu.load(v_ref, layout=MATRIX)
                v_ref[...] = jnp.where(visible(block, v.shape), v, jnp.zeros_like(v))

        plgpu.commit_smem()
        acc = add_product(
            acc * along(alpha, acc, 1),
            ring.v.at[slot].transpose((1, 0)),
            queries.p.transpose((1, 0)),
            interpret=interpret,
        )  # [D, N]
        plgpu.barrier_arrive(ring.v_free.at[slot])
        return m_new, l_new, acc

    @pl.when(piece.lo < piece.hi)
    def _():
        plgpu.barrier_wait(queries.full)
        queries.q.transpose((1, 0))[...] = plgpu.load(
            queries.arrived.transpose((1, 0)), layout=TRANSPOSED, optimized=False
        )
        plgpu.commit_smem()
        plgpu.barrier_arrive(queries.free)
        state = (
            full((num_columns,), -jnp.inf, COLUMNS),
            full((block_k, num_columns), 0.0, MATRIX),
            full((head_dim, num_columns), 0.0, MATRIX),
        )
        m_i, l_i, acc = lax.fori_loop(piece.lo, piece.hi, attend_block, state)
        l_i = l_i.sum(axis=0)
        out = plgpu.layout_cast(acc * along(1.0 / l_i, acc, 1), TRANSPOSED)
        store(o_ref.at[piece.slot].transpose((1, 0)), out)
        store(lse_ref.at[piece.slot], m_i * LN_2 + jnp.log(l_i))

    return step + piece.hi - piece.lo


def decode_kernel(
    q_ref,  # [B * Hq, D]
    k_ref,  # [Hkv, P, S, D]
    v_ref,  # [Hkv, P, S, D]
    block_tables_ref,  # i32[B, N]
    seq_lens_ref,  # i32[B]
    unit_ends_ref,  # i32[B] inclusive cumulative sum of the rows' blocks, or splits if fixed
    alibi_slopes_ref,  # f32[Hkv, N] or None
    o_ref,  # f32[Hkv, slots, N, D]
    lse_ref,  # f32[Hkv, slots, N]
    *,
    ring: Ring,
    queries: Queries,
    options: LogitOptions,
    config: MosaicDecodeConfig,
    group: int,
    interpret: bool,
):
    head = lax.axis_index("head")
    walk_share = functools.partial(
        walk,
        seq_lens_ref=seq_lens_ref,
        unit_ends_ref=unit_ends_ref,
        options=options,
        config=config,
    )
    let_next_kernel_start(interpret=interpret)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _():
        slopes = None
        if alibi_slopes_ref is not None:
            slopes = load(alibi_slopes_ref.at[head], COLUMNS)
        walk_share(
            functools.partial(
                attend,
                ring=ring,
                queries=queries,
                slopes=slopes,
                o_ref=o_ref.at[head],
                lse_ref=lse_ref.at[head],
                options=options,
                interpret=interpret,
            )
        )

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _():
        step = walk_share(
            functools.partial(
                produce,
                ring=ring,
                queries=queries,
                q_ref=q_ref,
                k_ref=k_ref.at[head],
                v_ref=v_ref.at[head],
                block_tables_ref=block_tables_ref,
                first_head=head * group,
                num_q_heads=group * k_ref.shape[0],
            )
        )
        drain(ring, step)

        @pl.when(step > 0)
        def _():
            plgpu.barrier_wait(queries.free)


def paged_decode(
    q: jax.Array,  # [B, Hq, D]
    k_pages: jax.Array,  # [Hkv, P, S, D]
    v_pages: jax.Array,  # [Hkv, P, S, D]
    block_tables: jax.Array,  # i32[B, N]
    seq_lens: jax.Array,  # i32[B], each in [0, N * S]
    alibi_slopes: jax.Array | None,  # f32[Hq]
    sinks: jax.Array | None,  # f32[Hq]
    *,
    options: LogitOptions,
    config: MosaicDecodeConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query token per row: `(out [B, Hq, D], lse f32[B, Hq])`."""
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    group = num_q_heads // num_kv_heads
    num_columns = pl.cdiv(group, 8) * 8

    # The same for every layer of a step, so inside one jit XLA keeps a single copy of it.
    with jax.named_scope("block_prefix_sums"):
        first_block, end_block = row_blocks(seq_lens, options, config.block_k)
        units = end_block - first_block
        if config.fixed_split_size is None:
            num_slots = config.num_programs + num_seqs
        else:
            units = pl.cdiv(units, config.fixed_split_size // config.block_k)
            num_slots = num_seqs * pl.cdiv(
                block_tables.shape[1] * page_size, config.fixed_split_size
            )
        unit_ends = jnp.cumsum(units)

    operands = [
        q.reshape(num_seqs * num_q_heads, head_dim),
        k_pages,
        v_pages,
        block_tables,
        seq_lens,
        unit_ends,
    ]
    if alibi_slopes is not None:
        slopes = alibi_slopes.reshape(num_kv_heads, group)
        operands.append(jnp.pad(slopes, ((0, 0), (0, num_columns - group))))

    def kernel(*refs, **scratch_refs):
        inputs, results = refs[: len(operands)], refs[len(operands) :]
        decode_kernel(
            *inputs,
            *([None] if alibi_slopes is None else []),
            *results,
            **scratch_refs,
            options=options,
            config=config,
            group=group,
            interpret=interpret,
        )

    matrix = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=matrix_transforms(q.dtype))
    scratch: dict[str, Any] = {
        "ring": ring_types(
            num_stages=config.num_stages,
            block_k=config.block_k,
            head_dim=head_dim,
            page_size=page_size,
            dtype=k_pages.dtype,
            num_consumers=1,
        ),
        "queries": Queries(
            arrived=plgpu.SMEM((num_columns, head_dim), q.dtype),
            q=matrix((num_columns, head_dim)),
            p=matrix((num_columns, config.block_k)),
            full=plgpu.Barrier(),
            free=plgpu.Barrier(),
        ),
    }
    outs, lses = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_kv_heads, num_slots, num_columns, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_kv_heads, num_slots, num_columns), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(num_kv_heads, config.num_programs),
        grid_names=("head", "program"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode",
        interpret=interpreter(interpret),
    )(*operands)
    return merge_shares(
        outs,
        lses,
        unit_ends,
        sinks,
        num_q_heads=num_q_heads,
        dtype=q.dtype,
        num_programs=config.num_programs,
        is_split=config.fixed_split_size is not None,
        interpret=interpret,
    )
