"""Shared memory of a program of the Hopper decode kernel, and its tiles of query heads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.mosaic_sm90 import one_byte
from pallas_paged.kernels.mosaic_sm90.config import MosaicDecodeConfig
from pallas_paged.kernels.mosaic_sm90.ring import Ring, wgmma_transforms

_MAX_HEADS = 64  # columns of a product


def compiler_params(kv_dtype: Any) -> plgpu.CompilerParams:
    """Return the parameters of the kernel for pages of a dtype."""
    if jnp.dtype(kv_dtype).itemsize == 1:
        return one_byte.COMPILER_PARAMS
    return plgpu.CompilerParams(approx_math=True)


@pytree
class Queries:
    """Refs in shared memory for the queries of one work item, or their types.

    A copy into swizzled rows, which wgmma needs, can begin at every 8th head only. So queries
    arrive in plain rows, and the consumer moves them. Then the queries of the next item may arrive.
    """

    arrived: Any  # [N, D], plain
    q: Any  # [N, D], swizzled
    p: Any  # [N, block_k], swizzled: the probabilities of a block
    full: Any  # barrier, complete when the queries have arrived
    free: Any  # barrier, complete when the consumer has moved them
    reduced: Any = None  # f32[4, N] of `one_byte.reduce_columns`, with int8 and fp8 pages

    def of(self, pair: Any) -> Queries:
        """Return the refs of one pair of warpgroups, from refs with an axis of pairs."""
        return jax.tree.map(lambda ref: ref.at[pair], self)


def scratch_types(
    config: MosaicDecodeConfig,
    *,
    group: int,
    head_dim: int,
    page_size: int,
    dtype: Any,
    kv_dtype: Any,
    scales_of_tokens: bool = True,
) -> tuple[Queries, Ring]:
    """Return the types of the shared memory of a program.

    Args:
        scales_of_tokens: whether tokens of int8 and fp8 pages have scales of their own.
    """
    num_columns = padded_group(group)
    quantized = jnp.dtype(kv_dtype).itemsize == 1
    operand = jnp.float16 if quantized else dtype
    swizzled = functools.partial(plgpu.SMEM, dtype=operand, transforms=wgmma_transforms(operand))
    queries = Queries(
        arrived=plgpu.SMEM((num_columns, head_dim), dtype),
        q=swizzled((num_columns, head_dim)),
        p=swizzled((num_columns, config.block_k)),
        full=plgpu.Barrier(),
        free=plgpu.Barrier(),
    )
    if quantized:
        pairs = config.num_pairs
        queries = Queries(
            arrived=plgpu.SMEM((pairs, num_columns, head_dim), dtype),
            q=swizzled((pairs, num_columns, head_dim)),
            p=swizzled((pairs, num_columns, config.block_k)),
            full=plgpu.Barrier(num_barriers=pairs),
            free=plgpu.Barrier(num_barriers=pairs),
            reduced=plgpu.SMEM((pairs, 4, num_columns), jnp.float32),
        )
        return queries, one_byte.ring_types(
            config, head_dim=head_dim, page_size=page_size, scales_of_tokens=scales_of_tokens
        )
    return queries, Ring.types(
        config, head_dim=head_dim, page_size=page_size, dtype=dtype, num_consumers=1
    )


def head_tiles(group: int) -> tuple[int, int]:
    """Return the number of parts of the query heads of a KV head, and the heads of a part.

    Each part reads K/V again, and the registers hold one of at most 64 heads.
    """
    num_tiles = pl.cdiv(group, _MAX_HEADS)
    return num_tiles, pl.cdiv(group, num_tiles)


def padded_group(group: int) -> int:
    """Return the columns of a product for `group` query heads: wgmma takes a multiple of 8."""
    return pl.cdiv(head_tiles(group)[1], 8) * 8
