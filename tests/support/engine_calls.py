"""Engines of one model and one set of sizes, which share compiled steps; runs that end."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from pallas_paged.engine import Engine, EngineConfig, Request, RequestOutput, SamplingParams
from pallas_paged.engine.device.pool import pool_bytes
from pallas_paged.engine.device.program import fit_mode, modes_for
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.plain_model import PlainModel

# A pool of this many pages is larger than any workspace of a step.
MANY_PAGES = 2**16 if jax.default_backend() == "cpu" else 2**20
MODEL = PlainModel(vocab_size=40, max_model_len=64)
WIDE = replace(MODEL, num_heads=8, num_kv_heads=4)  # for up to 8 devices
# Lengths on both sides of the borders of 4-token pages; the longest takes two steps.
PROMPTS = [[1, 2, 3], [*range(4, 13)], [14, 15, 16, 17], [18], [*range(20, 38)]]
# Every number of pages, slots, tokens or steps has programs of its own: change few of them.
SIZES: dict[str, Any] = dict(num_pages=16, page_size=4, max_num_seqs=4, max_num_batched_tokens=16)
SIZES |= dict(num_scheduler_steps=8, implementation="xla")
# Steps of greedy requests, of all but those with a top_k or top_p, and of any: the two shapes of
# each take 1, 2 and 5 s to compile.
_ANY = modes_for(None)[-1]
MODES = SamplingMode(), replace(_ANY, filters=0), _ANY


class NumberTokenizer:
    """Words are the decimal numbers of tokens; decoding can be made to fail."""

    broken = False

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        if self.broken:
            raise OSError("the tables are lost")
        return "".join(f" {token_id}" for token_id in token_ids)


def weights(model: PlainModel = MODEL, seed: int = 1) -> dict[str, jax.Array]:
    """Random weights; greedy tokens of the default ones vary."""
    return jax.device_put(model.init(seed))


_WEIGHTS = {MODEL: weights()}


def make_engine(
    model: Any = MODEL,
    params: Any = None,
    tokenizer: Any = None,
    *,
    modes: Iterable[SamplingMode] | None = MODES,
    num_steps: Any = None,
    draft_params: Any = None,
    **sizes,
) -> Engine:
    """An engine of the usual sizes, except those given, with the steps of `steps_of` if given.

    Its steps use `modes`, which serve all requests; None lets it choose the smallest for each step.
    """
    if params is None:
        params = _WEIGHTS.setdefault(model, weights(model))
    config = EngineConfig(**(SIZES | sizes))
    engine = Engine(model, params, config, tokenizer, draft_params=draft_params)
    if modes:
        use_modes(engine, modes)
    if num_steps is not None:
        steps_of(engine, num_steps)
    return engine


def use_modes(engine: Engine, modes: Iterable[SamplingMode]) -> None:
    """Let the steps of an engine use `modes`, which serve all requests, and no smaller ones."""
    for replica in engine.replicas:
        for shape in replica.runner.buckets.all():
            replica.runner.steps.compiled[shape] = {fit_mode(mode, shape) for mode in modes}


def greedy(**params) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=14, temperature=0.0) | params))


def sampling(**params) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=12, temperature=1.0, seed=5) | params))


def steps_of(engine: Engine, num_steps: Any) -> None:
    """Let calls that only decode run this many steps; a function is called each time."""
    for replica in engine.replicas:
        replica.step_policy = num_steps if callable(num_steps) else lambda: num_steps


def drafts_of(engine: Engine, num_drafts: Any) -> None:
    """Let calls verify this many drafts of a row; a function is called each time."""
    for replica in engine.replicas:
        replica.drafting.num_for = lambda _: num_drafts() if callable(num_drafts) else num_drafts


def run(engine: Engine, *, max_steps: int = 1000, check: bool = True) -> list[RequestOutput]:
    """Step until the engine is idle and return all outputs; fail after `max_steps`."""
    outputs: list[RequestOutput] = []
    for _ in range(max_steps):
        if engine.idle:
            assert_nothing_is_left(engine)
            return outputs
        outputs += step(engine, check=check)
    raise AssertionError(f"the engine is not idle after {max_steps} steps")


def step(engine: Engine, times: int = 1, *, check: bool = True) -> list[RequestOutput]:
    """Steps; then the invariants of the page table hold, and at most one call is in flight."""
    if times != 1:
        return [output for _ in range(times) for output in step(engine, check=check)]
    outputs = engine.step()
    for replica in engine.replicas:
        assert replica.calls_in_flight <= 1, "more than one call is in flight"
    if check:
        engine.check()  # runs the update, which the host has counted on
        for replica in engine.replicas:
            assert replica.scheduler.pages.num_free <= int(replica.runner.table.num_free)
    return outputs


def assert_nothing_is_left(engine: Engine) -> None:
    """Every page is free or cached, every slot is free, and no request is remembered."""
    engine.check()
    assert engine.idle
    for replica in engine.replicas:
        scheduler, cache, table = replica.scheduler, replica.cache, replica.runner.table
        num_cached = 0
        if cache is not None:
            num_cached = len(cache)
            assert cache.num_evictable == num_cached and cache.num_shared == 0
        assert int(table.num_free) + num_cached == engine.num_pages
        assert not np.any(np.asarray(table.seq_lens))
        assert not (scheduler.waiting or scheduler.running)
        assert sorted(scheduler.unused_slots) == list(range(engine.config.max_num_seqs))
        assert replica.load == 0


def assert_every_page_is_free(engine: Engine) -> None:
    """After the prefix cache is emptied."""
    engine.reset_prefix_cache()
    assert_nothing_is_left(engine)
    for replica in engine.replicas:
        assert int(replica.runner.table.num_free) == engine.num_pages


def submit(
    engine: Engine,
    prompts: Iterable[list[int]],
    params: SamplingParams | Iterable[SamplingParams],
) -> list[Request]:
    """Submit prompts with the same parameters, or each with its own."""
    prompts = list(prompts)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    return [engine.submit(prompt, one) for prompt, one in zip(prompts, each, strict=True)]


def serve(
    engine: Engine,
    prompts: Iterable[list[int]],
    params: SamplingParams | Iterable[SamplingParams],
    **options: Any,
) -> list[Request]:
    """Submit prompts at once and run the engine to its end."""
    requests = submit(engine, prompts, params)
    run(engine, **options)
    return requests


def tokens_of(requests: Iterable[Request | RequestOutput]) -> list[list[int]]:
    """The tokens of all completions, request by request."""
    return [output.token_ids for request in requests for output in request.outputs]


def reasons_of(requests: Iterable[Request | RequestOutput]) -> list[str | None]:
    """Why all completions ended, request by request."""
    return [output.finish_reason for request in requests for output in request.outputs]


def assert_deltas_add_up(deltas: Iterable[RequestOutput], requests: Iterable[Request]) -> None:
    """The deltas of each completion add up to its tokens, its text, and one end."""
    found: dict[str, list[RequestOutput]] = {}
    for one in deltas:
        found.setdefault(one.request_id, []).append(one)
    for request in requests:
        mine = found.pop(request.request_id)
        assert [one.finished for one in mine] == [False] * (len(mine) - 1) + [True]
        for output in request.outputs:
            parts = [part for one in mine for part in one.outputs if part.index == output.index]
            assert [x for part in parts for x in part.token_ids] == output.token_ids
            assert "".join(part.text for part in parts) == output.text
            reasons = [part.finish_reason for part in parts]
            assert reasons == [None] * (len(parts) - 1) + [output.finish_reason]
            if output.logprobs is not None:
                assert [x for part in parts for x in part.logprobs] == output.logprobs
    assert not found, "outputs of unknown requests"


def assert_logprobs(entry: Any, wanted: np.ndarray, token: int, top: int) -> None:
    """An entry has the token first, then the best `top`, with their ranks."""
    best = np.argsort(-wanted, kind="stable")[:top].tolist()
    assert list(entry) == [token, *(x for x in best if x != token)]
    for token_id, one in entry.items():
        assert abs(one.logprob - wanted[token_id]) <= 1e-4
        assert one.rank == 1 + np.sum(wanted > wanted[token_id])


def assert_copies_no_pool(engine: Engine, shape: tuple[int, ...] | None = None) -> Any:
    """A greedy step, of this shape or the largest, updates a pool of `MANY_PAGES` pages in place.

    Returns the compiled step.
    """
    runner = engine.replicas[0].runner
    batch = runner.empty_batch(shape or runner.buckets.all()[0], SamplingMode())
    compiled = runner.executor.compilation(batch).lower().compile()
    pool, memory = runner.executor.pool_shape, compiled.memory_analysis()
    pages = pool.layers[0].k_pages
    # Less than half of one layer's K: the rest is workspace; cuBLAS takes 32 MiB.
    assert memory.temp_size_in_bytes < pages.size * pages.dtype.itemsize / 2, memory
    assert memory.alias_size_in_bytes > pool_bytes(pool)
    element = {"float32": "f32", "int8": "s8", "float8_e4m3fn": "f8e4m3fn"}[pages.dtype.name]
    heads, num_pages, page_size, dim = pages.shape
    array = rf"{element}\[{heads},(?:{num_pages},{page_size}|{num_pages * page_size}),{dim}\]"
    assert re.search(array, compiled.as_text())
    assert not re.search(rf"= \S*{array}\S* copy\(", compiled.as_text())
    return compiled
