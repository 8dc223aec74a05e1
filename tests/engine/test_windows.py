"""Sequences longer than the pool, where every layer has a sliding window."""

from dataclasses import replace

import pytest

from pallas_paged.engine.schedule.windows import WindowPrefixes
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


# Which cached prefixes have the pages of their window.


def prefixes(sliding_window=6, num_pages=9, kept_tokens=12):
    return WindowPrefixes(
        sliding_window=sliding_window, kept_tokens=kept_tokens, page_size=4, num_pages=num_pages
    )


@pytest.mark.parametrize(
    ("window", "first"), [(1, 3), (2, 2), (5, 2), (6, 1), (9, 1), (10, 0), (99, 0)]
)
def test_a_query_behind_three_pages_sees_the_pages_of_its_window(window, first):
    """It is at position 12, and sees positions 13 - window to 12."""
    assert prefixes(window).first_block(3) == first


def test_a_prefix_is_usable_to_where_all_pages_of_its_window_are():
    cached, pages = prefixes(), [10, 11, 12, 13, 14, 15]
    assert cached.num_usable(pages) == 0
    assert cached.insert([12], [2]) == ([2], [])
    assert cached.num_usable(pages) == 0  # the window of 6 tokens behind block 2 needs two
    assert cached.insert([13], [3]) == ([3], [])
    assert cached.num_usable(pages) == 4
    assert cached.num_usable(pages[:3]) == 0
    assert cached.insert([10, 15], [0, 5]) == ([0, 5], [])
    assert cached.num_usable(pages) == 4
    assert cached.num_usable(pages[:1]) == 1
    assert cached.attach(pages[:4]) == [-1, -1, 2, 3]
    assert cached.num_inserted == 4 and sorted(cached.pages) == [0, 2, 3, 5]


def test_pages_that_were_used_the_longest_ago_go_first():
    cached = prefixes(num_pages=3)
    cached.insert([10, 11, 12], [0, 1, 2])
    cached.attach([10])
    assert cached.insert([11, 13, 14], [7, 3, -1]) == ([3], [2])  # 11 has one, and 14 has none
    assert cached.insert([15], [4]) == ([4], [0])
    assert cached.drop([11, 99, 15]) == [1, 4] and cached.pages == [3]


def test_the_first_blocks_of_a_sequence_may_be_free():
    assert [prefixes().first_kept(n) for n in (0, 11, 14, 15, 19)] == [0, 0, 0, 1, 2]
