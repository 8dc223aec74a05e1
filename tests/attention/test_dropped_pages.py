"""Attention with a sliding window over rows whose pages left of it were dropped."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_calls import assert_same_bits, decode, ragged
from tests.support.attention_cases import Case, cumulated
from tests.support.attention_options import chosen_options
from tests.support.marks import slow

# The interpreter of Mosaic multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

DECODE = Case(head_dim=16, seq_lens=(137, 5, 0, 61, 64), pages_per_seq=20)
RAGGED = Case(head_dim=16, seq_lens=(137, 5, 0, 61, 64), pages_per_seq=20, q_lens=(11, 5, 0, 2, 1))
CALLS = [(decode, DECODE), (ragged, RAGGED)]
IDS = ["decode", "ragged"]


def calls_with_and_without(
    case: Case, window: int, kv_dtype: str | None = None, dropped: int | None = None
):
    """The arrays of a call over full rows, and over rows without the pages left of the window.

    Of the second, all pages that no row holds are poisoned, and table entries of dropped pages are
    `dropped`, or what `free_before` leaves there. Scales are at the end.
    """
    rng = np.random.default_rng(0)
    lens = np.array(case.seq_lens, np.int32)
    q_lens = np.minimum(lens, 1) if case.q_lens is None else np.array(case.q_lens, np.int32)
    num_blocks = -(-lens // case.page_size)
    table = pp.create_page_table(
        num_pages=int(num_blocks.sum()) + 2, page_size=case.page_size, max_seqs=len(lens),
        pages_per_seq=case.pages_per_seq,
    )  # fmt: skip
    table, ok = pp.extend(table, lens)
    assert np.all(ok)
    rows = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lens])
    pool = pp.create_kv_pool(
        num_layers=1, num_pages=table.num_pages, num_kv_heads=case.num_kv_heads,
        page_size=case.page_size, head_dim=case.head_dim, dtype=kv_dtype or case.dtype,
    )  # fmt: skip
    k, v = rng.standard_normal((2, len(rows), case.num_kv_heads, case.head_dim))
    slots = pp.slot_mapping(table, rows, positions)
    layer = pp.write_kv(pool.layers[0], *(x.astype(case.dtype) for x in (k, v)), slots)
    smaller = pp.free_before(table, lens - q_lens + 1 - window)
    pp.check_page_table(smaller)
    assert smaller.num_free > table.num_free
    is_free = smaller.ref_counts == 0

    def poisoned(x):
        junk = 77 if x.dtype == jnp.int8 else jnp.nan
        return jnp.where(is_free.reshape(1, -1, *[1] * (x.ndim - 2)), jnp.array(junk, x.dtype), x)

    num_tokens = len(lens) if case.q_lens is None else int(q_lens.sum())
    q = rng.standard_normal((num_tokens, case.num_q_heads, case.head_dim)).astype(case.dtype)
    rest = () if case.q_lens is None else (cumulated(case.q_lens),)

    def call(layer, tables):
        scales = () if layer.k_scales is None else (layer.k_scales, layer.v_scales)
        return q, layer.k_pages, layer.v_pages, tables, lens, *rest, *scales

    tables = smaller.block_tables
    if dropped is not None:
        tables = jnp.where(tables == table.num_pages, dropped, tables)
    return call(layer, table.block_tables), call(jax.tree.map(poisoned, layer), tables)


def check(function, case, window, kv_dtype=None, dropped=None, **options):
    calls = calls_with_and_without(case, window, kv_dtype, dropped)
    expected, actual = (function(*x, sliding_window=window, **options) for x in calls)
    assert np.isfinite(np.asarray(expected[0], np.float32)).all()
    assert_same_bits(actual, expected)


@pytest.mark.parametrize(("function", "case"), CALLS, ids=IDS)
class TestDroppedPages:
    @pytest.mark.parametrize("window", [11, *slow([1, 56])])
    def test_change_no_bit(self, function, case, window, implementation):
        check(function, case.on(implementation), window, implementation=implementation)

    def test_change_no_bit_with_a_fixed_split_size(self, function, case, implementation):
        options, _ = chosen_options(
            ("split", "alibi"), ragged=case.q_lens is not None, implementation=implementation
        )
        check(function, case.on(implementation), 70, **options)

    @pytest.mark.parametrize("entry", [2**31 - 1, *slow([-1, -(2**31)])])
    def test_may_have_any_table_entry(self, function, case, entry, implementation):
        case = case.on(implementation)
        check(function, case, 30, dropped=entry, implementation=implementation)

    @pytest.mark.parametrize(
        ("page_size", "kv_dtype"), [(8, "int8"), *slow([(1, None), (1, "float8_e4m3fn")])]
    )
    def test_of_any_kind_may_have_any_table_entry(
        self, function, case, page_size, kv_dtype, implementation
    ):
        case = replace(case, page_size=page_size, pages_per_seq=160 // page_size)
        how = dict(dropped=-(2**31), implementation=implementation)
        check(function, case.on(implementation), 30, kv_dtype, **how)

    def test_change_no_bit_of_the_gradient_of_queries(self, function, case, implementation):
        calls = calls_with_and_without(case.on(implementation), 30, dropped=-(2**31))

        @jax.jit
        @jax.grad
        def gradient(q, *rest):
            out, _ = function(q, *rest, sliding_window=30, implementation=implementation)
            return jnp.sin(out.astype(jnp.float32)).sum()

        expected, actual = (gradient(*x) for x in calls)
        assert np.abs(np.asarray(expected, np.float32)).max() > 0
        assert_same_bits([actual], [expected])

    @pytest.mark.parametrize("kv_dtype", ["int8", *slow(["float8_e4m3fn"])])
    def test_change_no_bit_of_quantized_attention(self, function, case, kv_dtype, implementation):
        check(function, case.on(implementation), 11, kv_dtype, implementation=implementation)


@pytest.mark.skipif(mosaic_support.why_not_jax() is not None, reason="needs JAX 0.11")
@pytest.mark.parametrize(("function", "case"), CALLS, ids=IDS)
@pytest.mark.parametrize("fixed", [False, True], ids=["balanced", "fixed split size"])
@pytest.mark.parametrize("entry", [None, -1, *slow([-(2**31), 2**31 - 1])])
def test_dropped_pages_change_no_bit_in_the_interpreted_mosaic_kernels(
    function, case, fixed, entry
):
    implementation = "mosaic_gpu_interpret"
    options, _ = chosen_options(
        ("split",) if fixed else (), ragged=case.q_lens is not None, implementation=implementation
    )
    check(function, case.on(implementation), 30, dropped=entry, **options)
