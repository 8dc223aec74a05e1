"""Configs of the kernels for Ampere and later: what is allowed.

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax.numpy as jnp

from pallas_paged.checks import check_fixed_split_size, check_integer, check_num_programs
from pallas_paged.kernels.call import Arrays

_MMA_ROWS = 16
_WARPGROUP_ROWS = 64  # the least of a warpgroup of the ragged kernel
_WARP_COLUMNS = 32  # of the four warps, 8 each
# Elements of a row of shared memory, and of a product: a latent and its rotary key are multiples.
LATENT_COLUMNS = 64
_RESULT_COLUMNS = 256  # of a program of the ragged kernel: 128 f32 of a thread, for 64 rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTypes:
    """What the types of shared memory depend on besides the config: of a call, as in `Arrays`."""

    head_dim: int
    v_head_dim: int
    group: int = 1
    rope_dim: int = 0
    dtype: Any  # of the queries
    kv_dtype: Any
    scales_by_token: bool

    @classmethod
    def of(cls, arrays: Arrays) -> Self:
        """Return those of a call."""
        names = ("head_dim", "v_head_dim", "group", "rope_dim")
        return cls(
            **{name: getattr(arrays, name) for name in names},
            dtype=arrays.q.dtype,
            kv_dtype=arrays.k_pages.dtype,
            scales_by_token=arrays.k_scales is not None and arrays.k_scales.ndim > 0,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the pages."""
        return jnp.dtype(self.kv_dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicSm80DecodeConfig:
    """How the decode kernel for Ampere and its merge run. Results differ by rounding only.

    Attributes:
        block_k: tokens of K/V per loop step; 32, 64 or 128.
        num_stages: blocks of K and of V in shared memory, in [1, 8].
        num_programs: programs on the device, in [1, 65535]. Each KV head gets an equal number
            of them, at least one, and divides the blocks of all rows evenly among them.
        fixed_split_size: None, or tokens after which every row is split, a multiple of `block_k`,
            as in `DecodeConfig`. The bits of a row then depend on that row alone.

    Raises:
        ValueError: a value is outside its range.
    """

    block_k: int
    num_stages: int
    num_programs: int
    fixed_split_size: int | None = None

    def __post_init__(self) -> None:
        check_integer("block_k", self.block_k, 32, 128, power_of_2=True)
        check_integer("num_stages", self.num_stages, 1, 8)
        check_num_programs(self.num_programs)
        check_fixed_split_size(self.fixed_split_size, self.block_k)


def decode_rows(group: int, head_dim: int) -> int:
    """Return the query heads of a program, padding included."""
    most = 32 if head_dim <= 128 else 16  # more would take too many registers
    return min(-(-group // _MMA_ROWS) * _MMA_ROWS, most)


def decode_columns(head_dim: int, itemsize: int) -> int:
    """Return the 16-bit elements of a row of K or V in shared memory, padding included."""
    width = head_dim * itemsize // 2
    return -(-width // _WARP_COLUMNS) * _WARP_COLUMNS


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicSm80RaggedConfig:
    """How the ragged kernel for Ampere and its merge run. Results differ by rounding only.

    Attributes:
        block_q: query rows of a tile, one for each token and query head of a KV head's group: 64 or
            128 for each warpgroup, 64 where head_dim is above 128.
        block_k: tokens of K/V per loop step; 16, 32, 64 or 128.
        num_warpgroups: warpgroups of a program, in [1, 2]. Two share K and V, and the softmax of
            one runs under the products of the other.
        num_programs: programs of the device that run at the same time, in [1, 65535]. K/V are
            split where that lets them end earlier.
        fixed_split_size: None, or tokens after which the K/V are split of every row whose queries
            fit one tile, a multiple of `block_k`, as in `RaggedConfig`.

    Raises:
        ValueError: a value is outside its range.
    """

    block_q: int
    block_k: int
    num_warpgroups: int
    num_programs: int
    fixed_split_size: int | None = None

    def __post_init__(self) -> None:
        check_integer("num_warpgroups", self.num_warpgroups, 1, 2)
        rows = self.num_warpgroups * _WARPGROUP_ROWS
        check_integer("block_q", self.block_q, rows, 2 * rows, power_of_2=True)
        check_integer("block_k", self.block_k, 16, 128, power_of_2=True)
        check_num_programs(self.num_programs)
        check_fixed_split_size(self.fixed_split_size, self.block_k)

    @property
    def rows_per_warpgroup(self) -> int:
        """Query rows of a warpgroup."""
        return self.block_q // self.num_warpgroups


def result_columns(head_dim: int) -> tuple[int, int]:
    """Return among how many programs the columns of a result are divided, and those of each."""
    parts = -(-head_dim // _RESULT_COLUMNS)
    return parts, -(-head_dim // (parts * _MMA_ROWS)) * _MMA_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """How the kernel and its merge run. Results differ by rounding only."""

    block_q: int  # query rows of a tile, one for each token and query head: 16 or 32
    block_k: int  # latents per loop step, 16 or 32; 32 where a tile has 16 rows
    num_stages: int  # blocks of latents in shared memory
    # Programs of the device that run at the same time. Latents are split where that lets them end
    # earlier.
    num_programs: int
    # None, or tokens after which the latents are split of every row whose queries fit one tile, a
    # multiple of `block_k`.
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
