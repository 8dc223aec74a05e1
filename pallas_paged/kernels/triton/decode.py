"""Split decode attention over paged K/V, a Pallas-Triton kernel and its specs.

Every row of K/V is cut into blocks of `block_k` tokens and all rows' blocks are laid end to end.
Each of `num_programs` programs per KV head takes the next share of that line, all of one length but
the last, whatever rows it spans, so ragged batches stay balanced without a plan made on the host:

    row 0           row 1   row 2 ...
    |--|--|--|--|--||--|--||--|--|--|--|--|--|--|
    [ program 0  ][ program 1  ][ program 2  ]...

A program leaves one partial state (out, lse) for each row that it touched in slot `program + row`.
Along the line of shares at least one of the two grows, so no slot is written twice; `triton_merge`
reads a row's slots back. One program holds all query heads of its KV head, so K/V are read once.
Blocks left of a sliding window are not on the line.

Under a fixed split size the line is made of splits of a row instead, each of which leaves a partial
state of its own: then no sum depends on where a share happens to end.

Flash-Decoding's split over K/V, made even as in stream-K; see also FlashAttention (Dao 2022).
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.logits import LN_2, LogitOptions, base2_logits, dot
from pallas_paged.kernels.triton import merge as triton_merge
from pallas_paged.kernels.triton import one_byte
from pallas_paged.kernels.triton import softmax as triton_softmax
from pallas_paged.kernels.triton.config import DecodeConfig, next_power_of_2
from pallas_paged.kernels.triton.specs import kv_head, scale_spec, whole


def row_blocks(
    seq_len: jax.Array, options: LogitOptions, block_k: int
) -> tuple[jax.Array, jax.Array]:
    """The blocks `[first, end)` of a row that its newest token sees."""
    end = pl.cdiv(seq_len, block_k)
    return jnp.minimum(options.first_key(seq_len - 1) // block_k, end), end


def decode_kernel(
    q_refs,  # of arrays [B, G, ..] as `Operands.pack` makes them
    k_ref,  # [P * S, D], or words of one-byte elements [P * S, D / 2]
    v_ref,  # like k_ref
    k_scales_ref,  # f32[P * S], or [1] for all tokens, or None
    v_scales_ref,  # like k_scales_ref
    block_tables_ref,  # i32[B, N]
    seq_lens_ref,  # i32[B]
    unit_ends_ref,  # i32[B] inclusive cumulative sum of the rows' blocks, or splits if fixed
    alibi_slopes_ref,  # f32[G] or None
    o_ref,  # f32[C + B, G, D], or one per split
    lse_ref,  # f32[C + B, G]
    *,
    options: LogitOptions,
    page_size: int,
    operands: one_byte.Operands,
    config: DecodeConfig,
):
    block_k, fixed_split_size = config.block_k, config.fixed_split_size
    num_seqs, group = q_refs[0].shape[:2]
    program = pl.program_id(1)

    # Indices of loads and stores have power-of-two shapes; lanes past the real sizes are off.
    rows = jnp.arange(next_power_of_2(num_seqs))
    # The matrix unit takes no fewer than 16 rows, nor products over fewer than 16 elements.
    heads = jnp.arange(next_power_of_2(max(group, 16)))[:, None]
    num_words = k_ref.shape[1]
    words = jnp.arange(next_power_of_2(max(num_words, 16)))[None, :]
    dims = one_byte.elements(words, o_ref.shape[2] // num_words)
    head_mask, dim_mask = heads < group, words < num_words
    page_bits = page_size.bit_length() - 1
    total = unit_ends_ref[num_seqs - 1]
    # Rounded up: no program has more than in the evenest split, and to find the program of a unit,
    # as the merge must, takes one division.
    units_per_program = pl.cdiv(total, config.num_programs)
    start = program * units_per_program
    stop = jnp.minimum(start + units_per_program, total)
    unit_ends = plgpu.load(
        unit_ends_ref.at[rows],
        mask=rows < num_seqs,
        other=jnp.iinfo(jnp.int32).max,
        eviction_policy="evict_last",
    )
    seq_lens = plgpu.load(
        seq_lens_ref.at[rows], mask=rows < num_seqs, other=0, eviction_policy="evict_last"
    )
    slopes = None
    if alibi_slopes_ref is not None:
        slopes = plgpu.load(alibi_slopes_ref.at[heads], mask=head_mask, other=0.0)  # [G, 1]

    def row_of(unit):
        return jnp.sum((unit_ends <= unit).astype(jnp.int32))

    def attend_piece(piece, carry):
        """A row, as far as it is in the share; or one split."""
        row = piece if fixed_split_size is None else row_of(piece)
        # Picked from registers: a load here would be one more wait before the first K arrives.
        seq_len = jnp.sum(jnp.where(rows == row, seq_lens, 0))
        row_end = jnp.sum(jnp.where(rows == row, unit_ends, 0))
        first_block, end_block = row_blocks(seq_len, options, block_k)
        if fixed_split_size is None:
            row_start = row_end - (end_block - first_block)
            lo = first_block + jnp.maximum(start - row_start, 0)
            hi = first_block + jnp.minimum(stop, row_end) - row_start
            slot = program + row
        else:
            step = fixed_split_size // block_k
            row_start = row_end - pl.cdiv(end_block - first_block, step)
            lo = first_block + (piece - row_start) * step
            hi = jnp.minimum(lo + step, end_block)
            slot = piece
        first_key = options.first_key(seq_len - 1)

        def positions_of(block):
            """Positions of a block's keys, and which of them the query sees."""
            positions = block * block_k + jnp.arange(block_k)
            # The loads are masked, not only the logits: slots that the row does not own may hold
            # NaN. Masking every block, not just a row's last, measured no slower.
            valid = positions < seq_len
            if options.sliding_window is not None:
                valid &= positions >= first_key
            return positions, valid

        def pages_of(block):
            positions, valid = positions_of(block)
            # Every layer reads the table and the lengths again: they should stay in the L2.
            return plgpu.load(
                block_tables_ref.at[row[None], positions >> page_bits],
                mask=valid,
                other=0,
                eviction_policy="evict_last",
            )

        # K and V of one byte come in half the time, but wait as long for the table: reading it a
        # block ahead saves 11 to 13%. With two bytes that gained nothing, and took registers.
        ahead = [pages_of(lo)] if operands.narrow else []
        q_mask = head_mask & dim_mask
        q = [
            plgpu.load(ref.at[row[None, None], heads, words], mask=q_mask, other=one_byte.zero(ref))
            for ref in q_refs
        ]  # [G, D] in all
        q, q_scales = operands.of_queries(q)

        def attend_block(block, carry):
            state, *ahead = carry
            page = ahead[0] if ahead else pages_of(block)
            ahead = [pages_of(block + 1) for _ in ahead]
            positions, valid = positions_of(block)
            token = (page << page_bits) + (positions & (page_size - 1))
            slots = token[:, None]
            kv_mask = valid[:, None] & dim_mask

            def load(ref):
                return plgpu.load(ref.at[slots, words], mask=kv_mask, other=one_byte.zero(ref))

            def load_scales(ref):
                if ref.shape == (1,):
                    return ref[...]
                return plgpu.load(ref.at[token], mask=valid, other=0.0)

            k = operands.of_pages(load(k_ref))
            distances = (positions - (seq_len - 1))[None, :]
            s = functools.reduce(operator.add, map(lambda q, k: dot(q, k.T), q, k))
            if k_scales_ref is not None:
                s *= load_scales(k_scales_ref)[None, :]
            s, factor = base2_logits(s, options, slopes, distances, q_scales)  # [G, block_k]
            s = jnp.where(valid[None, :], s, -jnp.inf)
            state = triton_softmax.attend(
                state,
                s,
                factor,
                None if v_scales_ref is None else load_scales(v_scales_ref),
                lambda: operands.of_pages(load(v_ref)),
                all_see=True,
                operands=operands,
            )
            return state, *ahead

        state = triton_softmax.empty(heads.size, words.size, len(dims))
        (m_i, l_i, acc), *ahead = lax.fori_loop(lo, hi, attend_block, (state, *ahead))

        # A row inside the share that holds no tokens ran no block; nobody reads its slot.
        for d, a in zip(dims, acc, strict=True):
            plgpu.store(
                o_ref.at[slot[None, None], heads, d], a / l_i[:, None], mask=head_mask & dim_mask
            )
        plgpu.store(
            lse_ref.at[slot[None], heads[:, 0]],
            m_i * LN_2 + jnp.log(l_i),
            mask=head_mask[:, 0],
        )
        return carry

    if fixed_split_size is None:
        first = row_of(start)
        end = jnp.where(start < stop, jnp.sum((unit_ends < stop).astype(jnp.int32)) + 1, first)
    else:
        first, end = start, jnp.maximum(start, stop)
    lax.fori_loop(first, end, attend_piece, jnp.int32(0))


def paged_decode(
    q: jax.Array,  # [B, Hq, D]
    k_pages: jax.Array,  # [Hkv, P, S, D]
    v_pages: jax.Array,  # [Hkv, P, S, D]
    block_tables: jax.Array,  # i32[B, N]
    seq_lens: jax.Array,  # i32[B], each in [0, N * S]
    alibi_slopes: jax.Array | None,  # f32[Hq]
    sinks: jax.Array | None,  # f32[Hq]
    k_scales: jax.Array | None = None,  # f32[Hkv, P, S] or f32[]
    v_scales: jax.Array | None = None,  # like k_scales
    *,
    options: LogitOptions,
    config: DecodeConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query token per row: `(out [B, Hq, D], lse f32[B, Hq])`."""
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    group = num_q_heads // num_kv_heads

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

    operands = one_byte.Operands(dtype=q.dtype, kv_dtype=k_pages.dtype, interpret=interpret)
    qs = operands.pack(q.reshape(num_seqs, num_kv_heads, group, head_dim))
    kv = [one_byte.token_rows(pages) for pages in (k_pages, v_pages)]
    scales = [one_byte.scale_rows(x) for x in (k_scales, v_scales)]
    out_shape = (
        jax.ShapeDtypeStruct((num_slots, num_kv_heads, group, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_slots, num_kv_heads, group), jnp.float32),
    )
    slopes = None if alibi_slopes is None else alibi_slopes.reshape(num_kv_heads, group)
    outs, lses = pl.pallas_call(
        functools.partial(
            decode_kernel,
            options=options,
            page_size=page_size,
            operands=operands,
            config=config,
        ),
        grid=(num_kv_heads, config.num_programs),
        in_specs=[
            [kv_head(x, 1) for x in qs],
            *(kv_head(x, 0) for x in kv),
            *(scale_spec(x) for x in scales),
            *whole([block_tables, seq_lens, unit_ends]),
            kv_head(slopes, 0),
        ],
        out_specs=[kv_head(x, 1) for x in out_shape],
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_decode",
    )(qs, *kv, *scales, block_tables, seq_lens, unit_ends, slopes)
    return triton_merge.merge_shares(
        outs.reshape(num_slots, num_q_heads, head_dim),
        lses.reshape(num_slots, num_q_heads),
        unit_ends,
        sinks,
        dtype=q.dtype,
        config=config,
        interpret=interpret,
    )
