"""The search for thresholds of top_k, top_p and min_p against sorting in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import sampling_filters
from pallas_paged.engine.sampler import SamplingMode, sample
from pallas_paged.engine.sampling_filters import narrow, num_blocks, start_bracket
from tests.engine.test_sampler import metadata, take_rows
from tests.support.promotion import strict_promotion

VOCAB, ROWS = 1536, 24
FILTERS = SamplingMode(draws=True, filters=True)
jit_sample = jax.jit(sample, static_argnames="mode")


@pytest.fixture(autouse=True)
def _strict():
    with strict_promotion():
        yield


@jax.jit
def search(depth, top_k, top_p, tolerance):
    """The bracket after the search; all rows are active."""
    bracket = start_bracket(VOCAB, top_k, top_p, jnp.ones(top_k.shape, bool))
    return narrow(depth, bracket, tolerance)


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
    rough = search(depth, top_k, top_p, np.float32(2**-10))
    exact = search(depth, top_k, top_p, np.float32(0))
    for row in range(ROWS):
        deepest, margin = kept_by_sort(depth[row], top_k[row], top_p[row])
        if margin < 1e-6:
            num_close += 1
            continue
        one = depth[row][np.isfinite(depth[row])]  # others are never drawn
        wanted, found = one <= deepest, one < exact.far[row]
        np.testing.assert_array_equal(found, wanted)
        assert exact.near[row] == exact.far[row]
        assert np.all(wanted[one <= rough.near[row]])
        assert not np.any(wanted[one >= rough.far[row]])
    assert num_close <= ROWS // 4


def test_a_search_stops_early_where_little_probability_is_left_to_decide():
    logits = logits_of("flat", np.random.default_rng(5))
    depth = logits.max(axis=1, keepdims=True) - logits
    top_k, top_p = np.zeros(ROWS, np.int32), np.full(ROWS, 0.7, np.float32)
    bracket = search(depth, top_k, top_p, np.float32(0.05))
    weights = np.exp(-depth)
    kept = np.sum(np.where(depth <= bracket.near[:, None], weights, 0), axis=1)
    undecided = (depth > bracket.near[:, None]) & (depth < bracket.far[:, None])
    assert np.all(np.sum(np.where(undecided, weights, 0), axis=1) <= 0.05 * kept)
    assert np.sum(undecided.any(axis=1)) > ROWS // 2


def test_a_rough_search_changes_no_token(monkeypatch):
    """Also where a token is drawn of which it is not known at first whether it is kept."""
    rng = np.random.default_rng(7)
    logits = logits_of("flat", rng)
    rows = metadata(ROWS, top_p=rng.uniform(0.1, 0.9, ROWS))
    lens = np.arange(ROWS, dtype=np.int32)
    tokens = {}
    for tolerance in (0.0, 2**-10, 0.5):
        monkeypatch.setattr("pallas_paged.engine.sampler._TOLERANCE", tolerance)
        draw = jax.jit(lambda *args: sample(*args, FILTERS))
        tokens[tolerance] = np.asarray(draw(logits, rows, lens))
    np.testing.assert_array_equal(tokens[0.0], tokens[2**-10])
    np.testing.assert_array_equal(tokens[0.0], tokens[0.5])


@pytest.mark.parametrize("others", [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 40}])
@pytest.mark.parametrize("num_some", [0, 1, 8, 9, ROWS])
def test_a_few_rows_that_filter_draw_what_they_draw_alone(others, num_some):
    """They are taken out of the batch."""
    rng = np.random.default_rng(num_some)
    logits, lens = logits_of("normal", rng), np.arange(ROWS, dtype=np.int32)
    is_one = rng.permutation(ROWS) < num_some
    values = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    values = {
        name: np.where(is_one, one, others.get(name, value))
        for (name, value), one in zip(values.items(), (0.7, 30, 0.8, 0.01), strict=True)
    }
    rows = metadata(ROWS, **values)
    together = np.asarray(jit_sample(logits, rows, lens, FILTERS))
    for row in range(ROWS):
        some = np.array([row])
        alone = jit_sample(logits[some], take_rows(some, rows), lens[some], FILTERS)
        assert together[row] == alone[0]


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
