"""The Mosaic GPU kernels on a Hopper GPU, at real sizes: races, ordering and memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support import raw
from tests.support.attention_calls import assert_close, assert_same_bits, decode, ragged
from tests.support.attention_cases import Case, cumulated, mosaic_case
from tests.support.attention_oracle import relative_error
from tests.support.devices import implementations_here

if "mosaic_sm90" not in implementations_here():
    pytest.skip("needs a Hopper GPU and JAX 0.11", allow_module_level=True)

on_hopper = dict(implementation="mosaic_sm90")
EVERY_OPTION = dict(
    sm_scale=0.1,
    soft_cap=20.0,
    sliding_window=300,
    alibi_slopes=np.linspace(0, 0.1, 32, dtype=np.float32),
    sinks=np.linspace(-1, 2, 32, dtype=np.float32),
)
rows = partial(mosaic_case, num_q_heads=32, num_kv_heads=8, head_dim=128)


def up_to(most: int, num_seqs: int, seed: int = 0) -> tuple[int, ...]:
    """Numbers in [1, most]."""
    return tuple(np.random.default_rng(seed).integers(1, most + 1, num_seqs).tolist())


def one_of_each() -> Case:
    """Rows of 1 to 200 new tokens, in no order, some after a prefix."""
    rng = np.random.default_rng(1)
    q_lens = rng.permutation(200) + 1
    prefixes = rng.integers(0, 300, 200) * rng.integers(0, 2, 200)
    # Every third row has one token on its last page.
    prefixes[::3] += (1 - q_lens - prefixes)[::3] % 16
    q_lens, seq_lens = (tuple(x.tolist()) for x in (q_lens, q_lens + prefixes))
    return rows(q_lens=q_lens, seq_lens=seq_lens, pages_per_seq=33)


LENGTHS = (0, 1, *up_to(3000, 30))
DECODE = rows(seq_lens=LENGTHS, pages_per_seq=200)
LONG = rows(seq_lens=(20_000,), pages_per_seq=1280)  # split among many programs
FEW = rows(seq_lens=(9000, 700, 33), q_lens=(4, 40, 33), pages_per_seq=600)
MANY = rows(seq_lens=LENGTHS, q_lens=(0, 1, *up_to(300, 30, seed=2)), pages_per_seq=200)
PROMPTS = rows(seq_lens=(2048,) * 4, q_lens=(2048,) * 4, pages_per_seq=128)
SPLIT = dict(num_stages=2, fixed_split_size=512)
SPLIT_DECODE = pp.MosaicSm80DecodeConfig(block_k=64, num_programs=264, **SPLIT)
SPLIT_RAGGED = pp.MosaicSm90RaggedConfig(block_k=128, num_consumers=2, num_programs=132, **SPLIT)
CALLS = {
    "decode": (decode, DECODE, None),
    "long": (decode, LONG, None),
    "decode-split": (decode, DECODE, SPLIT_DECODE),
    "few": (ragged, FEW, None),
    "many": (ragged, MANY, None),
    "many-split": (ragged, MANY, SPLIT_RAGGED),
    "each length": (ragged, one_of_each(), None),
}
every_call = pytest.mark.parametrize("function, case, config", CALLS.values(), ids=[*CALLS])
options_or_none = pytest.mark.parametrize("options", [{}, EVERY_OPTION], ids=["plain", "options"])


def assert_same_as_xla(actual, arrays, **options):
    """`actual` equals the call on XLA in float32."""
    q, k_pages, v_pages, *rest = (jnp.asarray(x) for x in arrays)
    exact = (x.astype(jnp.float32) for x in (q, k_pages, v_pages))
    function = decode if len(rest) == 2 else ragged
    with jax.default_matmul_precision("highest"):
        out, lse = function(*exact, *rest, implementation="xla", **options)
    lse = np.asarray(lse)
    empty = np.isneginf(lse)
    np.testing.assert_array_equal(np.isneginf(actual[1]), empty)
    assert relative_error(actual[0], np.asarray(out, np.float64)) <= 5e-3
    np.testing.assert_allclose(np.asarray(actual[1])[~empty], lse[~empty], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [7, 64, 130])
def test_trees(size):
    rows_of_q = dict(seq_lens=(200, 90, 131), q_lens=(33, 90, 130), num_tokens=260)
    case = mosaic_case(num_q_heads=8, pages_per_seq=13, **rows_of_q)
    mask = np.random.default_rng(size).random((3, size, size)) < 0.5
    arrays = case.make()
    actual = ragged(*arrays, tree_mask=mask, **on_hopper)
    assert_close(actual, arrays, case.tolerance, tree_mask=mask)


@jax.jit
def same_bits(a, b):
    """`bool[]`; false if anything is NaN, as there must be none."""
    return jnp.all(jnp.array([jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)]))


@options_or_none
@every_call
def test_equals_xla_and_1000_launches_give_the_same_bits(function, case, config, options):
    arrays = case.make()
    placed = jax.device_put(arrays)
    call = partial(function, *placed, config=config, **on_hopper, **options)
    first = call()
    assert_same_as_xla(first, arrays, **options)
    same = [same_bits(call(), first) for _ in range(1000)]  # back to back
    assert np.all(jax.device_get(same))


@pytest.mark.parametrize("options", [{}, dict(sliding_window=1030)], ids=["all keys", "window"])
def test_under_a_split_size_a_row_has_its_bits_wherever_it_begins(options):
    # The row has one tile at some places and two at others; its window begins in several blocks.
    case = rows(q_lens=(30,), seq_lens=(3100,), pages_per_seq=200)
    q, k_pages, v_pages, tables, lens, _ = case.make()
    count = 9
    table, length = np.repeat(tables, count, axis=0), np.repeat(lens, count)
    queries = np.concatenate([q] * count)
    arrays = queries, k_pages, v_pages, table, length, cumulated([30] * count)
    out, lse = ragged(*arrays, config=SPLIT_RAGGED, **on_hopper, **options)
    alone = ragged(*case.make(), config=SPLIT_RAGGED, **on_hopper, **options)
    for state in zip(np.split(out, count), np.split(lse, count), strict=True):
        assert_same_bits(state, alone)


def test_prompts_equal_triton():
    arrays = PROMPTS.make()
    actual = ragged(*arrays, **on_hopper)
    out, lse = ragged(*arrays, implementation="triton")
    assert relative_error(actual[0], np.asarray(out, np.float64)) <= 5e-3
    np.testing.assert_allclose(actual[1], lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scan", [False, True], ids=["one after another", "scan"])
@pytest.mark.parametrize("name", ["decode", "decode-split", "many-split"])
def test_many_calls_in_one_program(name, scan):
    """As in a model, where XLA puts the calls in CUDA graphs."""
    function, case, config = CALLS[name]
    q, *cache = jax.device_put(case.make())
    attend = raw.paged_attention if function is decode else raw.ragged_paged_attention
    attend = partial(attend, config=config, **on_hopper)

    @jax.jit
    def layers(q, *cache):
        if scan:
            return jax.lax.scan(lambda q, _: (attend(q, *cache), None), q, length=12)[0]
        for _ in range(12):
            q = attend(q, *cache)
        return q

    expected = q
    for _ in range(12):
        expected = jax.jit(attend)(expected, *cache)
    for _ in range(5):  # XLA makes the graph after a few runs
        assert_same_bits([layers(q, *cache)], [expected])


def test_both_kernels_beside_each_other():
    """The kernels must not share shared memory, partial states or work counters."""
    one, other = jax.device_put(DECODE.make()), jax.device_put(FEW.make())

    @jax.jit
    def both(one, other):
        return raw.paged_attention(*one, **on_hopper), raw.ragged_paged_attention(
            *other, **on_hopper
        )

    expected = decode(*one, **on_hopper)[0], ragged(*other, **on_hopper)[0]
    for _ in range(20):
        assert_same_bits(both(one, other), expected)
