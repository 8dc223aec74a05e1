"""Attention by the Mosaic kernels for Hopper and for Ampere, interpreted on a CPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels import xla
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support import raw
from tests.support.attention_calls import (
    STATIC,
    assert_close,
    assert_same_bits,
    name_of,
    options_with_every_mask,
)
from tests.support.attention_cases import NarrowCase, mosaic_case, without_tokens_left_of
from tests.support.marks import slow
from tests.support.page_layouts import call_in_layout
from tests.support.quantized_cases import Quantized

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

from pallas_paged.kernels.mosaic_sm80 import ragged as sm80_ragged
from pallas_paged.kernels.mosaic_sm90 import converted_rows

pytestmark = [
    # The interpreter multiplies the poisoned values too.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.skipif(jax.default_backend() == "gpu", reason="the compiled kernels run there"),
]

HOPPER, AMPERE = "mosaic_sm90", "mosaic_sm80"
INT8, FP8 = "int8", "float8_e4m3fn"
# Programs that have several rows, and rows that several programs share.
DECODE = pp.MosaicSm80DecodeConfig(block_k=64, num_stages=2, num_programs=6)
CONFIGS = {
    HOPPER: pp.MosaicSm90RaggedConfig(block_k=64, num_consumers=2, num_stages=2, num_programs=3),
    AMPERE: pp.MosaicSm80RaggedConfig(block_q=64, block_k=32, num_warpgroups=1, num_programs=3),
}


@partial(jax.jit, static_argnames=STATIC)
def compiled(arrays, **options):
    entry = raw.ragged_paged_attention if "cu_q_lens" in arrays else raw.paged_attention
    return entry(**arrays, return_lse=True, **options)


def attend(family, arrays, *, config=None, kv_layout="HPND", **options):
    """(out, lse) of a decode or a ragged call, with changes of the family's config above."""
    arrays = call_in_layout(kv_layout, arrays)
    start = CONFIGS[family] if "cu_q_lens" in arrays else DECODE
    config = dataclasses.replace(start, **config or {})
    how = dict(implementation=f"{family}_interpret", config=config, kv_layout=kv_layout)
    return compiled(arrays, **how, **options)


def arrays_of(case, **how):
    """The arrays of a call, and those of the same call dequantized."""
    arrays = case.make(**how)
    return arrays if isinstance(case, Quantized) else (arrays, arrays)


def check(family, case, options):
    arrays, meant = arrays_of(case)
    tolerance = case.case.tolerance if isinstance(case, Quantized) else case.tolerance
    actual = attend(family, arrays, **options)
    options = {name: x for name, x in options.items() if name not in ("config", "kv_layout")}
    assert_close(actual, meant, tolerance, **options)


def each_call(calls, slow_calls=()):
    calls = [*calls, *slow(slow_calls)]
    return pytest.mark.parametrize(("family", "case", "options"), calls, ids=name_of)


def calls(family, options, *cases):
    return [(family, case, options) for case in cases]


every_option = partial(options_with_every_mask, sm_scale=-0.3, sliding_window=100)


def quantized(kv_dtype, *, per_tensor=False, case=mosaic_case, **sizes):
    return Quantized(case=case(**sizes), kv_dtype=kv_dtype, per_tensor=per_tensor)


def pages_of(page_size):
    return dict(page_size=page_size, pages_per_seq=256 // page_size)


few = partial(mosaic_case, seq_lens=(130, 0, 64, 1), pages_per_seq=9)
few_of_one_head = partial(few, num_kv_heads=1)
few_bytes = partial(quantized, case=few)
one_head = partial(mosaic_case, num_q_heads=2, num_kv_heads=1, pages_per_seq=16)
borders = partial(one_head, seq_lens=(0, 1, 63, 64, 65, 128, 200))
two_kv_heads = borders(num_q_heads=6, num_kv_heads=2)
SPLIT = dict(num_stages=3, num_programs=4, fixed_split_size=128)
BLOCKS_OF_32, SPLIT_OF_32 = (dict(config=dict(x, block_k=32)) for x in ({}, SPLIT))
# One program goes through all rows of a KV head. Some rows are too short to start the
# copies of the next one, and one has no tokens.
ROW_AFTER_ROW = one_head(seq_lens=(260, 0, 200, 33, 40, 300, 129), pages_per_seq=20)
ROW_AFTER_ROW_OF_INT8 = Quantized(case=ROW_AFTER_ROW, kv_dtype=INT8)


def one_program(num_stages, **options):
    return dict(config=dict(block_k=32, num_stages=num_stages, num_programs=1), **options)


@each_call(
    [
        # Two tiles of 32 rows.
        *calls(AMPERE, {}, few_of_one_head(num_q_heads=40), few_bytes(INT8, head_dim=80)),
        (AMPERE, few(**pages_of(2)), BLOCKS_OF_32),
        (AMPERE, few(head_dim=80, dtype="float16"), SPLIT_OF_32),
        (AMPERE, two_kv_heads, every_option(6, **SPLIT_OF_32)),
        (AMPERE, few_bytes(FP8), every_option(4)),
        (AMPERE, ROW_AFTER_ROW, one_program(3, sliding_window=150)),
    ],
    [
        (AMPERE, borders(), dict(sliding_window=1)),  # the newest key only
        (AMPERE, few(), dict(kv_layout="NH2D")),
        (AMPERE, ROW_AFTER_ROW_OF_INT8, one_program(2)),
        (AMPERE, one_head(seq_lens=(0, 1, 70) * 13), {}),
        *((AMPERE, few(), dict(config=dict(block_k=32, num_stages=n))) for n in (1, 4)),
        *((AMPERE, ROW_AFTER_ROW, one_program(n)) for n in (1, 2, 3)),
        (AMPERE, ROW_AFTER_ROW_OF_INT8, one_program(3)),
    ],
)  # fmt: skip
def test_decode_matches_the_oracle(family, case, options):
    check(family, case, options)


rows = partial(mosaic_case, num_kv_heads=1, pages_per_seq=26)
two_heads = partial(mosaic_case, num_q_heads=2, num_kv_heads=1, pages_per_seq=20)
bytes_of = partial(
    quantized, num_kv_heads=1, seq_lens=(100, 70, 17), q_lens=(40, 3, 17), pages_per_seq=7
)
ampere_bytes = partial(quantized, case=two_heads, page_size=4, seq_lens=(70, 9), q_lens=(40, 3))
ampere_columns = ampere_bytes(INT8, head_dim=512)  # which are divided among programs
MIXED = rows(num_kv_heads=2, seq_lens=(40, 100, 5, 17), q_lens=(40, 3, 0, 17))
LONG = rows(seq_lens=(400,), q_lens=(9,))
TWO_LONG = rows(seq_lens=(400, 100), q_lens=(9, 3))
MANY = rows(seq_lens=(100, 180), q_lens=(40, 20))
# K of 192 and V of 128 elements.
NARROW = NarrowCase(page_size=16, pages_per_seq=5, seq_lens=(70,), q_lens=(9,), num_q_heads=2)
NARROW = NARROW.on(HOPPER)
NARROW_ROWS = dataclasses.replace(NARROW, num_q_heads=4, seq_lens=(40, 70), q_lens=(40, 3))
GROUP_OF_20 = rows(num_q_heads=20, seq_lens=(70, 9), q_lens=(5, 3))
LARGE_PAGES = dict(page_size=128, pages_per_seq=1)
TREE = np.random.default_rng(0).random((3, 5, 5)) < 0.5
OF_20 = dict(tree_mask=TREE[:2], sinks=np.linspace(-1, 2, 20, dtype=np.float32))
SLOPES = np.linspace(0, 0.5, 4, dtype=np.float32)
ALL = every_option(4, sliding_window=30, soft_cap=5.0)
ONE_CONSUMER, ONE_Q_STAGE = dict(num_consumers=1), dict(num_q_stages=1)
TWO_WARPGROUPS = dict(block_q=128, num_warpgroups=2)


def ampere_sizes(head_dim, page_size, dtype="bfloat16"):
    pages = dict(page_size=page_size, pages_per_seq=-(-50 // page_size))
    return two_heads(head_dim=head_dim, dtype=dtype, **pages, seq_lens=(45,), q_lens=(20,))


@each_call(
    [
        (HOPPER, MIXED, {}),
        (HOPPER, LONG, dict(config=dict(num_programs=8))),
        (HOPPER, MIXED, dict(config=ONE_CONSUMER, kv_layout="HND")),
        (HOPPER, NARROW, dict(config=ONE_Q_STAGE)),
        (AMPERE, NARROW, dict(config=TWO_WARPGROUPS)),
        (HOPPER, GROUP_OF_20, OF_20),
        (AMPERE, GROUP_OF_20, dict(OF_20, config=dict(block_k=16))),
        (HOPPER, bytes_of(FP8, num_kv_heads=2, **LARGE_PAGES), dict(kv_layout="NH2D")),
        (AMPERE, MIXED, dict(config=TWO_WARPGROUPS)),
        (AMPERE, MANY, dict(sliding_window=30, soft_cap=5.0, alibi_slopes=SLOPES, causal=False)),
        (AMPERE, ampere_columns, dict(config=dict(block_k=16, num_programs=8))),
    ],
    [
        (HOPPER, MANY, dict(config=ONE_CONSUMER, sliding_window=30)),
        (HOPPER, bytes_of(INT8), dict(ALL, config=ONE_Q_STAGE)),
        (HOPPER, MIXED, dict(config=dict(num_consumers=3), sliding_window=30)),
        (AMPERE, LONG, dict(config=dict(num_programs=8, **TWO_WARPGROUPS))),
        (AMPERE, ampere_sizes(272, 4), {}),  # columns are 144 + 144
        (AMPERE, GROUP_OF_20, OF_20),
        (AMPERE, ampere_bytes(INT8), dict(config=TWO_WARPGROUPS)),
        *((family, TWO_LONG, dict(config=dict(fixed_split_size=128))) for family in CONFIGS),
        (HOPPER, NARROW_ROWS, dict(ALL, config=dict(ONE_Q_STAGE, fixed_split_size=64))),
        (AMPERE, NARROW_ROWS, dict(ALL, config=dict(fixed_split_size=64), kv_layout="NHD")),
        (AMPERE, ampere_columns, dict(config=dict(block_k=16))),
    ],
)  # fmt: skip
def test_ragged_matches_the_oracle(family, case, options):
    check(family, case, options)


LEFT = dict(seq_lens=(200, 130), num_kv_heads=1)
WINDOW = dict(sliding_window=70)


ONE_LEFT = rows(seq_lens=(180,), q_lens=(9,))


@each_call(
    [
        (AMPERE, quantized(INT8, **LEFT, **pages_of(16)), WINDOW),
        (HOPPER, ONE_LEFT, dict(sliding_window=30)),
    ],
    [
        (AMPERE, mosaic_case(**LEFT, **pages_of(16)), WINDOW),
        (AMPERE, ONE_LEFT, dict(sliding_window=30)),
    ],
)
def test_keys_left_of_the_window_are_not_read(family, case, options):
    arrays, _ = arrays_of(case)
    window, page_size = options["sliding_window"], arrays[1].shape[2]
    # The interpreter refuses this entry.
    others = without_tokens_left_of(window, arrays, page_size, entry=np.iinfo(np.int32).max)
    assert_same_bits(attend(family, others, **options), attend(family, arrays, **options))


def test_bits_depend_on_the_row_alone_under_a_split_size():
    q, k_pages, v_pages, tables, lens = one_head(seq_lens=(250, 3, 0, 129)).make()

    def of(rows):
        rows = np.array(rows)
        return attend(AMPERE, (q[rows], k_pages, v_pages, tables[rows], lens[rows]), config=SPLIT)

    # Row 2 has no tokens.
    assert_same_bits([x[2:] for x in of([3, 1, 0])], [x[:1] for x in of([0, 2, 2])])


@pytest.fixture
def converts_rows(monkeypatch):
    """Lets small calls convert rows before the kernel runs."""
    monkeypatch.setattr(converted_rows, "MIN_TILES", 1)
    monkeypatch.setattr(converted_rows, "MIN_LOGITS", 1)
    jax.clear_caches()  # the key of the cache does not hold the constants
    yield
    jax.clear_caches()


@each_call([(HOPPER, bytes_of(INT8), dict(ALL, config=ONE_Q_STAGE))])
def test_rows_that_are_converted_before_match_the_oracle(family, case, options, converts_rows):
    # 40 tokens of the first row; the others are left to the converter of the kernel.
    check(family, case, options)


@pytest.mark.slow
def test_which_rows_are_converted_before_changes_no_bit(monkeypatch, converts_rows):
    case = bytes_of(INT8, seq_lens=(150, 130, 30), q_lens=(20, 40, 7), pages_per_seq=10)
    arrays, _ = case.make()
    results = []
    for num_blocks in (0, 3, 100):  # of no row, of the first, of the first two
        room = 4 * arrays[1].shape[0] * 64 * arrays[0].shape[-1] * num_blocks
        monkeypatch.setattr(converted_rows, "MOST_BYTES", room)
        jax.clear_caches()
        results.append(attend(HOPPER, arrays, config=dict(num_consumers=1)))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_ampere_attends_to_keys_before_given_positions():
    case = two_heads(seq_lens=(70, 9), q_lens=(20, 3))
    names = ("q", "k_pages", "v_pages", "block_tables", "seq_lens", "cu_q_lens")
    made = dict(zip(names, map(jnp.asarray, case.make(poison=False)), strict=True))
    positions = 70 + jnp.arange(made["q"].shape[0]) % 7
    arrays = Arrays(**made, q_positions=positions, alibi_slopes=jnp.float32([0.5, 0.1]))
    options = LogitOptions(sm_scale=0.1, sliding_window=40)
    kernel = partial(sm80_ragged.ragged_paged_attention, config=CONFIGS[AMPERE], interpret=True)
    functions = (partial(f, options=options) for f in (kernel, xla.ragged_paged_attention))
    results = (jax.jit(f)(arrays) for f in functions)
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(np.float32(actual), np.float32(expected), atol=0.02)
