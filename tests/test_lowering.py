"""The kernels lower for CUDA on a machine that has no GPU."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_paged as pp
from pallas_paged.kernels.tuning import decode_config, merge_config

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
MESH = AbstractMesh((1,), ("x",), abstract_device=H200)


def lower(num_seqs, heads, page_size, pages_per_seq, dtype, implementation=None):
    num_q_heads, num_kv_heads, head_dim = heads
    pages = jax.ShapeDtypeStruct((num_kv_heads, 1000, page_size, head_dim), dtype)
    shapes = (
        jax.ShapeDtypeStruct((num_seqs, num_q_heads, head_dim), dtype),
        pages,
        pages,
        jax.ShapeDtypeStruct((num_seqs, pages_per_seq), jnp.int32),
        jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
    )
    with jax.sharding.use_abstract_mesh(MESH):
        traced = jax.jit(pp.paged_attention, static_argnames="implementation").trace(
            *shapes, implementation=implementation
        )
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("heads", "page_size", "dtype"),
    [
        *(((32, 8, d), 16, jnp.bfloat16) for d in (16, 64, 80, 96, 112, 128, 192, 256)),
        *(((8, 8, 64), s, jnp.float16) for s in (1, 2, 32, 256)),
        *(((g, 1, 128), 16, jnp.float32) for g in (1, 3, 7, 40, 128)),
    ],
    ids=str,
)
def test_lowers_for_cuda(heads, page_size, dtype):
    text = lower(4, heads, page_size, 16, dtype)
    assert "paged_decode" in text and "paged_decode_merge" in text


@pytest.mark.parametrize("num_seqs", [1, 3, 64, 300])
def test_lowers_for_any_number_of_rows(num_seqs):
    assert "paged_decode_merge" in lower(num_seqs, (32, 8, 128), 16, 128, jnp.bfloat16)


def test_a_pool_of_more_than_2_31_elements_lowers_with_64_bit_offsets():
    pages = jax.ShapeDtypeStruct((8, 2**17, 16, 160), jnp.bfloat16)  # 5 GiB
    shapes = (
        jax.ShapeDtypeStruct((4, 32, 160), jnp.bfloat16),
        pages,
        pages,
        jax.ShapeDtypeStruct((4, 2**15), jnp.int32),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )
    with jax.sharding.use_abstract_mesh(MESH):
        lowered = jax.jit(pp.paged_attention).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "paged_decode" in lowered.as_text()


@pytest.mark.parametrize(
    ("group", "head_dim", "itemsize"),
    [*itertools.product((1, 4, 7, 32, 128), (16, 80, 256), (2, 4))],
)
def test_the_heuristic_gives_a_config_that_fits(group, head_dim, itemsize):
    config = decode_config(
        num_q_heads=8 * group,
        num_kv_heads=8,
        head_dim=head_dim,
        max_kv_len=4096,
        num_seqs=64,
        itemsize=itemsize,
        num_sms=132,
    )
    # Two stages of a K and a V tile, for every program that shares the SM's 227 KB.
    padded = 1 << (head_dim - 1).bit_length()
    tiles = config.num_stages * 2 * config.block_k * padded * itemsize
    per_sm = -(-config.num_programs * 8 // 132)
    assert per_sm * tiles <= 4 * 64 * 1024
    assert config.num_programs * 8 <= 4 * 132


def test_few_tokens_get_few_programs():
    config = decode_config(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        max_kv_len=128,
        num_seqs=1,
        itemsize=2,
        num_sms=132,
    )
    assert config.num_programs == 128 // config.block_k


@pytest.mark.parametrize("num_seqs", [1, 3, 64, 1000])
@pytest.mark.parametrize("num_heads", [1, 7, 32, 128])
def test_the_merge_tile_is_made_of_powers_of_two(num_seqs, num_heads):
    tile = merge_config(num_seqs=num_seqs, num_heads=num_heads, head_dim=80, num_programs=66)
    sizes = dataclasses.astuple(tile)
    assert all(n > 0 and n & (n - 1) == 0 for n in sizes)
    assert tile.block_s * tile.block_h * tile.block_d <= 2**14
