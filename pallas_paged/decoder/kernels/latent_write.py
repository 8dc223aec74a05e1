"""Norms, rotates and quantizes new latents, and writes them: a Pallas-Triton kernel.

A program takes one token: its latent and its rotary key.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.decoder.kernels.rotary_write import (
    as_given,
    parts_of_columns,
    pool_by_slots,
    rounding,
    rounds,
    row_scale,
)
from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.triton.pages import row_index, slot_axes
from pallas_paged.kernels.triton.specs import full_specs
from pallas_paged.kernels.write_arrays import WriteArrays
from pallas_paged.pages.quantization import quantize

_NUM_WARPS = 2  # a thread has 16 bytes of a latent of 512 bf16 elements


def _latent_kernel(
    latents_ref,  # [T, D]
    slots_ref,  # i32[T]
    _,  # the pages and the scales of tokens, to write
    layer_scale_refs,  # f32[1], or none
    rotation_refs,  # cos, sin f32[T, R / 2], or none
    norm_refs,  # [C], or none
    pages_ref,  # in the memory of the pages
    token_scale_refs,  # in the memory of the scales, or none
    *,
    widths: tuple[int, ...],  # of the latent, the two halves that are rotated, and the rest
    axes: tuple[str, str],  # `slot_axes` of pages and of scales of tokens
    page_size: int,
    num_slots: int,
    eps: float,
    interpret: bool,
):
    token, head, dtype = pl.program_id(0), jnp.int32(0), latents_ref.dtype
    slot = plgpu.load(slots_ref.at[token])
    rounded = functools.partial(rounds, dtype=dtype, interpret=interpret)
    parts = parts_of_columns(widths)

    def load(ref, part, *place):
        columns, is_part = part
        return plgpu.load(ref.at[(*place, columns)], mask=is_part, other=0).astype(jnp.float32)

    @pl.when((slot >= 0) & (slot < num_slots))
    def write():
        x = [load(latents_ref, part, token) for part in parts]
        if norm_refs:
            scale = lax.rsqrt(jnp.sum(jnp.square(x[0])) / widths[0] + eps)
            x[0] = rounded(x[0] * scale * load(norm_refs[0], parts[0]))
        if rotation_refs:
            lane = jnp.arange(pl.next_power_of_2(widths[1]))
            cos, sin = (load(ref, (lane, lane < widths[1]), token) for ref in rotation_refs)
            turned = x[1] * cos - x[2] * sin, x[2] * cos + x[1] * sin
            x[1:3] = map(rounded, turned)
        element, (of_pages, of_scales) = pages_ref.dtype, axes
        if token_scale_refs or layer_scale_refs:
            if token_scale_refs:
                scale = row_scale(x, element)
                at = row_index(of_scales, slot, page_size, H=head)
                plgpu.store(token_scale_refs[0].at[at], scale)
            else:
                scale = layer_scale_refs[0][0]
            x = [quantize(one, scale, element, rounding(interpret)) for one in x]
        for (columns, is_part), one in zip(parts, x, strict=True):
            at = row_index(of_pages, slot, page_size, H=head, D=columns)
            plgpu.store(pages_ref.at[at], one.astype(element), mask=is_part)


def rotate_and_write(arrays: WriteArrays, *, eps: float, interpret: bool) -> tuple[jax.Array, ...]:
    """Return the arrays of `WriteArrays.written`, written in place."""
    layout, latents, v_head_dim = arrays.layout, arrays.latents, arrays.v_head_dim
    assert v_head_dim is not None
    page_size, num_pages = (layout.size(arrays.k_pages.shape, x) for x in "NP")
    rotation = [] if arrays.cos is None else [arrays.cos, arrays.sin]
    half = rotation[0].shape[1] if rotation else 0
    widths = v_head_dim, half, half, latents.shape[1] - v_head_dim - 2 * half
    pages, scales = pool_by_slots(arrays)
    layer_scale = [] if arrays.k_scales is None or scales else [arrays.k_scales[None]]
    norm = [] if arrays.norm is None else [arrays.norm]
    inputs = latents, arrays.slots, [*pages, *scales], layer_scale, rotation, norm
    out_shape: Any = [result_shape(x.shape, x.dtype) for x in (*pages, *scales)]
    out_shape = out_shape[0], out_shape[1:]
    written = pl.pallas_call(
        functools.partial(
            _latent_kernel,
            widths=tuple(width for width in widths if width),
            axes=(slot_axes(layout.axes), slot_axes(layout.scale_axes)),
            page_size=page_size,
            num_slots=num_pages * page_size,
            eps=eps,
            interpret=interpret,
        ),
        grid=(latents.shape[0],),
        in_specs=full_specs(inputs),
        out_specs=full_specs(out_shape),
        out_shape=out_shape,
        input_output_aliases={2 + i: i for i in range(len(pages) + len(scales))},
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="rotate_and_write_latents",
    )(*inputs)
    return as_given(arrays, written)
