"""Attention over prefixes that rows share: the same as over each row's own pages."""

import jax
import numpy as np
import pytest

from tests.support import raw
from tests.support.attention_calls import assert_close, cascade
from tests.support.attention_cases import Case, SharedPrefixes, without_tokens_left_of
from tests.support.attention_configs import config_of
from tests.support.marks import slow

CASE = Case(head_dim=16, num_pages=48)
SEQ_LENS = (37, 40, 64, 33, 50, 20, 45, 36)
# All of these have the same shapes, so they share one compiled program.
GROUPS = [
    SharedPrefixes(case=CASE, prefix_lens=prefixes, cu_group_sizes=ends, seq_lens=lens)
    for prefixes, ends, lens in [
        ((32, 0, 0), (0, 8, 8, 8), (37, 40, 64, 33, 50, 32, 45, 36)),  # one group of all rows
        ((32, 16, 40), (0, 3, 6, 8), SEQ_LENS),  # several groups
        ((0, 16, 32), (0, 1, 3, 5), SEQ_LENS),  # rows of no group, and a group without a prefix
        ((32, 24, 16), (0, 3, 6, 8), (37, 0, 40, 0, 0, 0, 45, 36)),  # a group of empty rows
        ((64, 16, 31), (0, 3, 6, 8), (37, 10, 64, 33, 7, 0, 45, 36)),  # longer than a row
        ((21, 7, 1), (0, 3, 6, 8), (37, 40, 64, 33, 50, 29, 45, 36)),  # end within a page
        ((32, 8, 8), (0, 3, 6, 8), (32, 32, 64, 8, 8, 9, 1, 2)),  # rows that end with the prefix
        ((32, 16, 40), (0, 1, 1, 2), SEQ_LENS),  # groups of one row and of none
    ]
]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_equals_attention_over_each_row(groups, implementation):
    groups = groups.on(implementation)
    arrays = groups.make()
    actual = cascade(*arrays, implementation=implementation)
    assert_close(actual, arrays[:5], groups.case.tolerance)


@pytest.mark.parametrize("window", [25, *slow([3, 21])])  # one ends within the suffix
def test_options(window, implementation):
    """Tokens left of every window may hold NaN, also within a page that is read."""
    slopes = np.float32([0.5, 0.25, 0.125, 0.0])
    options = dict(sliding_window=window, soft_cap=1.5, sm_scale=0.7)
    options |= dict(alibi_slopes=slopes, sinks=4 * slopes)
    for groups in (GROUPS[1], GROUPS[2]):
        groups = groups.on(implementation)
        arrays = groups.make()
        left = without_tokens_left_of(window, arrays[:5], 8, -1, groups.cu_group_sizes)
        given = *left, *arrays[5:]
        actual = cascade(*given, implementation=implementation, **options)
        assert_close(actual, arrays[:5], groups.case.tolerance, name=str(groups), **options)


def test_groups_are_clamped_to_rise_within_the_rows_and_lengths_to_the_table(implementation):
    lens = np.int32([37, 64, 64, 33, 0, 20, 45, 36])
    groups = SharedPrefixes(
        case=CASE, prefix_lens=(32, 16, 0), cu_group_sizes=(0, 3, 3, 8), seq_lens=tuple(lens)
    ).on(implementation)
    *arrays, _, _, _ = groups.make()
    beyond = np.int32([37, 2**31 - 1, 65, 33, -7, 20, 45, 36])
    ends = np.int32([32, 2**31 - 1, -5]), np.int32([2, 3, 1, 2**31 - 1])
    actual = cascade(*arrays, beyond, *ends, implementation=implementation)
    assert_close(actual, (*arrays, lens), groups.case.tolerance)


def test_returns_out_alone_by_default():
    arrays = GROUPS[1].make()
    out = jax.eval_shape(raw.cascade_attention, *arrays)
    assert out.shape == arrays[0].shape and out.dtype == arrays[0].dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix_lens": np.zeros((3, 1), np.int32)}, r"prefix_lens.shape=\(3, 1\)"),
        ({"prefix_lens": np.zeros(3, np.int64)}, "prefix_lens.dtype=int64 must be int32"),
        ({"prefix_lens": None}, "^prefix_lens=.* must be an array"),
        ({"cu_group_sizes": np.zeros(3, np.int32)}, r"cu_group_sizes.shape=\(3,\)"),
        ({"cu_group_sizes": np.zeros(4, np.int16)}, "cu_group_sizes.dtype=int16 must be int32"),
        ({"cu_group_sizes": "ab"}, "^cu_group_sizes=.* must be an array"),
    ],
)
def test_bad_groups_are_refused_by_name(changes, message):
    *arrays, prefix_lens, cu_group_sizes = GROUPS[0].make()
    groups = dict(prefix_lens=prefix_lens, cu_group_sizes=cu_group_sizes) | changes
    with pytest.raises(ValueError, match=message):
        raw.cascade_attention(*arrays, **groups)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a config chooses the implementation")
@pytest.mark.parametrize("family", ["triton", "mosaic_sm90"])
def test_a_config_is_for_the_tokens_behind_the_prefix(family):
    arrays = GROUPS[1].make()
    assert_close(cascade(*arrays, config=config_of(family, ragged=False)), arrays[:5], 1e-5)
    with pytest.raises(ValueError, match="must be a DecodeConfig or MosaicSm80DecodeConfig"):
        cascade(*arrays, config=config_of(family, ragged=True))
