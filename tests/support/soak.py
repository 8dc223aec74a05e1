"""A storm of requests on an engine with a small pool: each gets what it gets alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from pallas_paged.engine import Engine, Request, RequestOutput
from tests.support.engine_calls import (
    NumberTokenizer,
    assert_deltas_add_up,
    assert_every_page_is_free,
    assert_nothing_is_left,
    greedy,
    make_engine,
    run,
    sampling,
    serve,
    step,
    steps_of,
    weights,
)

TRACKED = 32  # most requests at a time, waiting and running
_STEM = np.random.default_rng(0).integers(1, 40, 20).tolist()
# Shared prefixes of 0 to 5 pages, and lengths on both sides of page borders.
_LENGTHS = [(0, 1), (0, 5), (4, 4), (8, 0), (8, 5), (12, 3), (20, 0)]
PROMPTS = [[*_STEM[:shared], *range(30, 30 + own)] for shared, own in _LENGTHS]
# None has a top_k or top_p, for which steps compile longer: what a row draws is its own matter.
PARAMS = [
    greedy(max_tokens=1),
    greedy(max_tokens=0),
    greedy(max_tokens=13, stop_token_ids=(37,)),
    greedy(max_tokens=33),
    greedy(max_tokens=20, stop_token_ids=(19, 2, 7), min_tokens=4),
    greedy(max_tokens=20, stop=[" 3", " 36"]),
    greedy(max_tokens=8, presence_penalty=1.2, repetition_penalty=1.3, logprobs=0),
    greedy(max_tokens=3, prompt_logprobs=1),
    sampling(max_tokens=15, n=3, temperature=0.8, seed=4, stop_token_ids=range(7)),
    sampling(max_tokens=17, temperature=0.7, seed=5, logprobs=2),
    sampling(max_tokens=16, best_of=3, n=2, seed=6, stop_token_ids=range(4)),
    sampling(max_tokens=4, n=7, seed=7),
    sampling(max_tokens=6, n=2, logit_bias={4: 3.0}, frequency_penalty=0.8, seed=8),
    greedy(max_tokens=12, beam_width=2, n=2),
    greedy(max_tokens=7, beam_width=2, stop_token_ids=range(5)),
    sampling(max_tokens=18, n=4, min_p=0.05, temperature=2.0, seed=9),
]
# Each of the parameters with one or two prompts.
CASES = [(i, j) for i in range(len(PROMPTS)) for j in range(len(PARAMS)) if (i + 3 * j) % 4 == 0]


def result(request: Request) -> tuple[list, list]:
    """The completions, each with its best tokens at every step, and those of the prompt."""
    outputs = [
        (x.token_ids, x.text, x.finish_reason, x.stop_reason, [*map(list, x.logprobs or ())])
        for x in request.outputs
    ]
    return outputs, [list(entry or ()) for entry in request.prompt_logprobs or ()]


def soak_engine(model: Any, **sizes) -> Engine:
    return make_engine(model, weights(model), NumberTokenizer(), **sizes)


@cache
def result_alone(model: Any, case: tuple[int, int]) -> tuple[list, list]:
    """The result of a case by itself, on one device, in single steps, without a cache."""
    engine = soak_engine(model, enable_prefix_caching=False, num_steps=1)
    return result(*serve(engine, [PROMPTS[case[0]]], PARAMS[case[1]], check=False))


@dataclass
class _Live:
    request: Request
    case: tuple[int, int]
    deltas: list[RequestOutput] = field(default_factory=list)
    aborted: bool = False
    restarted: bool = False

    def take(self, delta: RequestOutput) -> None:
        if delta.restarted:
            assert self.restarted
            self.deltas.clear()
        self.deltas.append(delta)

    def check(self, wanted: tuple[list, list]) -> None:
        """The request has ended with what it gets alone, or a part of that if it was aborted."""
        request = self.request
        assert request.error is None
        assert len(request.prompt_token_ids) > request.num_cached_tokens or self.restarted
        assert_deltas_add_up(self.deltas, [request])
        if not self.aborted:
            assert result(request) == wanted, (request.prompt_token_ids, request.params)
        elif not (request.params.beam_width or request.params.best_of):
            # Those return the best so far; some may have ended before the abort.
            assert "abort" in {output.finish_reason for output in request.outputs}
            for output, (tokens, text, *_) in zip(request.outputs, wanted[0], strict=True):
                assert output.token_ids == tokens[: len(output.token_ids)]
                assert text.startswith(output.text) or output.finish_reason == "abort"


def storm(
    engine: Engine,
    model: Any,
    rng: np.random.Generator,
    *,
    num_requests: int,
    num_steps: Callable[[], int],
) -> None:
    """Submit, abort, refuse, replace weights and sleep at random; check all that ends."""
    steps_of(engine, num_steps)
    live: dict[str, _Live] = {}
    num_left, num_calls, num_aborted = num_requests, 0, 0
    copies = [weights(model), jax.tree.map(np.asarray, weights(model))]
    while num_left or live:
        while num_left and len(live) < TRACKED and rng.random() < 0.45:
            i, j = case = CASES[rng.integers(len(CASES))]
            priority = int(rng.choice([0, 0, 0, -1, 5]))
            request = engine.submit(PROMPTS[i], PARAMS[j], priority=priority)
            live[request.request_id] = _Live(request, case)
            num_left -= 1
        event = rng.random()
        if live and event < 0.05:
            one = list(live.values())[rng.integers(len(live))]
            if not one.request.finished:
                one.aborted = True
                engine.abort(one.request)
        elif event < 0.07:
            restart, reset = bool(rng.integers(2)), bool(rng.integers(2))
            how = dict(reset_prefix_cache=reset, restart_running=restart)
            engine.update_params(copies[rng.integers(2)], **how)
            for one in live.values():
                one.restarted |= restart and not one.request.finished
        elif event < 0.08:
            engine.sleep()
            engine.wake_up()
        elif event < 0.1:
            with pytest.raises(ValueError, match="tokens"):
                engine.submit([1] * 60, greedy(max_tokens=9))
        for delta in step(engine):
            live[delta.request_id].take(delta)
        num_calls += 1
        assert num_calls < 60 * num_requests, "requests hang"
        for one in [one for one in live.values() if one.request.finished]:
            if one.deltas and one.deltas[-1].finished:
                live.pop(one.request.request_id).check(result_alone(model, one.case))
                num_aborted += one.aborted
    run(engine)
    assert_nothing_is_left(engine)
    stats = engine.stats()
    assert num_aborted > num_requests // 50
    assert stats.num_finished + stats.num_aborted == num_requests and stats.num_failed == 0
    assert stats.num_preemptions > num_requests // 10
    assert (stats.cache_hit_rate > 0.05) == engine.config.enable_prefix_caching
    assert 0 < stats.pages_used <= stats.peak_pages_used <= 1
    assert 0 < stats.pool_utilization <= 1
    assert_every_page_is_free(engine)
