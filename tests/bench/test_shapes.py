"""Shapes of calls: their names, sizes, bytes and operations."""

from __future__ import annotations

import numpy as np
import pytest

from bench import cascade, decode, kv_dtypes, prefill_shapes
from bench.options import Options
from bench.shapes import OPTION_PAIRS, SHAPES, TINY, select_shapes, uniform

GIB = 1 << 30
L2_BYTES = 60e6  # of an H200
ONE_BYTE = [shape for shape, _ in kv_dtypes.one_byte(SHAPES, ["bf16", "int8", "fp8"])]


def test_decode_shapes_have_the_sizes_of_their_names() -> None:
    for shape in SHAPES[:-1]:
        lens, dims = shape.name.split()
        num_seqs, length = map(int, lens.split("x"))
        assert shape.seq_lens == (length,) * num_seqs
        got = shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.page_size
        assert got == tuple(map(int, dims.split("/")))
    ragged = SHAPES[-1].seq_lens
    assert len(ragged) == 64 and min(ragged) >= 64 and max(ragged) < 16384
    # Log-uniform: half of the rows are shorter than the geometric mean of the bounds.
    assert 20 < sum(n < 1024 for n in ragged) < 44


@pytest.mark.parametrize("shapes", [SHAPES, ONE_BYTE, cascade.SHAPES], ids=len)
def test_sets_of_pages_exceed_the_l2_and_hold_each_token(shapes) -> None:
    assert len({shape.name for shape in shapes}) == len(shapes)
    for shape in shapes:
        token_bytes = shape.head_dim + 4 if shape.itemsize == 1 else 2 * shape.head_dim  # a scale
        own = sum(shape.seq_lens) - (len(shape.seq_lens) - 1) * shape.shared_prefix
        assert shape.num_bytes == own * 2 * shape.num_kv_heads * token_bytes
        assert 2 * L2_BYTES <= shape.num_sets * shape.num_bytes <= 4 * GIB
        assert shape.num_calls >= 8 and shape.num_calls % shape.num_sets == 0
        assert shape.pages_per_seq * shape.page_size >= max(shape.seq_lens)


def test_shapes_with_options_have_plain_shapes_of_equal_bytes() -> None:
    names = {shape.name: base.name for shape, base in OPTION_PAIRS}
    heads = "32/8/128/16"
    options = "soft_cap=50 alibi sinks return_lse fixed_split_size=512 fixed_split_size=1024"
    assert names == {
        **{f"64x4096 {heads} {option}": f"64x4096 {heads}" for option in options.split()},
        f"64x32768 {heads} sliding_window=1024": f"64x1024 {heads}",
        f"16x32768 {heads} sliding_window=1024": f"16x1024 {heads}",
    }
    for shape, base in OPTION_PAIRS:
        assert shape.num_bytes == base.num_bytes  # of windows, not of rows
        assert shape.num_sets * shape.num_bytes >= 2 * L2_BYTES
    chosen = decode.select_pairs(["window", "tiny"])
    assert [shape.name for shape, _ in chosen] == [*list(names)[-2:], "tiny options"]


def test_prefill_flops_count_the_pairs_that_the_masks_let_through() -> None:
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    for options in (Options(), Options(sliding_window=5)):
        shape = uniform(2, 12, **sizes, q_len=7, options=options)
        i, j = np.arange(5, 12)[:, None], np.arange(12)
        pairs = 2 * ((j <= i) & (i - j < (options.sliding_window or 99))).sum()
        assert shape.num_flops == 4 * 4 * 16 * pairs
    windowed = uniform(1, 100, **sizes, q_len=10, options=Options(sliding_window=5))
    assert windowed.num_bytes == 2 * 14 * 2 * 16 * 2


def test_prefill_shapes_have_the_sizes_of_their_names() -> None:
    for shape in prefill_shapes.SHAPES:
        assert all(q <= n for q, n in zip(shape.q_lens, shape.seq_lens, strict=True))
        assert shape.num_calls % shape.num_sets == 0
    by_name = {shape.name: shape for shape in prefill_shapes.SHAPES}
    assert len(by_name) == len(prefill_shapes.SHAPES)
    assert by_name["4x4096 32/8/128/16"].q_lens == (4096,) * 4
    chunk = by_name["8x512 after 8192 32/8/128/16"]
    assert chunk.q_lens == (512,) * 8 and chunk.seq_lens == (8704,) * 8


def test_shapes_are_selected_by_parts_of_their_names_and_by_dtype() -> None:
    assert select_shapes([]) == list(SHAPES)
    assert [s.name for s in select_shapes(["tiny", "1x1024"])] == ["1x1024 32/8/128/16", "tiny"]
    assert select_shapes(["1x77"]) == []
    assert kv_dtypes.with_dtype(TINY, "bf16") is TINY
    pairs = kv_dtypes.one_byte(SHAPES[:2], ["fp8", "bf16"])
    assert [(s.name, s.kv_dtype, base) for s, base in pairs] == [
        (f"{shape.name} fp8", "float8_e4m3fn", shape.name) for shape in SHAPES[:2]
    ]
