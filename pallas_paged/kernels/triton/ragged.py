"""Attention of ragged queries over paged K/V, a Pallas-Triton kernel and its specs.

The query rows of a sequence, token after token and within a token head after head of one KV head's
group, are divided into tiles, so that a few tokens fill the matrix unit and K/V are read once for
all heads of the group. Prompts, chunks of prompts, speculated tokens and single tokens may be
mixed. A tile visits the blocks of keys that any of its queries sees:

    keys       |--|--|--|--|--|--|      full blocks: no masks
    tile 0     |##|#/|                  blocks at the diagonal, at the edge of a
    tile 1     |##|##|##|#/|            window or under a tree mask: masked
    tile 2     |##|##|##|##|##|#/|

Where tiles are few, or one is much longer than the others, `ragged_plan` splits their keys into
several work items. The programs of a split tile leave partial states (out, lse) for `merge`.
The others write their result at once.

FlashAttention-2 (Dao 2023), with the heads of a group packed into the tile as in FlashInfer.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.decode_plan import programs_per_kv_head
from pallas_paged.kernels.logits import LN_2, LogitOptions, base2_logits, dot
from pallas_paged.kernels.ragged_plan import Plan, PlanShape, make_plan
from pallas_paged.kernels.ragged_plan_kernel import can_plan, plan_by_kernel, plan_types
from pallas_paged.kernels.ragged_tiles import for_each_block
from pallas_paged.kernels.triton import merge, one_byte, pages, softmax
from pallas_paged.kernels.triton.config import RaggedConfig
from pallas_paged.kernels.triton.pages import Tokens
from pallas_paged.kernels.triton.specs import as_int8, by_kv_head, full_specs, kv_head, loop_params


def _ragged_kernel(
    q_refs,  # of arrays [T, G, ..] from `Operands.split` or `pack`
    q_scales_ref,  # f32[T, G], factors of the rows of q, or None
    k_ref,  # [P * S, D] or [P, S, D], of int8 and fp8 elements words [.., D / 2]
    v_ref,  # like k_ref
    k_scales_ref,  # f32[P * S] or [P, S], or [1] for all tokens, or None
    v_scales_ref,  # like k_scales_ref
    block_tables_ref,  # i32[B, N]
    plan: Plan,  # of refs
    q_positions_ref,  # i32[T] or None
    alibi_slopes_ref,  # f32[G] or None
    sinks_ref,  # f32[G] or None
    tree_mask_ref,  # i8[B, M, M] or None
    o_ref,  # [T, G, D]
    lse_ref,  # f32[T, G]
    outs_ref,  # f32[num_partials, block_q, D]
    lses_ref,  # f32[num_partials, block_q]
    *,
    options: LogitOptions,
    page_size: int,
    operands: one_byte.Operands,
    config: RaggedConfig,
):
    """One program: attend one work item; store its result or, of a split tile, a partial state."""
    block_q, block_k = config.block_q, config.block_k
    num_tokens, group = q_refs[0].shape[:2]
    num_words = k_ref.shape[-1]
    index = pl.program_id(1)
    item = jax.tree.map(lambda ref: ref[index], plan.items)
    partial = plan.partial[index]
    row, q_len, kv_len = item.row, item.q_len, item.kv_len

    words = jnp.arange(pl.next_power_of_2(max(num_words, 16)))[None, :]
    dims = one_byte.elements(words, o_ref.shape[2] // num_words)
    padded = words.size != num_words
    dim_mask = words < num_words
    page_bits = page_size.bit_length() - 1
    packed = item.offset + jnp.arange(block_q)
    token, head = packed // group, packed % group  # [block_q]
    row_mask = token < q_len
    q_token = item.q_start + token
    # Lanes that are off read some other token, and write nothing. A mask would be a select after
    # the load, and q could no longer go to the matrix unit through shared memory: measured on an
    # H200, 300 instead of 430 TFLOP/s.
    q_row = jnp.minimum(q_token, num_tokens - 1)
    q_words = jnp.minimum(words, num_words - 1) if padded else words
    q = [plgpu.load(ref.at[q_row[:, None], head[:, None], q_words]) for ref in q_refs]
    q, q_scales = operands.of_queries(q)
    if q_scales_ref is not None:
        q_scales = plgpu.load(q_scales_ref.at[q_row, head])
    positions = kv_len - q_len + token
    if q_positions_ref is not None:
        positions = plgpu.load(q_positions_ref.at[q_row])
    slopes = None if alibi_slopes_ref is None else plgpu.load(alibi_slopes_ref.at[head])[:, None]

    def readable_keys(block):
        # Slots and table entries of keys that the tile must not read may hold anything. Such a key
        # is replaced by one that it may read: the logit is masked, and 0 times that value is 0.
        return jnp.clip(block * block_k + jnp.arange(block_k), item.first_key, kv_len - 1)

    def pages_of(block):
        # Prefetched one block past the end, and the item may be empty, so the load is masked.
        return plgpu.load(
            block_tables_ref.at[row[None], readable_keys(block) >> page_bits],
            mask=jnp.broadcast_to(item.lo < item.hi, (block_k,)),
            other=0,
            eviction_policy="evict_last",
        )

    def attend_block(masked, block, carry):
        state, next_pages = carry
        page = pages_of(block) if next_pages is None else next_pages
        next_pages = None if next_pages is None else pages_of(block + 1)
        keys = block * block_k + jnp.arange(block_k)
        readable = readable_keys(block) if masked else keys
        tokens = Tokens.of(page, readable, page_size)
        # Loads past head_dim are masked: q holds other values than 0 in those lanes.
        kv_mask = jnp.broadcast_to(dim_mask, (block_k, words.size)) if padded else None

        def load(ref):
            other = one_byte.zero(ref) if padded else None
            return plgpu.load(tokens.rows_of(ref, words), mask=kv_mask, other=other)

        k = operands.of_pages(load(k_ref))
        distances = keys[None, :] - positions[:, None]
        s = functools.reduce(operator.add, map(lambda q, k: dot(q, k.T), q, k))
        if k_scales_ref is not None:
            s *= tokens.load_scales(k_scales_ref)[None, :]
        s, factor = base2_logits(s, options, slopes, distances, q_scales)  # [block_q, block_k]
        if masked:
            sees = softmax.mask(
                keys[None, :],
                positions[:, None],
                token[:, None],
                kv_len - q_len,
                row=row,
                tree_mask_ref=tree_mask_ref,
                options=options,
                causal=options.causal and q_positions_ref is None,
                end=kv_len,
            )
            s = jnp.where(sees, s, -jnp.inf)
        state = softmax.attend(
            state,
            s,
            factor,
            tokens.load_scales(v_scales_ref),
            lambda: operands.of_pages(load(v_ref)),
            all_see=not masked,
            operands=operands,
        )
        return state, next_pages

    # As in decoding. Longer tiles need the registers for other values.
    next_pages = pages_of(item.lo) if operands.quantized and block_q < 64 else None
    carry = softmax.empty(block_q, words.size, len(dims)), next_pages
    carry = for_each_block(attend_block, item, carry, options)
    m_i, l_i, acc = carry[0]
    states = [(m_i * LN_2, l_i, a) for a in acc]

    @pl.when(partial < 0)
    def _():
        sinks = None if sinks_ref is None else plgpu.load(sinks_ref.at[head])
        for d, state in zip(dims, states, strict=True):
            out, lse = merge.finish(state, sinks)
            plgpu.store(
                o_ref.at[q_token[:, None], head[:, None], d],
                out.astype(o_ref.dtype),
                mask=row_mask[:, None] & dim_mask,
            )
        plgpu.store(lse_ref.at[q_token, head], lse, mask=row_mask)

    @pl.when(partial >= 0)
    def _():
        rows = jnp.arange(block_q)
        for d, state in zip(dims, states, strict=True):
            out, lse = merge.finish(state, None)
            plgpu.store(
                outs_ref.at[partial[None, None], rows[:, None], d],
                out,
                mask=jnp.broadcast_to(dim_mask, out.shape),
            )
        plgpu.store(lses_ref.at[partial[None], rows], lse)


def ragged_paged_attention(
    arrays: Arrays, *, options: LogitOptions, config: RaggedConfig, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return attention of each row's newest tokens: `(out [T, Hq, D], lse f32[T, Hq])`."""
    num_tokens, num_q_heads, head_dim = arrays.q.shape
    num_kv_heads, group = arrays.num_kv_heads, arrays.group

    # The same for every layer of a step, so inside one jit XLA keeps a single copy of it.
    with jax.named_scope("ragged_plan"):
        num_programs = programs_per_kv_head(config.num_programs, num_kv_heads)
        shape = PlanShape.of(arrays, config, options, num_programs=num_programs)
        lens = arrays.seq_lens, arrays.cu_q_lens
        if arrays.q_positions is None and can_plan(shape) and not interpret:
            plan = plan_by_kernel(*lens, plan_types(shape), shape, interpret=False)
        else:
            plan = make_plan(*lens, arrays.q_positions, shape)

    operands = one_byte.Operands.of(arrays, interpret=interpret)
    q = arrays.q.reshape(num_tokens, num_kv_heads, group, head_dim)
    qs, q_scales = operands.pack(q), None
    if config.block_q >= 64:
        # Not in the kernel, because q of such tiles should be loaded into shared memory as it is
        # (see above): on an H200 long prompts take 20% less. Tiles of few rows have it in
        # registers, and take 10% less if it is converted there.
        qs, q_scales = operands.of_queries(operands.split(q))
    kv, kv_specs = pages.operands_of(arrays)
    of_rows = (arrays.block_tables, plan, arrays.q_positions)
    of_heads = [by_kv_head(x, num_kv_heads) for x in (arrays.alibi_slopes, arrays.sinks)]
    tree = as_int8(arrays.tree_mask)
    partials = (num_kv_heads, plan.num_partials, config.block_q)
    out_shape = (
        result_shape((num_tokens, num_kv_heads, group, head_dim), q.dtype),
        result_shape((num_tokens, num_kv_heads, group), jnp.float32),
        result_shape((*partials, head_dim), jnp.float32),
        result_shape(partials, jnp.float32),
    )
    out, lse, outs, lses = pl.pallas_call(
        functools.partial(
            _ragged_kernel,
            options=options,
            page_size=arrays.page_size,
            operands=operands,
            config=config,
        ),
        grid=(num_kv_heads, plan.partial.shape[0]),
        in_specs=[
            *kv_head((qs, q_scales), 1),
            *kv_specs,
            *full_specs(of_rows),
            *kv_head(of_heads, 0),
            full_specs(tree),
        ],
        out_specs=[*kv_head(out_shape[:2], 1), *kv_head(out_shape[2:], 0)],
        out_shape=out_shape,
        compiler_params=loop_params(config),
        interpret=interpret,
        name="ragged_paged_attention",
    )(qs, q_scales, *kv, *of_rows, *of_heads, tree)
    out, lse = merge.merge_ragged(
        out, lse, outs, lses, plan, of_heads[1], config=config, interpret=interpret
    )
    return out.reshape(num_tokens, num_q_heads, head_dim), lse.reshape(num_tokens, num_q_heads)
