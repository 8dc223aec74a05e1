"""Attention over prefixes that rows share: the same as over each row's own pages."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close, cascade
from tests.support.attention_cases import Case, SharedPrefixes
from tests.support.attention_options import CASCADE_OPTIONS
from tests.support.marks import slow

CASE = Case(head_dim=16, num_pages=48)
SEQ_LENS = (37, 40, 64, 33, 50, 20, 45, 36)


def of_8_rows(prefix_lens, cu_group_sizes, *, seq_lens=SEQ_LENS):
    return SharedPrefixes(
        case=CASE, seq_lens=seq_lens, prefix_lens=prefix_lens, cu_group_sizes=cu_group_sizes
    )


# All of these have the same shapes, so they share one compiled program.
GROUPS = [
    # one group of all rows
    of_8_rows((32, 0, 0), (0, 8, 8, 8), seq_lens=(37, 40, 64, 33, 50, 32, 45, 36)),
    # several groups
    of_8_rows((32, 16, 40), (0, 3, 6, 8)),
    # rows of no group, and a group without a prefix
    of_8_rows((0, 16, 32), (0, 1, 3, 5)),
    # empty rows, and a group of empty rows
    of_8_rows((32, 24, 16), (0, 3, 6, 8), seq_lens=(37, 0, 40, 0, 0, 0, 45, 36)),
    # prefixes longer than a row
    of_8_rows((64, 16, 31), (0, 3, 6, 8), seq_lens=(37, 10, 64, 33, 7, 0, 45, 36)),
    # prefixes that end within a page
    of_8_rows((21, 7, 1), (0, 3, 6, 8), seq_lens=(37, 40, 64, 33, 50, 29, 45, 36)),
    # rows that end with the prefix
    of_8_rows((32, 8, 8), (0, 3, 6, 8), seq_lens=(32, 32, 64, 8, 8, 9, 1, 2)),
    # groups of one row and of none
    of_8_rows((32, 16, 40), (0, 1, 1, 2)),
]
LOOP = dict(block_k=16, num_programs=6, num_warps=2, num_stages=2)  # 3 for each of 2 KV heads


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_equals_attention_over_each_row(groups, implementation):
    groups = groups.on(implementation)
    arrays = groups.make()
    actual = cascade(*arrays, implementation=implementation)
    assert_close(actual, arrays[:5], groups.case.tolerance)


def without_tokens_left_of(window, arrays):
    """The call with NaN in the tokens that no row sees: a row, or its group, shares their pages."""
    q, k_pages, v_pages, tables, lens, prefix_lens, cu_group_sizes = arrays
    page_size, first = k_pages.shape[2], np.maximum(lens - window, 0)
    for begin, end in itertools.pairwise(cu_group_sizes):
        first[begin:end] = first[begin:end].min(initial=2**31 - 1)
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    for table, unseen in zip(tables, first, strict=True):
        tokens = np.arange(unseen)
        for pages in (k_pages, v_pages):
            pages[:, table[tokens // page_size], tokens % page_size] = np.nan
    return q, k_pages, v_pages, tables, lens, prefix_lens, cu_group_sizes


@pytest.mark.parametrize("name", ["all", *slow(x for x in CASCADE_OPTIONS if x != "all")])
def test_options(name, implementation):
    """Tokens left of every window may hold NaN, also within a page that is read."""
    options = CASCADE_OPTIONS[name]
    for groups in (GROUPS[1], GROUPS[2]):
        groups = groups.on(implementation)
        arrays = groups.make()
        window = options.get("sliding_window", 2**20)
        actual = cascade(
            *without_tokens_left_of(window, arrays), implementation=implementation, **options
        )
        assert_close(actual, arrays[:5], groups.case.tolerance, name=str(groups), **options)


@pytest.mark.slow  # `test_combinations.py` has other shapes by default
@pytest.mark.parametrize(
    "case",
    [
        Case(num_q_heads=7, num_kv_heads=1, head_dim=80, dtype="bfloat16"),
        Case(page_size=1, pages_per_seq=64, dtype="float16"),
        Case(num_q_heads=6, head_dim=128, page_size=16, pages_per_seq=4, dtype="bfloat16"),
        Case(num_q_heads=20, num_kv_heads=1, page_size=64, pages_per_seq=2),
    ],
    ids=str,
)
def test_shapes_and_dtypes(case, implementation):
    groups = SharedPrefixes(
        case=case, seq_lens=(70, 90, 64, 0), prefix_lens=(64, 0), cu_group_sizes=(0, 3, 4)
    )
    if case.page_size < 64:
        groups = dataclasses.replace(groups, seq_lens=(37, 40, 30, 0), prefix_lens=(24, 8))
    arrays = groups.make()
    actual = cascade(*arrays, implementation=implementation)
    assert_close(actual, arrays[:5], case.tolerance)


def test_group_ends_are_clamped_to_rise_within_the_rows(implementation):
    groups = of_8_rows((32, 16, 0), (0, 3, 3, 8)).on(implementation)
    *arrays, _, _ = groups.make()
    prefix_lens, cu_group_sizes = np.int32([32, 2**31 - 1, -5]), np.int32([2, 3, 1, 2**31 - 1])
    actual = cascade(*arrays, prefix_lens, cu_group_sizes, implementation=implementation)
    assert_close(actual, arrays, groups.case.tolerance)


def test_lengths_beyond_the_table_count_as_its_size(implementation):
    groups = GROUPS[4].on(implementation)
    *arrays, lens, prefix_lens, cu_group_sizes = groups.make()
    beyond = np.where(lens == 64, 2**31 - 1, np.where(lens == 0, -7, lens)).astype(np.int32)
    groups_of = prefix_lens, cu_group_sizes
    actual = cascade(*arrays, beyond, *groups_of, implementation=implementation)
    assert_close(actual, (*arrays, lens), groups.case.tolerance)


@pytest.mark.slow  # `test_combinations.py` has configs by default, without fixed splits
@pytest.mark.parametrize(
    ("fixed_split_size", "window"), [(None, None), (None, 30), (32, None), (32, 30)]
)
def test_configs(fixed_split_size, window):
    arrays = GROUPS[1].make()
    actual = cascade(
        *arrays,
        implementation="triton_interpret",
        sliding_window=window,
        config=pp.DecodeConfig(**LOOP, fixed_split_size=fixed_split_size),
        prefix_config=pp.RaggedConfig(**LOOP, block_q=16, fixed_split_size=fixed_split_size),
    )
    assert_close(actual, arrays[:5], 1e-5, sliding_window=window)


def test_returns_out_alone_by_default():
    arrays = GROUPS[1].make()
    out = jax.eval_shape(pp.cascade_attention, *arrays)
    assert out.shape == arrays[0].shape and out.dtype == arrays[0].dtype


@pytest.mark.parametrize(
    ("prefix_lens", "cu_group_sizes", "message"),
    [
        (np.zeros((3, 1), np.int32), np.zeros(4, np.int32), r"prefix_lens.shape=\(3, 1\)"),
        (np.zeros(3, np.int32), np.zeros(3, np.int32), r"cu_group_sizes.shape=\(3,\)"),
        (np.zeros(3, np.int64), np.zeros(4, np.int32), "prefix_lens.dtype=int64 must be int32"),
        (np.zeros(3, np.int32), np.zeros(4, np.int16), "cu_group_sizes.dtype=int16 must be int32"),
    ],
)
def test_bad_groups_are_refused_by_name(prefix_lens, cu_group_sizes, message):
    arrays = GROUPS[0].make()
    with pytest.raises(ValueError, match=message):
        pp.cascade_attention(*arrays[:5], prefix_lens, cu_group_sizes)


MOSAIC_LOOP = dict(block_k=64, num_programs=3, num_stages=2)
MOSAIC = dict(
    config=pp.MosaicDecodeConfig(**MOSAIC_LOOP),
    prefix_config=pp.MosaicRaggedConfig(**MOSAIC_LOOP, num_consumers=1),
)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="configs choose the implementation")
def test_configs_of_every_implementation_are_accepted_without_a_gpu():
    arrays = GROUPS[1].make()
    assert_close(cascade(*arrays, **MOSAIC), arrays[:5], 1e-5)
    mixed = MOSAIC | dict(config=pp.DecodeConfig(**LOOP))
    assert_close(cascade(*arrays, **mixed), arrays[:5], 1e-5)
    with pytest.raises(ValueError, match="must be a RaggedConfig for implementation='triton"):
        cascade(*arrays, **mixed, implementation="triton_interpret")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("config", pp.RaggedConfig(**LOOP, block_q=16)),
        ("config", MOSAIC["prefix_config"]),
        ("prefix_config", pp.DecodeConfig(**LOOP)),
        ("prefix_config", MOSAIC["config"]),
    ],
)
def test_a_config_of_the_other_kernel_is_refused(name, config):
    wanted = "DecodeConfig" if name == "config" else "RaggedConfig"
    with pytest.raises(ValueError, match=f"must be a {wanted} or Mosaic{wanted}"):
        jax.eval_shape(partial(pp.cascade_attention, **{name: config}), *GROUPS[0].make())
