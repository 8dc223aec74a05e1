"""Blocks of keys and values on their way through shared memory, for the ragged kernel.

K and V have two buffers each. While the copying warpgroup computes the softmax of block i, no
warpgroup needs K of block i and V of block i - 1 any more, so copies start into their places:

    K:  | i | i + 1 |  <- i + 2        V:  | i - 1 | i |  <- i + 1

One-byte rows arrive in buffers of their own a block earlier, and are converted at this point.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import CallTypes, result_columns
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK
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
from pallas_paged.pages.layout import K, V


@pytree
class Pool(Pages):
    """The pages of a call, whose bytes `find_keys` counts."""

    @property
    def units(self) -> tuple[int, ...]:
        """Bytes of K and of V that a place counts: chunks or, if these differ in size, rows."""
        rows = tuple(x.shape[-1] * jnp.dtype(x.dtype).itemsize for x in (self.k, self.v))
        return (CHUNK, CHUNK) if rows[0] == rows[1] else rows

    @property
    def strides(self) -> dict[str, int]:
        """Units from one page, token, head or half of a pair to the next, of K and of V."""
        strides = self.layout.strides(self.layout.axes, self.k.shape)
        item, unit = jnp.dtype(self.k.dtype).itemsize, self.units[K]
        return {axis: count * item // unit for axis, count in strides.items() if axis != "D"}

    @property
    def scale_strides(self) -> dict[str, int]:
        """Elements from one scale to the next along each axis."""
        return self.layout.strides(self.layout.scale_axes, self.k_scales.shape)

    @property
    def places(self) -> list[Places]:
        """Strides by which `find_keys` finds rows and, behind them, scales."""
        all_strides = [self.strides] + ([self.scale_strides] if self.scales_by_token else [])
        return [
            Places(page_size=self.page_size, page=strides["P"], token=strides["N"])
            for strides in all_strides
        ]


@pytree
class Buffers:
    """Refs to shared memory, or their types."""

    k: Any  # `[2, block_k, columns + pad]`, 16 bits an element
    v: Any  # like `k`, the program's columns of V
    raw_k: Any  # one-byte rows `[block_k, columns]` as they arrive, or None
    raw_v: Any  # like `raw_k`
    # i32`[3, block_k]`, `Pool.units` from the start of the pool to each row, and elements from the
    # start of the scales to each scale.
    places: list[Any]
    scales: Any  # f32`[2, 4, block_k]` of the tokens of K and of V, or None

    @classmethod
    def types(cls, block_k: int, types: CallTypes) -> Buffers:
        """Return the types of the refs."""
        _, columns_of_v = result_columns(types.v_head_dim)
        dtype, head_dim = types.dtype, types.head_dim

        def rows(columns):
            return plgpu.SMEM((2, block_k, padded(columns, dtype)), dtype)

        def raw(columns):
            return plgpu.SMEM((block_k, columns), types.kv_dtype) if types.itemsize == 1 else None

        places = plgpu.SMEM((3, block_k), jnp.int32)
        return cls(
            k=rows(head_dim),
            v=rows(columns_of_v),
            raw_k=raw(head_dim),
            raw_v=raw(columns_of_v),
            places=[places] * (1 + types.scales_by_token),
            scales=plgpu.SMEM((2, 4, block_k), jnp.float32) if types.scales_by_token else None,
        )


def _slot(ref: Any, block: Any) -> Any:
    return ref.at[lax.rem(block, ref.shape[0])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """The blocks `[lo, hi)` of a sequence and one KV head, at least one."""

    pool: Pool  # from where
    buffers: Buffers  # to where
    row: Any  # of the block table
    kv_head: Any
    first_key: Any  # the first key that may be read
    last_key: Any  # the last one
    lo: Any
    hi: Any
    columns: tuple[Any, Any]  # of K and of V, from the slice of `columns_of_part`
    interpret: bool

    @property
    def _one_byte(self) -> bool:
        return self.buffers.raw_k is not None

    def k(self, block: Any) -> Any:
        """Return the ref to K of a block."""
        return _slot(self.buffers.k, block)

    def v(self, block: Any) -> Any:
        """Return the ref to V of a block."""
        return _slot(self.buffers.v, block)

    def scales(self, kv: int, block: Any) -> Any:
        """Return the ref f32`[block_k]` to scales of K or of V."""
        return _slot(self.buffers.scales.at[kv], block)

    def start(self) -> None:
        """Copy the first block and the next K; wait for the thread's own copies."""
        for i in range(3):
            self._put(self.lo + i)
        ops.barrier(interpret=self.interpret)
        self._copy(K, self.lo)
        self._copy(V, self.lo)
        if self._one_byte:
            self._convert(K, self.lo)
            self._convert(V, self.lo)
        self._copy(K, self.lo + 1)
        if self._one_byte:
            self._convert(K, self.lo + 1)
            self._copy(K, self.lo + 2)
            self._copy(V, self.lo + 1)
            ops.barrier(interpret=self.interpret)
            self._put(self.lo + 3)
        else:
            wait_for_own_copies(interpret=self.interpret)

    def advance(self, block: Any) -> None:
        """Bring V of the next block and K of the one behind it, during the softmax of `block`."""
        ahead = 1 if self._one_byte else 0
        if self._one_byte:
            self._convert(K, block + 2)
            self._convert(V, block + 1)
        self._copy(K, block + 2 + ahead)
        self._copy(V, block + 1 + ahead)
        self._put(block + 3 + ahead)

    def arrive(self) -> None:
        """Wait for the thread's own copies, before the barrier that shows them to the others."""
        if not self._one_byte:
            wait_for_own_copies(interpret=self.interpret)

    def _put(self, block: Any) -> None:
        """Note where the keys of a block are."""
        found = find_keys(
            self.pool.block_tables.at[self.row],
            self.pool.places,
            block * self.buffers.k.shape[1],
            low=self.first_key,
            high=self.last_key,
            interpret=self.interpret,
        )
        for places, of_kind in zip(self.buffers.places, found, strict=True):
            put(_slot(places, block), of_kind, interpret=self.interpret)

    def _copy(self, kv: int, block: Any) -> None:
        """Start the copies of K and all scales, or of V, of a block."""
        pool, buffers = self.pool, self.buffers
        strides, places, columns = pool.strides, buffers.places, self.columns[kv]
        pages, raw, to = (
            (pool.k, buffers.raw_k, buffers.k) if kv == K else (pool.v, buffers.raw_v, buffers.v)
        )
        itemsize = jnp.dtype(pages.dtype).itemsize
        base = self.kv_head * strides["H"] + kv * strides.get("2", 0)
        if not isinstance(columns.start, int):
            base += columns.start * itemsize // CHUNK

        @pl.when(block < self.hi)
        def _():
            gather_rows(
                _slot(to, block) if raw is None else raw,
                pages,
                _slot(places[0], block),
                base,
                unit=pool.units[kv],
                row_bytes=columns.size * itemsize,
                interpret=self.interpret,
            )
            if kv == K and buffers.scales is not None:
                for of, scales in ((K, pool.k_scales), (V, pool.v_scales)):
                    gather_values(
                        self.scales(of, block),
                        scales,
                        _slot(places[1], block),
                        self.kv_head * pool.scale_strides["H"],
                        interpret=self.interpret,
                    )

    def _convert(self, kv: int, block: Any) -> None:
        """Wait for the thread's own copies, and convert the K or the V of a block."""
        buffers = self.buffers
        wait_for_own_copies(interpret=self.interpret)
        raw, to = (buffers.raw_k, buffers.k) if kv == K else (buffers.raw_v, buffers.v)
        columns = self.columns[kv].size
        convert_rows(_slot(to, block), raw, head_dim=columns, interpret=self.interpret)
