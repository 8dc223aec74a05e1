"""The decode kernel for Ampere and later, interpreted on a CPU."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

import pallas_paged as pp
from pallas_paged.kernels.mosaic.ops import shared_memory_bytes
from pallas_paged.kernels.mosaic_sm80 import ops
from pallas_paged.kernels.mosaic_sm80.config import (
    MosaicSm80DecodeConfig,
    decode_config,
    decode_shared_memory,
)
from pallas_paged.kernels.mosaic_sm80.decode import scratch_types
from tests.support.attention_calls import assert_close, assert_same_bits, decode
from tests.support.attention_cases import mosaic_case
from tests.support.marks import slow
from tests.support.page_layouts import call_in_layout
from tests.support.quantized_cases import Quantized

# Programs that have several rows, and rows that several programs share.
CONFIG = MosaicSm80DecodeConfig(block_k=64, num_stages=2, num_programs=6)
SPLIT = MosaicSm80DecodeConfig(block_k=32, num_stages=3, num_programs=4, fixed_split_size=128)
BORDERS = (0, 1, 63, 64, 65, 200)
rows_of_256 = functools.partial(
    mosaic_case, num_q_heads=2, num_kv_heads=1, seq_lens=BORDERS, pages_per_seq=16
)
few_rows = functools.partial(mosaic_case, seq_lens=(130, 0, 64))

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


interpreted = functools.partial(decode, implementation="mosaic_sm80_interpret")


def check(case, config=CONFIG, **options):
    arrays = case.make()
    actual = interpreted(*arrays, config=config, **options)
    assert_close(actual, arrays, case.tolerance, **options)


@pytest.mark.parametrize(
    "group", [40, *slow([1, 20])]
)  # two tiles of 32 rows, one of 16, one of 32
def test_groups(group):
    check(few_rows(num_q_heads=group, num_kv_heads=1, pages_per_seq=9))


@pytest.mark.parametrize(("page_size", "block_k"), [(2, 32), *slow([(1, 32), (4, 64), (256, 128)])])
def test_page_sizes(page_size, block_k):
    config = MosaicSm80DecodeConfig(block_k=block_k, num_stages=2, num_programs=4)
    check(few_rows(page_size=page_size, pages_per_seq=256 // page_size), config)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(80, "float16"), *slow([(192, "bfloat16"), (128, "float16")])]
)
def test_head_dims(head_dim, dtype):
    check(few_rows(head_dim=head_dim, pages_per_seq=9, dtype=dtype), SPLIT)


@pytest.mark.parametrize("num_stages", slow([1, 4]))
def test_one_stage_and_more_than_blocks(num_stages):
    config = MosaicSm80DecodeConfig(block_k=32, num_stages=num_stages, num_programs=4)
    check(few_rows(pages_per_seq=9), config)


# One program goes through all rows of a KV head. Some rows are too short to start the
# copies of the next one, and one has no tokens.
ROWS_OF_ONE_PROGRAM = (260, 0, 200, 33, 40, 300, 129)


@pytest.mark.parametrize(
    ("num_stages", "options"),
    [
        (3, {"sliding_window": 150}),
        *slow([(1, {}), (2, {}), (3, {}), *((n, {"sliding_window": 150}) for n in (1, 2))]),
    ],
    ids=str,
)
def test_one_program_attends_to_row_after_row(num_stages, options):
    config = MosaicSm80DecodeConfig(block_k=32, num_stages=num_stages, num_programs=1)
    check(rows_of_256(seq_lens=ROWS_OF_ONE_PROGRAM, pages_per_seq=20), config, **options)


@pytest.mark.parametrize("num_stages", [2, *slow([3])])
def test_one_program_attends_to_row_after_row_of_one_byte_pages(num_stages):
    config = MosaicSm80DecodeConfig(block_k=32, num_stages=num_stages, num_programs=1)
    case = rows_of_256(seq_lens=ROWS_OF_ONE_PROGRAM, pages_per_seq=20)
    stored, meant = Quantized(case=case, kv_dtype="int8", per_tensor=False).make()
    assert_close(interpreted(*stored, config=config), meant, 1e-2)


def every_option(num_q_heads):
    return dict(
        sm_scale=-0.3,
        soft_cap=3.0,
        sliding_window=100,
        alibi_slopes=np.linspace(0.01, 0.3, num_q_heads, dtype=np.float32),
        sinks=np.linspace(-1, 2, num_q_heads, dtype=np.float32),
    )


@pytest.mark.parametrize("config", [SPLIT, *slow([CONFIG])], ids=["splits", "shares"])
def test_options_together(config):
    check(rows_of_256(num_q_heads=6, num_kv_heads=2), config, **every_option(6))


@pytest.mark.parametrize("window", slow([1, 64, 73]))
def test_windows(window):
    check(rows_of_256(), sliding_window=window)


@pytest.mark.parametrize("kv_layout", ["NH2D", *slow(["NHD"])])
def test_layouts(kv_layout):
    case = few_rows(pages_per_seq=9)
    arrays = case.make()
    call = jax.jit(
        functools.partial(
            pp.paged_attention,
            implementation="mosaic_sm80_interpret",
            config=CONFIG,
            kv_layout=kv_layout,
            return_lse=True,
        )
    )
    assert_close(call(**call_in_layout(kv_layout, arrays)), arrays, case.tolerance)


@pytest.mark.parametrize(
    ("kv_dtype", "per_tensor", "dtype", "head_dim"),
    [
        ("int8", False, "bfloat16", 80),
        *slow(
            [
                ("float8_e4m3fn", True, "bfloat16", 64),
                ("int8", True, "float16", 128),
                ("float8_e4m3fn", False, "float16", 64),
            ]
        ),
    ],
)
def test_one_byte_pages(kv_dtype, per_tensor, dtype, head_dim):
    case = few_rows(pages_per_seq=9, dtype=dtype, head_dim=head_dim)
    stored, meant = Quantized(case=case, kv_dtype=kv_dtype, per_tensor=per_tensor).make()
    assert_close(interpreted(*stored, config=CONFIG), meant, 1e-2)


@pytest.mark.slow
def test_data_outside_a_row_changes_no_bit():
    options = dict(config=CONFIG, sliding_window=70)
    clean = interpreted(*rows_of_256().make(poison=False), **options)
    assert_same_bits(interpreted(*rows_of_256().make(), **options), clean)


def test_pages_left_of_the_window_are_not_read():
    q, k, v, tables, lens = arrays = rows_of_256(seq_lens=(200, 130)).make()
    others = tables.copy()
    for row, left in enumerate(lens - 70):
        others[row, : left // 16] = np.iinfo(np.int32).max  # the interpreter refuses this
    options = dict(config=CONFIG, sliding_window=70)
    expected = interpreted(*arrays, **options)
    assert_same_bits(interpreted(q, k, v, others, lens, **options), expected)


@pytest.mark.slow
def test_bits_depend_on_the_row_alone_under_a_split_size():
    q, k_pages, v_pages, tables, lens = rows_of_256(seq_lens=(250, 3, 0, 129)).make()

    def of(rows):
        rows = np.array(rows)
        return interpreted(q[rows], k_pages, v_pages, tables[rows], lens[rows], config=SPLIT)

    assert_same_bits([x[-1:] for x in of([3, 2, 0])], of([0]))


@pytest.mark.parametrize(
    ("num_seqs", "max_kv_len", "block_k", "programs_per_sm"),
    [
        (1, 1024, 64, 1),
        (8, 2048, 128, 2),
        (64, 1024, 128, 2),
        (64, 4096, 128, 2),
        (256, 1024, 64, 3),
    ],
    ids=["short row", "few rows", "some short rows", "long rows", "many short rows"],
)
def test_config_of_one_byte_pages(num_seqs, max_kv_len, block_k, programs_per_sm):
    sizes = dict(num_q_heads=32, num_kv_heads=8, head_dim=128, itemsize=1, num_sms=132)
    config = decode_config(num_seqs=num_seqs, max_kv_len=max_kv_len, **sizes)
    assert config.block_k == block_k
    assert (programs_per_sm - 1) * 132 < config.num_programs <= programs_per_sm * 132


@pytest.mark.parametrize("head_dim", [64, 80, 128, 512])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("group", [4, 40])
def test_shared_memory_is_that_of_the_buffers(head_dim, kv_dtype, group):
    types = scratch_types(
        CONFIG,
        group=group,
        head_dim=head_dim,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        scales_by_token=kv_dtype == "int8",
    )
    expected = shared_memory_bytes(types, ops.COMPILER_PARAMS)
    itemsize = jax.numpy.dtype(kv_dtype).itemsize
    sizes = dict(group=group, head_dim=head_dim, itemsize=itemsize)
    assert decode_shared_memory(CONFIG, **sizes) == expected
