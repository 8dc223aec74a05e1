"""Blocks of keys in shared memory, and the asynchronous copies of pages to them.

A block is `block_k` tokens of one KV head. cp.async copies 16 bytes a thread, so the rows of a
block may come from anywhere: pages have any size and any layout. Rows that no query sees arrive as
zeros, and so do columns past head_dim; these are not read from device memory.

The block table takes the same way. Entries are copied to shared memory long before the rows that
they point at, so no thread waits for one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import CallTypes
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK, Emitter, Tile

_TABLE_SLOTS = 2  # blocks of table entries in shared memory for each stage


@pytree
class Blocks:
    """Refs to blocks in shared memory, or their types."""

    k: Any  # `[num_stages, block_k, columns]`, swizzled
    v: Any  # like `k`; None of latents
    tables: Any  # i32`[2 * num_stages, block_k]`, the page of each token
    k_scales: Any  # f32`[num_stages, block_k]`, or None
    v_scales: Any  # like `k_scales`

    @classmethod
    def types(cls, config: Any, types: CallTypes, *, columns: int) -> Blocks:
        """Return the types of the refs for a config of decoding or of latents.

        A row has `columns` elements, at least head_dim; of one-byte pages words.
        """
        num_stages, block_k, latent = config.num_stages, config.block_k, types.rope_dim > 0
        dtype = jnp.int16 if types.itemsize == 1 else types.dtype
        block = ops.swizzled((num_stages, block_k, columns), dtype)
        scales = plgpu.SMEM((num_stages, block_k), jnp.float32) if types.scales_by_token else None
        return cls(
            k=block,
            v=None if latent else block,
            tables=plgpu.SMEM((_TABLE_SLOTS * num_stages, block_k), jnp.int32),
            k_scales=scales,
            v_scales=None if latent else scales,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copier:
    """The copies of one sequence and one KV head."""

    pages: Pages  # from where
    blocks: Blocks  # to where
    row: jax.Array  # of the block table
    kv_head: jax.Array
    first_key: jax.Array | int  # keys `[first_key, end_key)` that any query sees, at least one
    end_key: jax.Array
    interpret: bool

    @property
    def block_k(self) -> int:
        return self.blocks.k.shape[1]

    @property
    def num_stages(self) -> int:
        return self.blocks.k.shape[0]

    @property
    def _pairs(self) -> list[tuple[Any, Any]]:
        """Pages and blocks of K and, but of latents, of V."""
        of_k, of_v = (self.pages.k, self.blocks.k), (self.pages.v, self.blocks.v)
        return [of_k] if self.blocks.v is None else [of_k, of_v]

    @property
    def _scale_pairs(self) -> list[tuple[Any, Any]]:
        """Scales of tokens, as `_pairs`."""
        if not self.pages.scales_by_token:
            return []
        of_k = self.pages.k_scales, self.blocks.k_scales
        return (
            [of_k] if self.blocks.v is None else [of_k, (self.pages.v_scales, self.blocks.v_scales)]
        )

    def where(self, condition: jax.Array, other: Copier) -> Copier:
        """Return this copier where a condition holds, else `other` of the same program."""
        first_key = self.first_key
        if isinstance(first_key, jax.Array):
            first_key = jnp.where(condition, first_key, other.first_key)
        return dataclasses.replace(
            self,
            row=jnp.where(condition, self.row, other.row),
            first_key=first_key,
            end_key=jnp.where(condition, self.end_key, other.end_key),
        )

    def copy_table(self, block: jax.Array, place: jax.Array) -> None:
        """Start the copy of the table entries of a block, for its later `copy_block`.

        `place` is that of the block among all that the program attends to.
        """
        if self.interpret:
            return
        pages, num_slots = self.pages, self.blocks.tables.shape[0]
        pages_per_seq = pages.block_tables.shape[1]
        block_k, page_size = self.block_k, pages.page_size

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), (ops.SCALAR,) * 5))
        def copy(_, tables, slots, scalars):
            m = Emitter()
            row, slot, first, low, high = map(m.scalar, scalars)
            token = m.thread()

            def copy_entry():
                # Entries of pages that no query sees may be outside the table.
                key = m.clip(m.add(first, token), low, m.sub(high, 1))
                entry = m.add(m.mul(m.wide(row), pages_per_seq), m.wide(m.div(key, page_size)))
                m.copy(
                    m.address(slots, m.mul(m.add(m.mul(slot, block_k), token), 4)),
                    m.address(tables, m.mul(entry, 4)),
                    size=4,
                )

            m.when(token, block_k, copy_entry)

        copy(
            pages.block_tables,
            self.blocks.tables,
            ops.scalars(
                self.row,
                lax.rem(place, num_slots),
                block * block_k,
                self.first_key,
                self.end_key,
            ),
        )

    def copy_block(self, block: jax.Array, place: jax.Array) -> None:
        """Start the copies of a block and its scales to stage `place % num_stages`.

        The block's entries of the table must have arrived.
        """
        if self.interpret:
            self._copy_block_now(block, place)
            return
        pages, blocks, layout = self.pages, self.blocks, self.pages.layout
        num_stages, block_k, columns = blocks.k.shape
        item = jnp.dtype(blocks.k.dtype).itemsize
        strides = layout.strides(layout.axes, pages.k.shape)
        page_bytes = {axis: count * item for axis, count in strides.items()}
        head_bytes = pages.k.shape[-1] * item
        tile = Tile(columns=columns, dtype=blocks.k.dtype, in_parts=blocks.v is None)
        page_size, num_slots = pages.page_size, blocks.tables.shape[0]
        scales = self._scale_pairs
        of_scales = {}
        if scales:
            strides = layout.strides(layout.scale_axes, pages.k_scales.shape)
            of_scales = {axis: 4 * count for axis, count in strides.items()}
        ref, block_ref = plgpu.RefType(), plgpu.RefType(ops.transforms(columns, blocks.k.dtype))

        @plgpu.inline_mgpu(
            arg_types=(
                [(ref, block_ref) for _ in self._pairs],
                [(ref, ref) for _ in scales],
                ref,
                (ops.SCALAR,) * 6,
            )
        )
        def copy(_, pairs, scales, tables, scalars):
            m = Emitter()
            stage, slot, first, kv_head, low, high = map(m.scalar, scalars)
            if blocks.v is None:  # or the compiler keeps places on short pages in registers
                first = m.ptx("mov.b32 $0, $1;", first)
            slot_at = m.mul(slot, 4 * block_k)

            def page_of(token):
                return m.load_word(m.address(tables, m.add(slot_at, m.mul(token, 4))))

            def place_of(token, page, strides):
                """Return the bytes to a token, and whether a query sees it."""
                key = m.add(first, token)
                at = m.mul(m.wide(page), strides["P"])
                at = m.add(at, m.mul(m.wide(m.rem(key, page_size)), strides["N"]))
                return at, m.both(m.at_least(key, low), m.less(key, high))

            # In most blocks every key is seen; fewer instructions copy them.
            all_seen = m.both(m.at_least(first, low), m.less(m.add(first, block_k - 1), high))
            bases = []
            for kv, (source, block) in enumerate(pairs):
                at_head = m.mul(m.wide(kv_head), page_bytes["H"])
                at_head = m.add(at_head, kv * page_bytes.get("2", 0))
                at_stage = m.mul(stage, block_k * columns * item)
                bases.append((m.address(source, at_head), m.address(block, at_stage)))

            def copy_all(all_seen):
                def copy_chunk(token, column, shared, page):
                    at, seen = place_of(token, page, page_bytes)
                    real = m.less(column, head_bytes) if head_bytes < tile.row_bytes else None
                    if not all_seen:
                        real = seen if real is None else m.both(seen, real)
                    at = m.add(at, m.wide(column))
                    for source, block in bases:
                        m.copy(m.add(block, shared), m.add(source, at), size=CHUNK, real=real)

                def copy_scale():
                    token = m.thread()
                    at, seen = place_of(token, page_of(token), of_scales)
                    at = m.add(at, m.mul(m.wide(kv_head), of_scales["H"]))
                    to = m.mul(m.add(m.mul(stage, block_k), token), 4)
                    real = None if all_seen else seen
                    for source, block in scales:
                        m.copy(m.address(block, to), m.address(source, at), size=4, real=real)

                m.for_each_chunk(tile, block_k, copy_chunk, load=page_of)
                if scales:
                    m.when(m.thread(), block_k, copy_scale)

            m.either(all_seen, lambda: copy_all(True), lambda: copy_all(False))

        copy(
            self._pairs,
            scales,
            blocks.tables,
            ops.scalars(
                lax.rem(place, num_stages),
                lax.rem(place, num_slots),
                block * block_k,
                self.kv_head,
                self.first_key,
                self.end_key,
            ),
        )

    def _copy_block_now(self, block: jax.Array, place: jax.Array) -> None:
        pages, blocks, layout = self.pages, self.blocks, self.pages.layout
        num_stages, block_k, columns = blocks.k.shape
        stage = lax.rem(place, num_stages)
        page_size, head_dim = pages.page_size, pages.k.shape[-1]
        count = min(page_size, block_k)
        for i in range(0, block_k, count):
            first = block * block_k + i
            at = jnp.clip(first, self.first_key, self.end_key - 1) // page_size
            places = dict(
                P=pages.block_tables[self.row, at],
                N=pl.ds(lax.rem(first, page_size), count),
                H=self.kv_head,
            )
            keys = first + jnp.arange(count)
            seen = (keys >= self.first_key) & (keys < self.end_key)
            for kv, (source, to) in enumerate(self._pairs):
                x = source[layout.index(kv, **places)]
                x = jnp.pad(jnp.where(seen[:, None], x, 0), ((0, 0), (0, columns - head_dim)))
                to[stage, pl.ds(i, count)] = x
            for source, to in self._scale_pairs:
                index = tuple(places[letter] for letter in layout.scale_axes)
                to[stage, pl.ds(i, count)] = jnp.where(seen, source[index], 0)
