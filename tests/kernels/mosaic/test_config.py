"""Configs of the Mosaic kernels: valid values, shared memory, heuristics."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels.mosaic.config import (
    decode_config,
    prefer_mosaic,
    ragged_config,
)
from pallas_paged.kernels.mosaic.support import shared_memory, shared_memory_limit

DECODE = pp.MosaicDecodeConfig(block_k=64, num_stages=3, num_programs=33)
RAGGED = pp.MosaicRaggedConfig(block_k=128, num_consumers=2, num_stages=2, num_programs=132)
BOTH = pytest.mark.parametrize("good", [DECODE, RAGGED], ids=["decode", "ragged"])
DECODE_SIZES = dict(
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
    max_kv_len=4096,
    num_seqs=64,
    itemsize=2,
)
RAGGED_SIZES = DECODE_SIZES | {"num_tokens": 4096, "expected_seqs": 64}
H200 = dict(num_sms=132)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_k": 32}, r"block_k=32 must be an integer in \[64, 256\]"),
        ({"block_k": 96}, "block_k=96 must be a multiple of 64"),
        ({"block_k": 320}, "block_k=320"),
        ({"block_k": 64.0}, "block_k=64.0 must be an integer"),
        ({"num_stages": 1}, r"num_stages=1 must be an integer in \[2, 8\]"),
        ({"num_stages": 9}, "num_stages=9"),
        ({"num_stages": True}, "num_stages=True"),
        ({"num_programs": 0}, "num_programs=0"),
        ({"num_programs": 65536}, "num_programs=65536"),
        (
            {"fixed_split_size": 192, "block_k": 128},
            "fixed_split_size=192 must be a multiple of block_k=128",
        ),
        ({"fixed_split_size": 32}, "fixed_split_size=32 must be an integer in"),
        ({"fixed_split_size": 256.0}, "fixed_split_size=256.0"),
    ],
    ids=str,
)
@BOTH
def test_a_config_is_validated_when_built(good, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **change)


@pytest.mark.parametrize("value", [0, 5, 1.0])
def test_pairs_are_one_to_four(value):
    with pytest.raises(ValueError, match=rf"num_pairs={value} must be an integer in \[1, 4\]"):
        dataclasses.replace(DECODE, num_pairs=value)


@pytest.mark.parametrize("name", ["num_consumers", "num_q_stages"])
@pytest.mark.parametrize("value", [0, 3, 1.0])
def test_consumers_and_query_stages_are_one_or_two(name, value):
    with pytest.raises(ValueError, match=rf"{name}={value} must be an integer in \[1, 2\]"):
        dataclasses.replace(RAGGED, **{name: value})


@BOTH
def test_every_allowed_block_and_stage_count_is_accepted(good):
    for block_k, num_stages in itertools.product((64, 128, 192, 256), range(2, 9)):
        new = dict(block_k=block_k, num_stages=num_stages, fixed_split_size=2 * block_k)
        assert dataclasses.replace(good, **new).fixed_split_size == 2 * block_k


def test_shared_memory_is_the_sum_of_the_tiles():
    kb = 1024
    size = dict(head_dim=128)
    # K, V; queries twice, probabilities; sums, barriers
    assert shared_memory(DECODE, group=4, **size) == (2 * 48 + 2 * 2 + 1 + 3) * kb
    assert shared_memory(DECODE, group=9, **size) == (2 * 48 + 2 * 4 + 2 + 3) * kb
    # K, V; queries, out; records, barriers
    assert shared_memory(RAGGED, group=4, **size) == (2 * 64 + 64 + 32 + 2) * kb
    # and with int8 pages bytes of K and V and scales of K; results take the place of queries
    one_byte = shared_memory(RAGGED, group=4, kv_dtype=np.dtype("int8"), **size)
    assert one_byte == (2 * 64 + 64 + 2 * 16 + 1 + 2) * kb
    one = dataclasses.replace(RAGGED, num_consumers=1, num_q_stages=1)
    assert shared_memory(one, group=4, **size) == (2 * 64 + 16 + 16 + 2) * kb
    assert [shared_memory_limit(n) for n in (1, 2)] == [227 * kb, 113 * kb]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 16, 17, 24, 32, 40, 64])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
class TestHeuristicsFit:
    def test_decode(self, head_dim, group, num_kv_heads):
        heads = dict(num_q_heads=group * num_kv_heads, num_kv_heads=num_kv_heads)
        sizes = DECODE_SIZES | heads | {"head_dim": head_dim}
        config = decode_config(**H200, **sizes)
        per_sm = -(-config.num_programs // 132)
        needed = shared_memory(config, group=group, head_dim=head_dim)
        assert needed <= shared_memory_limit(per_sm)

    def test_decode_of_int8(self, head_dim, group, num_kv_heads):
        heads = dict(num_q_heads=group * num_kv_heads, num_kv_heads=num_kv_heads)
        sizes = DECODE_SIZES | heads | {"head_dim": head_dim, "itemsize": 1}
        config = decode_config(**H200, **sizes)
        needed = shared_memory(config, group=group, head_dim=head_dim, kv_dtype="int8")
        blocks = -(-config.num_programs // config.num_pairs)
        assert needed <= shared_memory_limit(-(-blocks // 132))

    def test_ragged(self, head_dim, group, num_kv_heads):
        heads = dict(num_q_heads=group * num_kv_heads, num_kv_heads=num_kv_heads)
        for dtype in ("float16", "int8"):
            kv_dtype = np.dtype(dtype)
            new = dict(head_dim=head_dim, itemsize=kv_dtype.itemsize)
            config = ragged_config(**H200, **RAGGED_SIZES | heads | new)
            assert config.num_programs == 132
            call = dict(group=group, head_dim=head_dim, kv_dtype=kv_dtype)
            assert shared_memory(config, **call) <= shared_memory_limit(1)


@pytest.mark.parametrize("group", range(1, 65))
def test_a_third_stage_is_used_where_it_fits(group):
    sizes = DECODE_SIZES | dict(num_q_heads=8 * group, head_dim=256)
    config = decode_config(**H200, **sizes)
    three = dataclasses.replace(config, num_stages=3)
    fits = shared_memory(three, group=group, head_dim=256) <= shared_memory_limit(1)
    assert config.num_stages == (3 if fits else 2)


def test_few_tokens_get_few_programs():
    sizes = DECODE_SIZES | dict(num_seqs=2, max_kv_len=300, num_kv_heads=1, num_q_heads=4)
    config = decode_config(**H200, **sizes)
    assert config.num_programs == 2 * -(-300 // config.block_k)


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
def test_mosaic_is_preferred_where_tiles_of_queries_fill(num_tokens, num_seqs, num_q_heads, wanted):
    sizes = dict(num_tokens=num_tokens, expected_seqs=num_seqs, num_q_heads=num_q_heads)
    for itemsize in (1, 2):
        sizes["itemsize"] = itemsize
        assert prefer_mosaic("ragged", **RAGGED_SIZES | sizes) is wanted
