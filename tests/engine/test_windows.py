"""Sequences longer than the pool, where every layer has a sliding window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pallas_paged.engine.sampler import SamplingMode
from tests.support.engine_calls import (
    assert_every_page_is_free,
    greedy,
    make_engine,
    run,
    serve,
    step,
    steps_of,
    submit,
    tokens_of,
    weights,
)
from tests.support.marks import slow
from tests.support.oracle import Oracle
from tests.support.plain_model import PlainModel, greedy_tokens

MODEL = PlainModel(vocab_size=40, max_model_len=256, sliding_window=6)
PROMPTS = [[1, 2, 3], [*range(30)] * 2, [7] * 9]


def test_a_sequence_holds_no_more_pages_than_its_window_needs_nor_does_a_long_prompt():
    engine = make_engine(MODEL)
    request = engine.submit([1, 2, 3], greedy(max_tokens=250))
    most = 0
    while not engine.idle:
        step(engine)
        held = engine.num_pages - int(engine.table.num_free) - len(engine.replicas[0].cache.pages)
        most = max(most, held)
    assert 2 <= most <= 4 and len(request.outputs[0].token_ids) == 250
    engine = make_engine(MODEL)
    (request,) = serve(engine, [[1] * 250], greedy(max_tokens=None))
    assert len(request.outputs[0].token_ids) == 6
    with pytest.raises(ValueError, match="more than the 256 tokens"):
        engine.submit([1] * 250, greedy(max_tokens=7))


@pytest.fixture(scope="module")
def wanted():
    return [greedy_tokens(MODEL, weights(MODEL), prompt, 60) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("num_steps", "caching", "sizes"),
    [
        (8, True, {}),
        (1, False, {}),
        *slow((n, c, dict(num_pages=8, max_num_seqs=1)) for n in (1, 8) for c in (False, True)),
        *slow((8, c, dict(num_pages=12, max_num_seqs=2)) for c in (False, True)),
    ],
)
def test_long_sequences_run_in_a_small_pool(wanted, num_steps, caching, sizes):
    """The longest has 120 tokens, the default pool 64; the table is checked at each step."""
    engine = make_engine(MODEL, enable_prefix_caching=caching, **sizes)
    assert engine.max_model_len == 256
    steps_of(engine, num_steps)
    # The samples of the second prompt are forked where its first pages are free by then.
    requests = serve(engine, PROMPTS, [greedy(max_tokens=60, n=n) for n in (1, 3, 1)])
    assert tokens_of(requests) == [wanted[0], *[wanted[1]] * 3, wanted[2]]
    assert_every_page_is_free(engine)


def test_windows_work_beside_prefix_caching_preemption_and_aborts(wanted):
    engine = make_engine(MODEL, watermark=0)
    for aborted in range(2):
        requests = submit(engine, PROMPTS * 2, greedy(max_tokens=60))
        for _ in range(5 + 7 * aborted):
            step(engine)
        engine.abort(requests.pop(aborted))
        engine.sleep()  # preempts all
        engine.wake()
        run(engine)
        assert tokens_of(requests) == [x for i, x in enumerate(wanted * 2) if i != aborted]
    assert engine.stats().num_preemptions > 0
    assert_every_page_is_free(engine)


def test_scores_of_long_sequences_equal_the_dense_model():
    engine = make_engine(MODEL, modes=[SamplingMode(prompt_logprobs=0)])
    sequences = np.random.default_rng(0).integers(0, 40, (3, 120)).tolist()
    scores = engine.score([x[:5] for x in sequences], [x[5:] for x in sequences])
    oracle = Oracle(MODEL, weights(MODEL))
    for row, tokens in zip(scores, sequences, strict=True):
        wanted = oracle.logprobs(tokens)[4:-1]
        np.testing.assert_allclose(row, wanted[range(115), tokens[5:]], atol=1e-4)
    assert_every_page_is_free(engine)


@pytest.mark.parametrize("num_pages", slow([7, 9, 12]))
def test_long_prompts_end_in_the_smallest_pools_that_accept_them(num_pages):
    model = replace(MODEL, sliding_window=16)
    sizes = dict(num_pages=num_pages, max_num_batched_tokens=5, max_model_len=64)
    (request,) = serve(make_engine(model, **sizes), [[*range(1, 40)]], greedy(max_tokens=5))
    assert len(request.outputs[0].token_ids) == 5
