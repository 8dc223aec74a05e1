"""Configs that are chosen for the Triton kernels, and the calls that Triton is chosen for."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from pallas_paged.kernels.call import Sizes
from pallas_paged.kernels.device import HOPPER_SHARED_MEMORY
from pallas_paged.kernels.families import FAMILIES
from pallas_paged.kernels.triton.config import (
    decode_config,
    decode_merge_config,
    keys_config,
    most_shared_memory,
    queries_config,
    ragged_config,
    writing_decode_config,
)
from tests.support.devices import A100
from tests.support.static_calls import PREFILL

SIZES = dict(
    num_q_heads=32, num_kv_heads=8, head_dim=128, max_kv_len=4096, num_seqs=64, itemsize=2,
    num_sms=132,
)  # fmt: skip


def decode_of(**sizes):
    return decode_config(Sizes(**dict(page_size=16) | SIZES | sizes))


@pytest.mark.parametrize("group", [1, 4, 7, 32, 128])
def test_the_heuristic_config_fits_in_shared_memory(group):
    for head_dim, itemsize in itertools.product((16, 80, 256, 512), (2, 4)):
        config = decode_of(num_q_heads=8 * group, head_dim=head_dim, itemsize=itemsize)
        # Two stages of a K and a V tile, for every program that shares the SM's 227 KB.
        padded = 1 << (head_dim - 1).bit_length()
        tiles = config.num_stages * 2 * config.block_k * padded * itemsize
        per_sm = -(-config.num_programs // 132)
        assert per_sm * tiles <= 4 * 64 * 1024
        assert config.num_programs <= 4 * 132


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_the_heuristic_configs_could_stand_in_a_tuning_file(head_dim, itemsize):
    sizes = dict(head_dim=head_dim, itemsize=itemsize)
    for num_tokens in (64, 4096):
        ragged = ragged_config(Sizes(**SIZES | sizes | dict(num_tokens=num_tokens)))
        for config, rows in ((decode_of(**sizes), 4), (ragged, ragged.block_q)):
            assert most_shared_memory(config, rows=rows, **sizes) <= HOPPER_SHARED_MEMORY


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (dict(page_size=32), dict(num_warps=4)),
        (dict(page_size=64), dict(num_warps=2)),  # a block of one page
        (dict(page_size=128), dict(num_warps=4)),
        # A few rows of narrow heads get small blocks.
        (dict(head_dim=64, num_seqs=8), dict(block_k=32, num_programs=1056)),
        (dict(head_dim=64, num_seqs=9), dict(block_k=128)),
        (dict(head_dim=64, num_seqs=1), dict(block_k=128)),
        (dict(num_seqs=8), dict(block_k=64)),
        # Few tokens get few programs.
        (dict(num_kv_heads=2, num_q_heads=8, max_kv_len=128, num_seqs=1),
         dict(block_k=64, num_programs=4)),
    ],
    ids=str,
)  # fmt: skip
def test_decode_config(sizes, expected):
    config = dataclasses.asdict(decode_of(**sizes))
    assert {name: config[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "max_kv_len", "head_dim", "block_q"),
    [
        (1, 1024, 1024, 128, 64),  # fewer than 3 tiles of 128 rows for each SM
        (1, 1536, 1536, 128, 64),
        (1, 2048, 2048, 128, 128),
        (1, 512, 8192, 128, 128),  # on a long prefix
        (4, 128, 32, 128, 128),  # a sequence fits one tile
        (4, 512, 128, 256, 128),
        (4, 512, 128, 320, 64),  # more would not fit
    ],
)
def test_short_prompts_get_smaller_tiles(num_seqs, num_tokens, max_kv_len, head_dim, block_q):
    sizes = dict(num_tokens=num_tokens, head_dim=head_dim, max_kv_len=max_kv_len, num_seqs=num_seqs)
    assert ragged_config(Sizes(**SIZES | sizes)).block_q == block_q


@pytest.mark.parametrize(
    ("change", "block_k"),
    [
        *[({}, 64), (dict(max_kv_len=8192), 128), (dict(num_seqs=2, head_dim=32), 128)],
        (dict(head_dim=256), 32),
    ],
    ids=str,
)
def test_a_short_row_that_is_written_too_has_smaller_blocks(change, block_k):
    sizes = dict(head_dim=64, page_size=64, max_kv_len=1216, num_seqs=1) | change
    config = writing_decode_config(decode_of(**sizes), Sizes(**SIZES | sizes))
    assert config.block_k == block_k
    assert change or config.num_programs == 19 * 8


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_quantized_blocks_have_as_many_tokens_and_more_stages(head_dim):
    one, two = (decode_of(head_dim=head_dim, itemsize=n) for n in (1, 2))
    assert one == dataclasses.replace(two, num_stages=3, num_warps=one.num_warps)
    assert one.num_warps <= two.num_warps
    sizes = SIZES | dict(head_dim=head_dim, num_tokens=4096)
    one, two = (ragged_config(Sizes(**sizes | dict(itemsize=n))) for n in (1, 2))
    assert one == two


@pytest.mark.parametrize("num_seqs", [1, 3, 64, 1000])
def test_the_sides_of_the_merge_tile_are_powers_of_two(num_seqs):
    for num_heads, fixed_split in itertools.product((1, 7, 32, 128), (False, True)):
        sizes = dict(num_heads=num_heads, head_dim=80, num_programs=66)
        tile = decode_merge_config(num_seqs=num_seqs, **sizes, fixed_split=fixed_split)
        assert all(n > 0 and n & (n - 1) == 0 for n in dataclasses.astuple(tile))
        assert tile.block_s * tile.block_h * tile.block_d <= 2**14


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "block_q"),
    [
        *[("9.0", jnp.bfloat16, 256, 128), ("8.6", jnp.bfloat16, 256, 64)],
        ("8.9", jnp.bfloat16, 256, 64),
        ("12.0", jnp.bfloat16, 128, 128),
    ],
)
def test_tiles_of_queries_fit_into_the_shared_memory(capability, dtype, head_dim, block_q):
    device = dataclasses.replace(A100, compute_capability=capability)
    types = dict(dtype=jnp.dtype(dtype), kv_dtype=jnp.dtype(dtype))
    call = dataclasses.replace(PREFILL, device=device, head_dim=head_dim, **types)
    assert FAMILIES["triton"].bind(call).keywords["config"].block_q == block_q


@pytest.mark.parametrize(("head_dim", "block_q", "num_warps"), [(80, 32, 4), (512, 16, 8)])
@pytest.mark.parametrize("kv_dtype", [jnp.int8, jnp.float32])
def test_f32_queries_get_tiles_that_the_compiler_can_unroll(kv_dtype, head_dim, block_q, num_warps):
    types = dict(dtype=jnp.dtype(jnp.float32), kv_dtype=jnp.dtype(kv_dtype))
    call = dataclasses.replace(PREFILL, device=A100, head_dim=head_dim, **types)
    config = FAMILIES["triton"].bind(call).keywords["config"]
    assert (config.block_q, config.block_k, config.num_warps) == (block_q, 16, num_warps)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 512])
def test_configs_of_the_gradient_fit_into_shared_memory(head_dim):
    padded = 1 << (head_dim - 1).bit_length()
    for rows, itemsize in itertools.product((1, 4, 4096), (2, 4)):
        sizes = dict(head_dim=head_dim, itemsize=itemsize, rows=rows)
        queries, keys = queries_config(**sizes), keys_config(**sizes)
        # Two tiles stay, and two more are in every stage.
        of_queries = queries.block_q + queries.num_stages * queries.block_k
        of_keys = keys.block_k + keys.num_stages * keys.block_q
        assert 2 * max(of_queries, of_keys) * padded * itemsize <= 227 * 1024, sizes
