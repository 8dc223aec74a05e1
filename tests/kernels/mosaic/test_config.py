"""Configs of the Mosaic kernels: valid values, shared memory, heuristics."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

import pallas_paged as pp
from pallas_paged.kernels.call import Sizes
from pallas_paged.kernels.mosaic_sm80 import heuristics as sm80
from pallas_paged.kernels.mosaic_sm90.config import prefer_ragged, ragged_config
from pallas_paged.kernels.mosaic_sm90.support import shared_memory

RAGGED = pp.MosaicSm90RaggedConfig(block_k=128, num_consumers=2, num_stages=2, num_programs=132)
SM80_DECODE = pp.MosaicSm80DecodeConfig(block_k=64, num_stages=2, num_programs=6)
SM80_RAGGED = pp.MosaicSm80RaggedConfig(block_q=128, block_k=64, num_warpgroups=2, num_programs=132)
SIZES = dict(
    num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16, max_kv_len=4096, num_seqs=64,
    itemsize=2, num_sms=132,
)  # fmt: skip
RAGGED_SIZES = SIZES | {"num_tokens": 4096, "expected_seqs": 64}
LOOP = [
    ({"block_k": 32}, r"block_k=32 must be an integer in 64\.\.256"),
    ({"block_k": 96}, "block_k=96 must be a multiple of 64"),
    ({"block_k": 320}, "block_k=320"),
    ({"block_k": 64.0}, "block_k=64.0 must be an integer"),
    ({"num_stages": 1}, r"num_stages=1 must be an integer in 2\.\.8"),
    ({"num_stages": 9}, "num_stages=9"),
    ({"num_stages": True}, "num_stages=True"),
    ({"num_programs": 0}, "num_programs=0"),
    ({"num_programs": 65536}, "num_programs=65536"),
    ({"fixed_split_size": 192, "block_k": 128}, "fixed_split_size=192 must be a multiple of"),
    ({"fixed_split_size": 32}, "fixed_split_size=32 must be an integer in"),
    ({"fixed_split_size": 256.0}, "fixed_split_size=256.0"),
]


@pytest.mark.parametrize(
    ("good", "change", "message"),
    [
        *((RAGGED, *row) for row in LOOP),
        (RAGGED, {"num_consumers": 0}, r"num_consumers=0 must be an integer in 1\.\.3"),
        (RAGGED, {"num_consumers": 4}, "num_consumers=4"),
        (RAGGED, {"num_q_stages": 0}, r"num_q_stages=0 must be an integer in 1\.\.2"),
        (RAGGED, {"num_q_stages": 3}, "num_q_stages=3"),
        (SM80_DECODE, {"block_k": 16}, r"block_k=16 must be a power of two in 32\.\.128"),
        (SM80_DECODE, {"num_stages": 0}, r"num_stages=0 must be an integer in 1\.\.8"),
        (SM80_RAGGED, {"block_q": 64}, r"block_q=64 must be a power of two in 128\.\.256"),
        (SM80_RAGGED, {"block_k": 8}, r"block_k=8 must be a power of two in 16\.\.128"),
        (SM80_RAGGED, {"num_warpgroups": 3}, r"num_warpgroups=3 must be an integer in 1\.\.2"),
        (SM80_RAGGED, {"fixed_split_size": 96}, "fixed_split_size=96 must be a multiple of"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else type(x).__name__,
)
def test_a_config_is_validated_when_built(good, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **change)


def test_shared_memory_is_the_sum_of_the_tiles():
    kb = 1024
    size = dict(head_dim=128)
    # K, V; queries, out; records, barriers
    assert shared_memory(RAGGED, group=4, **size) == (2 * 64 + 64 + 32 + 2) * kb
    # and with int8 pages bytes of K and V and scales of K; results take the place of queries
    one_byte = shared_memory(RAGGED, group=4, kv_dtype="int8", **size)
    assert one_byte == (2 * 64 + 64 + 2 * 16 + 1 + 2) * kb
    one = dataclasses.replace(RAGGED, num_consumers=1, num_q_stages=1)
    assert shared_memory(one, group=4, **size) == (2 * 64 + 16 + 16 + 2) * kb
    # K of 192 elements and V of 128; results take the place of queries
    narrow = dataclasses.replace(RAGGED, num_q_stages=1)
    size = dict(head_dim=192, v_head_dim=128)
    assert shared_memory(narrow, group=1, **size) == (2 * (48 + 32) + 48 + 2) * kb


NARROW = dict(head_dim=192, v_head_dim=128)


@pytest.mark.parametrize("num_tokens", [8, 4096, 100_000])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_sm90_configs_fit_into_shared_memory(kv_dtype, num_tokens):
    itemsize = jnp.dtype(kv_dtype).itemsize
    all_dims = [*(dict(head_dim=n) for n in (64, 128, 256)), *[NARROW] * (itemsize == 2)]
    groups = (1, 4, 8, 16, 17, 24, 32, 40, 64)
    for dims, group, num_kv_heads in itertools.product(all_dims, groups, (1, 2, 8)):
        call = dict(num_tokens=num_tokens, itemsize=itemsize, num_kv_heads=num_kv_heads, **dims)
        sizes = Sizes(**RAGGED_SIZES | call | dict(num_q_heads=group * num_kv_heads))
        config = ragged_config(sizes)
        assert config.num_programs == 132
        assert shared_memory(config, group=group, kv_dtype=kv_dtype, **dims) <= 227 * 1024, sizes


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "num_q_heads", "wanted"),
    [
        (4096, 4, 32, True),  # prompts
        (16, 1, 32, True),  # 64 rows of queries
        (15, 1, 32, False),
        (64, 8, 64, True),  # speculation, large groups
        (64, 64, 32, False),  # one token each
    ],
)
def test_sm90_is_preferred_where_tiles_of_queries_fill(num_tokens, num_seqs, num_q_heads, wanted):
    sizes = dict(num_tokens=num_tokens, expected_seqs=num_seqs, num_q_heads=num_q_heads)
    assert prefer_ragged(Sizes(**SIZES | sizes)) is wanted


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"head_dim": 256}, True),
        ({"head_dim": 64}, False),
        ({"head_dim": 512}, False),
        ({"num_seqs": 1, "max_kv_len": 8192}, False),
        ({"num_seqs": 8, "max_kv_len": 2048}, True),
        ({"max_kv_len": 1024}, False),
        ({"max_kv_len": 2048}, True),
        ({"max_kv_len": 2048, "itemsize": 1}, False),
        ({"num_seqs": 8, "max_kv_len": 2048, "itemsize": 1}, False),
        ({"itemsize": 1}, True),
        ({"itemsize": 1, "read_gbps": 4400}, False),
        # On a card of half as many SMs, half as much is as much for each.
        ({"num_seqs": 1, "max_kv_len": 8192, "num_sms": 66}, True),
        ({"num_seqs": 1, "max_kv_len": 4096, "num_sms": 66}, False),
        ({"num_seqs": 16, "max_kv_len": 1024}, True),
        ({"num_seqs": 16, "max_kv_len": 1024, "num_sms": 66}, False),
        ({"itemsize": 1, "read_gbps": 1400, "num_sms": 66}, True),
        ({"itemsize": 1, "read_gbps": 2200, "num_sms": 66}, False),
    ],
    ids=str,
)
def test_sm80_decodes_but_for_small_heads_short_calls_and_many_short_rows(changes, wanted):
    assert sm80.prefer_decode(Sizes(**SIZES | dict(read_gbps=2950) | changes)) is wanted


@pytest.mark.parametrize(
    ("num_seqs", "max_kv_len", "block_k", "programs_per_sm"),
    [
        (1, 1024, 64, 1),
        (8, 2048, 128, 2),
        (64, 1024, 128, 2),
        (64, 4096, 128, 2),
        (256, 1024, 128, 2),
    ],
    ids=["short row", "few rows", "some short rows", "long rows", "many short rows"],
)
def test_sm80_config_of_one_byte_pages(num_seqs, max_kv_len, block_k, programs_per_sm):
    sizes = dict(SIZES, num_seqs=num_seqs, max_kv_len=max_kv_len, itemsize=1)
    config = sm80.decode_config(Sizes(**sizes))
    assert config.block_k == block_k
    assert (programs_per_sm - 1) * 132 < config.num_programs <= programs_per_sm * 132


@pytest.mark.parametrize("num_tokens", [8, 4096])
@pytest.mark.parametrize("most", [99 * 1024, 163 * 1024, 227 * 1024])
def test_sm80_ragged_config_fits_into_shared_memory(most, num_tokens):
    call = dict(SIZES, num_tokens=num_tokens, max_kv_len=8192, num_seqs=8, num_sms=108)
    head_dims = [64, 80, 96, 112, 128, 192, 256, *([512] if most > 99 * 1024 else [])]
    each = [dict(head_dim=n, itemsize=x) for n, x in itertools.product(head_dims, (1, 2))]
    for sizes in [*each, NARROW | dict(itemsize=2)]:
        config = sm80.ragged_config(Sizes(**call | sizes, shared_memory=most))
        assert sm80.ragged_shared_memory(config, **sizes) <= most, sizes
