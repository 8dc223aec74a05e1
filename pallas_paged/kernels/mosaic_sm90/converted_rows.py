"""16-bit copies of the int8 and fp8 pages of rows with many queries, for the ragged kernel.

Each tile of queries reads all keys of its row. The converter of the ragged kernel converts them
again for every tile, which is right for rows of a few tiles. For the others, one kernel before it
converts the keys and values once, into a scratch pool of the call:

    block table     pages, any order     ->  16-bit blocks of a row, one after another
    [7] [2] [9]     7: k0  2: k1  9: k2      first_block[row]: k0 k1 k2

The scratch pool has a bound. Rows that do not fit are left to the converter, and so is every row of
a few tiles. The bits are the same: K exact, its scales beside it; V times its scales, rounded once.
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
from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic_sm90.block_conversion import BlockConversion
from pallas_paged.kernels.mosaic_sm90.config import MosaicSm90RaggedConfig
from pallas_paged.kernels.mosaic_sm90.ring import Ring
from pallas_paged.pages.layout import K, V
from pallas_paged.pages.prefix_sums import prefix_sums

# A row is converted if its queries fill more tiles. The copies of a block are written and read
# again, and the converter's time for it is saved once per tile.
MIN_TILES = 4
# A call is left to the converter if it has fewer: one more kernel takes as long as it saves.
MIN_LOGITS = 2**26
# Of a scratch pool, in device memory: 131072 tokens of 8 KV heads of 128.
MOST_BYTES = 2**29

_PROGRAMS = 8  # of the kernel, for each program of the attention kernel
_NONE = -(2**30)  # first block of a row that is not converted


@pytree
class ConvertedRows:
    """Converted rows of a call, or refs to them."""

    # `[Hkv, C, block_k, D]`, blocks of 16-bit elements, their columns in stored order, see
    # `ragged_operands`. Tokens that a row may not read are 0.
    k: Any
    v: Any
    # f32`[Hkv, C, block_k]`, times `only_factor`; None where all tokens have one scale.
    k_scales: Any
    first_block: Any  # i32`[B]`: block j of row b is `first_block[b] + j`. See `holds`.

    def holds(self, row: jax.Array) -> jax.Array:
        """Return whether a row is among them."""
        return self.first_block[row] > _NONE

    def stream(
        self,
        ring: Ring,
        k_scales: Any,
        row: jax.Array,
        kv_head: jax.Array,
        *,
        lo: jax.Array,
        hi: jax.Array,
        kv_iter: jax.Array,
    ) -> jax.Array:
        """Send the blocks `[lo, hi)` of a row through the ring, as `ring.stream` does.

        `k_scales` are f32[num_stages, block_k] in shared memory, or None. Their copy is one more
        arrival at `k_full`.
        """
        first = self.first_block[row]

        @pl.loop(lo, hi)
        def send(block):
            now = kv_iter + (block - lo)
            stage = lax.rem(now, ring.num_stages)
            for source, target, full, free in (
                (self.k, ring.k, ring.k_full, ring.k_free),
                (self.v, ring.v, ring.v_full, ring.v_free),
            ):
                ops.wait_if(now >= ring.num_stages, free.at[stage])
                plgpu.copy_gmem_to_smem(
                    source.at[kv_head, first + block], target.at[stage], full.at[stage]
                )
                if source is self.k and k_scales is not None:
                    plgpu.copy_gmem_to_smem(
                        self.k_scales.at[kv_head, first + block],
                        k_scales.at[stage],
                        full.at[stage],
                    )

        return kv_iter + hi - lo


@pytree
class _Blocks:
    """The blocks to convert, or refs to them."""

    items: Any  # i32`[C, 4]`: row, block of the row, its length, the first key that it may read
    count: Any  # i32`[1]`, blocks that are used


def _num_blocks(arrays: Arrays, config: MosaicSm90RaggedConfig) -> int:
    """Return the blocks for which the scratch pool of a call has room; 0 for no pool."""
    num_tokens, num_q_heads, _ = arrays.q.shape
    if num_tokens * num_q_heads * arrays.max_kv_len < MIN_LOGITS:
        return 0
    num_rows = min(arrays.num_seqs, num_tokens // (_few_queries(arrays, config) + 1))
    bytes_of_block = 4 * arrays.num_kv_heads * config.block_k * arrays.head_dim
    return min(num_rows * -(-arrays.max_kv_len // config.block_k), MOST_BYTES // bytes_of_block)


def _few_queries(arrays: Arrays, config: MosaicSm90RaggedConfig) -> int:
    """Return the most query tokens of a row that is left to the converter."""
    return MIN_TILES * config.block_q // arrays.group


def convert_rows(
    arrays: Arrays, *, options: LogitOptions, config: MosaicSm90RaggedConfig, interpret: bool
) -> ConvertedRows | None:
    """Return the converted rows of a call with int8 or fp8 pages, None where no row can be one."""
    room = _num_blocks(arrays, config)
    if not room:
        return None
    with jax.named_scope("ragged_plan"):
        first_block, blocks = _choose(arrays, options, config, room)
    pages = Pages.of(arrays)
    shape = (arrays.num_kv_heads, room, config.block_k)
    kv = result_shape((*shape, arrays.head_dim), arrays.q.dtype, varying=False)
    rows = ConvertedRows(
        k=kv,
        v=kv,
        k_scales=result_shape(shape, jnp.float32, varying=False) if pages.scales_by_token else None,
        first_block=None,
    )
    num_programs = _PROGRAMS * config.num_programs
    k_factor = options.only_factor(arrays.alibi_slopes)

    def body(inputs, rows):
        pages, blocks = inputs
        count = 2 * arrays.num_kv_heads * blocks.count[0]
        program = lax.axis_index("program")

        @pl.loop(0, lax.div(count - program + num_programs - 1, num_programs))
        def convert(i):
            unit = program + i * num_programs
            kv_head = lax.rem(lax.div(unit, 2), arrays.num_kv_heads)
            place = lax.div(unit, 2 * arrays.num_kv_heads)
            row, block, kv_len, first_key = (blocks.items[place, i] for i in range(4))
            for kv, out in ((K, rows.k), (V, rows.v)):

                @pl.when(lax.rem(unit, 2) == kv)
                def _(kv=kv, out=out):
                    BlockConversion(
                        pages=pages,
                        row=row,
                        kv=kv,
                        kv_head=kv_head,
                        block=block,
                        kv_len=kv_len,
                        first_key=first_key,
                        k_factor=1.0 if k_factor is None else k_factor,
                        interpret=interpret,
                    ).convert(
                        out.at[kv_head, place],
                        None if rows.k_scales is None else rows.k_scales.at[kv_head, place],
                    )

    rows = ops.run_kernel(
        body,
        (pages, blocks),
        rows,
        name="ragged_convert_rows",
        params=plgpu.CompilerParams(),
        interpret=interpret,
        grid=(num_programs,),
        grid_names=("program",),
    )
    return dataclasses.replace(rows, first_block=first_block)


def _choose(
    arrays: Arrays, options: LogitOptions, config: MosaicSm90RaggedConfig, room: int
) -> tuple[jax.Array, _Blocks]:
    """Return `ConvertedRows.first_block` and the blocks to convert."""
    q_lens, kv_lens, block_k = jnp.diff(arrays.cu_q_lens), arrays.seq_lens, config.block_k
    first_key = jnp.zeros_like(kv_lens)
    if arrays.q_positions is None:
        first_key = jnp.minimum(options.first_key(kv_lens - q_lens), jnp.maximum(kv_lens - 1, 0))
        first_key = jnp.maximum(first_key, 0)
    lo = first_key // block_k
    wanted = q_lens > _few_queries(arrays, config)
    counts = jnp.where(wanted, -(-kv_lens // block_k) - lo, 0)
    ends = prefix_sums(counts)
    taken = wanted & (ends <= room)
    place = jnp.arange(room)
    # Past the last block this is any row: the kernel reads no further than `count`.
    row = jnp.searchsorted(ends, place, side="right", method="compare_all")
    row = jnp.minimum(row, arrays.num_seqs - 1)
    first_block = ends - counts - lo
    items = [row, place - first_block[row], kv_lens[row], first_key[row]]
    blocks = _Blocks(
        items=jnp.stack(items, axis=1).astype(jnp.int32),
        count=jnp.max(jnp.where(taken, ends, 0)).reshape(1),
    )
    return jnp.where(taken, first_block, _NONE), blocks
