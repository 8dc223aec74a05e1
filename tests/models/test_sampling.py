"""Sampling: greedy, the filters against NumPy, distributions, same key same token, bad values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import RowSampling, hash_prompt, sample, sample_key

VOCAB = 12
LOGITS = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
DRAWS = 4000
jit_sample = jax.jit(sample)


def kept_tokens(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The probabilities after each filter in turn; 0 for a filtered token."""
    x = logits.astype(np.float64) / temperature
    order = list(np.argsort(-x, kind="stable"))
    if top_k:
        order = order[:top_k]
    probs = np.exp(x[order] - x[order].max())
    probs /= probs.sum()
    if top_p < 1:
        order = [token for i, token in enumerate(order) if probs[:i].sum() < top_p]
        probs = probs[: len(order)] / probs[: len(order)].sum()
    keep = probs >= min_p * probs.max()
    probs = probs * keep / (probs * keep).sum()
    dense = np.zeros(logits.size)
    dense[order] = probs
    return dense


def draw(params, count=DRAWS, seed=0, logits=LOGITS):
    keys = jax.random.split(jax.random.key(seed), count)
    return np.asarray(jit_sample(np.tile(logits, (count, 1)), keys, params))


def test_none_is_greedy_and_needs_no_key():
    logits = np.random.default_rng(1).normal(size=(5, VOCAB)).astype(np.float32)
    np.testing.assert_array_equal(jit_sample(logits, None, None), np.argmax(logits, axis=1))
    assert "random" not in str(jax.make_jaxpr(lambda x: sample(x, None, None))(logits))
    tied = np.zeros((1, VOCAB), np.float32)
    tied[0, [3, 7]] = 1.0
    assert jit_sample(tied, None, None).tolist() == [3]


def test_temperature_zero_is_greedy_with_any_filter():
    params = RowSampling.create(8, temperature=0.0, top_k=0, top_p=0.5, min_p=0.5)
    assert set(draw(params, 8)) == {int(LOGITS.argmax())}


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.15},
    ],
)
def test_draws_follow_the_filtered_distribution(values):
    wanted = kept_tokens(LOGITS, **values)
    counts = np.bincount(draw(RowSampling.create(DRAWS, **values)), minlength=VOCAB)
    assert not np.any(counts[wanted == 0]), "a token that was filtered out was drawn"
    sigma = np.sqrt(DRAWS * wanted * (1 - wanted))
    assert np.all(np.abs(counts - DRAWS * wanted) <= 5 * sigma + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_filters_apply_row_by_row(seed):
    rng = np.random.default_rng(seed)
    rows = {
        "temperature": rng.choice([0.3, 1.0, 2.5], DRAWS),
        "top_k": rng.choice([0, 1, 4, VOCAB, 1000], DRAWS),
        "top_p": rng.choice([0.05, 0.6, 1.0], DRAWS),
        "min_p": rng.choice([0.0, 0.3], DRAWS),
    }
    tokens = draw(RowSampling.create(DRAWS, **{k: v.tolist() for k, v in rows.items()}))
    cache = {}
    for row, token in enumerate(tokens):
        values = tuple(rows[name][row] for name in rows)
        if values not in cache:
            cache[values] = kept_tokens(LOGITS, *values)
        assert cache[values][token] > 0, dict(zip(rows, values, strict=True))


def test_off_values_change_nothing():
    plain = draw(RowSampling.create(DRAWS, temperature=1.3))
    off = RowSampling.create(DRAWS, temperature=1.3, top_k=0, top_p=1.0, min_p=0.0)
    np.testing.assert_array_equal(draw(off), plain)


def test_a_token_depends_on_its_key_not_on_the_batch():
    keys = jax.random.split(jax.random.key(3), 6)
    logits = np.random.default_rng(3).normal(size=(6, VOCAB)).astype(np.float32)
    together = jit_sample(logits, keys, RowSampling.create(6, temperature=1.0, top_p=0.9))
    for row in range(6):
        one = slice(row, row + 1)
        alone = jit_sample(logits[one], keys[one], RowSampling.create(1, top_p=0.9))
        assert alone[0] == together[row]
    assert len(set(draw(RowSampling.create(50), 50, seed=1))) > 1


def test_ties_with_the_last_kept_token_are_kept():
    logits = np.array([0.0, 5.0, 5.0, 5.0, -1.0], np.float32)
    for values in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.99}):
        tokens = draw(RowSampling.create(300, **values), 300, logits=logits)
        assert set(tokens) == {1, 2, 3}


def test_tiny_and_huge_temperatures_stay_finite():
    params = RowSampling.create(2, temperature=[1e-38, 1e38], top_p=0.9)
    tokens = draw(params, 2)
    assert tokens[0] == LOGITS.argmax() and 0 <= tokens[1] < VOCAB


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_a_row_without_a_finite_best_logit_gives_minus_one(bad, temperature):
    logits = np.tile(LOGITS, (2, 1))
    logits[0, slice(None) if bad == -np.inf else 4] = bad
    params = None
    if temperature is not None:
        params = RowSampling.create(2, temperature=temperature, top_k=2, top_p=0.9, min_p=0.1)
    keys = jax.random.split(jax.random.key(0), 2)
    tokens = jit_sample(logits, keys, params)
    assert tokens[0] == -1 and 0 <= tokens[1] < VOCAB


def test_masked_logits_are_never_drawn():
    logits = LOGITS.copy()
    logits[[0, 5]] = -np.inf
    assert not set(draw(RowSampling.create(500, temperature=50.0), 500, logits=logits)) & {0, 5}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 must be finite and not negative"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": [1.0, 1.0, 1.0]}, r"must be one value or 2 values"),
        ({"temperature": "hot"}, "must be numbers"),
        ({"top_k": -1}, "top_k=-1 must not be negative"),
        ({"top_k": 1.5}, "must be integers"),
        ({"top_k": 2**31}, "top_k=2147483648 must be integers of 32 bits"),
        ({"top_k": -(2**32)}, "top_k=-4294967296 must be integers of 32 bits"),
        ({"top_k": 2**64}, "top_k=18446744073709551616 must be integers of 32 bits"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"min_p": 1.0}, "min_p=1.0 must be at least 0 and below 1"),
        ({"min_p": [0.1, -0.1]}, "min_p="),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RowSampling.create(2, **values)


def test_bad_shapes_are_refused():
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(ValueError, match=r"must be f32\[B, V\]"):
        sample(jnp.zeros(4), None, None)
    with pytest.raises(ValueError, match=r"must be f32\[B, V\]"):
        sample(jnp.zeros((2, 4), jnp.bfloat16), None, None)
    with pytest.raises(ValueError, match="keys=None"):
        sample(jnp.zeros((2, 4)), None, RowSampling.create(2))
    with pytest.raises(ValueError, match=r"temperature.shape=\(3,\)"):
        sample(jnp.zeros((2, 4)), keys, RowSampling.create(3))


def test_a_key_depends_on_prompt_and_sample_number_only():
    def drawn(prompt, number=0):
        key = sample_key(jax.random.key(3), hash_prompt(prompt), number)
        return tuple(jax.random.bits(key, 2).tolist())

    prompts = [[1, 2], [2, 1], [1, 2, 0], [258]]
    keys = {drawn(prompt, number) for prompt in prompts for number in range(2)}
    assert len(keys) == 8
    assert drawn((1, 2)) == drawn(np.int64([1, 2])) == drawn([1, 2])
