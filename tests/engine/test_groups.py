"""Models whose layers are of two kinds: some see all tokens, others a window."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.engine import KVCacheSpec
from pallas_paged.engine.device.placement import Placement
from pallas_paged.engine.device.pool import create_pool, page_bytes, pages_that_fit, pool_bytes
from pallas_paged.engine.device.state import Batch
from pallas_paged.engine.device.step import NOT_SAMPLED
from pallas_paged.engine.model import check_model
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.engine_calls import (
    greedy,
    make_engine,
    run,
    sampling,
    serve,
    step,
    steps_of,
    submit,
    tokens_of,
    weights,
)
from tests.support.page_tables import i32
from tests.support.plain_model import PlainModel, greedy_tokens

# Windows of 4 sequences and a step of 16 tokens take at most 17 pages of 4 tokens.
MODEL = PlainModel(vocab_size=40, max_model_len=128, sliding_window=6, num_full_layers=1)
WINDOW_PAGES, GREEDY, DRAWS = 17, SamplingMode(), SamplingMode(draws=True)
PROMPTS = [[1, 2, 3], [*range(38)], [7] * 9]
PARAMS = [greedy(max_tokens=30, n=n) for n in (1, 3, 2)]


def engine_of(num_pages=30, model=MODEL, mode=GREEDY):
    engine = make_engine(model, modes=[mode], num_pages=num_pages)
    steps_of(engine, 8)
    return engine


def window_pages_held(engine):
    stats = engine.stats()
    return stats.num_window_pages - stats.num_free_window_pages


@pytest.fixture(scope="module")
def wanted():
    """Tokens of each sample, from all tokens before them."""
    each = [greedy_tokens(MODEL, weights(MODEL), prompt, 30) for prompt in PROMPTS]
    return [each[0], *[each[1]] * 3, *[each[2]] * 2]


def test_tokens_are_those_of_a_model_without_pages(wanted):
    """Forks and preempted sequences too; both tables are checked at each step."""
    engine = engine_of()
    requests = submit(engine, PROMPTS, PARAMS)
    held = []
    while not engine.idle:
        step(engine)
        held.append(window_pages_held(engine))
    assert tokens_of(requests) == wanted
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_window_pages == WINDOW_PAGES and 8 < max(held) <= WINDOW_PAGES
    assert stats.num_free_window_pages == WINDOW_PAGES


@pytest.mark.slow
def test_samples_are_those_of_an_engine_that_keeps_all_pages():
    """With so few pages that two pools would save nothing."""
    params = [sampling(max_tokens=30, n=n) for n in (1, 3, 2)]
    kept, freed = (engine_of(num_pages, mode=DRAWS) for num_pages in (WINDOW_PAGES, 30))
    assert kept.stats().num_window_pages == 0
    wanted, found = (tokens_of(serve(engine, PROMPTS, params)) for engine in (kept, freed))
    assert found == wanted
    assert freed.stats().num_window_pages == WINDOW_PAGES


def test_a_sequence_holds_the_window_pages_of_its_window_and_chunk_only():
    engine = engine_of()
    engine.submit([1] * 100, greedy(max_tokens=19))
    held = []
    while not engine.idle:
        step(engine)
        held.append(window_pages_held(engine))
    # 16 tokens and 5 before them; then 6 tokens. The other layers hold 30 pages at the end.
    assert max(held) == 6 and set(held[-4:-1]) <= {2, 3}
    assert engine.stats().peak_pages_used == 1


def test_requests_go_on_after_a_pause_and_after_others_are_aborted(wanted):
    engine = engine_of()
    aborted, *requests = submit(engine, [[9] * 40, *PROMPTS], [greedy(n=2), *PARAMS])
    for _ in range(3):
        step(engine)
    engine.abort(aborted)
    engine.sleep()
    engine.wake_up()
    run(engine)
    assert tokens_of(requests) == wanted


@pytest.mark.parametrize("lacking", ["table", "window_table"])
def test_a_row_that_lacks_a_page_in_one_table_grows_in_neither(lacking):
    """Of rows with 4 and 5 tokens, in pages of 4, the first needs one more."""
    executor = engine_of().replicas[0].runner.executor
    state, lens = executor.state, i32(4, 5, 0, 0)
    tables = {name: pp.extend(getattr(state, name), lens)[0] for name in ("table", "window_table")}
    tables[lacking] = replace(tables[lacking], num_free=i32(0)[0])
    free = [int(table.num_free) for table in tables.values()]
    slots = replace(state.slots, finished=jnp.zeros(4, bool), max_lens=i32(9, 9, 9, 9))
    executor.state = executor.placement.put(replace(state, **tables, slots=slots))
    batch = Batch(
        decode_slots=np.int32([0, 1, 4, 4]),
        num_steps=np.int32([1, 1, 0, 0]),
        chunks=None,
        mode=GREEDY,
        max_num_steps=8,
    )
    token_ids = np.asarray(executor.step(batch).token_ids)[0]
    assert token_ids[0] == NOT_SAMPLED and token_ids[1] >= 0
    for name, num_free in zip(tables, free, strict=True):
        table = getattr(executor.state, name)
        assert table.seq_lens.tolist() == [4, 6, 0, 0] and int(table.num_free) == num_free


@dataclass(frozen=True, kw_only=True)
class Forgetful(PlainModel):
    """Its last layer does not tell `attend` of its window."""

    def __call__(self, params, tokens, positions, attend, cache):
        def without_window(*args, sliding_window):
            return attend(*args)

        return super().__call__(params, tokens, positions, without_window, cache)


def test_a_layer_that_sees_more_than_its_spec_says_is_refused():
    model = Forgetful(**vars(MODEL))
    with pytest.raises(ValueError, match="sliding_window=None of a layer must be at most 6"):
        engine_of(model=model)
    engine_of(WINDOW_PAGES, model)  # where no pages are freed, it may


def test_windows_must_be_given_for_each_layer():
    @dataclass(frozen=True, kw_only=True)
    class Short(PlainModel):
        windows = (4,)

    with pytest.raises(ValueError, match=r"sliding_windows=\(4,\) must have one entry for each of"):
        check_model(Short())


SPEC = KVCacheSpec(
    num_layers=5,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    sliding_windows=(8, None, 16, 16, 4),
    k_scales=(1.0, 2.0, 3.0, 4.0, 5.0),
    v_scales=(6.0, 7.0, 8.0, 9.0, 10.0),
)


def test_layers_are_grouped_by_whether_they_have_a_window():
    full, limited = SPEC.groups
    assert (full.layers, full.sliding_window) == ((1,), None)
    assert (limited.layers, limited.sliding_window) == ((0, 2, 3, 4), 16)
    assert SPEC.sliding_window is None
    (alone,) = SPEC.of(limited).groups
    assert (alone.layers, alone.sliding_window) == ((0, 1, 2, 3), 16)
    (plain,) = replace(SPEC, sliding_windows=None).groups
    assert (plain.layers, plain.sliding_window) == ((0, 1, 2, 3, 4), None)


def test_each_layer_has_the_pages_of_its_group_and_its_own_scales():
    sizes = dict(num_pages=9, num_window_pages=3, page_size=4)
    pool = create_pool(SPEC, **sizes, dtype="float8_e4m3fn")
    assert [layer.num_pages for layer in pool.layers] == [3, 9, 3, 3, 3]
    assert [float(layer.k_scales) for layer in pool.layers] == [1, 2, 3, 4, 5]
    assert [float(layer.v_scales) for layer in pool.layers] == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("num_window_pages", [1, 1000, 10**6])
def test_memory_is_shared_by_two_pools_or_is_one(num_window_pages):
    sizes = dict(page_size=16, dtype="bfloat16")
    num_pages = pages_that_fit(
        SPEC,
        **sizes,
        memory_fraction=1,
        placements=[Placement.default()],
        num_window_pages=num_window_pages,
    )
    page = page_bytes(SPEC, **sizes)
    held = num_pages * page
    if num_window_pages < num_pages:
        held = num_pages * page // 5 + num_window_pages * page * 4 // 5
    assert 2**30 - page < held <= 2**30
    assert (num_window_pages < num_pages) == (num_window_pages < 10**6)


def test_a_pool_says_its_bytes_with_both_groups():
    engine = engine_of()
    pool = engine.replicas[0].runner.executor.state.pool
    layer = page_bytes(MODEL.kv_cache_spec, page_size=4, dtype="float32") // 2
    assert engine.stats().pool_bytes == pool_bytes(pool) == (30 + WINDOW_PAGES) * layer
