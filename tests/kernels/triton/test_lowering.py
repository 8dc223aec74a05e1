"""The Triton kernels lower for CUDA on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

import pallas_paged as pp
from pallas_paged.kernels.triton import implementation as triton
from pallas_paged.kernels.triton.config import (
    decode_config,
    decode_merge_config,
    ragged_config,
    writing_decode_config,
)
from tests.support.devices import A100, lower_for_cuda
from tests.support.lowered_options import LOOP, lowered_options, not_causal
from tests.support.marks import slow
from tests.support.static_calls import PREFILL


def lower(
    num_seqs,
    heads,
    page_size,
    pages_per_seq,
    dtype,
    num_tokens=None,
    num_groups=None,
    num_pages=1000,
    **call,
):
    """A call lowered for CUDA: decode, ragged (with num_tokens) or cascade (with num_groups)."""
    num_q_heads, num_kv_heads, head_dim = heads
    pages = jax.ShapeDtypeStruct((num_kv_heads, num_pages, page_size, head_dim), dtype)
    shapes = [
        jax.ShapeDtypeStruct((num_tokens or num_seqs, num_q_heads, head_dim), dtype),
        pages,
        pages,
        jax.ShapeDtypeStruct((num_seqs, pages_per_seq), jnp.int32),
        jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
    ]
    function = pp.paged_attention
    if num_tokens is not None:
        function = pp.ragged_paged_attention
        shapes.append(jax.ShapeDtypeStruct((num_seqs + 1,), jnp.int32))
    elif num_groups is not None:
        function = pp.cascade_attention
        shapes.append(jax.ShapeDtypeStruct((num_groups,), jnp.int32))
        shapes.append(jax.ShapeDtypeStruct((num_groups + 1,), jnp.int32))
    return lower_for_cuda(lambda *arrays: function(*arrays, **call), *shapes).as_text()


SHAPES = [
    *(((32, 8, d), 16, jnp.bfloat16) for d in (16, 64, 80, 96, 112, 128, 192, 256, 320, 512)),
    *(((8, 8, 64), s, jnp.float16) for s in (1, 2, 32, 256)),
    *(((g, 1, 128), 16, jnp.float32) for g in (1, 3, 7, 40, 128)),
]


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype"), [*SHAPES[1::2], *slow(SHAPES[::2])], ids=str
)
class TestLowersForCuda:
    def test_decode(self, heads, page_size, dtype):
        text = lower(4, heads, page_size, 16, dtype)
        assert "paged_decode" in text and "paged_decode_merge" in text

    @pytest.mark.parametrize("num_tokens", [600, *slow([6])])
    def test_ragged(self, heads, page_size, dtype, num_tokens):
        text = lower(4, heads, page_size, 16, dtype, num_tokens)
        assert "ragged_paged_attention" in text and "ragged_paged_attention_merge" in text


# Cascade runs the kernels of the other two; its own code depends on shapes little.
@pytest.mark.parametrize(("heads", "page_size", "dtype"), SHAPES[::4], ids=str)
def test_cascade_lowers_for_cuda(heads, page_size, dtype):
    text = lower(4, heads, page_size, 16, dtype, num_groups=2)
    assert "ragged_paged_attention" in text and "paged_decode" in text


@pytest.mark.parametrize(
    ("dtype", "fixed_split_size"), [(jnp.bfloat16, 128), *slow([(jnp.float32, None)])]
)
class TestOptionsLowerForCuda:
    def test_decode(self, dtype, fixed_split_size):
        config = pp.DecodeConfig(**LOOP, fixed_split_size=fixed_split_size)
        for call in lowered_options(6, 4):
            call.pop("tree_mask", None)
            assert "paged_decode" in lower(4, (6, 2, 80), 16, 32, dtype, config=config, **call)

    def test_ragged(self, dtype, fixed_split_size):
        config = pp.RaggedConfig(**LOOP, block_q=64, fixed_split_size=fixed_split_size)
        for call in [*lowered_options(6, 4), *not_causal(6)]:
            text = lower(4, (6, 2, 80), 16, 32, dtype, num_tokens=50, config=config, **call)
            assert "ragged_paged_attention" in text

    def test_cascade(self, dtype, fixed_split_size):
        both = dict(
            config=pp.DecodeConfig(**LOOP, fixed_split_size=fixed_split_size),
            prefix_config=pp.RaggedConfig(**LOOP, block_q=64, fixed_split_size=fixed_split_size),
        )
        everything = lowered_options(6, 4)[-1]
        everything.pop("tree_mask")
        text = lower(4, (6, 2, 80), 16, 32, dtype, num_groups=2, **both, **everything)
        assert "ragged_paged_attention" in text and "paged_decode" in text


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens"), [(1, None), (300, None), (1, 1), (3, 5000), (300, 5000)]
)
def test_lowers_for_any_number_of_rows(num_seqs, num_tokens):
    assert "_merge" in lower(num_seqs, (32, 8, 128), 16, 128, jnp.bfloat16, num_tokens)


@pytest.mark.parametrize("num_tokens", [None, 40], ids=["decode", "ragged"])
def test_a_pool_of_more_than_2_31_elements_lowers_with_64_bit_offsets(num_tokens):
    sizes = dict(num_pages=2**17, num_tokens=num_tokens)  # 5 GiB
    assert "_merge" in lower(4, (32, 8, 160), 16, 2**15, jnp.bfloat16, **sizes)


@pytest.mark.parametrize(
    ("group", "head_dim", "itemsize"),
    [*itertools.product((1, 4, 7, 32, 128), (16, 80, 256, 512), (2, 4))],
)
def test_the_heuristic_config_fits_in_shared_memory(group, head_dim, itemsize):
    config = decode_config(
        num_q_heads=8 * group,
        num_kv_heads=8,
        head_dim=head_dim,
        page_size=16,
        max_kv_len=4096,
        num_seqs=64,
        itemsize=itemsize,
        num_sms=132,
    )
    # Two stages of a K and a V tile, for every program that shares the SM's 227 KB.
    padded = 1 << (head_dim - 1).bit_length()
    tiles = config.num_stages * 2 * config.block_k * padded * itemsize
    per_sm = -(-config.num_programs // 132)
    assert per_sm * tiles <= 4 * 64 * 1024
    assert config.num_programs <= 4 * 132


def test_a_block_of_one_page_gets_fewer_warps():
    sizes = dict(num_q_heads=32, num_kv_heads=8, head_dim=128, max_kv_len=4096, num_seqs=64)
    configs = [
        decode_config(**sizes, page_size=page_size, itemsize=2, num_sms=132)
        for page_size in (32, 64, 128)
    ]
    assert [config.num_warps for config in configs] == [4, 2, 4]


@pytest.mark.parametrize(
    ("num_seqs", "head_dim", "block_k"),
    [(8, 64, 32), (9, 64, 128), (1, 64, 128), (8, 128, 64)],
    ids=["few", "more", "one", "wide"],
)
def test_a_few_rows_of_narrow_heads_get_small_blocks(num_seqs, head_dim, block_k):
    sizes = dict(num_q_heads=32, num_kv_heads=8, page_size=16, max_kv_len=4096, num_sms=132)
    config = decode_config(**sizes, head_dim=head_dim, num_seqs=num_seqs, itemsize=2)
    assert config.block_k == block_k and config.num_programs <= 8 * num_seqs * 4096 // block_k


def test_few_tokens_get_few_programs():
    config = decode_config(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        page_size=16,
        max_kv_len=128,
        num_seqs=1,
        itemsize=2,
        num_sms=132,
    )
    assert config.num_programs == 2 * (128 // config.block_k)  # of 2 KV heads


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
    config = ragged_config(
        num_tokens=num_tokens,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        max_kv_len=max_kv_len,
        num_seqs=num_seqs,
        itemsize=2,
        num_sms=132,
    )
    assert config.block_q == block_q


@pytest.mark.parametrize(
    ("change", "block_k"),
    [
        ({}, 64),
        (dict(max_kv_len=8192), 128),
        (dict(num_seqs=2, head_dim=32), 128),
        (dict(head_dim=256), 32),
    ],
)
def test_a_short_row_that_is_written_too_has_smaller_blocks(change, block_k):
    sizes = dict(num_q_heads=32, num_kv_heads=8, head_dim=64, page_size=64, max_kv_len=1216)
    sizes |= dict(num_seqs=1, itemsize=2, num_sms=132) | change
    config = writing_decode_config(decode_config(**sizes), **sizes)
    assert config.block_k == block_k
    assert change or config.num_programs == 19 * 8


@pytest.mark.parametrize("num_seqs", [1, 3, 64, 1000])
@pytest.mark.parametrize("num_heads", [1, 7, 32, 128])
@pytest.mark.parametrize("fixed_split", [False, True])
def test_the_sides_of_the_merge_tile_are_powers_of_two(num_seqs, num_heads, fixed_split):
    tile = decode_merge_config(
        num_seqs=num_seqs,
        num_heads=num_heads,
        head_dim=80,
        num_programs=66,
        fixed_split=fixed_split,
    )
    sizes = dataclasses.astuple(tile)
    assert all(n > 0 and n & (n - 1) == 0 for n in sizes)
    assert tile.block_s * tile.block_h * tile.block_d <= 2**14


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "block_q"),
    [
        ("9.0", jnp.float32, 256, 128),
        ("8.0", jnp.float32, 256, 64),
        ("8.6", jnp.float32, 256, 32),
        ("8.9", jnp.bfloat16, 256, 64),
        ("12.0", jnp.bfloat16, 128, 128),
    ],
)
def test_tiles_of_queries_fit_into_the_shared_memory_of_the_device(
    capability, dtype, head_dim, block_q
):
    device = dataclasses.replace(A100, compute_capability=capability)
    types = dict(dtype=jnp.dtype(dtype), kv_dtype=jnp.dtype(dtype))
    call = dataclasses.replace(PREFILL, device=device, head_dim=head_dim, **types)
    assert triton.bind(call, interpret=False).keywords["config"].block_q == block_q
