"""The arrays of a call that splits fused projections and writes K/V."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WriteArrays:
    """The arrays of a call, checked; those that a call goes without are None.

    Attributes:
        qkv: `[T, Hkv, G + 2, D]`, of each KV head its G queries, its K and its V.
        slots: i32`[T]`.
        k_pages, v_pages: `[Hkv, P, S, D]`.
        k_scales, v_scales: f32`[Hkv, P, S]` or f32`[]`.
        cos, sin: f32`[T, R / 2]`, with R up to D.
        q_norm, k_norm: `[D]`.
    """

    qkv: Any
    slots: Any
    k_pages: Any
    v_pages: Any
    k_scales: Any = None
    v_scales: Any = None
    cos: Any = None
    sin: Any = None
    q_norm: Any = None
    k_norm: Any = None
