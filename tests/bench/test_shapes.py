"""Shapes of calls: their names, sizes, bytes and operations."""

from __future__ import annotations

import numpy as np

from bench import cascade, decode, kv_dtypes, prefill_shapes
from bench.options import Options
from bench.shapes import OPTION_PAIRS, SHAPES, TINY, select_shapes, uniform

GIB = 1 << 30
L2_BYTES = 60e6  # of an H200


def test_decode_shapes_have_the_sizes_of_their_names() -> None:
    lens = "1x1024 1x8192 1x32768 1x131072 8x2048 8x8192 16x32768 64x1024 64x4096 128x2048"
    heads = "32/32/128/16 32/1/128/16 64/8/128/16 32/8/64/16 16/8/256/16 32/8/128/64"
    names = [f"{name} 32/8/128/16" for name in (*lens.split(), "256x1024")]
    names += [f"64x4096 {name}" for name in heads.split()]
    assert [shape.name for shape in SHAPES] == [*names, "64 ragged 32/8/128/16"]
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


def _check_sets(shape) -> None:
    assert 2 * L2_BYTES <= shape.num_sets * shape.num_bytes <= 4 * GIB
    assert shape.num_calls >= 8 and shape.num_calls % shape.num_sets == 0


def test_sets_of_pages_exceed_the_l2() -> None:
    by_name = {shape.name: shape for shape in SHAPES}
    assert by_name["64x4096 32/8/128/16"].num_bytes == 2 * 64 * 4096 * 8 * 128 * 2
    for shape in SHAPES:
        _check_sets(shape)
        assert shape.pages_per_seq * shape.page_size >= max(shape.seq_lens)


def test_int8_and_fp8_bytes_include_scales() -> None:
    for plain in SHAPES:
        per_token = 2 * plain.num_kv_heads
        assert plain.num_bytes == sum(plain.seq_lens) * per_token * 2 * plain.head_dim
        for shape, base in kv_dtypes.one_byte([plain], ["bf16", "int8", "fp8"]):
            assert base == plain.name and shape.name in (f"{base} int8", f"{base} fp8")
            assert shape.num_bytes == sum(plain.seq_lens) * per_token * (plain.head_dim + 4)
            _check_sets(shape)


def test_cascade_bytes_count_the_prefix_once() -> None:
    by_name = {shape.name: shape for shape in cascade.SHAPES}
    for prefix in (8192, 32768):
        for own in (128, 1024):
            shape = by_name[f"64x{own} after {prefix} shared 32/8/128/16"]
            assert shape.num_bytes == 2 * (prefix + 64 * own) * 8 * 128 * 2
            assert shape.seq_lens == (prefix + own,) * 64
            _check_sets(shape)


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


def test_prefill_shapes() -> None:
    for shape in prefill_shapes.SHAPES:
        assert len(shape.q_lens) == len(shape.seq_lens)
        assert all(q <= n for q, n in zip(shape.q_lens, shape.seq_lens, strict=True))
        assert shape.num_calls % shape.num_sets == 0
    by_name = {shape.name: shape for shape in prefill_shapes.SHAPES}
    assert len(by_name) == len(prefill_shapes.SHAPES)
    prompt = by_name["4x4096 32/8/128/16"]
    assert prompt.num_flops == 4 * 32 * 128 * 4 * 4096 * 4097 // 2
    chunk = by_name["8x512 after 8192 32/8/128/16"]
    assert chunk.q_lens == (512,) * 8 and chunk.seq_lens == (8704,) * 8


def test_select_shapes() -> None:
    assert select_shapes([]) == list(SHAPES)
    assert [s.name for s in select_shapes(["tiny", "1x1024"])] == ["1x1024 32/8/128/16", "tiny"]
    assert select_shapes(["1x77"]) == []


def test_with_dtype() -> None:
    assert kv_dtypes.with_dtype(TINY, "bf16") is TINY
    pairs = kv_dtypes.one_byte(SHAPES[:2], ["fp8", "bf16"])
    assert [(s.kv_dtype, base) for s, base in pairs] == [
        ("float8_e4m3fn", shape.name) for shape in SHAPES[:2]
    ]
