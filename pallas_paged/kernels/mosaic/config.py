"""Configs of the Mosaic GPU kernels, what fits, what is chosen, and when these are the faster."""

from __future__ import annotations

import dataclasses

from pallas_paged.kernels import tuned
from pallas_paged.kernels.triton.config import check_integer, check_split_size

# Shared memory of a Hopper SM. Every block costs 1 KB more than it asks for.
_SM_BYTES = 228 * 1024
_BLOCK_BYTES = 1024
_ALIGNMENT = 1024  # of what a kernel has there


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicDecodeConfig:
    """How the Mosaic decode kernel and its merge run. Results differ only by rounding.

    Attributes:
      block_k: tokens of K/V per loop step; a multiple of 64 in [64, 256].
      num_stages: blocks of K and of V in shared memory, in [2, 8].
      num_programs: programs per KV head among which all rows' blocks are shared out evenly, in
        [1, 65535].
      fixed_split_size: None, or tokens after which every row is split, a multiple of `block_k`, as in
        `DecodeConfig`: with it the bits of a row depend on nothing but the row.

    Raises:
      ValueError: if a value is outside its range.
    """

    block_k: int
    num_stages: int
    num_programs: int
    fixed_split_size: int | None = None

    def __post_init__(self) -> None:
        _check_loop(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicRaggedConfig:
    """How the Mosaic kernel of ragged queries and its merge run. Results differ only by rounding.

    Attributes:
      block_k, num_stages: as in `MosaicDecodeConfig`.
      num_consumers: warpgroups of a program that attend, each for 64 query rows, in [1, 2].
      num_q_stages: tiles of queries in shared memory, in [1, 2]. With 2 the next one's are on their
        way while one is attended.
      num_programs: programs of the whole device, not per KV head, which take pieces of work in
        turn, in [1, 65535].
      fixed_split_size: None, or tokens after which the K/V are split of every row whose queries fit one
        tile, a multiple of `block_k`. As in `RaggedConfig`, but for twice the memory: a sequence of
        one tile's length may stand in two.

    Raises:
      ValueError: if a value is outside its range.
    """

    block_k: int
    num_consumers: int
    num_stages: int
    num_programs: int
    fixed_split_size: int | None = None
    num_q_stages: int = 2

    def __post_init__(self) -> None:
        check_integer("num_consumers", self.num_consumers, 1, 2)
        check_integer("num_q_stages", self.num_q_stages, 1, 2)
        _check_loop(self)

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return self.num_consumers * 64


def _check_loop(config: MosaicDecodeConfig | MosaicRaggedConfig) -> None:
    check_integer("block_k", config.block_k, 64, 256)
    if config.block_k % 64:
        raise ValueError(f"block_k={config.block_k} must be a multiple of 64")
    check_integer("num_stages", config.num_stages, 2, 8)
    check_integer("num_programs", config.num_programs, 1, 65535)
    check_split_size(config.fixed_split_size, config.block_k)


def shared_memory(
    config: MosaicDecodeConfig | MosaicRaggedConfig, *, group: int, head_dim: int, itemsize: int
) -> int:
    """Bytes of shared memory that a program of the kernel asks for, at most.

    Args:
      group: query heads of a KV head.
      head_dim, itemsize: of the queries, K and V.
    """
    row = head_dim * itemsize
    ring = [config.num_stages * config.block_k * row] * 2
    if isinstance(config, MosaicDecodeConfig):
        columns = -(-group // 8) * 8
        queries = [columns * row] * 2
        probabilities = columns * config.block_k * itemsize
        parts = [*ring, *queries, probabilities, _ALIGNMENT * 2]  # and sums across warps
    else:
        queries = [config.num_q_stages * config.block_q * row]
        out = config.block_q * min(row, 128 * itemsize)
        parts = [*ring, *queries, out, config.block_q * 4, _ALIGNMENT]  # and records of pieces
    barriers = _ALIGNMENT
    return sum(-(-part // _ALIGNMENT) * _ALIGNMENT for part in (*parts, barriers))


def shared_memory_limit(programs_per_sm: int) -> int:
    """Bytes that each of so many programs on an SM may ask for."""
    return _SM_BYTES // programs_per_sm - _BLOCK_BYTES


def decode_config(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    max_kv_len: int,
    num_seqs: int,
    itemsize: int,
    num_sms: int,
) -> MosaicDecodeConfig:
    """Heuristic config of one decode call, from static shapes only; arguments as in `tuning`."""
    # Measured on an H200, 2026-11: of 128 wide heads one program with two blocks of 128 tokens on
    # the way beat two programs, deeper rings and smaller blocks on all but tiny batches.
    block_k = 128 if head_dim == 128 else 64
    num_stages = 2 if head_dim == 128 else 3
    programs_per_sm = 2 if head_dim < 128 else 1
    # More programs than blocks would only write empty partials.
    num_blocks = num_seqs * -(-max_kv_len // block_k)
    config = MosaicDecodeConfig(
        block_k=block_k,
        num_stages=num_stages,
        num_programs=max(1, min(programs_per_sm * num_sms // num_kv_heads, num_blocks)),
    )
    group = num_q_heads // num_kv_heads
    needed = shared_memory(config, group=group, head_dim=head_dim, itemsize=itemsize)
    if needed > shared_memory_limit(programs_per_sm):
        return dataclasses.replace(config, num_stages=2)
    return config


def ragged_config(
    *,
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    num_seqs: int,
    itemsize: int,
    num_sms: int,
) -> MosaicRaggedConfig:
    """Heuristic config of one ragged call, from static shapes only; arguments as in `tuning`."""
    # Measured on an H200, 2026-11: 128 rows and blocks of 32 KB; with blocks half as long 12% less.
    wide = head_dim > 128
    block_k = 64 if wide else 128
    if head_dim == 64 and max_kv_len >= 2048:
        block_k = 256
    # One warpgroup is enough for sequences whose queries fill no more than one.
    rows = num_tokens * (num_q_heads // num_kv_heads)
    return MosaicRaggedConfig(
        block_k=block_k,
        num_consumers=1 if rows <= 64 * num_seqs else 2,
        num_stages=2,
        num_programs=num_sms,
        num_q_stages=1 if wide else 2,
    )


def choose_config(
    kernel: str, *, device_kind: str, num_sms: int, **sizes: int
) -> MosaicDecodeConfig | MosaicRaggedConfig:
    """As `tuning.choose_config`, of the Mosaic kernels."""
    measured = tuned.lookup(f"mosaic_{kernel}", device_kind, sizes)
    if measured is None:
        heuristic = decode_config if kernel == "decode" else ragged_config
        return heuristic(num_sms=num_sms, **sizes)
    programs = measured.pop("programs_per_sm") * num_sms
    if kernel == "decode":
        return MosaicDecodeConfig(
            num_programs=max(1, programs // sizes["num_kv_heads"]), **measured
        )
    return MosaicRaggedConfig(num_programs=programs, **measured)


def prefer_mosaic(kernel: str, *, device_kind: str, **sizes: int) -> bool:
    """Whether the Mosaic kernel is faster than Triton's on a Hopper GPU.

    Args:
      kernel: "decode" or "ragged".
      device_kind: as JAX names the device.
      sizes: the other arguments of `decode_config` or `ragged_config`, without `num_sms`.
    """
    triton = tuned.microseconds(kernel, device_kind, sizes)
    mosaic = tuned.microseconds(f"mosaic_{kernel}", device_kind, sizes)
    if triton is not None and mosaic is not None:
        return mosaic < triton
    group = sizes["num_q_heads"] // sizes["num_kv_heads"]
    if kernel == "decode":
        # Ahead by up to 5% where few programs share few long rows, and by 1% with many heads a
        # group; behind by up to 8% elsewhere.
        few_rows = sizes["num_seqs"] * sizes["num_kv_heads"] <= 64 and sizes["max_kv_len"] >= 2048
        return sizes["head_dim"] == 128 and (group >= 8 or few_rows)
    # Tiles have 64 query rows a warpgroup; with fewer the matrix unit multiplies nothing much.
    return sizes["num_tokens"] * group >= 64 * sizes["num_seqs"]
