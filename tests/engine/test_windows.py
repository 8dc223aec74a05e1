"""Sequences longer than the pool, where every layer has a sliding window."""

from dataclasses import replace

import pytest

from tests.support.engine_calls import (
    assert_every_page_is_free,
    greedy,
    make_engine,
    serve,
    step,
    steps_of,
    tokens_of,
    weights,
)
from tests.support.marks import slow
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


@pytest.mark.parametrize("num_pages", slow([7, 9, 12]))
def test_long_prompts_end_in_the_smallest_pools_that_accept_them(num_pages):
    model = replace(MODEL, sliding_window=16)
    sizes = dict(num_pages=num_pages, max_num_batched_tokens=5, max_model_len=64)
    (request,) = serve(make_engine(model, **sizes), [[*range(1, 40)]], greedy(max_tokens=5))
    assert len(request.outputs[0].token_ids) == 5
