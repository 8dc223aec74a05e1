"""With a fixed split size the bits of a row depend on that row alone; without one they do not."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.support import attention_calls, raw
from tests.support.attention_calls import assert_close, jitted
from tests.support.attention_cases import Case, cumulated
from tests.support.attention_configs import config_of
from tests.support.devices import implementations_here
from tests.support.marks import slow

# Without fusion emitters, XLA's CPU code for the same sum may depend on the shapes around it.
OPTIONS_OF_XLA = {}
if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11):
    OPTIONS_OF_XLA["xla_cpu_use_fusion_emitters"] = True
decode = jitted(raw.paged_attention, OPTIONS_OF_XLA)
ragged = jitted(raw.ragged_paged_attention, OPTIONS_OF_XLA)

OPTIONS = dict(soft_cap=3.0, sliding_window=90, sinks=np.float32([1.0, -1.0, 0.0, 2.0]))
OPTIONS |= dict(alibi_slopes=np.float32([0.05, 0.02, 0.01, 0.0]))
DECODE = Case(head_dim=16, pages_per_seq=17, seq_lens=(130, 3, 64, 0, 33, 97))
CASES = {  # the ragged rows have one tile of queries, several, none; with and without a prefix
    "decode": DECODE,
    "ragged": replace(DECODE, q_lens=(5, 3, 20, 0, 1, 8)),
}
EMPTY_ROW = 3
EVERYTHING = tuple(range(6))  # rows of a batch, by their index in the case


def results(rows, arrays, shorter=False, padding=0, **call) -> Iterator[tuple[int, tuple]]:
    """Yields (index of the row in the case, its (out, lse)) for `rows` of a case, by their index.

    With `shorter` rows of odd index have half of their tokens. `padding` is a number of empty rows
    at the end; in a ragged batch, of query tokens of no row.
    """
    q, k_pages, v_pages, tables, lens, *offsets = arrays
    rows = np.array(rows if offsets else [*rows, *[EMPTY_ROW] * padding])
    short = shorter & (rows % 2 == 1)
    lens = np.where(short, lens[rows] // 2, lens[rows]).astype(np.int32)
    pages = k_pages, v_pages, tables[rows], lens
    if offsets:
        [cu] = offsets
        all_q_lens = np.diff(cu)[rows]
        q_lens = np.where(short, all_q_lens // 2, all_q_lens)
        tokens = [cu[row] + np.arange(n) for row, n in zip(rows, q_lens, strict=True)]
        # As many tokens in all, so that shorter rows share a program.
        padding += all_q_lens.sum() - q_lens.sum()
        packed = np.concatenate([q[np.concatenate(tokens)], np.full_like(q[:padding], np.nan)])
        cu = cumulated(q_lens)
        found = ragged(packed, *pages, cu, **call)
    else:
        cu, found = np.arange(len(rows) + 1), decode(q[rows], *pages, **call)
    out, lse = map(np.asarray, found)
    for row, begin, end in zip(rows, cu, cu[1:], strict=False):
        yield row, (out[begin:end], lse[begin:end])


@pytest.fixture(params=[name for name in implementations_here() if name != "xla"])
def implementation(request):
    """Every implementation on this machine that takes a config."""
    return request.param


@pytest.fixture
def case(kernel, implementation):
    return CASES[kernel].on(implementation)


@pytest.fixture
def call(kernel, implementation):
    """Keywords of a call with a fixed split size."""
    config = config_of(implementation, ragged=kernel == "ragged", split=True)
    return dict(implementation=implementation, config=config)


def same_bits(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def assert_same_rows(found, expected, rows=EVERYTHING):
    """Those of `rows` among the results that are found have the expected bits."""
    for row, state in found:
        assert row not in rows or same_bits(state, expected[row]), row


OTHER_OPTIONS = {"every option": OPTIONS, "not causal": dict(causal=False)}
OTHER_OPTIONS["no config"] = dict(fixed_split_size=64, config=None)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        *itertools.product(CASES, [""]),
        *slow(x for x in itertools.product(CASES, OTHER_OPTIONS) if x != ("decode", "not causal")),
    ],
)
def test_bits_do_not_depend_on_the_rest_of_the_batch(kernel, name, case, call):
    """Rows have the same bits in another order, beside shorter rows and beside empty ones.

    And in another shape: as one of more than 32 rows with a wider table, or alone.
    """
    options = OTHER_OPTIONS.get(name, {})
    arrays, call = case.make(), call | options
    expected = dict(results(EVERYTHING, arrays, **call))
    together = [np.concatenate(x) for x in zip(*expected.values(), strict=True)]
    assert_close(together, arrays, case.tolerance, **{} if name == "no config" else options)
    assert_same_rows(results(EVERYTHING[::-1], arrays, **call), expected)
    shorter = results(EVERYTHING, arrays, shorter=True, **call)
    assert_same_rows(shorter, expected, EVERYTHING[::2])
    *rest, lens = arrays[:5]
    for row in EVERYTHING:
        alone = np.where(np.arange(len(lens)) == row, lens, 0)
        found = results(EVERYTHING, (*rest, alone, *arrays[5:]), **call)
        assert_same_rows(found, expected, [row])
    if kernel == "decode" or name:
        wide = replace(case, pages_per_seq=40).make()
        found = results((2, 0, 0, 5, *EVERYTHING * 5), wide, padding=20, **call)
        assert_same_rows(found, expected)
    if name:
        assert_same_rows(results((0,), arrays, **call), expected)


@pytest.mark.parametrize("kernel", ["decode", *slow(["ragged"])])
def test_bits_depend_on_the_batch_without_a_split_size(kernel, case, call):
    function = getattr(attention_calls, kernel)
    call["config"] = replace(call["config"], fixed_split_size=None)
    *rest, lens = case.make()[:5]
    offsets = case.make()[5:]
    together = function(*rest, lens, *offsets, **call)
    alone = function(*rest, np.where(np.arange(len(lens)), 0, lens), *offsets, **call)
    assert not same_bits(alone[0][0], together[0][0])
