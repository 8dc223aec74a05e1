"""The pages of one KV head, and their scales, as the Triton kernels index them in any layout.

A program gets one KV head of K or of V through its block specs. What is left of the axes are slots,
where pages and their tokens are neighbours in memory, or else pages and tokens, and head_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.triton.specs import full_specs
from pallas_paged.pages.layout import K, V

_SLOTS = "S"  # pages and tokens as one axis


def operands_of(arrays: Arrays) -> tuple[list[Any], list[Any]]:
    """Return K, V and the scales of both, as a kernel gets them, and their block specs.

    The first axis of the grid must be the KV heads. Nothing is copied. Int8 and fp8 pages are words
    i16`[.., D / 2]`; one scale for a layer is f32`[1]`, and None stands for no scales.
    """
    layout = arrays.layout
    found: list[tuple[Any, Any]] = [
        _pages(pages, layout.axes, kv) for kv, pages in zip((K, V), arrays.kv_pages, strict=True)
    ]
    for scales in (arrays.k_scales, arrays.v_scales):
        if scales is None:
            found.append((None, None))
        elif scales.ndim:
            found.append(_of_kv_head(scales, layout.scale_axes, K))
        else:
            found.append((scales.reshape(1), full_specs(scales.reshape(1))))
    return [x for x, _ in found], [spec for _, spec in found]


def _pages(pages: jax.Array, axes: str, kv: int) -> tuple[jax.Array, pl.BlockSpec]:
    if pages.dtype.itemsize == 1:  # XLA sees a bitcast, so nothing is copied
        pages = lax.bitcast_convert_type(pages.reshape(*pages.shape[:-1], -1, 2), jnp.int16)
    return _of_kv_head(pages, axes, kv)


def slot_axes(axes: str) -> str:
    """Return axes of pages or scales with slots where pages and tokens are neighbours."""
    return axes.replace("PN", _SLOTS)


def with_slots(x: jax.Array, axes: str) -> jax.Array:
    """Return pages or scales with these axes as an array with `slot_axes` of them."""
    first, neighbours, _ = axes.partition("PN")
    at = len(first)
    return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :]) if neighbours else x


def row_index(axes: str, slots: jax.Array, page_size: int, **places: Any) -> tuple[Any, ...]:
    """Return the index of slots in pages or scales: `places` on other axes than those of slots."""
    if _SLOTS in axes:
        places[_SLOTS] = slots
    else:
        places |= {"P": lax.div(slots, page_size), "N": lax.rem(slots, page_size)}
    return tuple(places[letter] for letter in axes)


def _of_kv_head(x: jax.Array, axes: str, kv: int) -> tuple[jax.Array, pl.BlockSpec]:
    """Return pages or scales and the spec of one KV head, of K or of V."""
    x, axes = with_slots(x, axes), slot_axes(axes)
    block = tuple(None if axis in "H2" else size for axis, size in zip(axes, x.shape, strict=True))
    return x, pl.BlockSpec(
        block, lambda h, *_: tuple({"H": h, "2": kv}.get(axis, 0) for axis in axes)
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Places of the tokens of a block of keys."""

    pages: tuple[jax.Array, jax.Array]  # i32`[K]` their pages, and their places there
    slots: jax.Array  # i32`[K]` the same as one number
    slot_rows: jax.Array  # `slots` as i32`[K, 1]`

    @classmethod
    def of(cls, page: jax.Array, positions: jax.Array, page_size: int) -> Tokens:
        """Return the tokens at these positions of a row, which are on these pages."""
        first = page << (page_size.bit_length() - 1)
        place = positions & (page_size - 1)
        slots = first + place
        return cls(pages=(page, place), slots=slots, slot_rows=slots[:, None])

    def rows_of(self, ref: Any, words: jax.Array) -> Any:
        """Return the ref `[K, W]` to these tokens of K or of V."""
        if len(ref.shape) == 2:
            return ref.at[self.slot_rows, words]
        page, place = self.pages
        return ref.at[page[:, None], place[:, None], words]

    def load_scales(self, ref: Any, mask: jax.Array | None = None) -> jax.Array | None:
        """Return the scales f32`[K]` of the tokens, or `[1]` for all; None of None.

        Where a mask bool`[K]` is off they are 0.
        """
        if ref is None or ref.shape == (1,):
            return None if ref is None else ref[...]
        found = ref.at[self.slots] if len(ref.shape) == 1 else ref.at[self.pages]
        return plgpu.load(found, mask=mask, other=None if mask is None else 0.0)
