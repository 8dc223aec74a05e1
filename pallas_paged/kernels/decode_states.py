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
    """Partial states of a decode call, each normalised: arrays, or refs to them."""

    # f32`[partials, Hq, D]`, or `[Hkv, partials, N, C]` where the query heads of a KV head are the
    # first of N, and their elements the first of C.
    out: Any
    lse: Any  # f32, without the last axis of `out`, base e
    unit_ends: Any  # i32`[B]`, from `DecodePlan.unit_ends`
    sinks: Any  # f32`[Hq]`, logits that join the denominators of their heads, or None
    # None, or the final out `[B, Hq, D]` and lse f32`[B, Hq]` of the rows that have one partial
    # state, which then is not in `out` and `lse`. Of one row there are none.
    results: Any = None
    plan: DecodePlan = dataclasses.field(metadata={"static": True})  # of the call
    num_q_heads: int = dataclasses.field(metadata={"static": True})  # Hq
    head_dim: int = dataclasses.field(metadata={"static": True})  # D

    def place_of(self, head: Any) -> Callable[[Any], tuple[Any, ...]]:
        """Return the function from a partial state to its index in `lse`, for a query head."""
        if len(self.out.shape) == 3:
            return lambda partial: (partial, head)
        group = self.num_q_heads // self.out.shape[0]
        return lambda partial: (lax.div(head, group), partial, lax.rem(head, group))
