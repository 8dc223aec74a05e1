"""Models whose layers are of two kinds: some see all tokens, others a window."""

import random
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from pallas_paged.engine import EngineConfig, KVCacheSpec
from pallas_paged.engine.device.batch import NOT_SAMPLED, Batch
from pallas_paged.engine.device.pool import create_pool, page_bytes, pool_bytes
from pallas_paged.engine.model import check_model
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.engine.schedule.windows import WindowPool
from tests.support.engine_calls import (
    assert_every_page_is_free,
    greedy,
    make_engine,
    run,
    sampling,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)
from tests.support.mixed_model import MixedModel
from tests.support.page_tables import extend, i32
from tests.support.plain_model import PlainModel, greedy_tokens
from tests.support.scheduler_host import Host, make_sequence, with_forks

# Of each sequence the pages of 18 tokens are kept: the window, a page and a call of 8 steps. They
# are 7 pages at most. Those of 4 sequences and of a step of 16 tokens are two thirds of the pool.
MODEL = MixedModel(vocab_size=40, max_model_len=128, sliding_window=6, num_full_layers=1)
NUM_PAGES, WINDOW_PAGES, IN_USE = 64, 49, 32
# Without a prefix cache the pages of 6 tokens are kept.
UNCACHED = dict(enable_prefix_caching=False, num_pages=30)
UNCACHED_WINDOW_PAGES = 20
GREEDY, DRAWS = SamplingMode(), SamplingMode(draws=True)
PROMPTS = [[1, 2, 3], [*range(38)], [7] * 9]
COUNTS = 1, 3, 2  # samples of each


def engine_of(model=MODEL, mode=GREEDY, **sizes):
    engine = make_engine(model, modes=[mode], num_steps=8, **dict(num_pages=NUM_PAGES) | sizes)
    return engine


def window_pages_held(engine):
    stats = engine.stats()
    return stats.num_window_pages - stats.num_free_window_pages


def serve_counting(engine, prompts, params):
    """Serve requests; return the numbers of window pages that were held, after each step."""
    requests, held = submit(engine, prompts, params), []
    while not engine.idle:
        step(engine)
        held.append(window_pages_held(engine))
    return requests, held


@pytest.fixture(scope="module")
def wanted():
    """Tokens of each sample, from all tokens before them."""
    each = [greedy_tokens(MODEL, weights(MODEL), prompt, 80) for prompt in PROMPTS]
    return [tokens for tokens, n in zip(each, COUNTS, strict=True) for _ in range(n)]


@pytest.mark.cpu_budget(8)  # compiles programs that later tests share
def test_tokens_are_those_of_a_model_without_pages(wanted):
    """Forks and preempted sequences too; both tables are checked at each step."""
    engine = engine_of()
    params = [greedy(max_tokens=80, n=n) for n in COUNTS]
    requests, held = serve_counting(engine, PROMPTS, params)
    assert tokens_of(requests) == wanted
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.num_window_pages == WINDOW_PAGES
    assert IN_USE - 10 < max(held) < WINDOW_PAGES  # the cache has some
    assert_every_page_is_free(engine)
    assert engine.stats().num_free_window_pages == WINDOW_PAGES


def test_requests_go_on_after_a_pause_and_after_others_are_aborted(wanted):
    engine = engine_of()
    params = [greedy(n=2), *(greedy(max_tokens=80, n=n) for n in COUNTS)]
    aborted, *requests = submit(engine, [[9] * 40, *PROMPTS], params)
    step(engine, 3)
    engine.abort(aborted)
    engine.sleep()
    engine.wake_up()
    run(engine)
    assert tokens_of(requests) == wanted


def test_an_answer_is_cached_for_the_next_turn_where_its_window_is():
    engine, prompt = engine_of(), [*range(20, 40)]

    def serve_one(prompt, num_tokens):
        (request,) = serve(engine, [prompt], greedy(max_tokens=num_tokens))
        assert tokens_of([request]) == [greedy_tokens(MODEL, weights(MODEL), prompt, num_tokens)]
        return request

    first = serve_one(prompt, 40)
    text = prompt + first.outputs[0].token_ids
    second = serve_one([*text, 5], 10)
    assert second.num_cached_tokens == 56  # of 59 tokens with K and V the full pages
    assert serve_one([*text[:18], 5], 3).num_cached_tokens == 16  # near the end of the prompt
    # The answer's pages are cached, but in its middle those of the window are free.
    assert serve_one([*text[:41], 5], 3).num_cached_tokens in range(16, 24)


@pytest.mark.slow
def test_conversations_that_branch_end_and_are_aborted_have_the_same_tokens():
    engine, rng, texts = engine_of(), random.Random(0), [[*range(30)]]
    for turn in range(12):
        prompts, params = [], []
        for _ in range(5):
            text = rng.choice(texts)[: rng.randint(1, 90)]
            prompts.append(text + [rng.randrange(40) for _ in range(rng.randint(1, 9))])
            params.append(greedy(max_tokens=rng.randint(1, 28), n=rng.randint(1, 3)))
        requests = submit(engine, prompts, params)
        for _ in range(4 * (turn % 3 == 2)):
            step(engine)
        engine.abort(requests[0])
        if turn == 8:
            engine.reset_prefix_cache()
        run(engine)
        for prompt, one, request in zip(prompts[1:], params[1:], requests[1:], strict=True):
            tokens = greedy_tokens(MODEL, weights(MODEL), prompt, one.max_tokens)
            assert tokens_of([request]) == [tokens] * one.n
            texts.append(prompt + tokens)
    assert engine.stats().prefix_cache_hits > 300
    assert_every_page_is_free(engine)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GREEDY, DRAWS], ids=["greedy", "sampled"])
def test_tokens_are_those_of_an_engine_that_keeps_all_pages(mode):
    """It has so few pages that two pools would save nothing."""
    how = sampling if mode.draws else greedy
    params = [how(max_tokens=30, n=n) for n in COUNTS]
    kept = engine_of(mode=mode, **UNCACHED | dict(num_pages=UNCACHED_WINDOW_PAGES))
    assert kept.stats().num_window_pages == 0
    wanted = tokens_of(serve(kept, PROMPTS, params))
    engine = engine_of(mode=mode, **UNCACHED)
    requests, held = serve_counting(engine, PROMPTS, params)
    assert tokens_of(requests) == wanted
    assert max(held) <= engine.stats().num_window_pages == UNCACHED_WINDOW_PAGES
    # 16 tokens and 5 before them; then 6 tokens. The other layers hold 30 pages at the end.
    _, held = serve_counting(engine, [[1] * 100], greedy(max_tokens=19))
    assert max(held) == 6 and set(held[-4:-1]) <= {2, 3}
    assert engine.stats().peak_pages_used == 1


@pytest.mark.parametrize("lacking", ["table", "window_table"])
def test_a_row_that_lacks_a_page_in_one_table_grows_in_neither(lacking):
    """Of rows with 4 and 5 tokens, in pages of 4, the first needs one more."""
    executor = engine_of().replicas[0].runner.executor
    state, lens = executor.state, i32(4, 5, 0, 0)
    tables = {name: extend(getattr(state, name), lens)[0] for name in ("table", "window_table")}
    tables[lacking] = replace(tables[lacking], num_free=i32(0)[0])
    free = [int(table.num_free) for table in tables.values()]
    slots = replace(state.slots, finished=np.zeros(4, bool), max_lens=i32(9, 9, 9, 9))
    executor.state = executor.placement.put(replace(state, **tables, slots=slots))
    rows = dict(decode_slots=np.int32([0, 1, 4, 4]), num_steps=np.int32([1, 1, 0, 0]))
    batch = Batch(**rows, chunks=None, mode=GREEDY, max_num_steps=8)
    token_ids = np.asarray(executor.step(batch).token_ids)[0]
    assert token_ids[0] == NOT_SAMPLED and token_ids[1] >= 0
    for name, num_free in zip(tables, free, strict=True):
        table = getattr(executor.state, name)
        assert table.seq_lens.tolist() == [4, 6, 0, 0] and int(table.num_free) == num_free


@dataclass(frozen=True, kw_only=True)
class Forgetful(MixedModel):
    """Its last layer does not tell `attend` of its window."""

    def __call__(self, params, tokens, positions, attend, cache):
        def without_window(*args, sliding_window):
            return attend(*args)

        return super().__call__(params, tokens, positions, without_window, cache)


def test_a_layer_that_sees_more_than_its_spec_says_is_refused():
    model = Forgetful(**vars(MODEL))
    for one in (model, replace(model, num_full_layers=0)):  # also if all layers have a window
        with pytest.raises(ValueError, match="sliding_window=None of a layer must be at most 6"):
            engine_of(one)
    engine_of(model, num_pages=WINDOW_PAGES)  # where no pages are freed, it may


@pytest.mark.parametrize("name", ["sliding_windows", "k_scales", "v_scales"])
def test_windows_and_scales_must_be_given_for_each_layer(name):
    @dataclass(frozen=True, kw_only=True)
    class Short(PlainModel):
        @property
        def kv_cache_spec(self):
            return replace(super().kv_cache_spec, **{name: (4,)})

    with pytest.raises(ValueError, match=rf"{name}=\(4,\) must have one entry for each of"):
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


# A page of a layer takes 64 KiB. The engine takes 1 GiB of a CPU's memory, which is 16,384 pages.
BIG = MixedModel(num_layers=8, num_full_layers=2, sliding_window=1024, max_model_len=10**6)
BIG = replace(BIG, num_kv_heads=8, head_dim=64, num_heads=8)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the numbers are for 1 GiB")
@pytest.mark.parametrize(
    ("sizes", "num_pages", "num_window_pages", "num_seqs"),
    [
        (dict(max_num_seqs=4), 6371, 607, 4),  # as many as these need
        (dict(max_num_seqs=64), 4097, 1365, 11),  # half of the memory
        (dict(max_num_seqs=4, enable_prefix_caching=False), 7016, 392, 4),
        (dict(max_num_seqs=4, max_model_len=4096), 1024, None, 4),  # all fit in one pool
        (dict(max_num_seqs=4, num_pages=607), 607, None, 4),
        (dict(max_num_seqs=4, num_pages=608), 608, 607, 4),
    ],
)
def test_memory_is_divided_between_two_pools(sizes, num_pages, num_window_pages, num_seqs):
    config = EngineConfig(max_num_batched_tokens=2048, **sizes)
    found, max_len, windows = config.sizes(BIG)
    assert found == num_pages
    assert (windows and windows.num_pages) == num_window_pages
    if windows is not None:
        assert max_len == num_pages * 16
        assert windows.num_for_sequences // windows.num_of_sequence(max_len) == num_seqs
        assert 2 * num_pages + 6 * num_window_pages <= 16384


def test_no_more_sequences_run_than_the_pool_of_windows_holds():
    """Three of 4 pages each, or two and a short one; forks are counted too."""
    sizes = dict(num_pages=16, page_size=4, max_num_batched_tokens=16)
    windows = WindowPool(**sizes, sliding_window=6, kept_tokens=6, caches=False)
    assert windows.num_for_sequences == 12 and windows.most_of_sequence == 4
    each = [make_sequence(index, 20, new=20) for index in range(4)]
    with_forks(each[0], 2)
    short = make_sequence(9, 3, new=1, priority=-1)
    host = Host(*each, short, num_pages=64, windows=windows)
    num_running = []
    while host.scheduler.running or host.scheduler.waiting:
        host.step()
        num_running.append(len(host.scheduler.running))
    assert max(num_running) == 3
    assert all(one.finished for one in (*each, short))


def test_a_pool_says_its_bytes_with_both_groups():
    engine = engine_of()
    pool = engine.replicas[0].runner.executor.state.pool
    layer = page_bytes(MODEL.kv_cache_spec, page_size=4, dtype="float32") // 2
    assert engine.stats().pool_bytes == pool_bytes(pool) == (NUM_PAGES + WINDOW_PAGES) * layer
