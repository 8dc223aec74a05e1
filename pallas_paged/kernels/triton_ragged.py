"""Attention of ragged queries over paged K/V, a Pallas-Triton kernel and its specs.

The query rows of a sequence, token after token and within a token head after head of one KV head's
group, are cut into tiles, so that a few tokens fill the matrix unit and K/V are read once for all
heads of the group. Prompts, chunks, a few speculated tokens and single ones may be mixed. A tile
visits the blocks of keys that any of its queries sees:

    keys       |--|--|--|--|--|--|      full blocks: no masks
    tile 0     |##|#/|                  the blocks at the diagonal, at a window's
    tile 1     |##|##|##|#/|            edge or under a tree mask: masked
    tile 2     |##|##|##|##|##|#/|

Where there are few tiles, or one is much longer than the others, `ragged_plan` splits their keys
into pieces; the programs of a split tile leave partial states (out, lse) in slots, which
`triton_merge` unites. All others write their result at once.

FlashAttention-2 (Dao 2023), with the heads of a group packed into the tile as in FlashInfer.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels import one_byte, triton_merge
from pallas_paged.kernels.logits import LN_2, LogitOptions, accumulate, base2_logits, dot
from pallas_paged.kernels.ragged_plan import Plan, make_plan, make_tiles
from pallas_paged.kernels.specs import kv_head, token_scales, whole
from pallas_paged.kernels.tuning import RaggedConfig, next_power_of_2


def ragged_kernel(
    q_ref,  # [T, G, D]
    k_ref,  # [P * S, D], or words of one-byte elements [P * S, D / 2]
    v_ref,  # like k_ref
    k_scales_ref,  # f32[P * S], or [1] for all tokens, or None
    v_scales_ref,  # like k_scales_ref
    block_tables_ref,  # i32[B, N]
    plan: Plan,  # of refs
    q_positions_ref,  # i32[T] or None
    alibi_slopes_ref,  # f32[G] or None
    sinks_ref,  # f32[G] or None
    tree_mask_ref,  # i8[B, M, M] or None
    o_ref,  # [T, G, D]
    lse_ref,  # f32[T, G]
    outs_ref,  # f32[slots, block_q, D]
    lses_ref,  # f32[slots, block_q]
    *,
    options: LogitOptions,
    page_size: int,
    widen: one_byte.Widen,
    config: RaggedConfig,
):
    block_q, block_k = config.block_q, config.block_k
    num_tokens, group, head_dim = q_ref.shape
    index = pl.program_id(1)
    piece = jax.tree.map(lambda ref: ref[index], plan.pieces)
    slot = plan.slot[index]
    row, q_len, kv_len = piece.row, piece.q_len, piece.kv_len

    num_words = k_ref.shape[1]
    words = jnp.arange(next_power_of_2(max(num_words, 16)))[None, :]
    dims = one_byte.elements(words, head_dim // num_words)
    padded = words.size != num_words
    dim_mask = words < num_words
    page_bits = page_size.bit_length() - 1
    packed = piece.offset + jnp.arange(block_q)
    token, head = packed // group, packed % group  # [block_q]
    row_mask = token < q_len
    q_token = piece.q_start + token
    # Lanes that are off read something that is there, and write nothing. A mask would be a select
    # after the load, and that would keep q from going to the matrix unit by shared memory: measured
    # 300 instead of 430 TFLOP/s.
    q_row = jnp.minimum(q_token, num_tokens - 1)
    q_dims = [jnp.minimum(d, head_dim - 1) for d in dims] if padded else dims
    q = [plgpu.load(q_ref.at[q_row[:, None], head[:, None], d]) for d in q_dims]  # [block_q, D]
    if q_positions_ref is None:
        positions = kv_len - q_len + token
    else:
        positions = plgpu.load(q_positions_ref.at[q_row])
    slopes = None
    if alibi_slopes_ref is not None:
        slopes = plgpu.load(alibi_slopes_ref.at[head])[:, None]

    def visible(keys):
        """Which of the keys each query sees, beyond those that the row does not own."""
        if tree_mask_ref is not None:
            newest = keys - (kv_len - q_len)  # place among the row's newest tokens
            size = tree_mask_ref.shape[1]
            known = (token < size)[:, None] & (newest >= 0)[None, :] & (newest < size)[None, :]
            allowed = plgpu.load(
                tree_mask_ref.at[row[None, None], token[:, None], newest[None, :]],
                mask=known,
                other=0,
            )
            seen = (newest < 0)[None, :] | (allowed != 0)
        elif q_positions_ref is None:
            seen = keys[None, :] <= positions[:, None]
        else:
            seen = jnp.full((block_q, block_k), True)
        if options.sliding_window is not None:
            seen &= keys[None, :] >= options.first_key(positions)[:, None]
        return seen

    def attend_block(masked, block, state):
        m_i, l_i, acc = state
        keys = block * block_k + jnp.arange(block_k)
        # Keys that the tile must not read, whose slots and table entries may hold anything, are
        # replaced by one that it may: their logits are masked, and 0 times its value is 0.
        readable = jnp.clip(keys, piece.first_key, kv_len - 1) if masked else keys
        page = plgpu.load(
            block_tables_ref.at[row[None], readable >> page_bits], eviction_policy="evict_last"
        )
        key_slots = (page << page_bits) + (readable & (page_size - 1))
        slots = key_slots[:, None]
        # A padded head_dim's loads are masked; q's lanes there hold what is not 0.
        kv_mask = jnp.broadcast_to(dim_mask, (block_k, words.size)) if padded else None
        zero = 0.0 if len(dims) == 1 else 0  # of words, which are integers
        other = zero if padded else None

        def load(ref):
            return plgpu.load(ref.at[slots, words], mask=kv_mask, other=other)  # [block_k, D]

        def load_scales(ref):
            return ref[0] if ref.shape == (1,) else plgpu.load(ref.at[key_slots])[None, :]

        k = widen(load(k_ref))
        distances = keys[None, :] - positions[:, None]
        s = functools.reduce(operator.add, map(lambda q, k: dot(q, k.T), q, k))
        if k_scales_ref is not None:
            s *= load_scales(k_scales_ref)
        s, factor = base2_logits(s, options, slopes, distances)  # [block_q, block_k]
        if masked:
            s = jnp.where((keys < kv_len)[None, :] & visible(keys), s, -jnp.inf)
        m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
        # Queries that have seen no key yet.
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
        alpha = jnp.exp2(m_i - m_safe)
        p = jnp.exp2(s * factor - m_safe[:, None])
        l_new = l_i * alpha + p.sum(axis=1)
        v = widen(load(v_ref))
        scales = None if v_scales_ref is None else load_scales(v_scales_ref)
        acc = [accumulate(a, alpha, p, scales, v) for a, v in zip(acc, v, strict=True)]
        return m_new, l_new, acc

    state = (
        jnp.full((block_q,), -jnp.inf, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
        [jnp.zeros((block_q, words.size), jnp.float32) for _ in dims],
    )
    attend_full = functools.partial(attend_block, False)
    attend_masked = functools.partial(attend_block, True)
    if options.sliding_window is not None:
        state = lax.fori_loop(piece.lo, piece.full_lo, attend_masked, state)
    state = lax.fori_loop(piece.full_lo, piece.full_hi, attend_full, state)
    m_i, l_i, acc = lax.fori_loop(piece.full_hi, piece.hi, attend_masked, state)
    states = [(m_i * LN_2, l_i, a) for a in acc]

    @pl.when(slot < 0)
    def _():
        sinks = None if sinks_ref is None else plgpu.load(sinks_ref.at[head])
        for d, state in zip(dims, states, strict=True):
            out, lse = triton_merge.finish(state, sinks)
            plgpu.store(
                o_ref.at[q_token[:, None], head[:, None], d],
                out.astype(o_ref.dtype),
                mask=row_mask[:, None] & dim_mask,
            )
        plgpu.store(lse_ref.at[q_token, head], lse, mask=row_mask)

    @pl.when(slot >= 0)
    def _():
        rows = jnp.arange(block_q)
        for d, state in zip(dims, states, strict=True):
            out, lse = triton_merge.finish(state, None)
            plgpu.store(
                outs_ref.at[slot[None, None], rows[:, None], d],
                out,
                mask=jnp.broadcast_to(dim_mask, out.shape),
            )
        plgpu.store(lses_ref.at[slot[None], rows], lse)


def ragged_paged_attention(
    q: jax.Array,  # [T, Hq, D]
    k_pages: jax.Array,  # [Hkv, P, S, D]
    v_pages: jax.Array,  # [Hkv, P, S, D]
    block_tables: jax.Array,  # i32[B, N]
    seq_lens: jax.Array,  # i32[B], each in [0, N * S]
    cu_q_lens: jax.Array,  # i32[B + 1], rising, within [0, T]
    q_positions: jax.Array | None,  # i32[T]
    alibi_slopes: jax.Array | None,  # f32[Hq]
    sinks: jax.Array | None,  # f32[Hq]
    tree_mask: jax.Array | None,  # bool[B, M, M]
    k_scales: jax.Array | None = None,  # f32[Hkv, P, S] or f32[]
    v_scales: jax.Array | None = None,  # like k_scales
    *,
    options: LogitOptions,
    config: RaggedConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each row's newest tokens: `(out [T, Hq, D], lse f32[T, Hq])`.

    With `q_positions` the queries of a row stand there instead, and all of its keys are older.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    num_seqs, pages_per_seq = block_tables.shape
    group = num_q_heads // num_kv_heads

    # The same for every layer of a step, so inside one jit XLA keeps a single copy of it.
    with jax.named_scope("ragged_plan"):
        tiles = make_tiles(
            seq_lens,
            cu_q_lens,
            q_positions,
            num_tokens=num_tokens,
            group=group,
            block_q=config.block_q,
            block_k=config.block_k,
            options=options,
            has_tree=tree_mask is not None,
        )
        plan = make_plan(
            tiles,
            tile_tokens=config.block_q // group,
            block_k=config.block_k,
            num_programs=config.num_programs,
            split_size=config.split_size,
            max_kv_len=pages_per_seq * page_size,
            num_seqs=num_seqs,
        )

    def of_group(x):
        return None if x is None else x.reshape(num_kv_heads, group)

    scales = [one_byte.token_scales(x) for x in (k_scales, v_scales)]
    args = (
        q.reshape(num_tokens, num_kv_heads, group, head_dim),
        one_byte.token_rows(k_pages),
        one_byte.token_rows(v_pages),
        *scales,
        block_tables,
        plan,
        q_positions,
        of_group(alibi_slopes),
        of_group(sinks),
        None if tree_mask is None else tree_mask.astype(jnp.int8),
    )
    out_shape = (
        jax.ShapeDtypeStruct((num_tokens, num_kv_heads, group, head_dim), q.dtype),
        jax.ShapeDtypeStruct((num_tokens, num_kv_heads, group), jnp.float32),
        jax.ShapeDtypeStruct((num_kv_heads, plan.num_slots, config.block_q, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_kv_heads, plan.num_slots, config.block_q), jnp.float32),
    )
    out, lse, outs, lses = pl.pallas_call(
        functools.partial(
            ragged_kernel,
            options=options,
            page_size=page_size,
            widen=one_byte.widening(k_pages.dtype, q.dtype, interpret=interpret),
            config=config,
        ),
        grid=(num_kv_heads, plan.slot.shape[0]),
        in_specs=[
            *(kv_head(x, axis) for x, axis in zip(args[:3], (1, 0, 0), strict=True)),
            *(token_scales(x) for x in scales),
            *(whole(x) for x in args[5:8]),  # table, plan, positions
            *(kv_head(x, 0) for x in args[8:10]),  # slopes, sinks
            whole(args[10]),  # tree mask
        ],
        out_specs=[kv_head(x, axis) for x, axis in zip(out_shape, (1, 1, 0, 0), strict=True)],
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="ragged_paged_attention",
    )(*args)
    out, lse = triton_merge.merge_tiles(
        out, lse, outs, lses, plan, of_group(sinks), config=config, interpret=interpret
    )
    return out.reshape(q.shape), lse.reshape(num_tokens, num_q_heads)
