"""Configs that are chosen for the kernels for Ampere and later, and where these are preferred.

Importing this module does not import Mosaic; choosing a config does, for types of shared memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from pallas_paged.kernels.call import Sizes
from pallas_paged.kernels.mosaic.support import shared_memory_bytes
from pallas_paged.kernels.mosaic_sm80.config import (
    CallTypes,
    LatentConfig,
    MosaicSm80DecodeConfig,
    MosaicSm80RaggedConfig,
    decode_rows,
    head_tiles,
)

# Programs per SM, keys of a block and stages of the decode kernel, the first that fit.
_LOOPS = (
    (3, 128, 2),
    (3, 64, 3),
    (3, 64, 2),
    (2, 64, 2),
    (2, 32, 3),
    (2, 32, 2),
    (1, 64, 3),
    (1, 64, 2),
    (1, 32, 3),
    (1, 32, 2),
    (1, 32, 1),
)
# Tried before those with one-byte pages: their conversions want long blocks.
_ONE_BYTE_LOOPS = ((3, 128, 2), (2, 128, 2))
_SHORT_ROW = 2048  # tokens, at most
# Where this kernel is preferred. All are for each SM: an H100 and an H200, on which they were
# measured, have as many SMs and the same limits, though one reads 1.5 times as fast as the other.
_MANY_TOKENS = 32768 / 132  # of a batch, at least
_FAST_READS = 4000 / 132  # GB/s
_LEAST_BYTES = 40e6 / 132  # of K and V
# Blocks of 64 keys for each SM, above which it gets one, two or three programs: with fewer, the
# merge and a program's start cost more than another program hides. Conversions are more to hide.
_LEAST_BLOCKS = (0, 16, 32)
_LEAST_ONE_BYTE_BLOCKS = (0, 6, 32)
# Programs, keys and stages with latents, by the rows of a tile. Two programs run the softmax of one
# under the products of the other, and one begins while the other one reads.
_LATENT_LOOPS = {
    16: ((2, 32, 2), (1, 32, 4), (1, 32, 3), (1, 32, 2), (1, 32, 1)),
    32: ((2, 32, 2), (2, 16, 2), (1, 32, 2), (1, 16, 2), (1, 16, 1)),
}
_ONE_BYTE_LATENT_LOOPS = {  # half of the time to read a block, and conversions in it
    16: ((2, 32, 3), (2, 32, 2), (1, 32, 4), (1, 32, 3), (1, 32, 2)),
    32: ((2, 16, 2), (1, 32, 3), (1, 32, 2), (1, 16, 2), (1, 16, 1)),
}
# Keys per SM below which tiles of 16 rows have one program there: half as many states to merge.
_MANY_KEYS = 1500


def decode_shared_memory(config: MosaicSm80DecodeConfig, **sizes: int) -> int:
    """Return the bytes of shared memory that a program of the decode kernel needs at most."""
    from pallas_paged.kernels.mosaic_sm80 import decode, ops

    return shared_memory_bytes(decode.scratch_types(config, _types(**sizes)), ops.COMPILER_PARAMS)


def _types(
    *, itemsize: int, head_dim: int, v_head_dim: int | None = None, **sizes: int
) -> CallTypes:
    """Return the types of a call whose program needs the most, with sizes as in `Sizes`.

    The group matters to the decode kernel alone, and `rope_dim` to the kernel of latents.
    """
    return CallTypes(
        head_dim=head_dim,
        v_head_dim=v_head_dim or head_dim,
        **sizes,
        dtype="bfloat16",
        kv_dtype="int8" if itemsize == 1 else "bfloat16",
        scales_by_token=itemsize == 1,
    )


def decode_config(sizes: Sizes) -> MosaicSm80DecodeConfig:
    """Return the heuristic config of a decode call."""
    group, head_dim, itemsize = sizes.group, sizes.head_dim, sizes.itemsize
    tiles = sizes.num_kv_heads * -(-group // decode_rows(group, head_dim))
    blocks_per_sm = tiles * sizes.num_seqs * -(-sizes.max_kv_len // 64) / sizes.num_sms
    loops, least_blocks = list(_LOOPS), _LEAST_BLOCKS
    if itemsize == 1:
        loops, least_blocks = [*_ONE_BYTE_LOOPS, *_LOOPS], _LEAST_ONE_BYTE_BLOCKS
    for programs_per_sm, block_k, num_stages in loops:
        if blocks_per_sm <= least_blocks[programs_per_sm - 1]:
            continue
        config = MosaicSm80DecodeConfig(block_k=block_k, num_stages=num_stages, num_programs=1)
        needed = decode_shared_memory(config, group=group, head_dim=head_dim, itemsize=itemsize)
        if needed + 1024 <= (sizes.shared_memory + 1024) // programs_per_sm:
            break
    # More programs than blocks would only write empty partial states.
    num_blocks = sizes.num_seqs * -(-sizes.max_kv_len // block_k)
    per_tile = max(1, min(programs_per_sm * sizes.num_sms // tiles, num_blocks))
    return dataclasses.replace(config, num_programs=per_tile * tiles)


def prefer_decode(sizes: Sizes) -> bool:
    """Return whether this kernel is faster than the Triton kernel on a Hopper GPU."""
    num_sms, itemsize = sizes.num_sms, sizes.itemsize
    # Measured on an H100 and an H200, 2026-11: up to 3% faster, and up to 6% with one-byte pages.
    # Up to 5% slower with small heads, with many short rows, and with many one-byte tokens where
    # reads are so fast that conversions count for more. Short calls lose more to a later start.
    num_tokens = sizes.num_seqs * sizes.max_kv_len
    num_bytes = 2 * num_tokens * sizes.num_kv_heads * sizes.head_dim * itemsize
    if not 128 <= sizes.head_dim <= 256 or num_bytes / num_sms < _LEAST_BYTES:
        return False
    if num_tokens / num_sms < _MANY_TOKENS:
        return True
    if itemsize == 1:
        return sizes.max_kv_len > _SHORT_ROW and sizes.read_gbps / num_sms < _FAST_READS
    return sizes.max_kv_len > _SHORT_ROW // 2


def ragged_shared_memory(config: MosaicSm80RaggedConfig, **sizes: Any) -> int:
    """Return the bytes of shared memory that a program of the ragged kernel needs at most."""
    from pallas_paged.kernels.mosaic_sm80 import ragged

    types = ragged.scratch_types(config, _types(**sizes), interpret=False)
    return shared_memory_bytes(types, ragged.COMPILER_PARAMS)


def ragged_config(sizes: Sizes) -> MosaicSm80RaggedConfig:
    """Return the heuristic config of a call with ragged queries."""
    num_seqs, num_kv_heads, num_sms = sizes.num_seqs, sizes.num_kv_heads, sizes.num_sms
    rows = sizes.num_tokens * sizes.group
    # A thread has 128 f32 of results and 64 logits; with more it runs out of registers.
    narrow, tiles = (sizes.v_head_dim or sizes.head_dim) <= 128, [(1, 64)]
    if rows > 64 * num_seqs:
        tiles = [(2, 128)] * narrow + [(2, 64), (1, 64)]
    loops = [(*tile, block_k, 1) for tile, block_k in itertools.product(tiles, (64, 32, 16))]
    if rows > 64 * num_seqs and narrow and sizes.itemsize > 1:
        # Two programs of 128 rows are faster than one of 256, but not where each converts K and V.
        loops.insert(0, (1, 128, 64, 2))
    for num_warpgroups, num_rows, block_k, least_programs in loops:
        config = MosaicSm80RaggedConfig(
            block_q=num_warpgroups * num_rows,
            block_k=block_k,
            num_warpgroups=num_warpgroups,
            num_programs=1,
        )
        needed = ragged_shared_memory(
            config, head_dim=sizes.head_dim, v_head_dim=sizes.v_head_dim, itemsize=sizes.itemsize
        )
        if needed + 1024 <= (sizes.shared_memory + 1024) // least_programs:
            break
    # Two warpgroups have all registers of an SM.
    programs_per_sm = 1 if num_warpgroups == 2 else (sizes.shared_memory + 1024) // (needed + 1024)
    num_blocks = (rows // config.block_q + num_seqs) * -(-sizes.max_kv_len // block_k)
    programs = min(max(programs_per_sm, 1), 2) * num_sms
    per_kv_head = max(1, min(programs // num_kv_heads, num_blocks))
    return dataclasses.replace(config, num_programs=per_kv_head * num_kv_heads)


def latent_shared_memory(config: LatentConfig, **sizes: int) -> int:
    """Return the bytes of shared memory that a program of latents needs at most."""
    from pallas_paged.kernels.mosaic_sm80 import latent_program, ops

    types = latent_program.scratch_types(config, _types(**sizes))
    return shared_memory_bytes(types, ops.COMPILER_PARAMS)


def latent_config(sizes: Sizes) -> LatentConfig:
    """Return the heuristic config of a call, of one token a sequence or with `num_tokens`."""
    num_seqs, num_q_heads, num_sms = sizes.num_seqs, sizes.num_q_heads, sizes.num_sms
    head_dim, rope_dim, itemsize = sizes.head_dim, sizes.rope_dim, sizes.itemsize
    rows = num_q_heads * (sizes.num_tokens or num_seqs)
    block_q = 16 if rows <= 16 * num_seqs else 32
    loops = _LATENT_LOOPS if itemsize > 1 else _ONE_BYTE_LATENT_LOOPS
    few_keys = block_q == 16 and num_seqs * sizes.max_kv_len < _MANY_KEYS * num_sms
    for programs_per_sm, block_k, num_stages in loops[block_q]:
        if programs_per_sm > 1 and few_keys:
            continue
        config = LatentConfig(
            block_q=block_q, block_k=block_k, num_stages=num_stages, num_programs=1
        )
        needed = latent_shared_memory(
            config, head_dim=head_dim, rope_dim=rope_dim, itemsize=itemsize
        )
        if needed + 1024 <= (sizes.shared_memory + 1024) // programs_per_sm:
            break
    tiles = head_tiles(num_q_heads, block_q)
    num_blocks = (rows // (tiles * block_q) + num_seqs) * -(-sizes.max_kv_len // config.block_k)
    per_tile = max(1, min(programs_per_sm * num_sms // tiles, num_blocks))
    return dataclasses.replace(config, num_programs=per_tile * tiles)
