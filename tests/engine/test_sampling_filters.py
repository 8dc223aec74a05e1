"""The search for thresholds of top_k, top_p and min_p against sorting in NumPy."""

from __future__ import annotations

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import sampling_filters
from pallas_paged.engine.runner import modes_for
from pallas_paged.engine.sampler import SamplingMode, sample
from pallas_paged.engine.sampling_filters import find_limits, num_blocks
from pallas_paged.kernels.triton.sampling_search import search
from tests.support.marks import slow
from tests.support.promotion import strict_promotion
from tests.support.sampling_rows import metadata, race, sampling_implementations, take_rows

VOCAB, ROWS = 1536, 24
FILTERS = SamplingMode(draws=True, filters=2)
jit_sample = jax.jit(sample, static_argnames=("mode", "implementation"))


@pytest.fixture(autouse=True)
def _strict():
    with strict_promotion():
        yield


@partial(jax.jit, static_argnames="implementation")
def limits(logits, temperature, top_k, top_p, implementation):
    """The gap from which on tokens are dropped."""
    best = jnp.max(logits, axis=1)
    if implementation != "xla":
        interpret = implementation == "triton_interpret"
        sizes = dict(num_warps=2, num_loads=2) if interpret else {}
        return search(
            logits, best[:, None], temperature, top_k, top_p, interpret=interpret, **sizes
        )
    gap = best[:, None] - logits
    return find_limits(gap, top_k, top_p, temperature, 2)


def kept_by_sort(gap, top_k, top_p, temperature):
    """The largest gap that is kept, and by how little the last decision was made."""
    ordered, margin = np.sort(gap), 1.0
    ordered = ordered[np.isfinite(ordered)]
    if 0 < top_k < len(ordered):
        ordered = ordered[ordered <= ordered[top_k - 1]]
    if top_p < 1:
        weights = np.exp(-ordered.astype(np.float64) / temperature)
        less = np.array([weights[ordered < one].sum() for one in ordered]) / weights.sum()
        ordered, margin = ordered[less < np.float32(top_p)], np.min(abs(less - np.float32(top_p)))
    return ordered[-1], margin


def logits_of(kind, rng):
    x = rng.normal(size=(ROWS, VOCAB))
    scales = dict(flat=0.1, normal=2.0, peaked=8.0, tiny=1e-6)
    if kind in scales:
        x *= scales[kind]
    elif kind == "tied":
        x = np.round(2 * x)
    elif kind == "bf16":
        x = np.asarray(jnp.asarray(3 * x, jnp.bfloat16), np.float32)
    elif kind == "huge range":
        x *= 10 ** rng.uniform(-30, 30, x.shape)
    elif kind == "masked":
        x[rng.random(x.shape) < 0.7] = -np.inf
    elif kind == "equal":
        x[:] = 3.0
    return x.astype(np.float32)


KINDS = ["flat", "normal", "peaked", "tiny", "tied", "bf16", "huge range", "masked", "equal"]


@pytest.mark.parametrize("implementation", sampling_implementations())
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_tokens_that_sorting_keeps_are_kept(kind, implementation):
    """But for rows where rounding decides whether a token's predecessors sum to top_p."""
    rng = np.random.default_rng(KINDS.index(kind))
    logits, num_close = logits_of(kind, rng), 0
    gap = logits.max(axis=1, keepdims=True) - logits
    temperature = rng.choice([0.5, 1, 1, 3], ROWS).astype(np.float32)
    top_k = rng.choice([0, 0, 1, 2, 20, 50, 700, VOCAB, VOCAB + 9], ROWS).astype(np.int32)
    top_p = rng.choice([1, 0.01, 0.3, 0.9, 0.95, 0.999, 1 - 2**-24], ROWS).astype(np.float32)
    found = limits(logits, temperature, top_k, top_p, implementation)
    for row in range(ROWS):
        deepest, margin = kept_by_sort(gap[row], top_k[row], top_p[row], temperature[row])
        if margin < 1e-6:
            num_close += 1
            continue
        one = gap[row][np.isfinite(gap[row])]  # others are never drawn
        np.testing.assert_array_equal(one < found[row], one <= deepest)
    assert num_close <= ROWS // 4


@pytest.mark.parametrize("implementation", sampling_implementations())
@pytest.mark.parametrize("num_some", [0, 8, *slow([1])])
def test_rows_that_draw_among_greedy_ones_draw_what_they_draw_alone(num_some, implementation):
    rng = np.random.default_rng(num_some)
    logits, lens = logits_of("normal", rng), np.arange(ROWS, dtype=np.int32)
    draws = rng.permutation(ROWS) < num_some
    top_k = np.where(np.arange(ROWS) % 2, 100, 0)
    rows = metadata(ROWS, temperature=np.where(draws, 0.7, 0), top_k=top_k, top_p=0.8)
    by = {"implementation": implementation}
    together = np.asarray(jit_sample(logits, rows, lens, FILTERS, **by))
    np.testing.assert_array_equal(together[~draws], np.argmax(logits, axis=1)[~draws])
    for row in np.flatnonzero(draws):
        some = np.array([row])
        alone = jit_sample(logits[some], take_rows(some, rows), lens[some], FILTERS, **by)
        assert together[row] == alone


@pytest.mark.parametrize("implementation", sampling_implementations())
def test_blocks_that_lose_most_of_their_weight_race_with_what_is_left(implementation):
    """Each of five blocks keeps one token of 2048, and a hundredth of its weight or less."""
    rng = np.random.default_rng(0)
    logits = np.full((5, 2048), -3.0, np.float32)
    logits[np.arange(5), rng.integers(0, 2048, 5)] = rng.uniform(-1, 0, 5)
    logits = logits.ravel()
    rows, lens = metadata(ROWS, min_p=0.2), np.arange(ROWS)
    mode = SamplingMode(draws=True)
    tiled = np.tile(logits, (ROWS, 1))
    tokens = jit_sample(tiled, rows, lens, mode, implementation=implementation)
    weights = np.where(logits > -2, np.exp(logits.astype(np.float64)), 0)
    seeds = np.asarray(rows.seeds)
    wanted = [race(*row, weights) for row in zip(seeds, lens.astype(np.int32), strict=True)]
    np.testing.assert_array_equal(tokens, wanted)
    assert len(set(wanted)) == 5


@pytest.mark.parametrize(
    ("vocab_size", "kind"),
    [
        (1, "normal"),
        (2049, "bf16"),
        *slow([(1, "bf16"), (2049, "normal")]),
        *slow(itertools.product((3, 1000, 6007), ("normal", "bf16"))),
    ],
)
def test_kernels_draw_the_tokens_of_the_plain_passes(vocab_size, kind):
    rng = np.random.default_rng(vocab_size)
    logits = np.resize(logits_of(kind, rng), (ROWS, vocab_size))
    rows = metadata(
        ROWS,
        temperature=rng.choice([0, 0.5, 1, 2], ROWS),
        top_k=rng.choice([0, 1, 50, 900], ROWS),
        top_p=rng.choice([1, 0.3, 0.9], ROWS),
        min_p=rng.choice([0, 0.05], ROWS),
    )
    found = {
        name: jit_sample(logits, rows, np.arange(ROWS), FILTERS, implementation=name)
        for name in sampling_implementations()
    }
    for tokens in found.values():
        np.testing.assert_array_equal(tokens, found["xla"])


@pytest.mark.parametrize("mode", modes_for(None), ids=str)
def test_sampling_is_a_straight_line(mode):
    """In a loop that a GPU runs as a CUDA graph, a loop or a branch would give wrong tokens."""
    arrays = (logits_of("normal", np.random.default_rng(0)), metadata(ROWS))
    function = partial(sample, mode=mode, implementation="xla")
    program = str(jax.make_jaxpr(function)(*arrays, np.zeros(ROWS, np.int32)))
    assert not re.search(r"\b(while|scan|cond|sort|top_k)\[", program)


@pytest.mark.parametrize(
    ("vocab_size", "wanted"),
    [(128256, 256), (151936, 128), (50257, 29), (37, 37), (8, 8), (100003, 1), (50264, 8)],
)
def test_blocks_of_a_vocabulary_are_equal_and_can_be_shared_out(vocab_size, wanted):
    blocks = num_blocks(vocab_size)
    assert blocks == wanted and vocab_size % blocks == 0
    for num_devices in (2, 4, 8, 16):
        assert vocab_size % num_devices or blocks % num_devices == 0
    assert blocks <= sampling_filters._MAX_BLOCKS
