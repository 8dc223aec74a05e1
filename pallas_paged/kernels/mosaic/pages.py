"""The pages of a call as the Mosaic kernels read them."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import lax

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays
from pallas_paged.pages.layout import PageLayout


@pytree
class Pages:
    """The pages of K and V, their scales and the block tables: arrays, or refs to them."""

    k: Any  # with all axes of their layout
    v: Any  # like `k`; None of latents
    # f32 in the order of `layout.scale_axes`, f32`[1]` for all, or None; of latents only those of
    # k.
    k_scales: Any
    v_scales: Any
    block_tables: Any  # i32`[B, N]`
    layout: PageLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, arrays: Arrays, *, words: bool = False) -> Self:
        """Return the pages of a call, uncopied; one-byte ones with `words` as i16`[..., D / 2]`."""

        def of_kernel(x: Any) -> Any:
            if x is None or not words or x.dtype.itemsize > 1:
                return x
            return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.int16)

        k, v = (arrays.k_pages, None) if arrays.q_pe is not None else arrays.kv_pages
        scales = (arrays.k_scales, arrays.v_scales)
        k_scales, v_scales = (x.reshape(1) if x is not None and not x.ndim else x for x in scales)
        return cls(
            k=of_kernel(k),
            v=of_kernel(v),
            k_scales=k_scales,
            v_scales=v_scales,
            block_tables=arrays.block_tables,
            layout=arrays.layout,
        )

    @property
    def num_kv_heads(self) -> int:
        return self.layout.size(self.k.shape, "H")

    @property
    def page_size(self) -> int:
        return self.layout.size(self.k.shape, "N")

    @property
    def scales_by_token(self) -> bool:
        """Whether each token of each KV head has scales of its own."""
        return self.k_scales is not None and self.k_scales.shape != (1,)

    def box(self, kv: int, *, page: Any, tokens: Any, kv_head: Any) -> Any:
        """Return the ref to some tokens `[N, D]` of a page, K or V of one KV head."""
        return (self.k, self.v)[kv].at[self.layout.index(kv, P=page, N=tokens, H=kv_head)]
