"""Splits, norms, rotates and quantizes fused projections, and writes K/V: a Pallas-Triton kernel.

A program takes some queries of a KV head, or its K and V, of a few tokens that follow one another.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.triton.pages import row_index, slot_axes, with_slots
from pallas_paged.kernels.triton.specs import full_specs
from pallas_paged.kernels.write_arrays import WriteArrays
from pallas_paged.pages.layout import K, V
from pallas_paged.pages.quantization import quantize, scales_of

_BLOCK_QUERIES = 2  # heads of a program, which share the tokens' angles
_NUM_WARPS = 1
_PAGES = ("k_pages", "v_pages")


def _rotate_and_write_kernel(
    qkv_ref,  # [T, Hkv * (G + 2), D]
    slots_ref,  # i32[T]
    _,  # the pages, to write
    scale_refs,  # of K and of V, or none; f32[1] for the layer, or those of tokens, to write
    rotation_refs,  # cos, sin f32[T, R / 2], or none
    norm_refs,  # of q and k, [D] or None
    q_ref,  # [T, Hkv * G, D]
    pages_refs,  # of K and of V, or of both; in the memory of the pages
    token_scale_refs,  # in the memory of the scales of tokens, or none
    axes: tuple[str, str],  # `slot_axes` of pages and of scales of tokens
    page_size: int,
    num_slots: int,
    eps: float,
    block_tokens: int,
    interpret: bool,
):
    """One program: K and V of a KV head and `block_tokens` tokens, or some of its queries."""
    num_tokens, num_heads, head_dim = qkv_ref.shape
    num_kv_heads = (num_heads - q_ref.shape[1]) // 2
    dtype, group = qkv_ref.dtype, q_ref.shape[1] // num_kv_heads
    num_parts = 1 + pl.cdiv(group, _BLOCK_QUERIES)
    block, part = lax.div(pl.program_id(0), num_parts), lax.rem(pl.program_id(0), num_parts)
    block, kv_head = lax.div(block, num_kv_heads), lax.rem(block, num_kv_heads)
    token = block * block_tokens + jnp.arange(block_tokens)
    is_token = token < num_tokens

    # Columns in parts: the two halves that are rotated, and those that are not.
    rotary = 2 * rotation_refs[0].shape[1] if rotation_refs else 0
    parts = parts_of_columns(_widths(head_dim, rotary))
    masks = [is_token[:, None] & is_part[None, :] for _, is_part in parts]

    def load(kind, is_there=True):
        """Return the parts of heads of a kind: a query, K or V."""
        head = kv_head * (group + 2) + kind
        return [
            plgpu.load(
                qkv_ref.at[token[:, None], head, columns[None, :]], mask=mask & is_there, other=0
            )
            for (columns, _), mask in zip(parts, masks, strict=True)
        ]

    rounded = functools.partial(rounds, dtype=dtype, interpret=interpret)

    def normed(x, ref):
        if ref is None:
            return x
        squares = [jnp.sum(jnp.square(one.astype(jnp.float32)), axis=1) for one in x]
        total = functools.reduce(operator.add, squares)
        scale = lax.rsqrt(total / head_dim + eps)[:, None]
        weights = (
            plgpu.load(ref.at[columns], mask=is_part, other=0).astype(jnp.float32)
            for columns, is_part in parts
        )
        return [
            rounded(one.astype(jnp.float32) * scale * weight[None, :])
            for one, weight in zip(x, weights, strict=True)
        ]

    def angles():
        place = token[:, None], jnp.arange(pl.next_power_of_2(rotary // 2))[None, :]
        return [plgpu.load(ref.at[place], mask=masks[0], other=0) for ref in rotation_refs]

    def rotated(x, angles):
        if not angles:
            return x
        cos, sin = angles
        first, second = (one.astype(jnp.float32) for one in x[:2])
        turned = [first * cos - second * sin, second * cos + first * sin]
        return [*map(rounded, turned), *x[2:]]

    def store(ref, place, values, is_stored):
        """Store the parts of heads; in their place None stands for the columns."""
        # Rows that are not stored are out of range, or an interpreter would write old values
        # before over the row that is.
        for (columns, _), mask, one in zip(parts, masks, values, strict=True):
            at = tuple(columns[None, :] if x is None else x for x in place)
            plgpu.store(ref.at[at], one.astype(ref.dtype), mask=mask & is_stored)

    @pl.when(part > 0)
    def write_queries():
        turns = angles()
        for i in range(_BLOCK_QUERIES):
            head = (part - 1) * _BLOCK_QUERIES + i
            is_head = True if group % _BLOCK_QUERIES == 0 else head < group
            x = rotated(normed(load(head, is_head), norm_refs[0]), turns)
            to = jnp.where(is_token, token, num_tokens)[:, None]
            store(q_ref, (to, kv_head * group + head, None), x, is_head)

    @pl.when(part == 0)
    def write_k_and_v():
        slot = plgpu.load(slots_ref.at[token], mask=is_token, other=-1)
        is_written = (slot >= 0) & (slot < num_slots)
        to = jnp.where(is_written, slot, num_slots)
        k = rotated(normed(load(group), norm_refs[1]), angles())
        element = pages_refs[0].dtype
        round_half_to_even = rounding(interpret)
        of_pages, of_scales = axes
        for kv, x in ((K, k), (V, load(group + 1))):
            if scale_refs:
                if token_scale_refs:
                    scale = row_scale(x, element)
                    at = row_index(of_scales, to, page_size, H=kv_head)
                    plgpu.store(token_scale_refs[kv].at[at], scale, mask=is_written)
                else:
                    scale = jnp.broadcast_to(scale_refs[kv][0], (block_tokens,))
                x = [quantize(one, scale, element, round_half_to_even) for one in x]
            places = {"H": kv_head, "2": kv, "D": None}
            place = row_index(of_pages, to[:, None], page_size, **places)
            store(pages_refs[min(kv, len(pages_refs) - 1)], place, x, is_written[:, None])


def rotate_and_write(arrays: WriteArrays, *, eps: float, interpret: bool) -> tuple[jax.Array, ...]:
    """Return q `[T, Hkv, G, D]` and the arrays of `WriteArrays.written`, written in place."""
    num_tokens, num_kv_heads, kinds, head_dim = arrays.qkv.shape
    qkv = arrays.qkv.reshape(num_tokens, -1, head_dim)
    layout = arrays.layout
    page_size, num_pages = (layout.size(arrays.k_pages.shape, x) for x in "NP")
    pages, scales = pool_by_slots(arrays)
    written = pages, scales
    if arrays.k_scales is not None and not scales:
        scales = [arrays.k_scales[None], arrays.v_scales[None]]
    rotation = [] if arrays.cos is None else [arrays.cos, arrays.sin]
    inputs = (qkv, arrays.slots, pages, scales, rotation, [arrays.q_norm, arrays.k_norm])
    q = result_shape((num_tokens, num_kv_heads * (kinds - 2), head_dim), qkv.dtype)
    rotary = 0 if arrays.cos is None else 2 * arrays.cos.shape[1]
    block_tokens = _block_tokens(head_dim, rotary)
    num_parts = 1 + pl.cdiv(kinds - 2, _BLOCK_QUERIES)
    out_shape = (q, *jax.tree.map(lambda x: result_shape(x.shape, x.dtype), written))
    q, *written = pl.pallas_call(
        functools.partial(
            _rotate_and_write_kernel,
            axes=(slot_axes(layout.axes), slot_axes(layout.scale_axes)),
            page_size=page_size,
            num_slots=num_pages * page_size,
            eps=eps,
            block_tokens=block_tokens,
            interpret=interpret,
        ),
        grid=(pl.cdiv(num_tokens, block_tokens) * num_kv_heads * num_parts,),
        in_specs=full_specs(inputs),
        out_specs=full_specs(out_shape),
        out_shape=out_shape,
        input_output_aliases={2 + i: 1 + i for i in range(len(arrays.written))},
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="rotate_and_write_kv",
    )(*inputs)
    q = q.reshape(num_tokens, num_kv_heads, kinds - 2, head_dim)
    return q, *as_given(arrays, written)


def pool_by_slots(arrays: WriteArrays) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the pages, and the scales of tokens, that a call writes, with `slot_axes`."""
    layout, pool = arrays.layout, arrays.written.items()
    pages = [with_slots(x, layout.axes) for name, x in pool if name in _PAGES]
    return pages, [with_slots(x, layout.scale_axes) for name, x in pool if name not in _PAGES]


def as_given(arrays: WriteArrays, written: Any) -> tuple[jax.Array, ...]:
    """Return a tree of arrays like those of `pool_by_slots` in the shapes of `arrays.written`."""
    pairs = zip(jax.tree.leaves(written), arrays.written.values(), strict=True)
    return tuple(x.reshape(old.shape) for x, old in pairs)


def rounds(x: jax.Array, *, dtype: Any, interpret: bool) -> jax.Array:
    """Return x f32 in a dtype."""
    if interpret:  # XLA would leave out a conversion there and back
        info = jnp.finfo(dtype)
        x = lax.reduce_precision(x, info.nexp, info.nmant)
    return x.astype(dtype)


def row_scale(x: list[jax.Array], element: Any) -> jax.Array:
    """Return the scale of each row of `x`, a list of column parts."""
    # As integers: Triton finds the largest float, even beside a NaN.
    bits = (lax.bitcast_convert_type(jnp.abs(one.astype(jnp.float32)), jnp.int32) for one in x)
    largest = functools.reduce(jnp.maximum, (jnp.max(one, axis=-1) for one in bits))
    return scales_of(lax.bitcast_convert_type(largest, jnp.float32), element)


def _widths(head_dim: int, rotary: int) -> list[int]:
    """Return the columns of the two rotated halves and of the rest."""
    widths = [rotary // 2] * 2 + [head_dim - rotary]
    return [width for width in widths if width]


def parts_of_columns(widths: Iterable[int]) -> list[tuple[jax.Array, jax.Array]]:
    """Return the columns of each part, padded to a power of two, and the mask of real ones."""
    parts, start = [], 0
    for width in widths:
        lane = jnp.arange(pl.next_power_of_2(width))
        parts.append((start + lane, lane < width))
        start += width
    return parts


def _block_tokens(head_dim: int, rotary: int) -> int:
    """Return the tokens of a program.

    A thread of its warp has 16 bytes of a part of bf16 elements where that has 64 columns or more,
    or 32 with 8 tokens. With fewer bytes the sum of a norm would be added up in another order.
    """
    return 4 if min(_widths(head_dim, rotary)) > 32 else 8


def rounding(interpret: bool) -> Callable[[jax.Array], jax.Array]:
    """Return the function that rounds f32 to nearest, ties to even: Pallas lowers none."""
    return jnp.round if interpret else _round


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
