"""Partial states that a decode kernel leaves for its merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax

from pallas_paged.checks import pytree
from pallas_paged.kernels.decode_plan import DecodePlan


@pytree
class DecodeStates:
    """Partial states of a decode call, each normalised: arrays, or refs to them.

    Attributes:
        out: f32`[partials, Hq, D]`, or `[Hkv * parts, partials, N, D]` where each part of the query
            heads of a KV head has N columns; its heads are the first.
        lse: f32, without the last axis of `out`, base e.
        results: None, or the final out `[B, Hq, D]` and lse f32`[B, Hq]` of the rows that have one
            partial state, which then is not in `out` and `lse`. Of one row there are none.
        unit_ends: i32`[B]`, from `DecodePlan.unit_ends`.
        sinks: f32`[Hq]`, logits that join the denominators of their heads, or None.
        plan: of the call.
        num_q_heads: Hq.
        head_tiles: parts of the query heads of a KV head, and the heads of a part, which matter if
            there are several.
    """

    out: Any
    lse: Any
    unit_ends: Any
    sinks: Any
    results: Any = None
    plan: DecodePlan = dataclasses.field(metadata={"static": True})
    num_q_heads: int = dataclasses.field(metadata={"static": True})
    head_tiles: tuple[int, int] = dataclasses.field(default=(1, 0), metadata={"static": True})

    @property
    def head_dim(self) -> int:
        """D."""
        return self.out.shape[-1]

    def place_of(self, head: Any) -> Callable[[Any], tuple[Any, ...]]:
        """Return the function from a partial state to its index in `lse`, for a query head."""
        if len(self.out.shape) == 3:
            return lambda partial: (partial, head)
        num_tiles, heads = self.head_tiles
        group = self.num_q_heads * num_tiles // self.out.shape[0]
        part, column = lax.div(head, group), lax.rem(head, group)
        if num_tiles > 1:
            part, column = part * num_tiles + lax.div(column, heads), lax.rem(column, heads)
        return lambda partial: (part, partial, column)
