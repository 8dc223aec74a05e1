"""Configs of the Triton kernels: which sizes can be set, what is allowed, what is chosen."""

from __future__ import annotations

import dataclasses

from jax.experimental.pallas import next_power_of_2

from pallas_paged.checks import check_fixed_split_size, check_integer, check_num_programs
from pallas_paged.kernels.call import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How the Triton decode kernel and its merge run. Results differ by rounding only.

    Attributes:
        block_k: tokens of K/V per loop step; a power of two in [16, 256].
        num_programs: programs on the device, in [1, 65535]. Each KV head gets an equal number
            of them, at least one, and divides the blocks of all rows evenly among them.
        num_warps: warps per decode program; a power of two in [1, 16].
        num_stages: software-pipelining depth of the K/V loop, in [1, 8].
        fixed_split_size: None, or tokens after which every row is split, a multiple of `block_k`.
            The bits of a row then depend on that row (and the config) alone, not on the batch.
            Partial results take memory for `B * ceil(longest row that the table can hold /
            fixed_split_size)` f32 rows of q's heads.

    Raises:
        ValueError: a value is outside its range.
    """

    block_k: int
    num_programs: int
    num_warps: int
    num_stages: int
    fixed_split_size: int | None = None

    def __post_init__(self) -> None:
        _check_loop(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedConfig:
    """How the Triton kernel of ragged queries and its merge run. Results differ by rounding only.

    Attributes:
        block_q: query rows of a tile, one for each token and query head of a KV head's group; a
            power of two in [16, 256].
        block_k, num_warps, num_stages: as in `DecodeConfig`.
        num_programs: programs of the device that run at the same time, in [1, 65535]. K/V are
            split where that lets them end earlier.
        fixed_split_size: None, or tokens after which the K/V are split of every row whose queries
            fit one tile; longer rows are then not split. As in `DecodeConfig`, the bits of a row no
            longer depend on other rows. Partial results take memory for
            `B * ceil(longest row / fixed_split_size)` tiles.

    Raises:
        ValueError: a value is outside its range.
    """

    block_q: int
    block_k: int
    num_programs: int
    num_warps: int
    num_stages: int
    fixed_split_size: int | None = None

    def __post_init__(self) -> None:
        check_integer("block_q", self.block_q, 16, 256, power_of_2=True)
        _check_loop(self)


def _check_loop(config: DecodeConfig | RaggedConfig) -> None:
    check_integer("block_k", config.block_k, 16, 256, power_of_2=True)
    check_num_programs(config.num_programs)
    check_integer("num_warps", config.num_warps, 1, 16, power_of_2=True)
    check_integer("num_stages", config.num_stages, 1, 8)
    check_fixed_split_size(config.fixed_split_size, config.block_k)


def most_shared_memory(
    config: DecodeConfig | RaggedConfig, *, rows: int, head_dim: int, itemsize: int
) -> int:
    """Return the bytes of shared memory that a program of the kernel needs at most.

    The compiler often needs less: it keeps fewer stages where loads depend on one another. `rows`
    are the query rows of a program.
    """
    # Measured with what JAX 0.12 compiles for Hopper: all stages of K and V and the queries, or the
    # f32 sums, and small arrays.
    padded, rows = next_power_of_2(max(head_dim, 16)), next_power_of_2(max(rows, 16))
    tiles = 2 * config.num_stages * config.block_k * padded * itemsize
    return max(2 * rows * padded + tiles, 4 * rows * padded) + 4096


def decode_config(sizes: Sizes) -> DecodeConfig:
    """Return the heuristic config of a decode call."""
    num_seqs, num_kv_heads, num_sms = sizes.num_seqs, sizes.num_kv_heads, sizes.num_sms
    head_dim, itemsize = sizes.head_dim, sizes.itemsize
    # Measured on an H200 (132 SMs, 228 KB of shared memory each), 2026-11: with 16 KB tiles of K
    # and of V in two stages four programs fit on an SM, and that beat fewer programs with deeper
    # pipelines on nearly every shape (bench/notes/decode.md). One wave: a fifth program costs 20%.
    group = next_power_of_2(max(sizes.group, 16))
    # int8 and fp8 tiles have as many tokens as two-byte ones, but are loaded one stage earlier.
    row_bytes = next_power_of_2(head_dim) * max(itemsize, 2)
    tile_bytes, programs_per_sm = (32768, 2) if group == 32 else (16384, 4)
    block_k = min(max(tile_bytes // row_bytes, 16), 128)
    if block_k * row_bytes > tile_bytes:  # 16 tokens of 512 f32
        programs_per_sm //= 2
    # The accumulator [group, head_dim] must fit in the registers of the program's warps.
    least = max(group // 16, group * next_power_of_2(head_dim) // 4096)
    num_blocks = num_seqs * -(-sizes.max_kv_len // block_k)
    # A program with a block or two is all latency; more warps and a shorter pipeline help.
    short = num_blocks <= 2 * (programs_per_sm * num_sms // num_kv_heads)
    # Where a block is a page the kernel takes more registers, and with 4 warps only three programs
    # fit on an SM. int8 and fp8 tiles of longer ranges are faster with 2 warps: see
    # bench/notes/one_byte.md.
    wide = block_k >= 64 and block_k != sizes.page_size and (itemsize > 1 or group == 32 or short)
    num_warps = min(max(4 if wide else 2, least), 8)
    if num_warps == 8:
        programs_per_sm = 2
    num_stages = 3 if itemsize == 1 and not short else 2
    # Measured on an H200, 2026-11-23: with two to four blocks of 128 tokens for each program some
    # have half as many again as others. 8 rows of 2116 tokens take 14.8 us instead of 16.1.
    few = num_seqs > 1 and num_blocks <= 4 * (programs_per_sm * num_sms // num_kv_heads)
    if few and block_k == 128 and group == 16 and itemsize == 2 and head_dim > 32:
        num_blocks *= 4
        block_k, programs_per_sm, num_warps, num_stages = 32, 8, 1, 3
    # More programs than blocks would only write empty partial states.
    per_kv_head = max(1, min(programs_per_sm * num_sms // num_kv_heads, num_blocks))
    return DecodeConfig(
        block_k=block_k,
        num_programs=per_kv_head * num_kv_heads,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def writing_decode_config(config: DecodeConfig, sizes: Sizes) -> DecodeConfig:
    """Return the config of a decode kernel that also writes, from the config without the write."""
    # Measured on an H200, 2026-11, for one row of a Llama of 1B whose table holds 1216 tokens: the
    # first loads take most of the time, and smaller blocks end sooner. More than two programs per
    # SM were not measured.
    num_programs = -(-sizes.max_kv_len // 64) * sizes.num_kv_heads
    if sizes.num_seqs > 1 or config.block_k != 128 or num_programs > 2 * sizes.num_sms:
        return config
    return dataclasses.replace(config, block_k=64, num_programs=num_programs)


def ragged_config(sizes: Sizes) -> RaggedConfig:
    """Return the heuristic config of a call with ragged queries."""
    num_seqs, num_kv_heads, num_sms = sizes.num_seqs, sizes.num_kv_heads, sizes.num_sms
    num_tokens, group, itemsize = sizes.num_tokens, sizes.group, sizes.itemsize
    padded = next_power_of_2(max(sizes.head_dim, 16))
    rows = -(-num_tokens * group // num_seqs)  # of an average sequence
    # More rows of more than 256 elements would fit neither the registers nor the shared memory.
    block_q = most_rows = min(max(next_power_of_2(rows), 16), 128 if padded <= 256 else 64)
    # Measured on an H200, 2026-11: prompts that make less than 3 tiles of 128 rows for each SM take
    # 1.13 to 1.41 times as long as with tiles of 64 rows. On a long prefix it is the other way.
    few_tiles = rows > 128 and num_tokens * sizes.num_q_heads < 3 * 128 * num_sms
    if few_tiles and padded <= 128 and sizes.max_kv_len * num_seqs <= 2 * num_tokens:
        block_q = 64
    block_k = min(max(16384 // (padded * max(itemsize, 2)), 16), 64)
    if block_q < 64:  # bound by memory, as decoding is
        num_warps, programs_per_sm = max(2, block_q * padded // 4096), 3
        num_stages = 3 if itemsize == 1 else 2
    else:
        # Measured on an H200, 2026-11: 4 warps with 128 x 128 f32 of accumulators each leave an SM
        # two programs, whose softmax and products overlap; 8 warps on as many rows: 21 to 26% less.
        num_warps = 8 if block_q * padded > 128 * 128 else 4
        num_stages = 3 if most_rows == 128 else 2
        programs_per_sm = 1 if num_warps == 8 else 2
    num_tiles = num_tokens * group // block_q + min(num_seqs + 1, num_tokens)
    num_blocks = num_tiles * -(-sizes.max_kv_len // block_k)
    per_kv_head = max(1, min(programs_per_sm * num_sms // num_kv_heads, num_blocks))
    return RaggedConfig(
        block_q=block_q,
        block_k=block_k,
        num_programs=per_kv_head * num_kv_heads,
        num_warps=num_warps,
        num_stages=num_stages,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Tile of one program of a merge kernel; every size is a power of two."""

    block_s: int  # partial states per loop step
    block_h: int  # query heads, or query rows of a ragged tile
    block_d: int  # elements of head_dim
    num_warps: int  # warps per program


def decode_merge_config(
    *,
    num_seqs: int,
    num_heads: int,
    head_dim: int,
    num_programs: int,
    has_short: bool = False,
    fixed_split: bool,
) -> MergeConfig:
    """Return the heuristic tile of the merge of rows, from static shapes only.

    Args:
        num_programs: programs of each KV head that start together.
        has_short: others follow, with short ranges.
        fixed_split: the order of the sums, and so the tile, must not depend on the batch.
    """
    head_dim = next_power_of_2(head_dim)
    if fixed_split:
        return MergeConfig(block_s=8, block_h=1, block_d=min(head_dim, 128), num_warps=1)
    # A row of an even batch has about this many partial states; a longer row takes more loop steps.
    block_s = min(next_power_of_2(num_programs // num_seqs + 2), 128)
    if has_short:
        # Measured on an H200, 2026-11-23: a row in short ranges has more, but more programs than
        # 4096 take longer to start than a few loop steps.
        block_s = max(block_s, min(next_power_of_2(32768 // (num_seqs * num_heads)), 16))
    if num_seqs < 32:
        # A few rows have too few heads to fill a device, so head_dim is divided as well.
        block_h, block_d = 1, min(head_dim, 16 * next_power_of_2(num_seqs + 1))
    else:
        # Measured on an H200, 2026-11: one warp, which waits at no barrier, with 1024 values, or
        # with 2048 where rows have many partial states.
        block_d = min(head_dim, 64 if block_s > 8 else 128)
        values = 2048 if block_s > 8 else 1024
        block_h = min(next_power_of_2(num_heads), max(1, values // (block_s * block_d)))
    num_warps = 4 if num_seqs < 32 and block_s * block_d > 1024 else 1
    return MergeConfig(block_s=block_s, block_h=block_h, block_d=block_d, num_warps=num_warps)


def ragged_merge_config(
    *, num_merges: int, block_q: int, head_dim: int, num_programs: int, fixed_split: bool
) -> MergeConfig:
    """Return the heuristic tile of the merge of query tiles, `num_merges` of which may be split.

    Other arguments are as in `decode_merge_config`.
    """
    head_dim = next_power_of_2(head_dim)
    if fixed_split:
        return MergeConfig(block_s=8, block_h=1, block_d=min(head_dim, 128), num_warps=1)
    block_s = min(next_power_of_2(num_programs // num_merges + 1), 64)
    # Most programs find that their tile was not split, so few are best; but where a few tiles have
    # many partial states, the merge needs all of the device.
    values = 8192 if block_s <= 8 else 4096
    block_d = min(head_dim, 128 if block_s <= 16 else 64)
    block_h = min(block_q, max(1, values // (block_s * block_d)))
    return MergeConfig(block_s=block_s, block_h=block_h, block_d=block_d, num_warps=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """Config of one kernel of the backward pass; every size is a power of two."""

    block_q: int  # query rows of a tile, as in `RaggedConfig`
    block_k: int  # keys of a tile
    num_warps: int  # as in `RaggedConfig`
    num_stages: int  # as in `RaggedConfig`


def queries_config(*, head_dim: int, itemsize: int, rows: int) -> BackwardConfig:
    """Return the config of the kernel that makes the gradient of the queries.

    Args:
        head_dim, itemsize: of the queries.
        rows: query rows of an average sequence, for each KV head.
    """
    padded = next_power_of_2(max(head_dim, 16))
    if itemsize == 4:  # f32 products run without the matrix unit
        return BackwardConfig(block_q=16, block_k=16, num_warps=4, num_stages=1)
    rows = max(next_power_of_2(rows), 16)
    # Measured on an H200, 2026-11, on 4x4096: smaller tiles in two programs on an SM take 16% less
    # with head_dim 128, and with head_dim 64 as many warps as here 36% less than twice as many.
    block_q = min(rows, 128 if padded <= 64 else 64)
    block_k = min(64, 8192 // padded)
    num_warps = max(2, min(4 if padded <= 128 else 8, block_q * padded // 2048))
    num_stages = 3 if padded <= 128 else 2
    return BackwardConfig(
        block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=num_stages
    )


def keys_config(*, head_dim: int, itemsize: int, rows: int) -> BackwardConfig:
    """Return the config for the gradients of keys and values; sizes as in `queries_config`."""
    padded = next_power_of_2(max(head_dim, 16))
    if itemsize == 4:
        return BackwardConfig(block_q=16, block_k=16, num_warps=4, num_stages=1)
    # Measured on an H200, 2026-11, on 4x4096: with head_dim 128 tiles of 64 queries take 14% less
    # than those of 32, though some registers are spilled; with head_dim 64 four warps take 39% less
    # than eight.
    most = 32 if padded <= 64 else min(64, 8192 // padded)
    return BackwardConfig(
        block_q=min(max(next_power_of_2(rows), 16), most),
        block_k=min(128, 16384 // padded),
        num_warps=4 if padded <= 64 else 8,
        num_stages=2,
    )
