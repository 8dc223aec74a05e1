"""The gradients of keys and values, a Pallas-Triton kernel.

A program has one tile of keys and visits the queries of every row that reads them, row after row:
`dv = p^T.do` and `dk = ds^T.q`. Products are transposed, with keys on M: what the softmax leaves in
registers is then an operand as it is. The tiles of queries that see all keys of the tile need no
masks:

    queries of a row   |--|--|--|--|--|--|
    causal             |  |  |/#|##|##|##|
    with a window      |  |  |/#|##|#/|  |

All rows that share pages are read in one order, so the sums are the same bits in every run.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.backward import recompute
from pallas_paged.kernels.backward_plan import make_key_tiles
from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.logits import LogitOptions, dot
from pallas_paged.kernels.triton import one_byte
from pallas_paged.kernels.triton.config import BackwardConfig
from pallas_paged.kernels.triton.pages import Tokens, operands_of
from pallas_paged.kernels.triton.softmax import exp2, mask
from pallas_paged.kernels.triton.specs import as_int8, by_kv_head, full_specs, kv_head, loop_params
from pallas_paged.pages.layout import PageLayout

_NEVER = jnp.iinfo(jnp.int32).max


def _keys_kernel(
    q_ref,  # [T, G, D]
    do_ref,  # [T, G, D]
    lse_ref,  # f32[T, G] in base 2
    delta_ref,  # f32[T, G]
    k_ref,  # pages of the KV head
    v_ref,  # like k_ref
    block_tables_ref,  # i32[B * N]
    seq_lens_ref,  # i32[B]
    cu_q_lens_ref,  # i32[B + 1]
    plan: Any,  # `KeyTiles` of refs
    q_positions_ref,  # i32[T] or None
    alibi_slopes_ref,  # f32[G] or None
    tree_mask_ref,  # i8[B, M, M] or None
    zeros_refs,  # aliased with dk and dv
    *d_refs,  # one or two arrays like the pages
    options: LogitOptions,
    page_size: int,
    layout: PageLayout,
    operands: one_byte.Operands,
    config: BackwardConfig,
):
    """One program: the gradients of the keys and values of one tile."""
    del zeros_refs
    block_q, block_k = config.block_q, config.block_k
    _, group, head_dim = q_ref.shape
    num_seqs = seq_lens_ref.shape[0]
    pages_per_seq = block_tables_ref.shape[0] // num_seqs
    tiles_per_row = pl.cdiv(pages_per_seq * page_size, block_k)
    head = pl.program_id(0)
    tile = plan.tile[pl.program_id(1)]

    dims = jnp.arange(pl.next_power_of_2(max(head_dim, 16)))[None, :]
    padded = dims.size != head_dim
    q_dims = jnp.minimum(dims, head_dim - 1) if padded else dims
    page_bits = page_size.bit_length() - 1
    place = tile % tiles_per_row * block_k + jnp.arange(block_k)
    block, offset = place >> page_bits, place & (page_size - 1)
    entry = tile // tiles_per_row * pages_per_seq + block
    in_table = block < pages_per_seq
    first = plgpu.load(plan.first.at[entry], mask=in_table, other=0)
    end = plgpu.load(plan.end.at[entry], mask=in_table, other=0)
    leads = first < end  # keys that get their gradients from this tile
    page = plgpu.load(block_tables_ref.at[entry], mask=leads, other=0)

    def index(kv, page):
        return layout.index(
            jnp.full((1, 1), kv), P=page[:, None], N=offset[:, None], H=head[None, None], D=dims
        )

    tokens = Tokens.of(page, place, page_size)
    kv_mask = jnp.broadcast_to(dims < head_dim, (block_k, dims.size)) if padded else None

    def load(ref):
        # Other keys may be NaN: each has its own row in the sums, which is not stored. A mask would
        # keep the tile out of shared memory.
        return plgpu.load(tokens.rows_of(ref, dims), mask=kv_mask, other=0.0 if padded else None)

    k, v = load(k_ref), load(v_ref)

    def add_row(carry):
        reader, dk, dv = carry
        rows = plgpu.load(plan.readers.row.at[reader], mask=reader < end, other=_NEVER)
        row = jnp.min(rows)
        mine = rows == row  # pages of this tile that the row reads
        blocks = plgpu.load(plan.readers.block.at[reader], mask=mine, other=0)
        keys = (blocks << page_bits) + offset
        q_start = cu_q_lens_ref[row]
        q_len = cu_q_lens_ref[row + 1] - q_start
        kv_len = seq_lens_ref[row]
        before = kv_len - q_len
        mine &= keys < kv_len
        oldest = jnp.min(jnp.where(mine, keys, _NEVER))
        newest = jnp.max(jnp.where(mine, keys, -1))
        # Tokens from `lo` to `hi` see some of the keys, those from `full_lo` to `full_hi` all.
        lo, hi, full_lo, full_hi = 0, q_len, 0, q_len
        if tree_mask_ref is None and q_positions_ref is None and options.causal:
            lo, full_lo = oldest - before, newest - before
        if options.sliding_window is not None and q_positions_ref is None:
            hi = newest - before + options.sliding_window
            full_hi = oldest - before + options.sliding_window
        all_mine = jnp.min((mine | ~leads).astype(jnp.int32)) > 0
        if tree_mask_ref is not None:
            all_mine &= newest < before
        if options.sliding_window is not None and q_positions_ref is not None:
            all_mine = False
        first_tile = jnp.clip(lo, 0, q_len) * group // block_q
        end_tile = jnp.maximum(pl.cdiv(jnp.clip(hi, 0, q_len) * group, block_q), first_tile)
        full_lo = jnp.where(
            all_mine, pl.cdiv(jnp.clip(full_lo, 0, q_len) * group, block_q), end_tile
        )
        full_lo = jnp.clip(full_lo, first_tile, end_tile)
        # Rows past the last token are off without a mask.
        full_hi = jnp.where(full_hi < q_len, full_hi * group // block_q, end_tile)
        full_hi = jnp.clip(full_hi, full_lo, end_tile)

        def add_queries(masked, index, carry):
            dk, dv = carry
            packed = index * block_q + jnp.arange(block_q)
            token, q_head = packed // group, packed % group
            q_row = q_start + jnp.minimum(token, q_len - 1)
            q = plgpu.load(q_ref.at[q_row[:, None], q_head[:, None], q_dims])
            lse = plgpu.load(lse_ref.at[q_row, q_head])
            lse = jnp.where(token < q_len, lse, jnp.inf)[None, :]
            delta = plgpu.load(delta_ref.at[q_row, q_head])[None, :]
            positions = before + token
            if q_positions_ref is not None:
                positions = plgpu.load(q_positions_ref.at[q_row])
            slopes = None
            if alibi_slopes_ref is not None:
                slopes = plgpu.load(alibi_slopes_ref.at[q_head])[None, :]
            do = plgpu.load(do_ref.at[q_row[:, None], q_head[:, None], q_dims])
            sees = None
            if masked:
                sees = mine[:, None] & mask(
                    keys[:, None],
                    positions[None, :],
                    token[None, :],
                    before,
                    row=row,
                    tree_mask_ref=tree_mask_ref,
                    options=options,
                    causal=options.causal and q_positions_ref is None,
                )
            p, _, ds = recompute(
                dot(k, q.T), dot(v, do.T), lse, delta, sees, slopes,
                keys[:, None] - positions[None, :],
                options=options, exp2=functools.partial(exp2, operands=operands),
            )  # fmt: skip
            dv += dot(p.astype(do.dtype), do)
            dk += dot(ds.astype(q.dtype), q)
            return dk, dv

        add_masked, add_full = (functools.partial(add_queries, masked) for masked in (True, False))
        dk, dv = lax.fori_loop(first_tile, full_lo, add_masked, (dk, dv))
        dk, dv = lax.fori_loop(full_lo, full_hi, add_full, (dk, dv))
        if options.sliding_window is not None:
            dk, dv = lax.fori_loop(full_hi, end_tile, add_masked, (dk, dv))
        return reader + (rows == row).astype(jnp.int32), dk, dv

    zeros = jnp.zeros((block_k, dims.size), jnp.float32)
    _, dk, dv = lax.while_loop(
        lambda carry: jnp.max((carry[0] < end).astype(jnp.int32)) > 0,
        add_row,
        (first, zeros, zeros),
    )
    # The interpreter writes old values in lanes that are off, too: past the end, not to page 0.
    num_pages = layout.size(d_refs[0].shape, "P")
    page = jnp.where(leads, page, num_pages)
    for kv, d in enumerate((dk * options.sm_scale, dv)):
        ref = d_refs[kv % len(d_refs)]
        plgpu.store(
            ref.at[index(kv, page)], d.astype(ref.dtype), mask=leads[:, None] & (dims < head_dim)
        )


def keys_gradient(
    arrays: Arrays,
    do: jax.Array,  # [T, Hq, D]
    lse: jax.Array,  # f32[T, Hkv, G] in base 2
    delta: jax.Array,  # f32[T, Hkv, G]
    *,
    options: LogitOptions,
    config: BackwardConfig,
    interpret: bool,
) -> list[jax.Array]:
    """Return the gradients of the pages, like the pages; 0 in slots that no query sees."""
    num_tokens, _, head_dim = arrays.q.shape
    num_kv_heads, group = arrays.num_kv_heads, arrays.group
    with jax.named_scope("backward_plan"):
        plan = make_key_tiles(arrays, block_k=config.block_k, options=options)
    by_head = (num_tokens, num_kv_heads, group, head_dim)
    q, do = arrays.q.reshape(by_head), do.reshape(by_head)
    slopes, tree = by_kv_head(arrays.alibi_slopes, num_kv_heads), as_int8(arrays.tree_mask)
    of_rows = (
        arrays.block_tables.reshape(-1),
        arrays.seq_lens,
        arrays.cu_q_lens,
        plan,
        arrays.q_positions,
    )
    pages = [x for x in (arrays.k_pages, arrays.v_pages) if x is not None]
    zeros = [jnp.zeros_like(x) for x in pages]
    kv, kv_specs = operands_of(arrays)
    inputs = (q, do, lse, delta, *kv[:2], *of_rows, slopes, tree, zeros)
    first_zeros = len(jax.tree.leaves(inputs)) - len(zeros)
    return pl.pallas_call(
        functools.partial(
            _keys_kernel,
            options=options,
            page_size=arrays.page_size,
            layout=arrays.layout,
            operands=one_byte.Operands.of(arrays, interpret=interpret),
            config=config,
        ),
        grid=(num_kv_heads, plan.tile.shape[0]),
        in_specs=[
            *kv_head((q, do, lse, delta), 1),
            *kv_specs[:2],
            *full_specs(of_rows),
            kv_head(slopes, 0),
            full_specs(tree),
            full_specs(zeros),
        ],
        out_specs=full_specs(zeros),
        out_shape=[result_shape(x.shape, x.dtype) for x in pages],
        input_output_aliases={first_zeros + i: i for i in range(len(zeros))},
        compiler_params=loop_params(config),
        interpret=interpret,
        name="attention_gradient_of_keys",
    )(*inputs)
