"""The arrays of a call that writes the K/V of fused projections, or latents."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_paged.pages.layout import LAYOUTS, KVLayout, PageLayout


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WriteArrays:
    """The arrays of a call, checked; arrays that a call goes without are None."""

    qkv: Any = None  # `[T, Hkv, G + 2, D]`, of each KV head its G queries, its K and its V
    latents: Any = None  # in place of `qkv`, `[T, D]`, of each token its latent and its rotary key
    slots: Any  # i32`[T]`
    k_pages: Any  # with all axes of the layout
    v_pages: Any = None  # like `k_pages`; None where K and V share one
    k_scales: Any = None  # f32 with the axes of the layout's scales, or f32`[]`
    v_scales: Any = None  # like `k_scales`
    cos: Any = None  # f32`[T, R / 2]`, with R up to D
    sin: Any = None  # f32`[T, R / 2]`, with R up to D
    q_norm: Any = None  # `[D]`
    k_norm: Any = None  # `[D]`
    norm: Any = None  # `[v_head_dim]`, of latents
    kv_layout: KVLayout  # of the layer
    v_head_dim: int | None = None  # of the layer

    @property
    def layout(self) -> PageLayout:
        return LAYOUTS[self.kv_layout]

    @property
    def written(self) -> dict[str, Any]:
        """The arrays that the call writes, by name: pages, and scales if each token has its own."""
        names = ("k_pages", "v_pages", "k_scales", "v_scales")
        arrays = ((name, getattr(self, name)) for name in names)
        return {name: x for name, x in arrays if x is not None and x.ndim}
