"""Random requests in tiny pools on several devices: every page is free in the end."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.support.devices import mesh
from tests.support.engine_calls import (
    WIDE,
    NumberTokenizer,
    assert_deltas_add_up,
    assert_every_page_is_free,
    greedy,
    make_engine,
    run,
    sample_as,
    sampling,
    serve,
    step,
    steps_of,
    tokens_of,
    weights,
)
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
NUM_REQUESTS, NUM_PAGES = 36, 9
_STEM = np.random.default_rng(0).integers(1, 40, 20).tolist()
# Shared prefixes of 0 to 5 pages, and lengths on both sides of page borders.
PROMPTS = [
    [*_STEM[:shared], *range(30, 30 + own)]
    for shared, own in [(0, 1), (0, 5), (4, 4), (8, 5), (12, 3), (20, 0)]
]
PARAMS = [
    greedy(max_tokens=1),
    greedy(max_tokens=13),
    greedy(max_tokens=9, stop=[" 3", " 36"]),
    greedy(max_tokens=8, presence_penalty=1.0, min_tokens=3),
    greedy(max_tokens=3, prompt_logprobs=1),
    sampling(max_tokens=9, n=3, top_k=5, seed=4),
    sampling(max_tokens=6, best_of=3, n=2, seed=6),
    greedy(max_tokens=4, beam_width=2, n=2),
]


def pages_of(prompt, params) -> int:
    return -(-(len(prompt) + params.max_tokens) // 4) * (params.beam_width or 1)


CASES = [
    (prompt, params)
    for prompt in PROMPTS
    for params in PARAMS
    if pages_of(prompt, params) <= NUM_PAGES
]


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """The tokens of every case alone, on one device, in single steps, uncached."""
    engine = make_engine(WIDE, weights(WIDE), NumberTokenizer(), enable_prefix_caching=False)
    steps_of(sample_as(engine, PARAMS), 1)
    return [tokens_of(serve(engine, [prompt], params, check=False)) for prompt, params in CASES]


@pytest.mark.parametrize(
    ("tensor", "data", "steps"),
    [(2, 2, [1, 2, 8]), *slow([(2, 1, [1]), (8, 1, [1, 2, 8])])],
    ids=str,
)
def test_random_requests_get_the_tokens_of_one_device(alone, tensor, data, steps):
    mesh(tensor * data)
    sizes = dict(num_pages=NUM_PAGES, watermark=0.0, tensor_parallel=tensor, data_parallel=data)
    engine = make_engine(WIDE, weights(WIDE), NumberTokenizer(), **sizes)
    rng = np.random.default_rng([tensor, data])
    steps_of(sample_as(engine, PARAMS), lambda: int(rng.choice(steps)))
    copies = [weights(WIDE), jax.tree.map(np.asarray, weights(WIDE))]
    live, ended, deltas, aborted = {}, [], {}, set()
    num_left = NUM_REQUESTS
    while num_left or live:
        while num_left and len(live) < 16 * data and rng.random() < 0.6:
            case = int(rng.integers(len(CASES)))
            request = engine.submit(*CASES[case], priority=int(rng.choice([0, 0, 5])))
            live[request.request_id] = request, case
            num_left -= 1
        event = rng.random()
        if live and event < 0.04:
            request, _ = list(live.values())[rng.integers(len(live))]
            if not request.finished:
                engine.abort(request)
                aborted.add(request)
        elif event < 0.06:
            reset = bool(rng.integers(2))
            engine.update_params(copies[rng.integers(2)], reset_prefix_cache=reset)
        elif event < 0.07:
            engine.sleep()
            engine.wake()
        for delta in step(engine):
            deltas.setdefault(delta.request_id, []).append(delta)
            if delta.finished:
                ended.append(live.pop(delta.request_id))
    run(engine)
    assert len(ended) == NUM_REQUESTS and len(aborted) < NUM_REQUESTS / 3
    for request, case in ended:
        assert_deltas_add_up(deltas[request.request_id], [request])
        if request not in aborted:
            assert tokens_of([request]) == alone[case]
    stats = engine.stats()
    assert stats.num_finished + stats.num_aborted == NUM_REQUESTS
    assert stats.num_preemptions > 3 and stats.cached_tokens > 0
    assert_every_page_is_free(engine)
