"""Config of the kernel that reads latents, for Ampere and later: what is chosen.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses

from pallas_paged.kernels.call import Sizes

# Elements of a row of shared memory, and of a product: a latent and its rotary key are multiples.
LATENT_COLUMNS = 64
_REDUCTION_BYTES = 2048  # of the compiler, for reductions across warps
# Programs per SM, keys of a block and stages, by the rows of a tile: the first that fit. Two
# programs run the softmax of one under the products of the other, and one begins while the other
# one reads.
_LOOPS = {
    16: ((2, 32, 2), (1, 32, 4), (1, 32, 3), (1, 32, 2), (1, 32, 1)),
    32: ((2, 32, 2), (2, 16, 2), (1, 32, 2), (1, 16, 2), (1, 16, 1)),
}
_LOOPS_ONE_BYTE = {  # half of the time to read a block, and conversions in it
    16: ((2, 32, 3), (2, 32, 2), (1, 32, 4), (1, 32, 3), (1, 32, 2)),
    32: ((2, 16, 2), (1, 32, 3), (1, 32, 2), (1, 16, 2), (1, 16, 1)),
}
# Keys per SM below which tiles of 16 rows have one program there: half as many states to merge.
_MANY_KEYS = 1500


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """How the kernel and its merge run. Results differ by rounding only.

    Attributes:
        block_q: query rows of a tile, one for each token and query head: 16 or 32.
        block_k: latents per loop step, 16 or 32; 32 where a tile has 16 rows.
        num_stages: blocks of latents in shared memory.
        num_programs: programs of the device that run at the same time. Latents are split
            where that lets them end earlier.
        fixed_split_size: None, or tokens after which the latents are split of every row whose
            queries fit one tile, a multiple of `block_k`.
    """

    block_q: int
    block_k: int
    num_stages: int
    num_programs: int
    fixed_split_size: int | None = None


def latent_columns(head_dim: int, rope_dim: int, itemsize: int) -> tuple[int, int]:
    """Return the 16-bit elements of a latent and of its rotary key in shared memory, padded."""
    latent, rope = (x * itemsize // 2 for x in (head_dim, rope_dim))
    return latent, -(-rope // LATENT_COLUMNS) * LATENT_COLUMNS


def head_tiles(num_q_heads: int, block_q: int) -> int:
    """Return among how many programs the heads of a token are divided.

    More than one have the rows of one token each. Otherwise tiles have rows of several tokens.
    """
    return max(num_q_heads // block_q, 1) if num_q_heads % block_q == 0 else 1


def latent_shared_memory(
    config: LatentConfig, *, head_dim: int, rope_dim: int, itemsize: int
) -> int:
    """Return the bytes of shared memory that a program needs at most."""
    widths = latent_columns(head_dim, rope_dim, itemsize)
    tokens = config.num_stages * config.block_k
    forms = (2, 2, 4) if itemsize == 1 else (2,)  # bytes: even and odd elements, and pairs
    buffers = [
        *[size * config.block_q * width for size in forms for width in widths],  # the queries
        2 * config.block_q * config.block_k,  # the probabilities of a block
        2 * tokens * sum(widths),  # the latents
        *([4 * tokens] if itemsize == 1 else []),  # their scales
        8 * tokens,  # entries of the block table
        _REDUCTION_BYTES,
    ]
    return sum(-(-size // 1024) * 1024 for size in buffers)  # the compiler aligns each to 1 KB


def latent_config(sizes: Sizes) -> LatentConfig:
    """Return the heuristic config of a call, of one token a sequence or with `num_tokens`."""
    num_seqs, num_q_heads, num_sms = sizes.num_seqs, sizes.num_q_heads, sizes.num_sms
    head_dim, rope_dim, itemsize = sizes.head_dim, sizes.rope_dim, sizes.itemsize
    rows = num_q_heads * (sizes.num_tokens or num_seqs)
    block_q = 16 if rows <= 16 * num_seqs else 32
    loops = _LOOPS if itemsize > 1 else _LOOPS_ONE_BYTE
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
