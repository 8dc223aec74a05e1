"""The Mosaic GPU decode kernel and its merge: interpreted on a CPU, and lowered for a GPU."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.kernels.decode_plan import DecodePlan
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import decode_merge
from pallas_paged.kernels.mosaic.decode import MosaicDecodeConfig
from pallas_paged.kernels.mosaic.decode_merge import (
    MAX_STATES_PER_STEP,
    block_sizes,
    merge_decode,
)
from pallas_paged.kernels.mosaic.decode_shares import row_of_unit
from pallas_paged.kernels.mosaic.ops import Partials
from tests.support.attention_calls import assert_close, assert_same_bits, decode
from tests.support.attention_cases import mosaic_case
from tests.support.lowering import few_with_every_level, named, pairwise
from tests.support.marks import slow
from tests.support.programs import Program

# Programs that have several rows, and rows that several programs share.
CONFIG = MosaicDecodeConfig(block_k=64, num_stages=2, num_programs=6)
SPLIT = MosaicDecodeConfig(block_k=64, num_stages=3, num_programs=4, fixed_split_size=128)
BORDERS = (0, 1, 63, 64, 65, 128, 200)
rows_of_256 = functools.partial(
    mosaic_case, num_q_heads=2, num_kv_heads=1, seq_lens=BORDERS, pages_per_seq=16
)

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


interpreted = functools.partial(decode, implementation="mosaic_gpu_interpret")


def check(case, config=CONFIG, **options):
    arrays = case.make()
    actual = interpreted(*arrays, config=config, **options)
    assert_close(actual, arrays, case.tolerance, **options)


@pytest.mark.parametrize("group", [40, *slow([1, 3, 4, 8, 16, 67])])
def test_groups(group):
    check(mosaic_case(num_q_heads=2 * group, seq_lens=(130, 0, 64), pages_per_seq=9))


@pytest.mark.parametrize(
    ("page_size", "block_k"),
    [(8, 64), *slow([(1, 64), (4, 128), (16, 128), (128, 64), (256, 128)])],
)
def test_page_sizes(page_size, block_k):
    config = MosaicDecodeConfig(block_k=block_k, num_stages=2, num_programs=4)
    check(rows_of_256(page_size=page_size, pages_per_seq=256 // page_size), config)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(256, "float16"), *slow([(128, "float16"), (192, "bfloat16"), (256, "bfloat16")])],
)
def test_head_dims(head_dim, dtype):
    check(mosaic_case(head_dim=head_dim, seq_lens=(130, 64, 1), pages_per_seq=9, dtype=dtype))


@pytest.mark.parametrize(
    "seq_lens",
    [tuple(itertools.islice(itertools.cycle((0, 1, 70)), 40)), *slow([((0, 0, 0),), ((1024,),)])],
    ids=["many", "empty", "one"],
)
def test_rows(seq_lens):
    check(mosaic_case(num_q_heads=2, num_kv_heads=1, seq_lens=seq_lens, pages_per_seq=64))


# The newest key only; a window from the first key of a block on; one from within a block.
@pytest.mark.parametrize("window", [1, *slow([64, 73])])
def test_windows(window):
    check(rows_of_256(), sliding_window=window)


def every_option(num_q_heads):
    return dict(
        sm_scale=-0.3,
        soft_cap=3.0,
        sliding_window=100,
        alibi_slopes=np.linspace(0.01, 0.3, num_q_heads, dtype=np.float32),
        sinks=np.linspace(-1, 2, num_q_heads, dtype=np.float32),
    )


@pytest.mark.parametrize("name", slow(["alibi_slopes", "sm_scale"]))
def test_option_alone(name):  # each changes how logits are computed
    check(rows_of_256(), **{name: every_option(2)[name]})


@pytest.mark.parametrize("seq_lens", slow([(BORDERS,), ((0, 0),)]), ids=["rows", "empty"])
def test_splits(seq_lens):
    check(rows_of_256(seq_lens=seq_lens), SPLIT)


@pytest.mark.parametrize("config", [SPLIT, *slow([CONFIG])], ids=["splits", "shares"])
def test_options_together(config):
    check(rows_of_256(num_q_heads=6, num_kv_heads=2), config, **every_option(6))


@pytest.mark.parametrize("options", slow([{"sliding_window": 70}, {}]), ids=["window", "all keys"])
def test_data_outside_a_row_changes_no_bit(options):
    options |= dict(config=CONFIG)
    clean = interpreted(*rows_of_256().make(poison=False), **options)
    assert_same_bits(interpreted(*rows_of_256().make(), **options), clean)


@pytest.mark.parametrize("page_size", [16, *slow([1, 4])])
def test_keys_left_of_the_window_are_not_read(page_size):
    lens = (200, 130)
    arrays = rows_of_256(seq_lens=lens, page_size=page_size, pages_per_seq=256 // page_size).make()
    q, k_pages, v_pages, tables, lens = arrays
    k, v, others = k_pages.copy(), v_pages.copy(), tables.copy()
    for row, left in enumerate(lens - 70):
        pages, places = np.divmod(np.arange(left), page_size)
        k[:, tables[row, pages], places] = v[:, tables[row, pages], places] = np.nan
        others[row, : left // page_size] = np.iinfo(np.int32).max  # the interpreter refuses this
    options = dict(config=CONFIG, sliding_window=70)
    assert_same_bits(interpreted(q, k, v, others, lens, **options), interpreted(*arrays, **options))


def test_bits_depend_on_the_row_alone_under_a_split_size():
    arrays = rows_of_256(seq_lens=(250, 3, 0, 129)).make()
    q, k_pages, v_pages, tables, lens = arrays

    def of(rows):
        rows = np.array(rows)
        return interpreted(q[rows], k_pages, v_pages, tables[rows], lens[rows], config=SPLIT)

    assert_same_bits([x[-1:] for x in of([3, 2, 0])], of([0]))


@pytest.mark.parametrize(
    ("config", "page_size"),
    [(CONFIG, 2), *slow([(SPLIT, 16)])],  # test_races.py has larger pages without splits
    ids=["small pages", "splits"],
)
def test_no_races(config, page_size, capfd):
    sizes = dict(page_size=page_size, pages_per_seq=256 // page_size)
    case = rows_of_256(seq_lens=(200, 0, 70, 65), **sizes)
    jax.clear_caches()  # JAX's cache key does not hold the interpreter's parameters
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        check(case, config)
    jax.clear_caches()
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("num_seqs", [1, 2, 15, 16, 17, 64, 255, 257, 300])
def test_the_row_of_a_unit(num_seqs):
    ends = np.cumsum(np.random.default_rng(num_seqs).integers(0, 3, num_seqs)).astype(np.int32)
    ends[-1] += 1
    units = np.arange(ends[-1], dtype=np.int32)
    rows = jax.jit(jax.vmap(row_of_unit, in_axes=(0, None)))(units, ends)
    np.testing.assert_array_equal(rows, np.searchsorted(ends, units, side="right"))


def plan_of(num_programs, fixed_split_size=None):
    return DecodePlan(
        options=LogitOptions(sm_scale=1.0),
        block_k=64,
        fixed_split_size=fixed_split_size,
        num_seqs=1,
        num_programs=num_programs,
        num_partials=0,
    )


@pytest.mark.parametrize("head_dim", [192, *slow([64, 256])])
def test_merge_of_many_slots_in_several_steps(head_dim):
    rng = np.random.default_rng(head_dim)
    num_slots = 2 * MAX_STATES_PER_STEP + 5
    outs = rng.standard_normal((1, num_slots, 8, head_dim)).astype(np.float32)
    lses = (2 * rng.standard_normal((1, num_slots, 8))).astype(np.float32)
    outs[:, :, 3:] = lses[:, :, 3:] = np.nan  # columns beyond the heads
    outs[:, -1], lses[:, -1] = np.nan, np.nan  # a slot that no program writes
    units = jnp.array([num_slots - 1], jnp.int32)
    sinks = np.float32([1.0, -3.0, 12.0])
    call = functools.partial(
        merge_decode,
        head_dim=head_dim,
        plan=plan_of(num_programs=num_slots - 1),
        num_q_heads=3,
        dtype=jnp.float32,
        interpret=True,
    )
    out, lse = jax.jit(call)(Partials(out=outs, lse=lses), units, sinks)
    logits = np.concatenate([lses[0, :-1, :3], sinks[None]]).astype(np.float64)
    weights = np.exp(logits - logits.max(axis=0))
    total = weights.sum(axis=0)
    expected = np.einsum("sh,shd->hd", weights[:-1], outs[0, :-1, :3]) / total[:, None]
    np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse[0], logits.max(axis=0) + np.log(total), rtol=1e-5)


@pytest.mark.parametrize(
    ("group", "block_h", "num_tiles"),
    [(4, 8, 1), (3, 6, 1), (12, 8, 2), *slow([(8, 4, 1), (6, 4, 1)])],
)
def test_merge_of_several_heads_by_one_program(monkeypatch, group, block_h, num_tiles):
    rng = np.random.default_rng(group)
    num_kv_heads, head_dim, num_programs, ends = 2, 32, 3, np.int32([4, 4, 9])
    monkeypatch.setattr(decode_merge, "block_sizes", lambda *_, **__: (2, block_h))
    plan, rows = plan_of(num_programs), range(len(ends))
    shape = num_kv_heads * num_tiles, num_programs + len(ends), 16
    lses = rng.standard_normal(shape).astype(np.float32)
    outs = rng.standard_normal((*shape, head_dim)).astype(np.float32)
    sinks = rng.standard_normal(num_kv_heads * group).astype(np.float32)
    call = functools.partial(
        merge_decode,
        plan=plan,
        num_q_heads=num_kv_heads * group,
        head_dim=head_dim,
        head_tiles=(num_tiles, group // num_tiles),
        dtype=jnp.float32,
        interpret=True,
    )
    out, lse = jax.jit(call)(Partials(out=outs, lse=lses), jnp.array(ends), sinks)

    def of_heads(x):
        """Return the states `[.., N, ..]` by query head and partial state."""
        x = np.moveaxis(x[:, :, : group // num_tiles], 2, 1)
        return x.reshape(num_kv_heads * group, *x.shape[2:]).astype(np.float64)

    for row in rows:
        first, count = map(int, plan.partials_of_row(jnp.int32(row), jnp.array(ends)))
        states = slice(first, first + count)
        if not count:
            assert not out[row].any() and np.isneginf(lse[row]).all()
            continue
        weights = np.exp(of_heads(lses)[:, states])
        total = weights.sum(axis=1) + np.exp(sinks)
        expected = np.einsum("hs,hsd->hd", weights, of_heads(outs)[:, states]) / total[:, None]
        np.testing.assert_allclose(out[row], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[row], np.log(total), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_q_heads", [1, 7, 32])
@pytest.mark.parametrize("num_seqs", [1, 8, 64, 4096])
def test_block_sizes_of_the_merge(num_seqs, num_q_heads):
    sizes = dict(num_seqs=num_seqs, num_q_heads=num_q_heads)
    for num_programs, split_size in itertools.product((1, 33, 264), (None, 128)):
        span = num_programs // num_seqs + 1
        block_s, block_h = block_sizes(plan_of(num_programs, split_size), span=span, **sizes)
        assert num_q_heads % block_h == 0
        assert block_s * block_h <= MAX_STATES_PER_STEP
        assert split_size is None or block_s == 8


def lower(num_q_heads, config=CONFIG, *, num_seqs=4, options=None, **sizes):
    """A decode call lowered for CUDA."""
    sizes |= dict(num_q_heads=num_q_heads, num_seqs=num_seqs, max_kv_len=2048)
    options = dict(config=config) | (options or {})
    how = dict(function="decode", implementation="mosaic_gpu", num_pages=100)
    return Program(**how, **sizes, options=options).text()


LOWERED = pairwise(
    group=(1, 5, 64, 130),
    head_dim=(64, 128, 192, 256),
    page_size=(1, 8, 256),
    dtype=("bfloat16", "float16"),
)


@pytest.mark.parametrize("row", few_with_every_level(LOWERED), ids=named)
def test_lowers_for_cuda(row):
    sizes = {name: row[name] for name in ("head_dim", "page_size", "dtype")}
    text = lower(2 * row["group"], num_kv_heads=2, **sizes)
    assert "paged_decode" in text and "paged_decode_merge" in text


@pytest.mark.parametrize(
    ("block_k", "fixed_split_size"), [(64, 256), (128, None), *slow([(64, None), (128, 256)])]
)
def test_lowers_for_cuda_with_every_option(block_k, fixed_split_size):
    config = MosaicDecodeConfig(
        block_k=block_k, num_stages=3, num_programs=132, fixed_split_size=fixed_split_size
    )
    text = lower(12, config, num_kv_heads=2, options=every_option(12))
    assert "paged_decode_merge" in text


@pytest.mark.parametrize("num_seqs", [1, 300, *slow([17])])
def test_lowers_for_any_number_of_rows(num_seqs):
    assert "paged_decode_merge" in lower(32, head_dim=64, num_seqs=num_seqs)
