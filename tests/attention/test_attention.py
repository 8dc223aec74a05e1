"""One suite for every implementation of `paged_attention`, against float64 NumPy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close, assert_same_bits, decode
from tests.support.attention_cases import TOLERANCE, Case
from tests.support.attention_oracle import attend, relative_error
from tests.support.marks import needs_triton, slow
from tests.support.page_tables import extend, fork

BORDERS = Case(seq_lens=(0, 1, 7, 8, 9, 64))
CASES = [
    Case(),
    BORDERS,
    Case(dtype="bfloat16"),
    Case(dtype="float16"),
    # heads: MHA, MQA, groups of 3 and 7, groups above the matrix unit's 16 rows
    Case(num_q_heads=4, num_kv_heads=4),
    Case(num_q_heads=6, num_kv_heads=2),
    Case(num_q_heads=7, num_kv_heads=1),
    Case(num_q_heads=40, num_kv_heads=1, dtype="bfloat16"),
    Case(num_q_heads=1, num_kv_heads=1),
    # head dims
    *(Case(head_dim=d, seq_lens=(19, 33)) for d in (8, 64, 80)),
    *slow(Case(head_dim=d, seq_lens=(19, 33)) for d in (16, 96, 112, 192)),
    Case(head_dim=128, dtype="bfloat16"),
    Case(head_dim=256, dtype="float16"),
    Case(head_dim=320, dtype="bfloat16", seq_lens=(19, 33)),
    *slow(Case(head_dim=d, seq_lens=(19, 33)) for d in (384, 510)),
    Case(head_dim=512, dtype="bfloat16", seq_lens=(19, 33)),
    # shapes that the Mosaic kernels take
    Case(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        page_size=16,
        seq_lens=(130, 1, 0, 64),
        pages_per_seq=9,
        dtype="bfloat16",
    ),
    Case(
        num_q_heads=3,
        num_kv_heads=3,
        head_dim=64,
        page_size=256,
        seq_lens=(257, 3),
        pages_per_seq=2,
        dtype="float16",
    ),
    # page sizes
    Case(page_size=1, pages_per_seq=50, seq_lens=(50, 1, 0, 17)),
    Case(page_size=16, pages_per_seq=10, seq_lens=(150, 16)),
    Case(page_size=256, pages_per_seq=2, seq_lens=(257, 3)),
    *slow(
        [
            Case(page_size=2, pages_per_seq=70, seq_lens=(139, 20)),
            Case(page_size=64, pages_per_seq=3, seq_lens=(129, 64, 192)),
        ]
    ),
    # rows: one, more than programs, lengths far apart
    Case(seq_lens=(300,), pages_per_seq=40),
    Case(seq_lens=tuple(range(1, 41))),
    Case(seq_lens=(1000, 0, 0, 1, 2, 0, 513), pages_per_seq=125),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case, implementation):
    case = case.on(implementation)
    arrays = case.make()
    assert_close(decode(*arrays, implementation=implementation), arrays, case.tolerance)


def test_a_wrong_v_fails(implementation):
    case = Case(dtype="bfloat16").on(implementation)
    q, k_pages, v_pages, *rest = arrays = case.make()
    wrong = np.where(np.isfinite(v_pages), v_pages * jnp.bfloat16(1.02), v_pages)
    actual = decode(q, k_pages, wrong, *rest, implementation=implementation)
    with pytest.raises(AssertionError):
        assert_close(actual, arrays, case.tolerance)


def test_rows_of_length_zero_only(implementation):
    case = Case(seq_lens=(0, 0, 0)).on(implementation)
    out, lse = decode(*case.make(), implementation=implementation)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize("case", [BORDERS, Case(head_dim=80, dtype="bfloat16")], ids=str)
def test_data_outside_a_row_changes_no_bit(case, implementation):
    case = case.on(implementation)
    clean = decode(*case.make(poison=False), implementation=implementation)
    assert_same_bits(decode(*case.make(), implementation=implementation), clean)


def test_the_order_of_pages_changes_no_bit(implementation):
    case = Case().on(implementation)
    first = decode(*case.make(order=0), implementation=implementation)
    assert_same_bits(decode(*case.make(order=1), implementation=implementation), first)


def test_same_inputs_same_bits(implementation):
    arrays = [jnp.asarray(x) for x in Case(dtype="bfloat16").on(implementation).make()]
    first = decode(*arrays, implementation=implementation)
    for _ in range(3):
        assert_same_bits(decode(*arrays, implementation=implementation), first)


def test_sm_scale(implementation):
    case = Case().on(implementation)
    arrays = case.make()
    actual = decode(*arrays, implementation=implementation, sm_scale=0.5)
    assert_close(actual, arrays, case.tolerance, sm_scale=0.5)


def test_large_logits_do_not_overflow(implementation):
    case = Case().on(implementation)
    q, *rest = case.make()
    arrays = (q * 1000, *rest)
    assert_close(decode(*arrays, implementation=implementation), arrays, case.tolerance)


def test_lengths_beyond_the_table_count_as_its_size(implementation):
    q, k_pages, v_pages, tables, _ = Case(seq_lens=(64, 64)).on(implementation).make()
    full = decode(q, k_pages, v_pages, tables, np.int32([64, 0]), implementation=implementation)
    lens = np.int32([2**31 - 1, -5])
    assert_same_bits(decode(q, k_pages, v_pages, tables, lens, implementation=implementation), full)


def test_jitted_without_options_returns_out_alone():
    arrays = Case().make()
    out = jax.jit(pp.paged_attention)(*arrays)
    assert isinstance(out, jax.Array)
    assert relative_error(out, attend(*arrays)[0]) <= TOLERANCE["float32"]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU with 9 GB free")
def test_a_pool_of_more_than_2_31_elements():
    case = Case(head_dim=64, page_size=256, pages_per_seq=2, seq_lens=(300, 17), dtype="bfloat16")
    arrays = case.make()
    large = case.in_a_large_pool(arrays, num_pages=70_000)
    assert large[1].size > 2**31
    assert_close(decode(*large, implementation="triton"), arrays, case.tolerance)


@pytest.mark.parametrize("num_programs", [1, 3, 100, *slow([2, 5])])  # for each of 2 KV heads
@pytest.mark.parametrize("block_k", [16, *slow([64])])
def test_every_split_matches_the_oracle(num_programs, block_k):
    case = Case(seq_lens=(100, 0, 3, 64, 16, 1), pages_per_seq=13)
    arrays = case.make()
    config = pp.DecodeConfig(
        block_k=block_k, num_programs=2 * num_programs, num_warps=2, num_stages=2
    )
    actual = decode(*arrays, implementation="triton_interpret", config=config)
    assert_close(actual, arrays, case.tolerance)


def test_prefix_sums_are_computed_once_for_all_layers():
    arrays = [jnp.asarray(x) for x in Case().make()]

    def layers(q, *rest, num_layers):
        for _ in range(num_layers):
            q = pp.paged_attention(q, *rest, implementation="triton_interpret")
        return q

    @jax.default_device(jax.local_devices(backend="cpu")[0])  # GPUs fuse them with what follows
    def count(num_layers):
        lowered = jax.jit(partial(layers, num_layers=num_layers)).lower(*arrays)
        return lowered.compile().as_text().count("block_prefix_sums")

    assert 0 < count(1) == count(3)


@needs_triton
def test_equals_jaxs_own_op_on_scaled_queries():
    theirs = pytest.importorskip("jax.experimental.pallas.ops.gpu.paged_attention")
    case = Case(seq_lens=(37, 5, 64), page_size=8, pages_per_seq=8, head_dim=64)
    q, k_pages, v_pages, tables, lens = case.make(poison=False)
    scaled = q * np.float32(case.head_dim**-0.5)
    expected = theirs.paged_attention(
        scaled, k_pages, v_pages, tables, lens, k_splits=2, interpret=True
    )
    ours = pp.paged_attention(scaled, k_pages, v_pages, tables, lens, None, None, sm_scale=1.0)
    assert relative_error(ours, np.asarray(expected, np.float64)) <= 1e-3  # theirs may use TF32


class TestMerge:
    def test_merged_parts_of_the_keys_equal_the_whole(self, implementation):
        case = Case(seq_lens=(64, 40, 9)).on(implementation)
        q, k_pages, v_pages, tables, lens = arrays = case.make()
        for cut in (1, 3, 5):  # in pages
            cut_len = cut * case.page_size
            first = decode(
                q,
                k_pages,
                v_pages,
                tables,
                np.minimum(lens, cut_len),
                implementation=implementation,
            )
            second = decode(
                q,
                k_pages,
                v_pages,
                np.ascontiguousarray(tables[:, cut:]),
                np.maximum(lens - cut_len, 0),
                implementation=implementation,
            )
            states = [jnp.stack(x) for x in zip(first, second, strict=True)]
            assert_close(jax.jit(pp.merge_attention_states)(*states), arrays, case.tolerance)

    def test_an_empty_state_is_ignored_whatever_it_holds(self):
        outs = jnp.stack([jnp.full((2, 4), jnp.nan), jnp.ones((2, 4))])
        lses = jnp.array([[-jnp.inf, -jnp.inf], [3.0, -jnp.inf]])
        out, lse = pp.merge_attention_states(outs.astype(jnp.bfloat16), lses)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_array_equal(out, [[1.0] * 4, [0.0] * 4])
        np.testing.assert_array_equal(lse, [3.0, -np.inf])

    @pytest.mark.parametrize(
        ("outs", "lses", "message"),
        [
            (jnp.ones((2, 3, 4)), jnp.ones((2, 4)), r"outs.shape=\(2, 3, 4\)"),
            (jnp.ones((0, 3, 4)), jnp.ones((0, 3)), "S >= 1"),
            (jnp.ones((2, 4), jnp.int32), jnp.ones(2), "outs.dtype=int32"),
            (jnp.ones((2, 4)), jnp.ones(2, jnp.bfloat16), "lses.dtype=bfloat16 must be float32"),
        ],
    )
    def test_bad_input(self, outs, lses, message):
        with pytest.raises(ValueError, match=message):
            pp.merge_attention_states(outs, lses)


def test_64_bit_mode_changes_nothing(implementation):
    arrays = [jnp.asarray(x) for x in Case().on(implementation).make()]
    expected = decode(*arrays, implementation=implementation)
    with jax.enable_x64(True):
        actual = decode(*arrays, implementation=implementation)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_decode_after_fork_equals_decode_of_an_unshared_copy(implementation):
    """Each of two rows that share pages appends a token of its own."""
    heads, head_dim, num_tokens = 2, 32, 11
    rng = np.random.default_rng(0)
    prompt, own = (
        rng.standard_normal((2, n, heads, head_dim)).astype(np.float32) for n in (num_tokens, 2)
    )
    q = jnp.asarray(rng.standard_normal((2, 4, head_dim)), jnp.float32)
    sizes = dict(num_pages=8, page_size=4)

    @jax.jit
    def write(table, pool, rows, positions, kv):
        slots = pp.slot_mapping(table, rows, positions)
        return pp.KVPool(layers=(pp.write_kv(pool.layers[0], *kv, slots),))

    def decode_both(shared):
        table = pp.create_page_table(**sizes, max_seqs=2, pages_per_seq=4)
        pool = pp.create_kv_pool(
            **sizes, num_layers=1, num_kv_heads=heads, head_dim=head_dim, dtype=jnp.float32
        )
        table, ok = extend(table, np.int32([num_tokens, 0 if shared else num_tokens]))
        for row in (0,) if shared else (0, 1):
            rows = np.full(num_tokens, row, np.int32)
            pool = write(table, pool, rows, np.arange(num_tokens, dtype=np.int32), prompt)
        if shared:
            table, copies, ok = fork(table, np.int32([0]), np.int32([1]))
            pool = jax.jit(pp.copy_pages)(pool, copies)
        assert np.all(ok)
        table, ok = extend(table, np.int32([1, 1]))
        assert np.all(ok)
        pool = write(table, pool, np.int32([0, 1]), np.int32([num_tokens] * 2), own)
        pages_used = sizes["num_pages"] - int(table.num_free)
        layer = pool.layers[0]
        arrays = (q, layer.k_pages, layer.v_pages, table.block_tables, table.seq_lens)
        return decode(*arrays, implementation=implementation), pages_used

    (forked, few), (unshared, many) = decode_both(shared=True), decode_both(shared=False)
    assert (few, many) == (4, 6)
    assert_same_bits(forked, unshared)


@pytest.mark.parametrize("dtype", ["bfloat16", *slow(["float16"])])
def test_runs_without_jit(dtype):
    """On a CPU XLA has only some layouts of a bf16 product, unless it fuses the product."""
    case = Case(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        seq_lens=(20, 30, 5, 32),
        pages_per_seq=2,
        dtype=dtype,
    )
    arrays = case.make()
    actual = pp.paged_attention(*arrays, return_lse=True, implementation="xla")
    assert_close(actual, arrays, case.tolerance)
