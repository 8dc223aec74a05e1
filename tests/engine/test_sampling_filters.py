"""The search for thresholds of top_k, top_p and min_p against sorting in NumPy."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import sampling_filters
from pallas_paged.engine.runner import modes_for
from pallas_paged.engine.sampler import (
    ALL_DRAW,
    ANY_TOP_K,
    FEW_DRAW,
    FEW_TOP_K,
    MIN_P,
    TOP_P,
    SamplingMode,
    sample,
)
from pallas_paged.engine.sampling_filters import (
    MAX_FEW,
    limit_count,
    limit_few,
    limit_mass,
    num_blocks,
)
from tests.support.promotion import strict_promotion
from tests.support.sampling_rows import metadata, take_rows

VOCAB, ROWS = 1536, 24
FILTERS = SamplingMode(draws=ALL_DRAW, filters=ANY_TOP_K)
jit_sample = jax.jit(sample, static_argnames="mode")


@pytest.fixture(autouse=True)
def _strict():
    with strict_promotion():
        yield


@jax.jit
def limits(depth, top_k, top_p):
    """The depth from which on tokens are dropped: by search, and where top_k is small by a look."""
    searched = limit_mass(depth, top_p, limit_count(depth, top_k))
    return searched, limit_few(depth, top_k, top_p)


def kept_by_sort(depth, top_k, top_p):
    """The deepest token that is kept, and by how little the last decision was made."""
    ordered, margin = np.sort(depth), 1.0
    ordered = ordered[np.isfinite(ordered)]
    if 0 < top_k < len(ordered):
        ordered = ordered[ordered <= ordered[top_k - 1]]
    if top_p < 1:
        weights = np.exp(-ordered.astype(np.float64))
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


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_tokens_that_sorting_keeps_are_kept(kind):
    """But for rows where rounding decides whether a token's predecessors sum to top_p."""
    rng = np.random.default_rng(KINDS.index(kind))
    logits, num_close = logits_of(kind, rng), 0
    depth = logits.max(axis=1, keepdims=True) - logits
    top_k = rng.choice([0, 0, 1, 2, 20, 50, 700, VOCAB, VOCAB + 9], ROWS).astype(np.int32)
    top_p = rng.choice([1, 0.01, 0.3, 0.9, 0.95, 0.999, 1 - 2**-24], ROWS).astype(np.float32)
    searched, looked_up = limits(depth, top_k, top_p)
    for row in range(ROWS):
        deepest, margin = kept_by_sort(depth[row], top_k[row], top_p[row])
        if margin < 1e-6:
            num_close += 1
            continue
        one = depth[row][np.isfinite(depth[row])]  # others are never drawn
        wanted = one <= deepest
        np.testing.assert_array_equal(one < searched[row], wanted)
        if 0 < top_k[row] <= MAX_FEW:
            np.testing.assert_array_equal(one < looked_up[row], wanted)
        else:
            assert looked_up[row] == np.inf
    assert num_close <= ROWS // 4


@pytest.mark.parametrize("num_some", [0, 1, 7, 8])
@pytest.mark.parametrize("filters", [ANY_TOP_K, TOP_P, FEW_TOP_K, MIN_P])
def test_few_rows_that_draw_among_greedy_ones_draw_what_they_draw_alone(filters, num_some):
    """They are taken out of the batch; larger modes give the same tokens."""
    rng = np.random.default_rng(num_some)
    logits, lens = logits_of("normal", rng), np.arange(ROWS, dtype=np.int32)
    draws = rng.permutation(ROWS) < num_some
    params = {MIN_P: {"min_p": 0.01}, FEW_TOP_K: {"top_k": 30, "top_p": 0.8}}
    params |= {TOP_P: {"top_p": 0.8}, ANY_TOP_K: {"top_k": 100, "top_p": 0.8}}
    rows = metadata(ROWS, temperature=np.where(draws, 0.7, 0), **params[filters])
    mode = SamplingMode(draws=FEW_DRAW, filters=filters)
    together = np.asarray(jit_sample(logits, rows, lens, mode))
    np.testing.assert_array_equal(together, jit_sample(logits, rows, lens, FILTERS))
    np.testing.assert_array_equal(together[~draws], np.argmax(logits, axis=1)[~draws])
    for row in np.flatnonzero(draws):
        some = np.array([row])
        assert together[row] == jit_sample(logits[some], take_rows(some, rows), lens[some], mode)


@pytest.mark.parametrize("mode", modes_for(None), ids=str)
def test_sampling_is_a_straight_line(mode):
    """In a loop that a GPU runs as a CUDA graph, a loop or a branch would give wrong tokens."""
    arrays = (logits_of("normal", np.random.default_rng(0)), metadata(ROWS))
    program = str(jax.make_jaxpr(partial(sample, mode=mode))(*arrays, np.zeros(ROWS, np.int32)))
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
