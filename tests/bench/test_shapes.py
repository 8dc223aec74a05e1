"""Shapes of calls: their names, sizes, bytes and operations."""

import re

import numpy as np
import pytest

from bench.decode import cascade, latents
from bench.measuring import kv_dtypes
from bench.measuring.options import Options
from bench.measuring.shapes import OPTION_PAIRS, SHAPES, uniform
from bench.prefill import shapes as prefill_shapes

GIB = 1 << 30
L2_BYTES = 60e6  # of an H200
ONE_BYTE = kv_dtypes.one_byte(SHAPES, ["bf16", "int8", "fp8"])
PARTS = re.compile(r"(\d+)x(\d+)(?: after (\d+))? (\d+)/(\d+)/(\d+)/(\d+)")


@pytest.mark.parametrize("shapes", [SHAPES, prefill_shapes.SHAPES], ids=["decode", "prefill"])
def test_shapes_have_the_sizes_of_their_names(shapes) -> None:
    for shape, parts in ((shape, PARTS.match(shape.name)) for shape in shapes):
        assert shape.num_calls >= 8 and shape.num_calls % shape.num_sets == 0
        if parts:  # not ragged
            num_seqs, tokens, older, *dims = (int(part or 0) for part in parts.groups())
            assert shape.seq_lens == (older + tokens,) * num_seqs
            assert shape.q_lens == (1 if shapes is SHAPES else tokens,) * num_seqs
            sizes = shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.page_size
            assert sizes == tuple(dims)


@pytest.mark.parametrize("shapes", [SHAPES, ONE_BYTE, cascade.SHAPES], ids=len)
def test_sets_of_pages_exceed_the_l2_and_hold_each_token(shapes) -> None:
    assert len({shape.name for shape in shapes}) == len(shapes)
    for shape in shapes:
        token_bytes = shape.head_dim + 4 if shape.itemsize == 1 else 2 * shape.head_dim  # a scale
        own = sum(shape.seq_lens) - (len(shape.seq_lens) - 1) * shape.shared_prefix
        assert shape.num_bytes == own * 2 * shape.num_kv_heads * token_bytes
        assert 2 * L2_BYTES <= shape.num_sets * shape.num_bytes <= 4 * GIB
        assert shape.pages_per_seq * shape.page_size >= max(shape.seq_lens)


def test_latents_are_counted_once_and_exceed_the_l2() -> None:
    for shape in latents.SHAPES:
        assert shape.num_bytes == sum(shape.seq_lens) * 576 * 2
        assert 2 * L2_BYTES <= shape.num_sets * shape.num_bytes <= 4 * GIB
        pairs = sum(int(shape.keys_of(row).sum()) for row in range(len(shape.seq_lens)))
        assert shape.num_flops == 2 * shape.num_q_heads * (576 + 512) * pairs
    assert len({shape.name for shape in latents.SHAPES}) == len(latents.SHAPES) == 18


def test_shapes_with_options_have_plain_shapes_of_equal_bytes() -> None:
    for shape, base in OPTION_PAIRS:
        assert shape.options.name in shape.name and not base.options.name
        assert shape.num_bytes == base.num_bytes  # of windows, not of rows
        assert shape.num_sets * shape.num_bytes >= 2 * L2_BYTES


@pytest.mark.parametrize("window", [None, 5])
def test_prefill_flops_count_the_pairs_that_the_masks_let_through(window) -> None:
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    shape = uniform(2, 12, **sizes, q_len=7, options=Options(sliding_window=window))
    i, j = np.arange(5, 12)[:, None], np.arange(12)
    seen = (j <= i) & (i - j < (window or 99))
    assert shape.num_flops == 4 * 4 * 16 * 2 * seen.sum()
    assert shape.num_bytes == 2 * seen.any(axis=0).sum() * 2 * 2 * 16 * 2
