"""Engines of one set of sizes, so that their steps compile once, and runs that end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from models.decoder import Decoder
from models.engine import Engine, EngineConfig
from models.request import News, Request, SamplingParams
from models.tokenizer import Tokenizer

SIZES: dict[str, Any] = dict(
    num_pages=16, page_size=4, max_seqs=4, token_budget=16, implementation="xla"
)


def make_engine(model: Decoder, tokenizer: Tokenizer | None = None, **sizes: Any) -> Engine:
    """An engine of the usual sizes, except those given."""
    return Engine(model, None, tokenizer, EngineConfig(**(SIZES | sizes)))


def run(engine: Engine, *, max_steps: int = 1000, check: bool = True) -> list[News]:
    """Steps until the engine is idle and returns all news; fails after `max_steps`."""
    news: list[News] = []
    for _ in range(max_steps):
        if engine.idle:
            assert_nothing_is_left(engine)
            return news
        news += engine.step()
        assert len(engine._flights) <= 1, "more than one step is unread"
        if check:
            engine.check()
    raise AssertionError(f"the engine is not idle after {max_steps} steps")


def assert_nothing_is_left(engine: Engine) -> None:
    """Every page is free or cached, every row is free, and no request is remembered."""
    engine.check()
    scheduler, cache, num_pages = engine._scheduler, engine._cache, engine.config.num_pages
    num_cached = 0
    if cache is not None:
        assert not cache._leases
        num_cached = len(cache)
        assert cache.num_evictable == num_cached
    assert int(engine.table.num_free) + num_cached == num_pages
    assert not np.any(np.asarray(engine.table.seq_lens))
    assert not (engine._groups or engine._flights)
    assert not (scheduler.queue or scheduler.running)
    assert sorted(scheduler._rows) == list(range(engine.config.max_seqs))


def serve(
    engine: Engine,
    prompts: Iterable[list[int]],
    params: SamplingParams | Iterable[SamplingParams],
    **options: Any,
) -> list[Request]:
    """Submits prompts at once and runs the engine to its end."""
    prompts = list(prompts)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [engine.submit(p, one) for p, one in zip(prompts, each, strict=True)]
    run(engine, **options)
    return requests


def tokens_of(requests: Iterable[Request]) -> list[list[int]]:
    """The tokens of all completions, request by request."""
    return [completion.tokens for request in requests for completion in request.completions]


def reasons_of(requests: Iterable[Request]) -> list[str | None]:
    """Why all completions ended, request by request."""
    return [completion.finish_reason for request in requests for completion in request.completions]


def assert_news_tell_all(news: Iterable[News], requests: Iterable[Request]) -> None:
    """The news of each completion add up to its tokens, its text and one end."""
    found: dict[tuple[Request, int], list[News]] = {}
    for one in news:
        found.setdefault((one.request, one.index), []).append(one)
    for request in requests:
        for completion in request.completions:
            mine = found.pop((request, completion.index))
            assert [token for one in mine for token in one.tokens] == completion.tokens
            assert "".join(one.text for one in mine) == completion.text
            reasons = [one.finish_reason for one in mine]
            assert reasons == [None] * (len(mine) - 1) + [completion.finish_reason]
    assert not found, "news of unknown completions"
