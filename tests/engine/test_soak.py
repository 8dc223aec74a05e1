"""Random requests in tiny pools: every page is free in the end, every output is right.

All steps of a short run can sample with any parameters; those of a slow run with what their
requests need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import jax
import numpy as np
import pytest

from pallas_paged.engine import Engine, Request, RequestOutput
from tests.support.engine_calls import (
    MODEL,
    NumberTokenizer,
    assert_deltas_add_up,
    assert_every_page_is_free,
    assert_nothing_is_left,
    greedy,
    make_engine,
    run,
    sample_as,
    sampling,
    serve,
    step,
    steps_of,
    weights,
)
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("exact_products")
FEW_REQUESTS, MANY_REQUESTS = 120, 300
NUM_PAGES = 9
TRACKED = 32  # most requests at a time, waiting and running
EOS_MODEL = replace(MODEL, eos_token_ids=(37,))

_STEM = np.random.default_rng(0).integers(1, 40, 20).tolist()
# Shared prefixes of 0 to 5 pages, and lengths on both sides of page borders.
PROMPTS = [
    [*_STEM[:shared], *range(30, 30 + own)]
    for shared, own in [(0, 1), (0, 2), (0, 5), (4, 1), (4, 4), (8, 0), (8, 5), (12, 3), (20, 0)]
]
PARAMS = [
    greedy(max_tokens=1),
    greedy(max_tokens=7),
    greedy(max_tokens=13),
    greedy(max_tokens=0),
    greedy(max_tokens=13, ignore_eos=True),
    greedy(max_tokens=9, stop_token_ids=(19, 2, 7)),
    greedy(max_tokens=9, stop=[" 3", " 36"]),
    greedy(max_tokens=8, presence_penalty=1.0, repetition_penalty=1.2, min_tokens=3),
    greedy(max_tokens=3, prompt_logprobs=1),
    sampling(max_tokens=5, n=2, seed=3),
    sampling(max_tokens=9, n=3, temperature=0.8, top_k=5, seed=4, stop_token_ids=range(7)),
    sampling(max_tokens=7, top_p=0.8, seed=5, logprobs=2),
    sampling(max_tokens=6, best_of=3, n=2, seed=6),
    sampling(max_tokens=4, n=7, seed=7),
    sampling(max_tokens=6, n=2, logit_bias={4: 3.0}, frequency_penalty=0.8, seed=8),
    greedy(max_tokens=5, beam_width=2, n=2),
    greedy(max_tokens=4, beam_width=3, stop_token_ids=range(5)),
    sampling(max_tokens=8, n=4, min_p=0.05, seed=9),
]
Case = tuple[int, int]  # indices into PROMPTS and PARAMS


def result(request: Request) -> tuple[list, list]:
    """The completions, each with its best tokens at every step, and those of the prompt."""
    outputs = [
        (x.token_ids, x.text, x.finish_reason, x.stop_reason, [*map(list, x.logprobs or ())])
        for x in request.outputs
    ]
    return outputs, [list(entry or ()) for entry in request.prompt_logprobs or ()]


def soak_engine(**sizes) -> Engine:
    sizes = dict(num_pages=NUM_PAGES, num_scheduler_steps=8) | sizes
    return make_engine(EOS_MODEL, weights(), NumberTokenizer(), **sizes)


@pytest.fixture(scope="module")
def cases(oracle) -> dict[Case, list]:
    """Every case that fits into the pool, with its result alone, in single steps, uncached."""
    engine = soak_engine(enable_prefix_caching=False)
    steps_of(sample_as(engine, PARAMS), 1)
    alone = {}
    for i, prompt in enumerate(PROMPTS):
        for j, params in enumerate(PARAMS):
            num_pages = -(-(len(prompt) + params.max_tokens) // 4) * (params.beam_width or 1)
            if num_pages <= NUM_PAGES:
                alone[i, j] = result(*serve(engine, [prompt], params, check=False))
        assert alone[i, 4][0][0][0] == oracle.continue_(prompt, 13)
    assert len(alone) > 0.8 * len(PROMPTS) * len(PARAMS)
    return alone


@dataclass
class Ended:
    """A request that has ended, with what was done to it."""

    request: Request
    case: Case
    deltas: list[RequestOutput] = field(default_factory=list)
    aborted: bool = False
    restarted: bool = False


def storm(engine: Engine, cases, rng: np.random.Generator, num_requests: int) -> Iterator[Ended]:
    """Submit, abort, refuse, replace weights and sleep at random; yield requests that end."""
    keys = list(cases)
    live: dict[str, Ended] = {}
    num_left, num_steps = num_requests, 0
    copies = [weights(), jax.tree.map(np.asarray, weights())]
    while num_left or live:
        while num_left and len(live) < TRACKED and rng.random() < 0.45:
            i, j = keys[rng.integers(len(keys))]
            priority = int(rng.choice([0, 0, 0, -1, 5]))
            request = engine.submit(PROMPTS[i], PARAMS[j], priority=priority)
            live[request.request_id] = Ended(request, (i, j))
            num_left -= 1
        event = rng.random()
        if live and event < 0.05:
            one = list(live.values())[rng.integers(len(live))]
            if not one.request.finished:
                one.aborted = True
                engine.abort(one.request)
        elif event < 0.07:
            restart = bool(rng.integers(2))
            engine.update_params(
                copies[rng.integers(2)],
                reset_prefix_cache=bool(rng.integers(2)),
                restart_running=restart,
            )
            for one in live.values():
                one.restarted |= restart and not one.request.finished
        elif event < 0.08:
            engine.sleep()
            engine.wake()
        elif event < 0.1:
            with pytest.raises(ValueError, match="tokens"):
                engine.submit([1] * 60, greedy(max_tokens=9))
        for delta in step(engine):
            one = live[delta.request_id]
            if delta.restarted:
                assert one.restarted
                one.deltas.clear()
            one.deltas.append(delta)
        num_steps += 1
        assert num_steps < 60 * num_requests, "requests hang"
        for one in [one for one in live.values() if one.request.finished]:
            if one.deltas and one.deltas[-1].finished:
                yield live.pop(one.request.request_id)


CHOICES = {"one": [1], "eight": [8], "random": [1, 1, 2, 3, 8]}


@pytest.mark.parametrize(
    ("caching", "watermark", "steps", "seed", "num_requests"),
    [
        (False, 0.2, "one", 0, FEW_REQUESTS),
        (True, 0.0, "random", 0, FEW_REQUESTS),
        (True, 0.2, "eight", 1, FEW_REQUESTS),
        *slow(
            [
                (False, 0.0, "random", 2, MANY_REQUESTS),
                (False, 0.2, "eight", 2, MANY_REQUESTS),
                (True, 0.2, "one", 2, MANY_REQUESTS),
                (True, 0.0, "random", 2, MANY_REQUESTS),
            ]
        ),
    ],
)
def test_soak(cases, caching, watermark, steps, seed, num_requests):
    rng = np.random.default_rng([seed, caching, int(10 * watermark)])
    engine = soak_engine(enable_prefix_caching=caching, watermark=watermark)
    steps_of(engine, lambda: int(rng.choice(CHOICES[steps])))
    if num_requests == FEW_REQUESTS:
        sample_as(engine, PARAMS)
    num_ended = num_aborted = 0
    for one in storm(engine, cases, rng, num_requests):
        num_ended += 1
        request, wanted = one.request, cases[one.case]
        assert request.error is None
        assert len(request.prompt_token_ids) > request.num_cached_tokens or one.restarted
        assert_deltas_add_up(one.deltas, [request])
        if not one.aborted:
            assert result(request) == wanted
            continue
        num_aborted += 1
        if request.params.beam_width or request.params.best_of:
            continue  # these return the best so far; some may have ended before the abort
        reasons = {output.finish_reason for output in request.outputs}
        assert "abort" in reasons
        for output, (tokens, text, *_) in zip(request.outputs, wanted[0], strict=True):
            assert output.token_ids == tokens[: len(output.token_ids)]
            assert text.startswith(output.text) or output.finish_reason == "abort"
    run(engine)
    assert_nothing_is_left(engine)
    stats = engine.stats()
    assert num_ended == num_requests and num_aborted > num_requests // 50
    assert stats.num_finished + stats.num_aborted == num_requests and stats.num_failed == 0
    assert stats.num_preemptions > num_requests // 10
    assert (stats.cache_hit_rate > 0.05) == caching
    assert 0 < stats.pages_used <= stats.peak_pages_used <= 1
    assert 0 < stats.pool_utilization <= 1
    assert_every_page_is_free(engine)
