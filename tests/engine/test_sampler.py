"""The sampler against NumPy: filters, draws, processors, penalties, log-probabilities, modes."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import logprobs
from pallas_paged.engine.logprobs import gather_logprobs
from pallas_paged.engine.sampler import (
    SamplingMode,
    TokenCounts,
    add_output_tokens,
    create_token_counts,
    hash_prompt,
    process_logits,
    sample,
    set_token_counts,
)
from pallas_paged.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from tests.support.marks import slow
from tests.support.promotion import assert_is_strict, strict_promotion
from tests.support.sampling_rows import (
    VOCAB,
    compiled_implementations,
    metadata,
    race,
    sampling_implementations,
    take_rows,
)

LOGITS = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
DRAWS = 1000  # of which interpreted kernels take seconds
MANY_DRAWS = 4000
GREEDY = SamplingMode()
PLAIN = SamplingMode(draws=True)
FILTERS = SamplingMode(draws=True, filters=2)
jit_sample = jax.jit(sample, static_argnames=("mode", "implementation"))
jit_process = jax.jit(process_logits, static_argnames="mode")
jit_logprobs = jax.jit(gather_logprobs, static_argnames="num_logprobs")


@pytest.fixture(autouse=True)
def _strict():
    with strict_promotion():
        yield


@pytest.fixture(params=sampling_implementations())
def by(request):
    """How to sample, a keyword argument."""
    return {"implementation": request.param}


def draw(by, count=DRAWS, logits=LOGITS, mode=FILTERS, lens=5, **values):
    """Draw once in each of `count` rows that have the same logits."""
    tiled = np.tile(logits, (count, 1))
    rows, lens = metadata(count, **values), np.full(count, lens, np.int32)
    return np.asarray(jit_sample(tiled, rows, lens, mode, **by))


def filtered_probs(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
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
    dense = np.zeros(logits.size)
    dense[order] = probs * keep / (probs * keep).sum()
    return dense


def test_the_rules_of_promotion_are_strict():
    assert_is_strict()


# Drawing


def test_greedy_takes_the_largest_and_of_equal_logits_the_lowest_token(by):
    logits = np.random.default_rng(1).normal(size=(5, VOCAB)).astype(np.float32)
    logits[:4, [3, 5, 7]] = 9.0
    lens = np.zeros(5, np.int32)
    for mode, values in ((GREEDY, {}), (FILTERS, dict(temperature=0.0, top_p=0.5, min_p=0.5))):
        tokens = jit_sample(logits, metadata(5, **values), lens, mode, **by)
        np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
        assert tokens.dtype == np.int32


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.5},
        *slow([{"temperature": 1.0}, {"temperature": 3.0}]),
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.15},
    ],
)
def test_draws_follow_the_filtered_distribution(values, by):
    num_draws = MANY_DRAWS if by["implementation"] in compiled_implementations() else DRAWS
    expected = num_draws * filtered_probs(LOGITS, **values)
    counts = np.bincount(draw(by, num_draws, **values), minlength=VOCAB)
    assert not np.any(counts[expected == 0]), "a token that was filtered out was drawn"
    chi_square = np.sum((counts - expected) ** 2 / np.maximum(expected, 1))
    freedom = np.count_nonzero(expected) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("implementation", compiled_implementations())
@pytest.mark.parametrize("values", [{}, {"temperature": 2.0, "min_p": 0.02}], ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "masses"),
    [
        (
            5000,
            {(0, 3): 0.2, (3, 2047): 0.2, (2047, 2049): 0.2, (4095, 4097): 0.1, (4999, 5000): 0.2},
        ),
        (5000, {(4096, 5000): 0.9, (4996, 4999): 0.1}),
        (4096, {(0, 2048): 0.4, (2048, 2049): 0.4, (4000, 4096): 0.2}),
    ],
    ids=["edges of blocks", "the last block, of fewer tokens", "many tokens against few"],
)
def test_draws_of_many_tokens_follow_the_filtered_distribution(
    vocab_size, masses, values, implementation
):
    """Where blocks of 2048 tokens race first; the tokens of a range share its mass."""
    probs = np.full(vocab_size, 1e-7)
    for (start, end), mass in masses.items():
        probs[start:end] += mass / (end - start)
    logits = np.log(probs).astype(np.float32)
    by = {"implementation": implementation}
    tokens = draw(by, MANY_DRAWS, logits=logits, mode=PLAIN, **values)
    expected = MANY_DRAWS * filtered_probs(logits, **values)
    assert not np.any(expected[tokens] == 0), "a token that was filtered out was drawn"
    likely = expected > 20
    rest = np.arange(vocab_size) // 256 + 1  # unlikely neighbours count together
    bins = np.where(likely, vocab_size + np.arange(vocab_size), rest)
    found, wanted = (
        np.bincount(bins, x) for x in (np.bincount(tokens, None, vocab_size), expected)
    )
    some = wanted > 5
    chi_square = np.sum((found - wanted)[some] ** 2 / wanted[some])
    freedom = np.count_nonzero(some) - 1
    assert freedom > 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("seed", [0, *slow([1, 2])])
def test_filters_apply_row_by_row(seed, by):
    rng = np.random.default_rng(seed)
    rows = {
        "temperature": rng.choice([0.3, 1.0, 2.5], DRAWS),
        "top_k": rng.choice([0, 1, 4, VOCAB, 1000], DRAWS),
        "top_p": rng.choice([0.05, 0.6, 1.0], DRAWS),
        "min_p": rng.choice([0.0, 0.3], DRAWS),
    }
    cache = {}
    for row, token in enumerate(draw(by, **rows)):
        values = tuple(rows[name][row] for name in rows)
        if values not in cache:
            cache[values] = filtered_probs(LOGITS, *values)
        assert cache[values][token] > 0, dict(zip(rows, values, strict=True))


def test_filters_that_are_off_change_nothing(by):
    plain = draw(by, temperature=1.3, mode=PLAIN)
    np.testing.assert_array_equal(draw(by, temperature=1.3), plain)


@pytest.mark.parametrize("vocab_size", [VOCAB, 5000])
def test_the_token_that_arrives_first_is_drawn(vocab_size, by):
    """The key of the times is made of the seed, the prompt, the sample's index and the length."""
    seeds = np.array([[3, 1, 0], [3, 1, 1], [3, 2, 0], [4, 1, 0], [3, 1, 0]], np.uint32)
    lens, temperature = np.array([5, 5, 5, 5, 6], np.int32), 3.0
    one = np.random.default_rng(2).normal(0, 2, vocab_size).astype(np.float32)
    rows = metadata(5, seeds=seeds, temperature=temperature)
    tokens = jit_sample(np.tile(one, (5, 1)), rows, lens, PLAIN, **by)
    weights = np.exp((one.astype(np.float64) - one.max()) / temperature)
    wanted = [race(*row, weights) for row in zip(seeds, lens, strict=True)]
    np.testing.assert_array_equal(tokens, wanted)
    assert len(set(wanted)) > 1


def test_the_hash_of_a_prompt_depends_on_its_tokens_and_their_order():
    prompts = [[1, 2], [2, 1], [1, 2, 0], [258]]
    assert len(set(map(hash_prompt, prompts))) == 4
    assert hash_prompt((1, 2)) == hash_prompt(np.int64([1, 2])) == hash_prompt([1, 2])
    assert all(0 <= hash_prompt(prompt) < 2**32 for prompt in prompts)


def test_a_row_does_not_depend_on_the_other_rows(by):
    num_rows = 6
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(num_rows, VOCAB)).astype(np.float32)
    logits[2, 4] = np.nan
    lens = np.arange(num_rows, dtype=np.int32)
    rows = metadata(
        num_rows,
        temperature=[1.0, 0.0, 0.5, 2.0, 1.0, 3.0],
        top_k=[0, 3, 4, 0, 5, 0],
        top_p=[0.9, 1.0, 0.8, 0.7, 1.0, 1.0],
        frequency_penalty=rng.normal(size=num_rows),
        min_lens=[3] * num_rows,
        stop_token_ids=rng.integers(0, VOCAB, (num_rows, 3)),
        bias_token_ids=np.stack([rng.permutation(VOCAB)[:4] for _ in range(num_rows)]),
        bias=rng.normal(size=(num_rows, 4)),
    )
    counts = TokenCounts(
        prompt=rng.random((num_rows, VOCAB)) < 0.5,
        output=rng.integers(0, 3, (num_rows, VOCAB)).astype(np.int32),
    )
    mode = replace(FILTERS, processors=True, penalties=True)

    def tokens_of(some):
        one = take_rows(some, rows)
        processed = jit_process(logits[some], one, take_rows(some, counts), lens[some], mode)
        return np.asarray(jit_sample(processed, one, lens[some], mode, **by))

    together = tokens_of(np.arange(num_rows))
    np.testing.assert_array_equal(tokens_of(np.arange(num_rows)[::-1]), together[::-1])
    np.testing.assert_array_equal(
        [tokens_of(np.array([row]))[0] for row in range(num_rows)], together
    )


def test_tokens_that_tie_with_the_last_kept_one_are_kept(by):
    logits = np.array([0.0, 5.0, 5.0, 5.0, -1.0], np.float32)
    for values in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.99}):
        assert set(draw(by, 300, logits, **values)) == {1, 2, 3}


def test_tiny_and_huge_temperatures_stay_finite(by):
    tokens = draw(by, 2, temperature=[1e-38, 1e38], top_p=0.9)
    assert tokens[0] == LOGITS.argmax() and 0 <= tokens[1] < VOCAB


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", [GREEDY, PLAIN, FILTERS], ids=["greedy", "plain", "filters"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_largest_logit_gives_minus_one(bad, mode, temperature, by):
    logits = np.tile(LOGITS, (2, 1))
    logits[0, slice(None) if bad == -np.inf else 4] = bad
    rows = metadata(2, temperature=temperature, top_k=2, top_p=0.9, min_p=0.1)
    tokens = jit_sample(logits, rows, np.zeros(2, np.int32), mode, **by)
    assert tokens[0] == -1 and 0 <= tokens[1] < VOCAB


def test_masked_logits_are_never_drawn(by):
    logits = LOGITS.copy()
    logits[[0, 5]] = -np.inf
    assert not set(draw(by, 500, logits, temperature=50.0)) & {0, 5}


# Processors and penalties


def wanted_logits(logits, rows, counts, lens, mode):
    """What `process_logits` returns, one row and one token at a time."""
    out = logits.astype(np.float64)
    values = jax.tree.map(np.asarray, rows)
    for row in range(len(logits)):
        if mode.processors:
            for token, bias in zip(values.bias_token_ids[row], values.bias[row], strict=True):
                if 0 <= token < VOCAB:
                    out[row, token] += bias
            for token in values.stop_token_ids[row]:
                if token >= 0 and lens[row] < values.min_lens[row]:
                    out[row, token] = -np.inf
        for token in range(VOCAB if mode.penalties else 0):
            count, factor = int(counts.output[row, token]), values.repetition_penalty[row]
            if counts.prompt[row, token] or count:
                out[row, token] *= 1 / factor if out[row, token] > 0 else factor
            out[row, token] -= values.frequency_penalty[row] * count
            out[row, token] -= values.presence_penalty[row] * (count > 0)
    return out


@pytest.mark.parametrize("processors", [False, True])
@pytest.mark.parametrize("penalties", [False, True])
def test_processed_logits_equal_those_of_numpy(processors, penalties):
    num_rows = 40
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 2, (num_rows, VOCAB)).astype(np.float32)
    logits[0, 3], logits[1, 3], logits[2, 3], logits[3] = np.nan, -np.inf, np.inf, 1.0
    lens = rng.integers(0, 6, num_rows).astype(np.int32)
    rows = metadata(
        num_rows,
        presence_penalty=rng.uniform(-2, 2, num_rows),
        frequency_penalty=rng.uniform(-2, 2, num_rows),
        repetition_penalty=rng.uniform(0.3, 3, num_rows),
        min_lens=rng.integers(0, 6, num_rows),
        stop_token_ids=rng.integers(-1, VOCAB, (num_rows, 3)),
        # -1 and VOCAB are padding.
        bias_token_ids=np.stack([rng.permutation(VOCAB + 2)[:9] - 1 for _ in range(num_rows)]),
        bias=rng.uniform(-100, 100, (num_rows, 9)),
    )
    counts = TokenCounts(
        prompt=rng.random((num_rows, VOCAB)) < 0.4,
        output=rng.poisson(0.7, (num_rows, VOCAB)).astype(np.int32),
    )
    mode = SamplingMode(processors=processors, penalties=penalties)
    got = jit_process(logits, rows, counts if penalties else None, lens, mode)
    wanted = wanted_logits(logits, rows, counts, lens, mode)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert got.dtype == np.float32


def test_processors_of_a_row_that_asks_for_none_change_nothing():
    logits = np.stack([LOGITS, np.full(VOCAB, np.nan, np.float32)])
    mode = SamplingMode(processors=True, penalties=True)
    counts = TokenCounts(prompt=np.ones((2, VOCAB), bool), output=np.ones((2, VOCAB), np.int32))
    got = jit_process(
        logits, metadata(2, stop_token_ids=[[1, 2, 3]] * 2), counts, np.zeros(2, np.int32), mode
    )
    np.testing.assert_array_equal(got, logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_row_draws_a_stop_token_before_its_minimum(temperature):
    """Also where the stop tokens are by far the most likely and have the largest bias."""
    logits = np.tile(LOGITS, (300, 1))
    logits[:, [2, 7]] = 50.0
    lens = np.repeat(np.int32([4, 5, 6]), 100)
    rows = metadata(
        300,
        temperature=temperature,
        min_lens=5,
        stop_token_ids=[[7, -1, 2]] * 300,
        bias_token_ids=[[7, VOCAB, VOCAB, -1]] * 300,
        bias=[[100.0] * 4] * 300,
    )
    mode = SamplingMode(draws=True, processors=True)
    tokens = np.asarray(jit_sample(jit_process(logits, rows, None, lens, mode), rows, lens, mode))
    assert not set(tokens[lens < 5]) & {2, 7} and set(tokens[lens >= 5]) == {7}


def test_greedy_rows_obey_penalties():
    """A strong frequency penalty makes a greedy row visit every token before one comes twice."""
    counts, rows = create_token_counts(3, VOCAB), metadata(1, frequency_penalty=2.0)
    logits = (LOGITS / 10)[None]  # within 2 of one another
    drawn = []
    for _ in range(VOCAB):
        one = take_rows(np.array([1]), counts)
        mode = SamplingMode(penalties=True)
        token = sample(process_logits(logits, rows, one, np.int32([0]), mode), rows, None, mode)
        counts = add_output_tokens(counts, np.int32([1]), token)
        drawn += token.tolist()
    assert sorted(drawn) == list(range(VOCAB))
    np.testing.assert_array_equal(counts.output, np.int32([[0] * VOCAB, [1] * VOCAB, [0] * VOCAB]))


def test_added_output_tokens_are_counted_and_bad_ones_dropped():
    counts = create_token_counts(3, VOCAB)
    rows, tokens = np.int32([0, 2, 2, 3, -1, 1, 1, 0]), np.int32([5, 1, 1, 1, 1, -1, VOCAB, 0])
    for _ in range(2):
        counts = jax.jit(add_output_tokens)(counts, rows, tokens)
    wanted = np.zeros((3, VOCAB), np.int32)
    wanted[0, [0, 5]], wanted[2, 1] = 2, 4
    np.testing.assert_array_equal(counts.output, wanted)
    assert not np.any(counts.prompt)


def test_token_counts_of_a_row_are_set_piece_by_piece():
    size, rng = 4, np.random.default_rng(5)
    set_piece = jax.jit(set_token_counts)
    dirty = TokenCounts(
        prompt=jnp.ones((3, VOCAB), bool), output=jnp.full((3, VOCAB), 7, jnp.int32)
    )

    def pieces(tokens, number):
        padded = np.full(number * size, -1, np.int32)
        padded[: len(tokens)] = tokens
        return padded.reshape(number, size)

    for num_prompt, num_output in ((1, 0), (11, 6), (3, 9)):
        prompt, output = rng.integers(0, VOCAB, num_prompt), rng.integers(0, VOCAB, num_output)
        for row in (1, 3, -1):  # those out of range change nothing
            counts = dirty
            for index, piece in enumerate(zip(pieces(prompt, 3), pieces(output, 3), strict=True)):
                counts = set_piece(counts, np.int32(row), *piece, np.bool_(index == 0))
            wanted = jax.tree.map(np.array, dirty)
            if row == 1:
                wanted.prompt[1] = np.isin(np.arange(VOCAB), prompt)
                wanted.output[1] = np.bincount(output, minlength=VOCAB)
            jax.tree.map(np.testing.assert_array_equal, counts, wanted)
    assert set_piece._cache_size() == 1


# Log-probabilities


@pytest.mark.parametrize("num_logprobs", [0, 5, MAX_LOGPROBS])
def test_logprobs_and_ranks_equal_those_of_numpy(num_logprobs):
    rng = np.random.default_rng(6)
    logits = rng.integers(-4, 5, (30, VOCAB)).astype(np.float32)  # with ties
    logits[0, 3] = -np.inf
    tokens = rng.integers(0, VOCAB, 30).astype(np.int32)
    tokens[0] = 3
    got = jit_logprobs(logits, tokens, num_logprobs)
    exact = logits.astype(np.float64)
    exact -= np.log(np.sum(np.exp(exact), axis=1, keepdims=True))
    chosen = np.take_along_axis(exact, tokens[:, None], axis=1)
    best = np.argsort(-exact, axis=1, kind="stable")[:, :num_logprobs]  # V at most
    np.testing.assert_allclose(got.logprob, chosen[:, 0], atol=1e-5)
    np.testing.assert_array_equal(
        got.rank, 1 + np.sum(logits > logits[np.arange(30), tokens][:, None], 1)
    )
    np.testing.assert_array_equal(got.top_token_ids, best)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(exact, best, 1), atol=1e-5)
    assert got.rank[0] == VOCAB and got.rank.dtype == got.top_token_ids.dtype == np.int32


@pytest.mark.parametrize("size", [1, 20, 21, 96, 1000, 4096])
@pytest.mark.parametrize("most_pairs", [2**8, 2**24])
def test_the_best_tokens_are_those_of_a_stable_sort(size, most_pairs, monkeypatch):
    """With many ties, and with rows that are cut into blocks, and those again."""
    monkeypatch.setattr(logprobs, "_MAX_PAIRS", most_pairs)
    rng = np.random.default_rng(size)
    values = rng.normal(size=(6, size)).astype(np.float32)
    values[1:3] = np.round(3 * values[1:3])
    values[3, rng.random(size) < 0.9] = -np.inf
    values[4] = 7.0
    values[5] = np.sort(values[5])
    for k in {0, 1, min(5, size), min(MAX_LOGPROBS, size)}:
        wanted = np.argsort(-values, axis=1, kind="stable")[:, :k]
        best, tokens = jax.jit(lambda x, k=k: logprobs.top_tokens(x, k))(values)
        np.testing.assert_array_equal(tokens, wanted)
        np.testing.assert_array_equal(best, np.take_along_axis(values, wanted, 1))


def test_logprobs_of_a_bad_row_leave_the_others_alone():
    logits = np.stack([np.full(VOCAB, np.nan, np.float32), LOGITS])
    got = jit_logprobs(logits, np.int32([-1, 4]), 3)
    alone = jit_logprobs(logits[1:], np.int32([4]), 3)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1:], y), got, alone)


# Modes


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, {"draws": True}),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, {}),
        ({"top_k": 5, "top_p": 0.5}, {"draws": True, "filters": 2}),
        ({"top_k": 65}, {"draws": True, "filters": 1}),
        ({"top_p": 0.5, "min_p": 0.1}, {"draws": True, "filters": 1}),
        ({"min_p": 0.1}, {"draws": True}),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, {"processors": True}),
        ({"temperature": 0.0, "min_tokens": 1}, {"processors": True}),
        ({"temperature": 0.0, "presence_penalty": -0.5}, {"penalties": True}),
        ({"temperature": 0.0, "frequency_penalty": 0.5}, {"penalties": True}),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, {"penalties": True}),
        ({"temperature": 0.0, "logprobs": 0}, {"logprobs": 0}),
        ({"temperature": 0.0, "logprobs": 1}, {"logprobs": MAX_LOGPROBS}),
        ({"best_of": 2}, {"draws": True, "logprobs": 0}),
        ({"beam_width": 2}, {"logprobs": MAX_LOGPROBS}),
    ],
)
def test_the_mode_of_parameters_has_only_what_they_need(params, wanted):
    assert SamplingMode.of(SamplingParams(**params)) == SamplingMode(**wanted)


def test_a_join_covers_both_modes():
    one, other = SamplingMode(draws=True, logprobs=0), SamplingMode(penalties=True)
    both = one | other
    assert both == SamplingMode(draws=True, penalties=True, logprobs=0)
    assert both.covers(one) and both.covers(other) and not one.covers(both)
    assert not one.covers(replace(one, logprobs=MAX_LOGPROBS)) and one.covers(GREEDY)


def test_a_mode_compiles_only_what_it_names():
    logits, lens = np.tile(LOGITS, (2, 1)), np.zeros(2, np.int32)
    counts = create_token_counts(2, VOCAB)

    def step(mode):
        def run(logits, rows):
            logits = process_logits(logits, rows, counts, lens, mode)
            return sample(logits, rows, lens, mode)

        program = str(jax.make_jaxpr(run)(logits, metadata(2)))
        words = dict(
            draws=[" log1p "],
            filters=[" exp ", "sampling_search"],  # the second on a GPU
            processors=[" scatter"],
            penalties=[" mul "],
        )
        return {name for name, some in words.items() if any(word in program for word in some)}

    assert step(GREEDY) == set()
    assert step(SamplingMode(processors=True)) == {"processors"}
    assert step(SamplingMode(penalties=True)) == {"penalties"}
    assert {"draws"} <= step(PLAIN) and not {"filters", "processors"} & step(PLAIN)
    assert {"draws", "filters"} <= step(FILTERS)


@pytest.mark.parametrize("logits", [np.zeros(VOCAB, np.float32), np.zeros((2, VOCAB), np.float16)])
def test_bad_logits_are_refused(logits):
    rows, lens = metadata(2), np.zeros(2, np.int32)
    for call in (
        lambda: sample(logits, rows, lens, GREEDY),
        lambda: process_logits(logits, rows, None, lens, GREEDY),
        lambda: gather_logprobs(logits, lens, 0),
    ):
        with pytest.raises(ValueError, match=r"must be f32\[S, V\]"):
            call()


def test_penalties_without_counts_are_refused():
    rows, mode = metadata(2), SamplingMode(penalties=True)
    with pytest.raises(ValueError, match="counts=None"):
        process_logits(np.zeros((2, VOCAB), np.float32), rows, None, np.zeros(2, np.int32), mode)
