"""The ragged kernel for Ampere and later and its merge, interpreted on a CPU."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

import pallas_paged as pp
from pallas_paged.kernels import xla
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic.ops import shared_memory_bytes
from pallas_paged.kernels.mosaic_sm80.config import ragged_config, ragged_shared_memory
from pallas_paged.kernels.mosaic_sm80.ragged import (
    COMPILER_PARAMS,
    ragged_paged_attention,
    scratch_types,
)
from tests.support.attention_calls import assert_close, assert_same_bits, ragged
from tests.support.attention_cases import mosaic_case
from tests.support.marks import slow
from tests.support.quantized_cases import Quantized

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

CONFIG = dict(block_q=64, block_k=32, num_warpgroups=1, num_programs=3)
TWO = {"block_q": 128, "num_warpgroups": 2}
rows = partial(mosaic_case, num_kv_heads=1, pages_per_seq=26)
small = partial(mosaic_case, num_q_heads=2, num_kv_heads=1, pages_per_seq=13)
SINKS = np.linspace(-1, 2, 20, dtype=np.float32)
SLOPES = np.linspace(0, 0.5, 4, dtype=np.float32)
TREE = np.random.default_rng(0).random((2, 5, 5)) < 0.5


def call(arrays, config, **options):
    config = pp.MosaicSm80RaggedConfig(**{**CONFIG, **config})
    return ragged(*arrays, implementation="mosaic_sm80_interpret", config=config, **options)


@pytest.mark.parametrize(
    ("case", "config", "options"),
    [
        (
            rows(num_kv_heads=2, seq_lens=(40, 100, 5, 17), q_lens=(40, 3, 0, 17)),
            TWO,
            {},
        ),
        pytest.param(
            rows(seq_lens=(70,), q_lens=(40,)),
            {"block_q": 256, "block_k": 64, "num_warpgroups": 2},
            {},
            marks=pytest.mark.slow,
        ),
        (rows(seq_lens=(400,), q_lens=(9,)), {"num_programs": 8, **TWO}, {}),
        pytest.param(
            rows(seq_lens=(400, 100), q_lens=(9, 3)),
            {"fixed_split_size": 128},
            {},
            marks=pytest.mark.slow,
        ),
        (
            rows(seq_lens=(100, 180), q_lens=(40, 20)),
            {},
            {"sliding_window": 30, "soft_cap": 5.0, "alibi_slopes": SLOPES, "causal": False},
        ),
        pytest.param(
            small(seq_lens=(100, 20), q_lens=(30, 9)),
            {},
            {"causal": False},
            marks=pytest.mark.slow,
        ),
        (
            mosaic_case(
                num_q_heads=20, num_kv_heads=1, seq_lens=(70, 9), pages_per_seq=5, q_lens=(5, 3)
            ),
            {},
            {"tree_mask": TREE, "sinks": SINKS},
        ),
    ],
    ids=["mixed", "256 rows", "split", "split size", "window", "full", "group of 20, tree, sinks"],
)
def test_matches_the_oracle(case, config, options):
    arrays = case.make()
    assert_close(call(arrays, config, **options), arrays, case.tolerance, **options)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "dtype"),
    [
        (272, 4, "bfloat16"),  # 144 + 144
        *slow([(112, 2, "float16"), (80, 1, "bfloat16"), (256, 64, "bfloat16")]),
    ],
)
def test_head_dims_and_pages_of_any_size(head_dim, page_size, dtype):
    case = small(
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        seq_lens=(45,),
        pages_per_seq=-(-50 // page_size),
        q_lens=(20,),
    )
    arrays = case.make()
    assert_close(call(arrays, {}), arrays, case.tolerance)


@pytest.mark.parametrize("config", [{"num_programs": 8}, *slow([{}])], ids=["split", "whole"])
def test_columns_of_a_large_head_dim_are_divided_among_programs(config):
    case = small(head_dim=512, seq_lens=(70, 9), q_lens=(20, 3), page_size=4, pages_per_seq=20)
    arrays, meant = Quantized(case=case, kv_dtype="int8").make()
    assert_close(call(arrays, {"block_k": 16, **config}), meant, case.tolerance)


def test_keys_left_of_the_window_are_not_read():
    arrays = rows(seq_lens=(180,), q_lens=(9,)).make()
    q, k_pages, v_pages, tables, *rest = arrays
    k, v = k_pages.copy(), v_pages.copy()
    left = np.arange(180 - 9 - 30 + 1)
    k[:, tables[0, left // 16], left % 16] = v[:, tables[0, left // 16], left % 16] = np.nan
    others = tables.copy()
    others[0, : len(left) // 16] = np.iinfo(np.int32).max
    expected = call(arrays, {}, sliding_window=30)
    assert_same_bits(call((q, k, v, others, *rest), {}, sliding_window=30), expected)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "per_tensor", "config"),
    [
        ("int8", "bfloat16", False, TWO),
        *slow(
            [
                ("float8_e4m3fn", "float16", True, {}),
                ("float8_e4m3fn", "float16", False, {}),
                ("int8", "float16", True, {}),
            ]
        ),
    ],
)
def test_pages_of_one_byte(kv_dtype, dtype, per_tensor, config):
    case = small(seq_lens=(70, 9), q_lens=(40, 3), dtype=dtype, page_size=4, pages_per_seq=20)
    arrays, meant = Quantized(case=case, kv_dtype=kv_dtype, per_tensor=per_tensor).make()
    assert_close(call(arrays, config), meant, case.tolerance)


def test_queries_at_given_positions():
    q, k, v, tables, lens, cu_q_lens = small(seq_lens=(70, 9), q_lens=(20, 3)).make(poison=False)
    arrays = Arrays(
        q=jnp.asarray(q),
        k_pages=jnp.asarray(k),
        v_pages=jnp.asarray(v),
        block_tables=jnp.asarray(tables),
        seq_lens=jnp.asarray(lens),
        cu_q_lens=jnp.asarray(cu_q_lens),
        q_positions=70 + jnp.arange(q.shape[0]) % 7,
        alibi_slopes=jnp.float32([0.5, 0.1]),
    )
    options = LogitOptions(sm_scale=0.1, sliding_window=40)
    config = pp.MosaicSm80RaggedConfig(**CONFIG)
    kernels = partial(ragged_paged_attention, options=options, config=config, interpret=True)
    reference = partial(xla.ragged_paged_attention, options=options)
    for x, expected in zip(*(jax.jit(f)(arrays) for f in (kernels, reference)), strict=True):
        np.testing.assert_allclose(*(np.float32(y) for y in (x, expected)), atol=0.02)


@pytest.mark.parametrize("num_tokens", [8, 4096])
@pytest.mark.parametrize("shared_memory", [99 * 1024, 163 * 1024, 227 * 1024])
def test_the_chosen_config_fits_into_shared_memory(shared_memory, num_tokens):
    head_dims = [64, 80, 96, 112, 128, 192, 256, *([512] if shared_memory > 99 * 1024 else [])]
    for head_dim, itemsize in itertools.product(head_dims, (1, 2)):
        config = ragged_config(
            num_tokens=num_tokens,
            num_q_heads=32,
            num_kv_heads=8,
            head_dim=head_dim,
            max_kv_len=8192,
            num_seqs=8,
            itemsize=itemsize,
            num_sms=108,
            shared_memory=shared_memory,
        )
        needed = ragged_shared_memory(config, head_dim=head_dim, itemsize=itemsize)
        types = scratch_types(
            config,
            head_dim=head_dim,
            dtype=jnp.bfloat16,
            kv_dtype=jnp.int8 if itemsize == 1 else jnp.bfloat16,
            scales_by_token=itemsize == 1,
        )
        assert shared_memory_bytes(types, COMPILER_PARAMS) <= needed <= shared_memory
