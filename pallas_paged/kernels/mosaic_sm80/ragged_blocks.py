"""Blocks of keys and values on their way through shared memory, for the ragged kernel.

All threads copy and all attend. K and V have `num_stages` buffers each, and a block meets two
barriers; behind each of them the buffer that has just been used takes the next block:

    K of the block is there         -> V of a later block starts | q.k, places of later keys
    V is there, q.k is finished     -> K of a later block starts | softmax, p.v

So one buffer of each is enough for copies that run under the products, as in FlashAttention-2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.kv_layout import K, PageLayout, V
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.ragged_copies import (
    Places,
    convert_rows,
    find_keys,
    gather_rows,
    gather_values,
    put,
    wait_for_own_copies,
)
from pallas_paged.kernels.mosaic_sm80.ragged_products import padded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """The pages of a call with all axes of their layout, and their scales: arrays or refs.

    Attributes:
        k, v: pages.
        k_scales, v_scales: f32 in the order of `layout.scale_axes`, f32`[1]` for all, or None.
        block_tables: i32`[B, N]`.
    """

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    block_tables: Any
    layout: PageLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, arrays: Arrays) -> Pool:
        """Return the pages of a call."""
        scales = (arrays.k_scales, arrays.v_scales)
        k_scales, v_scales = (x.reshape(1) if x is not None and not x.ndim else x for x in scales)
        k, v = arrays.kv_pages
        return cls(
            k=k,
            v=v,
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

    @property
    def strides(self) -> dict[str, int]:
        """Chunks of 16 bytes from one page, token, head or half of a pair to the next."""
        strides = ops.strides(self.layout.axes, self.k)
        return {letter: strides[letter] // ops.CHUNK for letter in strides if letter != "D"}

    @property
    def scale_strides(self) -> dict[str, int]:
        """Elements from one scale to the next along each axis."""
        strides = ops.strides(self.layout.scale_axes, self.k_scales)
        return {letter: stride // 4 for letter, stride in strides.items()}

    @property
    def places(self) -> list[Places]:
        """How `find_keys` finds rows and, behind them, scales."""
        all_strides = [self.strides] + ([self.scale_strides] if self.scales_by_token else [])
        return [
            Places(page_size=self.page_size, page=strides["P"], token=strides["N"])
            for strides in all_strides
        ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """Refs to shared memory, or their types.

    Attributes:
        k, v: `[num_stages, block_k, D + pad]`; of one-byte pages 16 bits `[1, block_k, D + pad]`.
        raw_k, raw_v: one-byte rows `[num_stages, block_k, D]` as they arrive, or None.
        places: i32`[2, block_k]`, chunks of 16 bytes from the start of the pool to each row.
        scales: f32`[2, num_stages + 1, block_k]` of the tokens of K and of V, or None.
    """

    k: Any
    v: Any
    raw_k: Any
    raw_v: Any
    places: Any
    scales: Any

    @classmethod
    def types(
        cls,
        *,
        num_stages: int,
        block_k: int,
        head_dim: int,
        dtype: Any,
        kv_dtype: Any,
        scales_by_token: bool,
    ) -> Buffers:
        """Return the types of the refs."""
        dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype)
        one_byte = kv_dtype.itemsize == 1
        slots = 1 if one_byte else num_stages
        raw = plgpu.SMEM((num_stages, block_k, head_dim), kv_dtype) if one_byte else None
        rows = plgpu.SMEM((slots, block_k, padded(head_dim, dtype)), dtype)
        return cls(
            k=rows,
            v=rows,
            raw_k=raw,
            raw_v=raw,
            places=plgpu.SMEM((2, block_k), jnp.int32),
            scales=(
                plgpu.SMEM((2, num_stages + 1, block_k), jnp.float32) if scales_by_token else None
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """The blocks `[lo, hi)` of a sequence and one KV head, at least one.

    Attributes:
        pool, buffers: from where and to where.
        row: of the block table.
        kv_head: the KV head.
        first_key, last_key: the keys that may be read.
        lo, hi: the blocks.
        num_stages: buffers of K and of V.
        head_dim: of K and V.
        interpret: the kernel is interpreted.
    """

    pool: Pool
    buffers: Buffers
    row: Any
    kv_head: Any
    first_key: Any
    last_key: Any
    lo: Any
    hi: Any
    num_stages: int
    head_dim: int
    interpret: bool

    @property
    def _block_k(self) -> int:
        return self.buffers.k.shape[1]

    def start(self) -> None:
        """Start the copies of the first blocks. Nothing reads the buffers any more."""
        for i in range(self.num_stages):
            block = self.lo + i
            found = self._find(block)
            self._put(block, found)
            ops.barrier(interpret=self.interpret)
            self._copy_k(block, found)
            if i + 1 < self.num_stages:
                self._copy_v(block)

    def take_k(self, block: Any) -> tuple[Any, list[jax.Array]]:
        """Wait for K of a block; return its ref, and what `take_v` needs.

        All threads have used V of the block before.
        """
        self._wait(block, self.buffers.raw_k, self.buffers.k)
        self._copy_v(block + self.num_stages - 1)
        found = self._find(block + self.num_stages)
        return self.buffers.k.at[lax.rem(block, self.buffers.k.shape[0])], found

    def take_v(self, block: Any, found: list[jax.Array]) -> Any:
        """Wait for V of a block and until all threads have used K; return the ref to V."""
        self._put(block + self.num_stages, found)
        self._wait(block, self.buffers.raw_v, self.buffers.v)
        self._copy_k(block + self.num_stages, found)
        return self.buffers.v.at[lax.rem(block, self.buffers.v.shape[0])]

    def scales(self, kv: int, block: Any) -> Any:
        """Return the ref f32`[block_k]` to scales of K, after `take_k`, or of V."""
        return self.buffers.scales.at[kv, lax.rem(block, self.num_stages + 1)]

    def _wait(self, block: Any, raw: Any, to: Any) -> None:
        pending = 2 * (self.num_stages - 1)
        if raw is None:
            ops.wait_for_copies(pending, interpret=self.interpret)
            return
        wait_for_own_copies(pending, interpret=self.interpret)
        stage = lax.rem(block, self.num_stages)
        convert_rows(to.at[0], raw.at[stage], head_dim=self.head_dim, interpret=self.interpret)
        ops.barrier(interpret=self.interpret)

    def _find(self, block: Any) -> list[jax.Array]:
        return find_keys(
            self.pool.block_tables.at[self.row],
            self.pool.places,
            block * self._block_k,
            low=self.first_key,
            high=self.last_key,
            interpret=self.interpret,
        )

    def _put(self, block: Any, found: list[jax.Array]) -> None:
        put(self.buffers.places.at[lax.rem(block, 2)], found[0], interpret=self.interpret)

    def _copy_k(self, block: Any, found: list[jax.Array]) -> None:
        """Start the copies of K and of all scales."""
        buffers, pool = self.buffers, self.pool

        @pl.when(block < self.hi)
        def _():
            self._copy(K, block, buffers.raw_k if buffers.raw_k is not None else buffers.k)
            if buffers.scales is not None:
                index = found[1] + self.kv_head * pool.scale_strides["H"]
                for kv, scales in ((K, pool.k_scales), (V, pool.v_scales)):
                    gather_values(self.scales(kv, block), scales, index, interpret=self.interpret)

        ops.commit_copies(interpret=self.interpret)

    def _copy_v(self, block: Any) -> None:
        buffers = self.buffers

        @pl.when(block < self.hi)
        def _():
            self._copy(V, block, buffers.raw_v if buffers.raw_v is not None else buffers.v)

        ops.commit_copies(interpret=self.interpret)

    def _copy(self, kv: int, block: Any, to: Any) -> None:
        pool = self.pool
        strides = pool.strides
        pages = pool.k if kv == K else pool.v
        gather_rows(
            to.at[lax.rem(block, self.num_stages)],
            pages,
            self.buffers.places.at[lax.rem(block, 2)],
            self.kv_head * strides["H"] + kv * strides.get("2", 0),
            unit=ops.CHUNK,
            row_bytes=self.head_dim * jnp.dtype(pages.dtype).itemsize,
            interpret=self.interpret,
        )
