"""Page layouts: in which order the axes of K/V pages lie in memory.

A letter names each axis: P pages, N tokens of a page, H KV heads, D elements of a head, and 2 for K
and V, where they share an array. Functions index pages by these letters, so no pool is transposed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

KVLayout = Literal["NHD", "HND", "HPND", "2NHD", "NH2D"]
"""Orders of axes: P pages, N tokens of a page, H KV heads, 2 for K and V, D elements of a head."""
K, V = 0, 1  # places on axis "2"

AXIS_NAMES = {
    "P": "num_pages",
    "N": "page_size",
    "H": "num_kv_heads",
    "D": "kv_head_dim",
    "2": "k_and_v",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageLayout:
    """The order of axes of one layout."""

    name: KVLayout  # as the entries take it
    axes: str  # of the pages as kernels get them, a letter each
    merged: str = ""  # two neighbours of `axes` that are one axis of the caller's array, or ""

    @property
    def one_array(self) -> bool:
        """Whether K and V share an array, and `v_pages` is None."""
        return "2" in self.axes

    @property
    def scale_axes(self) -> str:
        """The axes of the scales of tokens."""
        return self.axes.replace("2", "").replace("D", "")

    @property
    def given_axes(self) -> str:
        """The axes of the caller's pages, where H may hold the heads of K and of V."""
        return self.axes.replace(self.merged, "H") if self.merged else self.axes

    @property
    def head_axis(self) -> int:
        """The axis of the caller's pages that holds the KV heads."""
        return self.given_axes.index("H")

    @property
    def page_axis(self) -> int:
        """The axis of pages; the same in the caller's arrays and in those of scales."""
        return self.axes.index("P")

    @property
    def shape_rule(self) -> str:
        """The shape of the caller's pages, for messages."""
        names = {"P": "num_pages", "N": "page_size", "H": "num_kv_heads", "D": "head_dim", "2": "2"}
        axes = [names[letter] for letter in self.given_axes]
        if self.merged:
            axes[self.head_axis] = "2 * num_kv_heads"
        return f"[{', '.join(axes)}]"

    def shape(self, **sizes: int) -> tuple[int, ...]:
        """Return the shape of the caller's pages of these sizes of H, P, N and D."""
        shape = [sizes[letter] if letter != "2" else 2 for letter in self.given_axes]
        if self.merged:
            shape[self.head_axis] *= 2
        return tuple(shape)

    def size(self, shape: tuple[int, ...], letter: str) -> int:
        """Return the size of an axis of pages with all axes."""
        return shape[self.axes.index(letter)]

    @staticmethod
    def strides(axes: str, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the elements from one index of each axis to the next, where none is padded."""
        return {axis: math.prod(shape[i + 1 :]) for i, axis in enumerate(axes)}

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the caller's pages with all axes.

        Raises:
            ValueError: the shape has another number of axes, or they hold no pairs of K and V.
        """
        wrong = f"k_pages.shape={shape} must be {self.shape_rule} with kv_layout={self.name!r}"
        if len(shape) != len(self.given_axes):
            raise ValueError(wrong)
        if self.merged:
            axis = self.head_axis
            heads, odd = divmod(shape[axis], 2)
            shape = (*shape[:axis], heads, 2, *shape[axis + 1 :])
            if odd:
                raise ValueError(wrong)
        if self.one_array and self.size(shape, "2") != 2:
            raise ValueError(wrong)
        return shape

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of tokens of pages with all axes."""
        return tuple(self.size(shape, letter) for letter in self.scale_axes)

    def with_all_axes(self, pages: jax.Array) -> jax.Array:
        """Return the caller's pages with an axis for each letter; nothing is copied."""
        if not self.merged:
            return pages
        spec = _spec_of(pages)
        spec.insert(self.head_axis + 1, None)
        return _reshaped(pages, self.full_shape(pages.shape), spec)

    def with_given_axes(self, pages: jax.Array) -> jax.Array:
        """Return pages with all axes as the caller has them; nothing is copied."""
        if not self.merged:
            return pages
        spec = _spec_of(pages)
        spec.pop(self.axes.index("2"))
        shape = self.shape(**dict(zip(self.axes, pages.shape, strict=True)))
        return _reshaped(pages, shape, spec)

    def index(self, kv: Any, **places: Any) -> tuple[Any, ...]:
        """Return the index of a box of K or of V in pages with all axes.

        Args:
            kv: `K` or `V`.
            places: index of the axis of each letter; other axes are taken in full.
        """
        places = {"2": kv} | places
        return tuple(places.get(letter, slice(None)) for letter in self.axes)


def _spec_of(pages: jax.Array) -> list[Any]:
    """Return the mesh axes of each axis, as the type of the pages says."""
    spec = jax.typeof(pages).sharding.spec
    return [*spec, *[None] * (pages.ndim - len(spec))]


def _reshaped(pages: jax.Array, shape: tuple[int, ...], spec: list[Any]) -> jax.Array:
    """Return pages of another shape, on an explicit mesh with this sharding."""
    mesh = jax.typeof(pages).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return lax.reshape(pages, shape)
    return lax.reshape(pages, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))


LAYOUTS: dict[str, PageLayout] = {
    layout.name: layout
    for layout in (
        PageLayout(name="NHD", axes="PNHD"),
        PageLayout(name="HND", axes="PHND"),
        PageLayout(name="HPND", axes="HPND"),
        PageLayout(name="2NHD", axes="P2NHD"),
        PageLayout(name="NH2D", axes="PNH2D", merged="H2"),
    )
}


def checked_layout(kv_layout: Any) -> PageLayout:
    """Return the layout of this name, or raise ValueError."""
    if not isinstance(kv_layout, str) or kv_layout not in LAYOUTS:
        raise ValueError(f"{kv_layout=} must be one of {get_args(KVLayout)}")
    return LAYOUTS[kv_layout]
