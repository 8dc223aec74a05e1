"""Splits, norms, rotates and quantizes fused projections, and writes K/V: a Pallas-Triton kernel.

A row is a head of a token: a query, a K or a V. Rows need nothing of one another, so a program
takes the next `block_rows` of them, whatever they are, and stores each where it belongs.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.triton.specs import whole
from pallas_paged.kernels.write_arrays import WriteArrays
from pallas_paged.quantization import quantize, scales_of

# Of one warp: a thread then has 16 bytes of each half of a bf16 head of 64.
_BLOCK_ROWS = 8


def rotate_and_write_kernel(
    qkv_ref,  # [N, D], N = T * Hkv * (G + 2)
    slots_ref,  # i32[T]
    pool_refs,  # k_pages, v_pages [Hkv, P * S, D], and k_scales, v_scales f32[Hkv, P * S] or [1]
    rotation_refs,  # cos, sin f32[T, R / 2], or none
    norm_refs,  # of q and k, [D] or None
    q_ref,  # [T * Hkv * G, D]
    *pages_refs,  # pool_refs without scales [1], in the same memory
    eps: float,
    block_rows: int,
    interpret: bool,
):
    """One program: `block_rows` heads."""
    num_rows, head_dim = qkv_ref.shape
    num_kv_heads, num_slots, _ = pages_refs[0].shape
    dtype, group = qkv_ref.dtype, q_ref.shape[0] // (slots_ref.shape[0] * num_kv_heads)
    row = pl.program_id(0) * block_rows + jnp.arange(block_rows)
    kv_head, kind = lax.div(row, group + 2), lax.rem(row, group + 2)
    token, head = lax.div(kv_head, num_kv_heads), lax.rem(kv_head, num_kv_heads)
    is_row, is_q, is_v = row < num_rows, kind < group, kind == group + 1
    slot = plgpu.load(slots_ref.at[token], mask=is_row, other=-1)
    is_written = (slot >= 0) & (slot < num_slots)

    # Columns in parts: the two halves that are rotated, and those that are not.
    rotary = 2 * rotation_refs[0].shape[1] if rotation_refs else 0
    parts = _parts(head_dim, rotary)
    masks = [is_row[:, None] & is_part[None, :] for _, is_part in parts]
    x = [
        plgpu.load(qkv_ref.at[row[:, None], columns[None, :]], mask=mask, other=0)
        for (columns, _), mask in zip(parts, masks, strict=True)
    ]
    for ref, is_kind in zip(norm_refs, (is_q, kind == group), strict=True):
        if ref is not None:
            squares = [jnp.sum(jnp.square(one.astype(jnp.float32)), axis=1) for one in x]
            total = functools.reduce(operator.add, squares)
            scale = lax.rsqrt(total / head_dim + eps)[:, None]
            for i, (columns, is_part) in enumerate(parts):
                weight = plgpu.load(ref.at[columns], mask=is_part, other=0).astype(jnp.float32)
                normed = (x[i].astype(jnp.float32) * scale * weight[None, :]).astype(dtype)
                x[i] = jnp.where(is_kind[:, None], normed, x[i])
    if rotation_refs:
        place = token[:, None], jnp.arange(pl.next_power_of_2(rotary // 2))[None, :]
        cos, sin = (plgpu.load(ref.at[place], mask=masks[0], other=0) for ref in rotation_refs)
        first, second = (one.astype(jnp.float32) for one in x[:2])
        turned = [first * cos - second * sin, second * cos + first * sin]
        for i, one in enumerate(turned):
            x[i] = jnp.where(is_v[:, None], x[i], one.astype(dtype))

    def store(ref, rows, values, is_stored):
        # Rows that are not stored are out of range, or an interpreter would write what was there
        # before over the row that is.
        rows = (*rows[:-1], jnp.where(is_stored, rows[-1], ref.shape[-2]))
        for (columns, _), mask, one in zip(parts, masks, values, strict=True):
            place = (*(index[:, None] for index in rows), columns[None, :])
            plgpu.store(ref.at[place], one.astype(ref.dtype), mask=mask & is_stored[:, None])

    store(q_ref, (kv_head * group + kind,), x, is_q)
    pages, is_kv = pages_refs[:2], (kind == group, is_v)
    if len(pool_refs) == 2:
        for ref, is_kind in zip(pages, is_kv, strict=True):
            store(ref, (head, slot), x, is_kind & is_written)
        return
    element = pages[0].dtype
    round_half_to_even = jnp.round if interpret else _round  # Pallas lowers no rounding
    if len(pages_refs) == 4:
        # As integers: Triton finds the largest float, even beside a NaN.
        bits = (lax.bitcast_convert_type(jnp.abs(one.astype(jnp.float32)), jnp.int32) for one in x)
        largest = functools.reduce(jnp.maximum, (jnp.max(one, axis=1) for one in bits))
        scale = scales_of(lax.bitcast_convert_type(largest, jnp.float32), element)
        for ref, is_kind in zip(pages_refs[2:], is_kv, strict=True):
            is_stored = is_kind & is_written
            to = jnp.where(is_stored, slot, num_slots)
            plgpu.store(ref.at[head, to], scale, mask=is_stored)
    for i, (ref, is_kind) in enumerate(zip(pages, is_kv, strict=True)):
        if len(pages_refs) == 2:
            scale = jnp.broadcast_to(pool_refs[2 + i][0], (block_rows,))
        small = [quantize(one, scale, element, round_half_to_even) for one in x]
        store(ref, (head, slot), small, is_kind & is_written)


def rotate_and_write(arrays: WriteArrays, *, eps: float, interpret: bool) -> tuple[jax.Array, ...]:
    """Return q `[T, Hkv, G, D]`, and the pages and, of tokens, the scales, in place."""
    num_tokens, num_kv_heads, kinds, head_dim = arrays.qkv.shape
    qkv = arrays.qkv.reshape(-1, head_dim)
    pool = [arrays.k_pages, arrays.v_pages]
    if arrays.k_scales is not None:
        pool += [arrays.k_scales, arrays.v_scales]
    flat = [x.reshape(num_kv_heads, -1, *x.shape[3:]) if x.ndim else x[None] for x in pool]
    written = [x for x in flat if x.ndim > 1]
    rotation = [] if arrays.cos is None else [arrays.cos, arrays.sin]
    inputs = (qkv, arrays.slots, flat, rotation, [arrays.q_norm, arrays.k_norm])
    q = result_shape((num_tokens * num_kv_heads * (kinds - 2), head_dim), qkv.dtype)
    q, *written = pl.pallas_call(
        functools.partial(
            rotate_and_write_kernel, eps=eps, block_rows=_BLOCK_ROWS, interpret=interpret
        ),
        grid=(pl.cdiv(qkv.shape[0], _BLOCK_ROWS),),
        in_specs=whole(inputs),
        out_specs=whole([q, *written]),
        out_shape=[q, *(result_shape(x.shape, x.dtype) for x in written)],
        input_output_aliases={2 + i: 1 + i for i in range(len(written))},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rotate_and_write_kv",
    )(*inputs)
    q = q.reshape(num_tokens, num_kv_heads, kinds - 2, head_dim)
    return q, *(x.reshape(old.shape) for x, old in zip(written, pool, strict=False))


def _parts(head_dim: int, rotary: int) -> list[tuple[jax.Array, jax.Array]]:
    """Return the columns of each part, as many as a power of two, and which of them are there."""
    half = rotary // 2
    parts = [(start, size) for start, size in ((0, half), (half, half)) if size]
    if rotary < head_dim:
        parts.append((rotary, head_dim - rotary))
    lanes = [(start, size, jnp.arange(pl.next_power_of_2(size))) for start, size in parts]
    return [(start + lane, lane < size) for start, size, lane in lanes]


def _round(x: jax.Array) -> jax.Array:
    """Return x f32 rounded to nearest, ties to even."""
    [out] = plgpu.elementwise_inline_asm(
        "cvt.rni.f32.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return out
