"""Sequences longer than the pool, where every layer has a sliding window."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.support.engine_calls import (
    assert_every_page_is_free,
    greedy,
    make_engine,
    run,
    sampling,
    serve,
    steps_of,
    submit,
    tokens_of,
    weights,
)
from tests.support.marks import slow
from tests.support.oracle import Oracle
from tests.support.plain_model import PlainModel, greedy_tokens

pytestmark = pytest.mark.usefixtures("exact_products")
WINDOW = 6
MODEL = PlainModel(vocab_size=40, max_model_len=256, sliding_window=WINDOW)
PROMPTS = [[1, 2, 3], [*range(30)] * 2, [7] * 9]


@pytest.fixture(scope="module")
def wanted(exact_products):
    return [greedy_tokens(MODEL, weights(MODEL), prompt, 60) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("num_pages", "max_num_seqs", "num_steps", "caching"),
    [
        *((8, 1, 1, False), (20, 4, 8, True)),
        *slow([(8, 1, 8, True), (12, 2, 8, False)]),
        *slow([(8, 1, 1, True), (8, 1, 8, False), (12, 2, 8, True), (20, 4, 8, False)]),
    ],
)
def test_long_sequences_run_in_a_small_pool(wanted, num_pages, max_num_seqs, num_steps, caching):
    """The longest has 120 tokens, the smallest pool 32; the table is checked at each step."""
    sizes = dict(num_pages=num_pages, max_num_seqs=max_num_seqs, enable_prefix_caching=caching)
    engine = make_engine(MODEL, **sizes)
    assert engine.max_model_len == 256
    steps_of(engine, num_steps)
    requests = serve(engine, PROMPTS, greedy(max_tokens=60))
    assert tokens_of(requests) == wanted
    assert_every_page_is_free(engine)


def test_a_sequence_holds_no_more_pages_than_its_window_needs():
    engine = make_engine(MODEL, num_pages=32)
    engine.submit([1, 2, 3], greedy(max_tokens=250))
    most = 0
    while not engine.idle:
        engine.step()
        engine.check()
        held = engine.num_pages - int(engine.table.num_free) - len(engine.replicas[0].cache.pages)
        most = max(most, held)
    assert 2 <= most <= 4


def test_samples_of_a_long_prompt_equal_single_requests():
    def tokens(num_pages, **params):
        engine = make_engine(MODEL, num_pages=num_pages)
        return tokens_of(serve(engine, PROMPTS[1:2], sampling(max_tokens=40, **params)))

    samples = tokens(14, n=3)
    assert samples == tokens(64, n=3) and len(set(map(tuple, samples))) == 3


def test_windows_work_beside_prefix_caching_preemption_and_aborts(wanted):
    engine = make_engine(MODEL, num_pages=12, watermark=0)
    for round_ in range(3):
        requests = submit(engine, PROMPTS * 2, greedy(max_tokens=60))
        for _ in range(5 + 7 * round_):
            engine.step()
            engine.check()
        engine.abort(requests[round_])
        run(engine)
        for request, tokens in zip(requests, wanted * 2, strict=True):
            if request is not requests[round_]:
                assert tokens_of([request]) == [tokens]
    assert_every_page_is_free(engine)


def test_scores_of_long_sequences_equal_the_dense_model():
    engine = make_engine(MODEL, num_pages=12)
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, 40, (3, 120)).tolist()
    scores = engine.score([x[:5] for x in sequences], [x[5:] for x in sequences])
    oracle = Oracle(MODEL, weights(MODEL))
    for row, tokens in zip(scores, sequences, strict=True):
        wanted = oracle.logprobs(tokens)[4:-1]
        np.testing.assert_allclose(row, wanted[range(115), tokens[5:]], atol=1e-4)
    assert_every_page_is_free(engine)


def test_a_prompt_needs_only_the_pages_of_its_window_and_chunk():
    """By its length alone it would need 64 pages."""
    engine = make_engine(MODEL, num_pages=8, max_num_seqs=1)
    (request,) = serve(engine, [[1] * 250], greedy(max_tokens=None))
    assert len(request.outputs[0].token_ids) == 6
    with pytest.raises(ValueError, match="more than the 256 tokens"):
        engine.submit([1] * 250, greedy(max_tokens=7))
    assert jax.device_get(engine.table.num_free) + len(engine.replicas[0].cache) == 8


@pytest.mark.parametrize("num_pages", [7, *slow([9, 12])])
def test_long_prompts_end_in_the_smallest_pools_that_accept_them(num_pages):
    model = replace(MODEL, sliding_window=16)
    engine = make_engine(
        model,
        num_pages=num_pages,
        max_num_seqs=4,
        max_num_batched_tokens=5,
        max_model_len=64,
    )
    request = engine.submit([*range(1, 40)], greedy(max_tokens=5))
    run(engine)
    assert len(tokens_of([request])[0]) == 5
