"""Rows that start, decode, wait, resume and end, against generation without a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_paged as pp
from models.generate_state import Status, decode, progress, release, resume
from models.sampling import RowSampling
from tests.support.generate_steps import (
    CAPACITY,
    MANY_PAGES,
    MAX_SEQS,
    NUM_PAGES,
    assert_copies_no_pool,
    empty_state,
    start,
    statuses,
    step,
    texts,
)

pytestmark = pytest.mark.usefixtures("exact_products")
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16]]
KEYS = jax.random.split(jax.random.key(7), (3, 1))


@pytest.mark.parametrize("steps", [[20], [1, 2, 20]])
def test_paged_greedy_equals_dense_greedy_across_page_borders(split, oracle, steps):
    state, ok = start(split, empty_state(), [*PROMPTS[:2], []], [0, 2, 4], limit=8)
    assert ok.tolist() == [[True], [True], [False]]
    pp.check_page_table(state.table)
    for num_steps in steps:
        state = step(split, state, num_steps)
        pp.check_page_table(state.table)
    assert statuses(state) == [Status.MAX_TOKENS, Status.EMPTY, Status.MAX_TOKENS, Status.EMPTY]
    assert texts(state) == [
        oracle.continue_(PROMPTS[0], 8),
        [],
        oracle.continue_(PROMPTS[1], 8),
        [],
    ]
    # The newest token's K/V are not written yet.
    assert state.table.seq_lens.tolist() == [3 + 7, 0, 8 + 7, 0]


def test_drawn_tokens_follow_the_keys_by_position(split, oracle):
    state, _ = start(split, empty_state(), [*PROMPTS[:2], []], [3, 1, 4], temperature=1.0, limit=6)
    state = step(split, step(split, state, 2), 20)
    drawn = RowSampling.create(1, temperature=1.0)
    assert texts(state)[3] == oracle.continue_(PROMPTS[0], 6, key=KEYS[0, 0], params=drawn)
    assert texts(state)[1] == oracle.continue_(PROMPTS[1], 6, key=KEYS[1, 0], params=drawn)
    assert texts(state)[3] != oracle.continue_(PROMPTS[0], 6)


def test_each_row_ends_for_its_own_reason(split, oracle):
    greedy = oracle.continue_(PROMPTS[0], 6)
    stop = greedy[4]
    first = greedy.index(stop)
    state, _ = start(split, empty_state(), [PROMPTS[0], [], []], [0, 4, 4], stops=[39, stop])
    long = [17] * 12
    state, ok = start(split, state, [long, [], [20]], [1, 4, 2], limit=[16, 0, 1])
    assert ok.tolist() == [[True], [False], [True]]
    state = step(split, state, 20)
    assert statuses(state) == [Status.STOPPED, Status.TABLE_FULL, Status.MAX_TOKENS, Status.EMPTY]
    assert texts(state)[0] == greedy[:first]
    assert int(state.last_tokens[0]) == stop
    assert texts(state)[1] == oracle.continue_(long, CAPACITY - 12 + 1)
    assert texts(state)[2] == oracle.continue_([20], 1)
    assert int(state.table.seq_lens[1]) == CAPACITY
    pp.check_page_table(state.table)


def test_rows_out_of_pages_can_resume(split, oracle):
    """Rows pause when the pool is empty and go on unchanged after another row is released."""
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    wanted = [oracle.continue_(prompt, 12) for prompt in prompts]
    state, ok = start(split, empty_state(), prompts, [0, 1, 2], limit=12)
    assert ok.all()
    state = step(split, state, 100)
    assert statuses(state)[:3] == [Status.OUT_OF_PAGES] * 3
    assert int(state.table.num_free) < 3
    before = texts(state)
    assert all(before[row] == wanted[row][: len(before[row])] for row in range(3))
    again = step(split, resume(state), 100)  # without free pages no row may advance
    assert texts(again) == before and statuses(again)[:3] == [Status.OUT_OF_PAGES] * 3
    pp.check_page_table(again.table)

    state = step(split, resume(release(again, jnp.array([False, True, False, False]))), 100)
    assert statuses(state) == [Status.MAX_TOKENS, Status.EMPTY, Status.MAX_TOKENS, Status.EMPTY]
    assert [texts(state)[0], texts(state)[2]] == [wanted[0], wanted[2]]
    pp.check_page_table(state.table)
    state = release(state, jnp.ones(MAX_SEQS, bool))
    pp.check_page_table(state.table)
    assert int(state.table.num_free) == NUM_PAGES


def test_prompts_without_pages_can_be_started_later(split, oracle):
    prompts = [[i, *range(11)] for i in (20, 21, 22)]  # 3 pages each
    state, ok = start(split, empty_state(), prompts, [0, 1, 2], limit=3)
    assert ok.tolist() == [[True], [True], [False]]
    assert statuses(state)[2] is Status.OUT_OF_PAGES and int(state.table.seq_lens[2]) == 0
    state = step(split, resume(state), 10)  # a row without a prompt has nothing to resume
    assert statuses(state)[:3] == [Status.MAX_TOKENS] * 2 + [Status.OUT_OF_PAGES]
    state = release(state, jnp.array([True, False, False, False]))
    state, ok = start(split, state, [[], [], prompts[2]], [4, 4, 2], limit=3)
    assert ok[2, 0]
    state = step(split, state, 10)
    assert texts(state)[1:3] == [oracle.continue_(prompt, 3) for prompt in prompts[1:]]
    pp.check_page_table(state.table)


def test_a_refused_start_changes_nothing(split, oracle):
    state, _ = start(split, empty_state(), [PROMPTS[0], [], []], [1, 4, 4], limit=5)
    state = step(split, state, 2)
    pages = np.asarray(state.pool.layers[0].k_pages[:, :NUM_PAGES])
    table = jax.tree.map(np.asarray, state.table)
    too_long = list(range(CAPACITY + 1))
    # A row in use, a row out of range, a prompt longer than a row.
    state, ok = start(split, state, [PROMPTS[1], [5], too_long], [1, -1, 0])
    assert not ok.any()
    assert statuses(state) == [Status.TABLE_FULL, Status.RUNNING, Status.EMPTY, Status.EMPTY]
    # Samples of a prompt whose first row is taken.
    state, ok = start(split, state, [[5]], [[1, 2, 3]])
    assert not ok.any() and statuses(state)[2:] == [Status.EMPTY, Status.EMPTY]
    # The same row twice: the first entry gets it.
    state, ok = start(split, state, [[], [6], [7]], [2, 3, 3], limit=1)
    assert ok.tolist() == [[False], [True], [False]] and statuses(state)[2] == Status.EMPTY
    assert texts(state)[3] == oracle.continue_([6], 1)
    state = release(state, jnp.array([False, False, False, True]))
    for before, after in zip(jax.tree.leaves(table), jax.tree.leaves(state.table), strict=True):
        np.testing.assert_array_equal(before, after)
    held = table.block_tables[1][:2]
    after = np.asarray(state.pool.layers[0].k_pages)
    np.testing.assert_array_equal(pages[:, held], after[:, held])
    assert texts(step(split, state, 10))[1] == oracle.continue_(PROMPTS[0], 5)


def test_a_prompt_without_pages_is_not_resumed(split):
    prompts = [[1] * 16, [2] * 12, [3] * 8]  # of 9 pages
    state, ok = start(split, empty_state(), prompts, [0, 1, 2], limit=1)
    assert ok.tolist() == [[True], [True], [False]]
    assert statuses(resume(state))[2] == Status.OUT_OF_PAGES


def test_samples_of_one_prompt_equal_independent_runs_with_the_same_keys(split):
    keys = jax.random.split(jax.random.key(1), 3)
    prompt = [3, 1, 4, 1, 5, 9]
    options = {"keys": keys[None], "limit": 6, "temperature": 1.0}
    state, ok = start(split, empty_state(), [prompt], [[2, 0, 3]], **options)
    assert ok.all()
    pp.check_page_table(state.table)
    assert NUM_PAGES - int(state.table.num_free) == 1 + 3  # one shared, three tails
    state = step(split, state, 10)
    pp.check_page_table(state.table)
    shared = [texts(state)[row] for row in (2, 0, 3)]
    assert len(set(map(tuple, shared))) > 1
    for key, text in zip(keys, shared, strict=True):
        one = {"keys": key.reshape(1, 1), "limit": 6, "temperature": 1.0}
        fresh, _ = start(split, empty_state(), [prompt], [1], **one)
        assert texts(step(split, fresh, 10))[1] == text


def test_samples_without_a_page_hold_nothing(split):
    state, _ = start(split, empty_state(), [[1] * 12, [2] * 9], [0, 1], limit=1)
    keys = jax.random.split(jax.random.key(1), (1, 3))
    state = release(state, jnp.array([True, False, False, False]))  # 5 pages are free
    state, ok = start(split, state, [[3] * 14], [[0, 2, 3]], keys=keys)
    assert ok.tolist() == [[True, True, False]]
    assert statuses(state)[3] is Status.OUT_OF_PAGES and int(state.table.seq_lens[3]) == 0
    pp.check_page_table(state.table)


def test_a_model_that_gives_nan_ends_its_rows(split):
    graphdef, params = split
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    state, _ = start(split, empty_state(), PROMPTS, [0, 1, 2])
    state = step((graphdef, broken), state, 5)
    assert statuses(state)[:3] == [Status.BAD_LOGITS] * 3
    assert state.num_tokens.tolist()[:3] == [1, 1, 1]
    state, _ = start((graphdef, broken), empty_state(), PROMPTS, [0, 1, 2])
    assert statuses(state)[:3] == [Status.BAD_LOGITS] * 3 and not state.num_tokens.any()


def test_decode_takes_any_number_of_steps_without_compiling_again(split):
    state, _ = start(split, empty_state(), PROMPTS, [0, 1, 2])
    state = step(split, state, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx, "merge", None)  # a new trace would call it and fail
        state = step(split, state, 3)
        state = step(split, state, 0)
    assert state.num_tokens.tolist() == [5, 5, 5, 0]


def test_a_progress_report_outlives_the_donated_state(split):
    state, _ = start(split, empty_state(), PROMPTS, [0, 1, 2])
    report = progress(state)
    after = step(split, state, 4)
    assert state.tokens.is_deleted() and not report.tokens.is_deleted()
    assert report.num_tokens.tolist() == [1, 1, 1, 0] and after.num_tokens.tolist() == [5, 5, 5, 0]


def test_compiled_decode_copies_no_pool(split):
    state = jax.eval_shape(lambda: empty_state(num_pages=MANY_PAGES))
    compiled = decode.lower(*split, state, 5, implementation="xla").compile()
    assert_copies_no_pool(compiled, state)


def test_a_state_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        empty_state(max_new_tokens=0)
