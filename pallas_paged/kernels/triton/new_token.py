"""The newest token of a row in the decode kernel: its rotation, its logit and its place.

The kernel takes the product with a fused weight. Each program rotates its queries itself. The last
key of a row comes from there and not from the pages: the program that has the row's last block
starts from that key, and writes it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.logits import LogitOptions, base2_logits
from pallas_paged.kernels.triton.pages import row_index
from pallas_paged.kernels.triton.softmax import State


@dataclasses.dataclass(frozen=True, eq=False)
class NewTokens:
    """Refs to the newest tokens of the rows, of one KV head."""

    qkv: Any  # `[B, G + 2, D]`, with D a power of two
    slots: Any  # i32`[B]`, where they go in the pages
    cos: Any  # f32`[B, D / 2]`
    sin: Any  # f32`[B, D / 2]`
    k_pages: Any  # `[P * S, D]` or `[P, S, D]`, to write
    v_pages: Any  # `[P * S, D]` or `[P, S, D]`, to write

    def load(
        self, row: jax.Array, heads: jax.Array, dims: jax.Array, head_mask: Any, is_last: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q `[H, D]` and k `[1, D]`, rotated, and v `[1, D]`.

        Args:
            row: of the batch.
            heads, dims: i32`[H, 1]` and i32`[1, D]`.
            head_mask: bool`[H, 1]`, of the group; other queries are 0.
            is_last: bool`[]`; else k and v are 0.
        """
        _, kinds, head_dim = self.qkv.shape
        half, at = head_dim // 2, row[None, None]
        cos, sin = (plgpu.load(ref.at[at, dims & (half - 1)]) for ref in (self.cos, self.sin))
        sin = jnp.where(dims < half, -sin, sin)
        k_mask = jnp.broadcast_to(is_last, (1, head_dim))
        q_mask = jnp.broadcast_to(head_mask, (heads.size, head_dim))

        def load(head: Any, dims: jax.Array, mask: jax.Array) -> jax.Array:
            return plgpu.load(self.qkv.at[at, head, dims], mask=mask, other=0)

        def rotated(head: Any, mask: jax.Array) -> jax.Array:
            here, there = load(head, dims, mask), load(head, dims ^ half, mask)
            turned = here.astype(jnp.float32) * cos + there.astype(jnp.float32) * sin
            return turned.astype(self.qkv.dtype)

        k, v = (jnp.full((1, 1), kinds - i, jnp.int32) for i in (2, 1))
        return rotated(heads, q_mask), rotated(k, k_mask), load(v, dims, k_mask)

    def write(
        self, row: jax.Array, dims: jax.Array, k: jax.Array, v: jax.Array, is_last: jax.Array
    ) -> None:
        """Write k and v if `is_last` and the slot exists."""
        slot = self.slots[row]
        *places, _ = self.k_pages.shape
        is_slot = is_last & (slot >= 0) & (slot < math.prod(places))
        mask = jnp.broadcast_to(is_slot, dims.shape)
        axes = "SD" if len(places) == 1 else "PND"
        at = row_index(axes, slot[None, None], places[-1], D=dims)
        for ref, x in ((self.k_pages, k), (self.v_pages, v)):
            plgpu.store(ref.at[at], x, mask=mask)


def state_of(
    q: jax.Array, k: jax.Array, v: jax.Array, is_last: jax.Array, options: LogitOptions
) -> State:
    """Return the state after the key k if `is_last`, or else before any key."""
    # At distance 0 ALiBi adds nothing.
    no_slopes: Any = None
    s = jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=1)
    s, factor = base2_logits(s, options, no_slopes, no_slopes)
    acc = jnp.where(is_last, v.astype(jnp.float32), 0.0)
    return (
        jnp.where(is_last, s * factor, -jnp.inf),
        jnp.where(is_last, jnp.ones_like(s), 0.0),
        [jnp.broadcast_to(acc, q.shape)],
    )
