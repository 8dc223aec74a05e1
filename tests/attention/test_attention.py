"""`paged_attention` and `ragged_paged_attention` on every implementation, against float64 NumPy."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import pallas_paged as pp
from tests.support import raw
from tests.support.attention_calls import assert_close, assert_same_bits, cascade, decode, ragged
from tests.support.attention_cases import Case, enlarged, of_first_rows, with_dead_rows
from tests.support.attention_oracle import attend
from tests.support.kv_pools import make_pool
from tests.support.marks import needs_large_gpu, slow
from tests.support.page_layouts import LAYOUTS, call_in_layout
from tests.support.page_tables import copy_pages, extend, extended, fork, slot_mapping, write_kv
from tests.support.promotion import assert_is_strict
from tests.support.quantized_cases import Quantized

# The cases of each group have the same shapes, so they share one compiled program.
rows_of_6 = partial(Case, head_dim=16, num_pages=51)
DECODE = [
    rows_of_6(seq_lens=(0, 1, 7, 8, 9, 64)),  # around the borders of pages
    rows_of_6(seq_lens=(37, 5, 64, 20, 33, 2)),
    rows_of_6(seq_lens=(64, 64, 64, 64, 64, 64)),  # all pages of all rows
    rows_of_6(seq_lens=(0, 0, 0, 0, 0, 64)),  # one row has everything
    rows_of_6(seq_lens=(0, 0, 0, 0, 0, 0)),
]
rows_of_5 = partial(Case, head_dim=16, pages_per_seq=5, num_tokens=48, num_pages=28)
MIXES = [
    rows_of_5(seq_lens=(17, 8, 1, 15, 20), q_lens=(17, 8, 1, 15, 7)),  # prompts
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(12, 1, 8, 8, 16)),  # chunks on a prefix
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(4, 5, 4, 3, 4)),  # a few tokens each
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(1, 1, 1, 1, 1)),  # decode
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(1, 0, 5, 1, 33)),  # a mix of these
    rows_of_5(seq_lens=(0, 40, 0, 9, 0), q_lens=(0, 30, 0, 9, 0)),  # empty rows
    rows_of_5(seq_lens=(0, 3, 40, 5, 1), q_lens=(4, 20, 3, 6, 2)),  # more queries than keys
    rows_of_5(seq_lens=(0, 0, 40, 0, 0), q_lens=(0, 0, 40, 0, 0)),  # one row has everything
    rows_of_5(seq_lens=(40, 38, 20, 9, 33), q_lens=(0, 0, 0, 0, 0)),  # padding tokens only
    rows_of_5(seq_lens=(8, 8, 16, 8, 8), q_lens=(8, 8, 16, 8, 8)),  # ends on borders of pages
]
CALLS = [(decode, DECODE[1]), (ragged, MIXES[4])]
BOTH = pytest.mark.parametrize(("function", "case"), CALLS, ids=["decode", "ragged"])
NAMES = {decode: "decode", ragged: "ragged", cascade: "cascade"}


def test_strict_promotion_is_in_force():
    assert_is_strict()


@pytest.mark.parametrize(
    ("function", "cases"), [(decode, DECODE), (ragged, MIXES)], ids=["decode", "ragged"]
)
@pytest.mark.smoke
def test_matches_the_oracle(function, cases, implementation):
    """Logits of both sizes: with large ones `exp` would overflow without its maximum."""
    for case in cases:
        case = case.on(implementation)
        q, *rest = case.make()
        for arrays in ((q, *rest), (q * 1000, *rest)):
            actual = function(*arrays, implementation=implementation)
            assert_close(actual, arrays, case.tolerance, name=str(case))


@pytest.mark.parametrize(
    ("function", "case"),
    [
        (decode, Case(seq_lens=(300,), pages_per_seq=40)),  # one row
        (decode, Case(head_dim=8, seq_lens=tuple(range(1, 41)))),  # more rows than programs
        (decode, Case(seq_lens=(1000, 0, 0, 1, 2, 0, 513), pages_per_seq=125, dtype="float16")),
        (ragged, Case(seq_lens=(9, 0, 0, 64, 7, 30), q_lens=(0, 0, 0, 2, 0, 0))),  # few tokens
    ],
    ids=lambda x: NAMES.get(x, x) if callable(x) else str(x),
)
def test_matches_the_oracle_in_other_shapes(function, case, implementation):
    case = case.on(implementation)
    arrays = case.make()
    actual = function(*arrays, implementation=implementation)
    assert_close(actual, arrays, case.tolerance)


def test_a_small_error_fails():
    """The comparison with the oracle sees 2% of V, and a length or an offset off by one."""
    case = replace(MIXES[1], dtype="bfloat16")
    arrays = q, k, v, tables, lens, cu = case.make()
    out, lse = attend(*arrays)
    assert_close((out.astype(q.dtype), np.float32(lse)), arrays, case.tolerance)
    for wrong in (
        (q, k, v.astype(np.float32) * 1.02, tables, lens, cu),
        (q, k, v, tables, lens - 1, cu),
        (q, k, v, tables, lens, np.append(cu[:-1], cu[-1] - 1)),
    ):
        out, lse = attend(*wrong)
        with pytest.raises(AssertionError):
            assert_close((out.astype(q.dtype), np.float32(lse)), arrays, case.tolerance)


@BOTH
def test_memory_of_others_page_order_and_repeats_change_no_bit(function, case, implementation):
    case = case.on(implementation)
    call = partial(function, implementation=implementation)
    first = call(*case.make())
    assert_same_bits(call(*case.make(poison=False)), first)
    assert_same_bits(call(*case.make(order=1)), first)
    for _ in range(3):
        assert_same_bits(call(*case.make()), first)


@BOTH
def test_lengths_beyond_the_table_count_as_its_size(function, case, implementation):
    size = case.pages_per_seq * case.page_size
    lens = (size, size, size, 9, size, 0)[: len(case.seq_lens)]
    case = replace(case, seq_lens=lens).on(implementation)
    arrays = list(case.make())
    beyond = np.int32([size, 2**31 - 1, size + 1, 9, size, -5])[: len(lens)]
    actual = function(*arrays[:4], beyond, *arrays[5:], implementation=implementation)
    assert_close(actual, arrays, case.tolerance)


def test_cu_q_lens_are_clamped_to_rise_within_the_tokens(implementation):
    case = replace(MIXES[1].on(implementation), q_lens=(48, 0, 0, 0, 0))
    q, k, v, tables, lens, _ = case.make()
    for cu_q_lens in (
        (0, 20, 10, 40, 40, 41),  # falls
        (0, 20, 21, 2**31 - 1, 50, 100),  # exceeds T
        (-5, -3, 7, 7, 8, 30),  # begins below 0
        (3, 9, 9, 20, 21, 22),  # begins above 0
    ):
        taken = np.clip(np.maximum.accumulate([0, *cu_q_lens[1:]]), 0, len(q)).astype(np.int32)
        actual = ragged(q, k, v, tables, lens, np.int32(cu_q_lens), implementation=implementation)
        meant = q, k, v, tables, lens, taken
        assert_close(actual, meant, case.tolerance, name=str(cu_q_lens))


@pytest.mark.parametrize("function", NAMES, ids=NAMES.values())
def test_one_program_serves_all_numbers_of_rows(function, compilations):
    """Rows from `num_seqs` on may hold anything, and tables may be flat."""
    case = MIXES[1] if function is ragged else DECODE[1]
    groups = (np.int32([1]), np.int32([0, 2])) if function is cascade else ()
    arrays, counts = case.make(), set()
    for num_seqs in (2, 0, -4, 3, len(case.seq_lens), 2**31 - 1):
        rows = min(max(num_seqs, 0), len(case.seq_lens))
        dead = list(with_dead_rows(arrays, rows)) if rows < len(case.seq_lens) else list(arrays)
        dead[3] = dead[3].reshape(-1)
        actual = function(*dead, *groups, num_seqs=np.int32(num_seqs), implementation="xla")
        assert_close(actual, of_first_rows(arrays, rows), 1e-5, name=f"num_seqs {num_seqs}")
        counts.add(len(compilations))
    assert len(counts) == 1


@pytest.mark.slow
def test_num_seqs_under_vmap():
    call = partial(ragged, *MIXES[1].make(), implementation="xla")
    numbers = np.int32([2, 5])
    mapped = jax.vmap(lambda num_seqs: call(num_seqs=num_seqs))(numbers)
    for i, number in enumerate(numbers):
        for x, expected in zip(mapped, call(num_seqs=number), strict=True):
            np.testing.assert_allclose(x[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.smoke
def test_a_call_without_jit_takes_lists_of_integers():
    """On a CPU XLA has only some layouts of a bf16 product, unless it fuses the product."""
    arrays = replace(DECODE[1], dtype="bfloat16").make(poison=False)
    lists = [x.tolist() for x in arrays[3:]]
    actual = raw.paged_attention(*arrays[:3], *lists, return_lse=True, implementation="xla")
    assert_close(actual, arrays, 5e-3)


@pytest.mark.parametrize(
    ("function", "case"), [CALLS[0], *slow([CALLS[1]])], ids=["decode", "ragged"]
)
def test_64_bit_mode_changes_nothing(function, case, implementation):
    arrays = case.on(implementation).make()
    expected = function(*arrays, implementation=implementation)
    with jax.enable_x64(True):
        actual = function(*arrays, implementation=implementation)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


@pytest.mark.parametrize("sink", [0.0, 14.0])
def test_a_sink_far_above_the_logits_leaves_f16_its_precision(sink, implementation):
    case = Case(head_dim=16, seq_lens=(64, 60), dtype="float16").on(implementation)
    q, k_pages, v_pages, *rest = case.make()
    # Large values, so that the output itself is not too small for f16.
    arrays = (q * np.float16(0.1), k_pages, v_pages * np.float16(256), *rest)
    sinks = np.full(case.num_q_heads, sink, np.float32)
    actual = decode(*arrays, sinks=sinks, implementation=implementation)
    assert_close(actual, arrays, case.tolerance, sinks=sinks)


@pytest.mark.parametrize(
    ("function", "kv_dtype", "kv_layout"),
    [
        *zip(itertools.cycle([raw.paged_attention]), itertools.cycle(["int8", "float32"]), LAYOUTS),
        (raw.ragged_paged_attention, "int8", "NH2D"),
        (raw.ragged_paged_attention, "float32", "HND"),
        *slow(itertools.product([raw.ragged_paged_attention], ["int8", "float32"], LAYOUTS)),
    ],
)
def test_xla_makes_nothing_of_the_size_of_a_pool(function, kv_dtype, kv_layout):
    q_lens = (11, 5, 0) if function is raw.ragged_paged_attention else None
    case = Case(head_dim=16, num_pages=4000, q_lens=q_lens)
    stored, _ = Quantized(case=case, kv_dtype="int8").make()
    call = call_in_layout(kv_layout, stored if kv_dtype == "int8" else case.make())
    entry = partial(function, kv_layout=kv_layout, implementation="xla")
    memory = jax.jit(entry).lower(**call).compile().memory_analysis()
    assert memory.temp_size_in_bytes < call["k_pages"].nbytes // 4


@needs_large_gpu
@pytest.mark.parametrize(("kv_layout", "axis"), [("HPND", 1), ("2NHD", 0)])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", *slow(["int8"])])
@pytest.mark.parametrize(
    ("function", "q_lens"), [(raw.paged_attention, None), (raw.ragged_paged_attention, (40, 17, 0))]
)
def test_pools_beyond_2_31_elements(function, q_lens, kv_dtype, kv_layout, axis, implementation):
    """The pages of the case are the last ones, beyond the reach of offsets of 32 bits."""
    case = Case(
        head_dim=128, page_size=16, pages_per_seq=20, seq_lens=(300, 17, 0), q_lens=q_lens,
        dtype="bfloat16",
    )  # fmt: skip
    arrays = meant = case.make()
    if kv_dtype == "int8":
        arrays, meant = Quantized(case=case, kv_dtype="int8").make()
    call = call_in_layout(kv_layout, arrays)
    pages = call["k_pages"]
    num_pages = 3 * 2**30 // (pages.size // pages.shape[axis])
    first = num_pages - pages.shape[axis]
    for name in ("k_pages", "v_pages", "k_scales", "v_scales"):
        if call.get(name) is not None:
            call[name] = enlarged(call[name], num_pages, axis)
    call["block_tables"] = call["block_tables"] + np.int32(first)
    attention = partial(function, kv_layout=kv_layout, implementation=implementation)
    actual = jax.jit(partial(attention, return_lse=True))(**call)
    assert_close(actual, meant, case.tolerance)


@pytest.mark.slow  # compiles several layers; of interest for speed alone
@pytest.mark.parametrize(
    ("function", "case", "name", "most"),
    [
        (raw.paged_attention, DECODE[0], "block_prefix_sums", 1.0),
        (raw.ragged_paged_attention, Case(q_lens=(3, 1, 2)), "ragged_plan", 1.2),
    ],
)
def test_the_plan_is_made_once_for_all_layers(function, case, name, most):
    @jax.default_device(jax.local_devices(backend="cpu")[0])  # GPUs fuse them with what follows
    def count(num_layers):
        def layers(q, *rest):
            for _ in range(num_layers):
                q = function(q, *rest, implementation="triton_interpret")
            return q

        return jax.jit(layers).lower(*case.make()).compile().as_text().count(name)

    assert 0 < count(2) <= most * count(1)


class TestMerge:
    merge = staticmethod(jax.jit(pp.merge_attention_states))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_merged_parts_of_the_keys_equal_the_whole(self, dtype):
        """One of the parts has the sinks; some parts have none of a row's keys."""
        case = replace(DECODE[0], dtype=dtype)
        sinks = np.float32([1.0, -3.0, 0.0, 8.0])
        q, k_pages, v_pages, tables, lens = arrays = case.make()
        parts = []
        for begin, end in ((0, 1), (1, 4), (4, 8)):  # in pages
            own = np.clip(lens - 8 * begin, 0, 8 * (end - begin))
            rest = k_pages, v_pages, tables[:, begin:end], own
            parts.append(attend(q, *rest, sinks=sinks if begin == 0 else None))
        outs, lses = (np.stack(x) for x in zip(*parts, strict=True))
        outs[np.isneginf(lses)] = np.nan  # whatever they hold
        merged = self.merge(outs.astype(q.dtype), np.float32(lses))
        assert_close(merged, arrays, case.tolerance, sinks=sinks)

    def test_the_gradient_beside_states_without_keys_is_finite(self):
        def total(lses):
            _, lse = pp.merge_attention_states(np.ones((2, 3, 4), np.float32), lses)
            return jax.numpy.where(jax.numpy.isneginf(lse), 0.0, lse).sum()

        lses = np.float32([[0.0, -np.inf, -np.inf], [1.0, 2.0, -np.inf]])
        weights = 1 / (1 + np.exp([1.0, -1.0]))
        expected = [[weights[0], 0, 0], [weights[1], 1, 0]]
        np.testing.assert_allclose(jax.jit(jax.grad(total))(lses), expected, rtol=1e-6)

    @pytest.mark.parametrize(
        ("outs", "lses", "message"),
        [
            (np.ones((2, 3, 4), "f4"), np.ones((2, 4), "f4"), r"outs.shape=\(2, 3, 4\)"),
            (np.ones((0, 3, 4), "f4"), np.ones((0, 3), "f4"), "S >= 1"),
            (np.ones((2, 4), np.int32), np.ones(2, "f4"), "outs.dtype=int32"),
            (np.ones((2, 4), "f4"), np.ones(2, "f2"), "lses.dtype=float16 must be float32"),
        ],
    )
    def test_bad_input(self, outs, lses, message):
        with pytest.raises(ValueError, match=message):
            pp.merge_attention_states(outs, lses)


def test_decode_after_fork_sees_the_shared_tokens_and_those_of_the_row(implementation):
    """Each of two rows that share pages appends a token of its own."""
    case, prompt = DECODE[0].on(implementation), np.arange(11)
    q = case.make()[0]
    tokens = np.random.default_rng(0).standard_normal((2, 13, 2, case.head_dim)).astype(q.dtype)
    sizes = dict(num_pages=case.num_pages, page_size=case.page_size)
    table = extended((11, *[0] * 5), **sizes, max_seqs=6, pages_per_seq=case.pages_per_seq)
    pool = make_pool(**sizes, num_layers=1, head_dim=case.head_dim, dtype=q.dtype)

    def write(pool, rows, positions, which):
        slots = slot_mapping(table, np.int32(rows), np.int32(positions))
        return pp.KVPool(layers=(write_kv(pool.layers[0], *tokens[:, which], slots),))

    pool = write(pool, [0] * 11, prompt, prompt)
    table, copies, forked = fork(table, [0], [1])
    pool = copy_pages(pool, copies)
    table, ok = extend(table, np.int32([1, 1, 0, 0, 0, 0]))
    assert forked.all() and ok.all() and table.num_free == case.num_pages - 3
    [layer] = write(pool, [0, 1], [11, 11], [11, 12]).layers
    pages = layer.k_pages, layer.v_pages, table.block_tables, table.seq_lens
    # The oracle has one page for each row.
    k, v = tokens[:, [[*prompt, 11], [*prompt, 12]]].transpose(0, 3, 1, 2, 4)
    meant = q, k, v, np.int32([[0], [1], *[[0]] * 4]), table.seq_lens
    assert_close(decode(q, *pages, implementation=implementation), meant, case.tolerance)
