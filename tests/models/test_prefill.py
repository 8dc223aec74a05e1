"""Prompts into rows: how they are packed, reserved and run in chunks of any size."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_paged as pp
from models.generate_state import Status, release
from models.prefill import pack, prefill, reserve
from tests.support.generate_steps import (
    CAPACITY,
    CHUNK,
    MANY_PAGES,
    MAX_SEQS,
    assert_copies_no_pool,
    empty_state,
    requests,
    reserve_chunks,
    start,
    statuses,
    step,
    texts,
)
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16]]


@pytest.mark.parametrize("size", [1, 3, 8, 16, 17, 100])
def test_packed_chunks_hold_the_prompts(size):
    prompts = [[1], list(range(2, 40)), [50, 51], [60], list(range(70, 77))]
    rows = np.arange(10, dtype=np.int32).reshape(5, 2)
    found = {prompt: [] for prompt in range(5)}
    shapes = set()
    for chunk in pack(prompts, rows, size=size, max_prompts=8):
        shapes.add(tuple(x.shape for x in jax.tree.leaves(chunk)))
        cu = np.asarray(chunk.cu_q_lens)
        assert cu[0] == 0 and (np.diff(cu) >= 0).all() and cu[-1] <= chunk.tokens.size <= size
        for index, first in enumerate(np.asarray(chunk.rows)[:, 0]):
            mine = np.asarray(chunk.tokens)[cu[index] : cu[index + 1]].tolist()
            if first >= 10:
                assert not mine  # padding
                continue
            assert mine and chunk.starts[index] == len(found[first // 2])
            assert chunk.rows[index].tolist() == rows[first // 2].tolist()
            found[first // 2] += mine
    assert list(found.values()) == prompts
    assert len(shapes) == 1


def test_few_shapes_serve_many_prompts():
    def shape(*lens, size=64):
        rows = np.zeros((len(lens), 1), np.int32)
        chunk = pack([[1] * n for n in lens], rows, size=size, max_prompts=8)[0]
        return chunk.tokens.size, chunk.starts.size

    assert shape(1) == shape(9) == shape(1, 2, 3) == (16, 8)
    assert shape(17) == shape(16, 1) == shape(17, 15) == (32, 8)
    assert shape(50) == shape(100) == shape(20, 20, 20, 20) == (64, 8)
    assert shape(50, size=40) == (40, 8)
    assert shape(50, size=3) == (3, 3)
    assert pack([], np.zeros((0, 1), np.int32), size=64, max_prompts=8) == []


@pytest.mark.parametrize("size", [3, 100, *slow([1, 5])])
def test_a_chunk_of_any_size_gives_the_same_tokens(split, oracle, size):
    state, ok = start(split, empty_state(), PROMPTS, [0, 2, 1], size=size, limit=4)
    assert ok.all()
    pp.check_page_table(state.table)
    assert statuses(state) == [Status.RUNNING] * 3 + [Status.EMPTY]
    assert [text[0] for text in texts(state)[:3]] == [
        oracle.continue_(PROMPTS[prompt], 1)[0] for prompt in (0, 2, 1)
    ]
    state = step(split, state, 10)
    assert texts(state)[:3] == [oracle.continue_(PROMPTS[prompt], 4) for prompt in (0, 2, 1)]


def test_every_implementation_gives_the_same_tokens(split, oracle, implementation):
    state, _ = start(split, empty_state(), PROMPTS, [0, 1, 2], implementation=implementation)
    assert [text[0] for text in texts(state)[:3]] == [oracle.continue_(p, 1)[0] for p in PROMPTS]


def test_rows_decode_between_the_chunks_of_another(split, oracle):
    state, _ = start(split, empty_state(), [PROMPTS[0]], [3], limit=6)
    long = [*range(20, 30)]
    state, _, chunks = reserve_chunks(state, [long], [[1, 2]], size=4, limit=3)
    assert len(chunks) == 3
    for chunk in chunks:
        assert statuses(state)[1:] == [Status.PREFILLING] * 2 + [Status.RUNNING]
        state = step(split, prefill(*split, state, chunk, implementation="xla"), 1)
        pp.check_page_table(state.table)
    assert texts(state)[3] == oracle.continue_(PROMPTS[0], 4)
    assert [len(text) for text in texts(state)] == [0, 2, 2, 4]
    state = step(split, state, 10)
    wanted = oracle.continue_(long, 3)
    assert texts(state) == [[], wanted, wanted, oracle.continue_(PROMPTS[0], 6)]


def test_a_row_in_prefill_is_taken(split):
    state, _, _ = reserve_chunks(empty_state(), [PROMPTS[0]], [[0, 2]])
    assert state.table.seq_lens.tolist() == [3, 0, 0, 0]
    state, reserved, chunks = reserve_chunks(state, PROMPTS[1:], [0, 2])
    assert (reserved == MAX_SEQS).all() and not chunks
    assert statuses(state)[0] is statuses(state)[2] is Status.PREFILLING


def test_a_prompt_released_in_prefill_writes_no_more(split):
    prompt = list(range(1, 13))
    state, _, chunks = reserve_chunks(empty_state(), [prompt], [[0, 2]])
    state = prefill(*split, state, chunks[0], implementation="xla")
    state = release(state, jnp.array([True, False, True, False]))
    other, _ = start(split, state, [PROMPTS[1]], [1])  # takes the released pages
    pages = [np.array(x) for x in jax.tree.leaves(other.pool)]
    after = prefill(*split, other, chunks[1], implementation="xla")
    assert statuses(after) == [Status.EMPTY, Status.RUNNING, Status.EMPTY, Status.EMPTY]
    assert after.num_tokens.tolist() == [0, 1, 0, 0]
    for before, leaf in zip(pages, jax.tree.leaves(after.pool), strict=True):
        np.testing.assert_array_equal(before, leaf)
    pp.check_page_table(after.table)


def test_a_prompt_has_all_of_its_pages_or_none():
    prompts = [[1] * 12, [2] * 16, [3] * 8, [4] * (CAPACITY + 1)]  # 3, 4, 2 pages and too many
    state, reserved, _ = reserve_chunks(empty_state(), prompts, [0, 1, 2, 3])
    assert reserved[:, 0].tolist() == [0, 1, MAX_SEQS, MAX_SEQS]
    assert statuses(state) == [
        Status.PREFILLING,
        Status.PREFILLING,
        Status.OUT_OF_PAGES,
        Status.TABLE_FULL,
    ]
    assert state.table.seq_lens.tolist() == [12, 16, 0, 0]
    pp.check_page_table(state.table)


def test_samples_without_a_next_token_share_nothing(split):
    graphdef, params = split
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    state, _ = start((graphdef, broken), empty_state(), [PROMPTS[0]], [[0, 2]])
    assert statuses(state)[::2] == [Status.BAD_LOGITS] * 2
    assert state.table.seq_lens.tolist() == [3, 0, 0, 0] and not state.num_tokens.any()
    pp.check_page_table(state.table)


def test_a_chunk_is_compiled_once_for_a_shape(split):
    state, _ = start(split, empty_state(), [PROMPTS[1]], [0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx, "merge", None)  # a new trace would call it and fail
        state, ok = start(split, state, [list(range(1, 14))], [1], limit=2, temperature=0.5)
    assert ok.all() and state.num_tokens.tolist() == [1, 1, 0, 0]


def test_a_compiled_chunk_copies_no_pool(split):
    state = jax.eval_shape(lambda: empty_state(num_pages=MANY_PAGES))
    rows = np.zeros((3, 2), np.int32)
    chunk = pack(PROMPTS, rows, size=CHUNK, max_prompts=MAX_SEQS)[0]
    compiled = prefill.lower(*split, state, chunk, implementation="xla").compile()
    assert_copies_no_pool(compiled, state)
    compiled = reserve.lower(state, requests(PROMPTS, rows)).compile()
    assert_copies_no_pool(compiled, state)


def test_wrong_shapes_are_refused(split):
    good = requests(PROMPTS, [0, 1, 2])
    for name, value in {
        "lens": good.lens[:2],
        "keys": good.keys[:, 0],
        "stop_tokens": good.stop_tokens[:, :1],
        "max_new_tokens": good.rows,
    }.items():
        with pytest.raises(ValueError, match=rf"requests.{name} has shape"):
            reserve(empty_state(), replace(good, **{name: value}))
    with pytest.raises(
        ValueError, match=r"requests.sampling sets None, must set \['temperature'\]"
    ):
        reserve(empty_state(), replace(good, sampling=None))
    (chunk,) = pack(PROMPTS, np.zeros((3, 1), np.int32), size=16, max_prompts=3)
    for name in ("cu_q_lens", "starts"):
        with pytest.raises(ValueError, match=rf"chunk.{name} has shape"):
            prefill(*split, empty_state(), replace(chunk, **{name: chunk.tokens}))
