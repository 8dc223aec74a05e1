"""The operands of the Mosaic decode kernel."""

from __future__ import annotations

from typing import Any, Self

import jax.numpy as jnp

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.mosaic_sm90 import one_byte
from pallas_paged.kernels.mosaic_sm90.decode_scratch import head_tiles, padded_group
from pallas_paged.kernels.mosaic_sm90.one_byte_scales import Scales
from pallas_paged.kernels.mosaic_sm90.ring import Pool


@pytree
class DecodeInputs:
    """Operands of the kernel, or refs to them."""

    q: Any  # [B * Hq, D]
    pool: Pool
    block_tables: Any  # i32[B, N]
    seq_lens: Any  # i32[B]
    unit_ends: Any  # i32[B], from DecodePlan
    alibi_slopes: Any  # f32[Hkv * parts of a group, N] or None
    scales: Scales | None = None  # of int8 and fp8 pages

    @classmethod
    def of(cls, arrays: Arrays, plan: DecodePlan) -> Self:
        """Return the operands of a call."""
        scales, slopes, group = Scales.of(arrays), arrays.alibi_slopes, arrays.group
        if slopes is not None:
            num_tiles, heads = head_tiles(group)
            slopes = slopes.reshape(arrays.num_kv_heads, group)
            if num_tiles > 1:
                padding = num_tiles * heads - group
                slopes = jnp.pad(slopes, ((0, 0), (0, padding))).reshape(-1, heads)
            slopes = jnp.pad(slopes, ((0, 0), (0, padded_group(group) - heads)))
        return cls(
            q=arrays.q.reshape(arrays.num_seqs * arrays.num_q_heads, arrays.head_dim),
            pool=Pool.of(arrays) if scales is None else one_byte.pool_of(arrays),
            block_tables=arrays.block_tables,
            seq_lens=arrays.seq_lens,
            unit_ends=plan.unit_ends(arrays.seq_lens),
            alibi_slopes=slopes,
            scales=scales,
        )
