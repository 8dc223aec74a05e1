"""The gradient of the queries, a Pallas-Triton kernel: the tiles and loops of the forward pass.

A program has one tile of queries, visits the blocks of keys that any of them sees, and sums
`dq = ds.k`. With ALiBi it also sums the gradients of the slopes for each query and head.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.backward import recompute
from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.logits import LogitOptions, dot, signed_distances
from pallas_paged.kernels.ragged_tiles import Tiles, Tiling, for_each_block, make_tiles
from pallas_paged.kernels.triton import one_byte
from pallas_paged.kernels.triton.config import BackwardConfig
from pallas_paged.kernels.triton.pages import Tokens, operands_of
from pallas_paged.kernels.triton.softmax import exp2, mask
from pallas_paged.kernels.triton.specs import as_int8, by_kv_head, full_specs, kv_head, loop_params


def _queries_kernel(
    q_refs,  # of arrays [T, G, W] from `Operands.split`
    do_refs,  # like q_refs
    lse_ref,  # f32[T, G] in base 2
    delta_ref,  # f32[T, G]
    k_ref,  # pages of the KV head, or words of int8 and fp8 elements
    v_ref,  # like k_ref
    k_scales_ref,  # f32, or [1] for all tokens, or None
    v_scales_ref,  # like k_scales_ref
    block_tables_ref,  # i32[B, N]
    tiles: Tiles,  # of refs
    q_positions_ref,  # i32[T] or None
    alibi_slopes_ref,  # f32[G] or None
    tree_mask_ref,  # i8[B, M, M] or None
    dq_refs,  # like q_refs
    d_slopes_ref,  # f32[T, G] or None
    *,
    options: LogitOptions,
    page_size: int,
    operands: one_byte.Operands,
    config: BackwardConfig,
):
    """One program: the gradient of one tile of queries."""
    block_q, block_k = config.block_q, config.block_k
    num_tokens, group, num_words = q_refs[0].shape
    index = pl.program_id(1)
    item = jax.tree.map(lambda ref: ref[index], tiles)
    row, q_len, kv_len = item.row, item.q_len, item.kv_len
    before = kv_len - q_len

    words = jnp.arange(pl.next_power_of_2(max(num_words, 16)))[None, :]
    padded = words.size != num_words
    page_bits = page_size.bit_length() - 1
    packed = item.offset + jnp.arange(block_q)
    token, q_head = packed // group, packed % group  # [block_q]
    # Lanes that are off read the row's last token, and write nothing.
    q_row = item.q_start + jnp.clip(token, 0, jnp.maximum(q_len - 1, 0))
    q_row = jnp.minimum(q_row, num_tokens - 1)
    q_words = jnp.minimum(words, num_words - 1) if padded else words
    q, do = (
        [plgpu.load(ref.at[q_row[:, None], q_head[:, None], q_words]) for ref in refs]
        for refs in (q_refs, do_refs)
    )
    lse = plgpu.load(lse_ref.at[q_row, q_head])
    delta = plgpu.load(delta_ref.at[q_row, q_head])
    positions = before + token
    if q_positions_ref is not None:
        positions = plgpu.load(q_positions_ref.at[q_row])
    slopes = None if alibi_slopes_ref is None else plgpu.load(alibi_slopes_ref.at[q_head])[:, None]

    def add_block(masked, block, carry):
        dq, d_slopes = carry
        keys = block * block_k + jnp.arange(block_k)
        # As in the forward pass, a key that must not be read is replaced by one that may.
        readable = jnp.clip(keys, item.first_key, kv_len - 1)
        page = plgpu.load(
            block_tables_ref.at[row[None], readable >> page_bits], eviction_policy="evict_last"
        )
        tokens = Tokens.of(page, readable, page_size)
        kv_mask = jnp.broadcast_to(words < num_words, (block_k, words.size)) if padded else None

        def load(ref):
            other = one_byte.zero(ref) if padded else None
            loaded = plgpu.load(tokens.rows_of(ref, words), mask=kv_mask, other=other)
            return [tile.astype(operands.dtype) for tile in operands.of_pages(loaded)]

        def products(queries, values):
            return functools.reduce(operator.add, map(lambda q, k: dot(q, k.T), queries, values))

        k, v = load(k_ref), load(v_ref)
        s, dp = products(q, k), products(do, v)
        k_scales, v_scales = tokens.load_scales(k_scales_ref), tokens.load_scales(v_scales_ref)
        if k_scales is not None and v_scales is not None:
            s, dp = s * k_scales[None, :], dp * v_scales[None, :]
        sees = None
        if masked:
            sees = mask(
                keys[None, :],
                positions[:, None],
                token[:, None],
                before,
                row=row,
                tree_mask_ref=tree_mask_ref,
                options=options,
                causal=options.causal and q_positions_ref is None,
                end=kv_len,
            )
        distances = keys[None, :] - positions[:, None]
        _, d_logits, ds = recompute(
            s, dp, lse[:, None], delta[:, None], sees, slopes, distances,
            options=options, exp2=functools.partial(exp2, operands=operands),
        )  # fmt: skip
        if d_slopes is not None:
            d_slopes += (d_logits * signed_distances(distances, options)).sum(axis=1)
        if k_scales is not None:
            ds = ds * k_scales[None, :]
        ds = ds.astype(operands.dtype)
        return [d + dot(ds, tile) for d, tile in zip(dq, k, strict=True)], d_slopes

    dq = [jnp.zeros((block_q, words.size), jnp.float32) for _ in q_refs]
    d_slopes = None if d_slopes_ref is None else jnp.zeros((block_q,), jnp.float32)
    dq, d_slopes = for_each_block(add_block, item, (dq, d_slopes), options)

    row_mask = token < q_len
    q_token = item.q_start + token
    for ref, d in zip(dq_refs, dq, strict=True):
        plgpu.store(
            ref.at[q_token[:, None], q_head[:, None], words],
            (d * options.sm_scale).astype(ref.dtype),
            mask=row_mask[:, None] & (words < num_words),
        )
    if d_slopes_ref is not None:
        plgpu.store(d_slopes_ref.at[q_token, q_head], d_slopes, mask=row_mask)


def queries_gradient(
    arrays: Arrays,
    do: jax.Array,  # [T, Hq, D]
    lse: jax.Array,  # f32[T, Hkv, G] in base 2
    delta: jax.Array,  # f32[T, Hkv, G]
    *,
    options: LogitOptions,
    config: BackwardConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the gradients of q `[T, Hq, D]` and, with ALiBi, of the slopes f32`[Hq]`."""
    num_tokens, num_q_heads, head_dim = arrays.q.shape
    num_kv_heads, group = arrays.num_kv_heads, arrays.group
    with jax.named_scope("backward_plan"):
        tiling = Tiling(
            group=group,
            block_q=config.block_q,
            block_k=config.block_k,
            options=options,
            has_tree=arrays.tree_mask is not None,
        )
        lens = arrays.seq_lens, arrays.cu_q_lens
        tiles = make_tiles(*lens, arrays.q_positions, num_tokens, tiling)
    operands = one_byte.Operands.of(arrays, interpret=interpret)
    by_head = (num_tokens, num_kv_heads, group, head_dim)
    qs, dos = (operands.split(x.reshape(by_head)) for x in (arrays.q, do))
    kv, kv_specs = operands_of(arrays)
    slopes, tree = by_kv_head(arrays.alibi_slopes, num_kv_heads), as_int8(arrays.tree_mask)
    of_heads, of_rows = (qs, dos, lse, delta), (arrays.block_tables, tiles, arrays.q_positions)
    d_slopes = None if slopes is None else result_shape(by_head[:3], jnp.float32)
    out_shape = [result_shape(x.shape, x.dtype) for x in qs], d_slopes
    dq, d_slopes = pl.pallas_call(
        functools.partial(
            _queries_kernel,
            options=options,
            page_size=arrays.page_size,
            operands=operands,
            config=config,
        ),
        grid=(num_kv_heads, tiles.row.shape[0]),
        in_specs=[
            *kv_head(of_heads, 1),
            *kv_specs,
            *full_specs(of_rows),
            kv_head(slopes, 0),
            full_specs(tree),
        ],
        out_specs=kv_head(out_shape, 1),
        out_shape=out_shape,
        compiler_params=loop_params(config),
        interpret=interpret,
        name="attention_gradient_of_queries",
    )(*of_heads, *kv, *of_rows, slopes, tree)
    dq = dq[0] if len(dq) == 1 else jnp.stack(dq, axis=-1)
    if d_slopes is not None:
        d_slopes = d_slopes.sum(axis=0).reshape(num_q_heads)
    return dq.reshape(arrays.q.shape), d_slopes
