"""Traces, records and static batches of the serving bench, on a CPU."""

from __future__ import annotations

import math
import time

import jax.numpy as jnp
import numpy as np
import pytest

from bench.serving import batches, static
from bench.serving.batches import BatchTimes, serve_in_batches
from bench.serving.record import Record, Served, Usage
from bench.serving.requests import TraceRequest, describe_trace, make_trace
from bench.serving.static import StaticBatch
from tests.support.dense_oracle import CONFIG


def test_lengths_have_the_stated_means() -> None:
    trace = make_trace(20_000, vocab_size=2, max_len=1 << 16)
    found = describe_trace(trace)
    assert found["prompt_mean"] == pytest.approx(161, rel=0.03)
    assert found["output_mean"] == pytest.approx(338, rel=0.03)
    logs = np.log([one.num_tokens for one in trace])
    assert np.std(logs) == pytest.approx(0.8, rel=0.02)
    clipped = make_trace(2000, vocab_size=2, max_len=2048)
    found = describe_trace(clipped)
    assert found["prompt_max"] == found["output_max"] == 1024
    assert min(len(one.prompt) for one in clipped) == 4
    quarter = describe_trace(make_trace(2000, vocab_size=2, max_len=512))
    assert quarter["output_mean"] == pytest.approx(found["output_mean"] / 4, rel=0.05)


def test_system_prompts_and_arrivals() -> None:
    sizes = dict(vocab_size=1000, max_len=256, prefix_share=0.25, prefix_len=32, num_prefixes=3)
    trace = make_trace(2000, rate=10.0, **sizes)
    heads = [one.prompt[:32].tobytes() for one in trace if len(one.prompt) >= 32]
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    assert sum(counts[:3]) == pytest.approx(500, rel=0.15) and counts[2] > 100 and counts[3] == 1
    assert max(len(one.prompt) for one in trace) <= 128
    gaps = np.diff([0.0] + [one.arrival for one in trace])
    assert (gaps >= 0).all() and gaps.mean() == pytest.approx(0.1, rel=0.1)
    assert gaps.std() == pytest.approx(0.1, rel=0.15)  # of a Poisson process, as its mean
    assert all(one.arrival == 0 for one in make_trace(5, **sizes))
    again = make_trace(2000, rate=10.0, **sizes)
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(trace, again, strict=True))
    other = make_trace(2000, rate=10.0, seed=1, **sizes)
    assert not all(a.num_tokens == b.num_tokens for a, b in zip(trace, other, strict=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": 0},
        {"rate": 0.0},
        {"prefix_share": 1.5},
        {"prefix_len": 29},
        {"max_len": 7},
        {"num_prefixes": 0},
    ],
)
def test_invalid_traces(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make_trace(**{"num_requests": 1, "vocab_size": 9, "max_len": 64} | wrong)


def test_summary_of_a_record() -> None:
    served = [
        Served(arrival=1.0, first_token=2.0, finish=4.0, num_tokens=5),
        Served(arrival=0.0, first_token=3.0, finish=3.0, num_tokens=1),
    ]
    usage = [
        Usage(time=0.0, live=10, reserved=20, waits=True),
        Usage(time=3.0, live=30, reserved=30, waits=False),
        Usage(time=4.0, live=0, reserved=0, waits=False),
    ]
    record = Record(served=served, usage=usage, wall=8.0, num_tokens=12, capacity=40)
    found = record.summarize()
    assert found["tokens_per_s"] == 1.5 and found["requests_per_s"] == 0.25
    assert found["ttft_s"]["p50"] == 2.0 and found["latencies"] == [3.0, 3.0]
    assert found["tpot_s"] == {"p50": 0.5, "p99": 0.5}
    # A half for three seconds, all of it for one; without reserved memory there is no share.
    assert found["utilization"] == pytest.approx((3 * 0.5 + 1) / 4)
    assert found["live_of_budget"] == pytest.approx((3 * 10 + 30) / 4 / 40)
    assert found["live_of_budget_under_load"] == pytest.approx(10 / 40)
    assert found["reserved_of_budget"] == pytest.approx((3 * 20 + 30) / 4 / 40)
    nothing = Record(served=[], usage=[], wall=1.0, num_tokens=0, capacity=40).summarize()
    assert nothing["latency_s"] is None and nothing["utilization"] is None


def _requests(*sizes: tuple[float, int, int]) -> list[TraceRequest]:
    return [
        TraceRequest(arrival=at, prompt=np.ones(length, np.int32), num_tokens=count)
        for at, length, count in sizes
    ]


class _Clock:
    """A clock that advances only by `wait`."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(batches.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(batches.time, "sleep", self.wait)

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("grows", [False, True])
def test_batches_take_arrived_requests_in_order(monkeypatch, grows) -> None:
    clock, sizes = _Clock(monkeypatch), []
    trace = _requests((1.0, 10, 4), (1.0, 20, 2), (1.0, 5, 1), (2.5, 5, 1), (90.0, 5, 1))

    def run_batch(batch):
        sizes.append((clock.now - 100, len(batch)))
        clock.wait(1.0)
        first = clock.now
        clock.wait(4.0)
        return BatchTimes(first_token=first, finish=clock.now, padded_len=20)

    record = serve_in_batches(trace, run_batch, batch_size=2, max_len=32, seconds=50.0, grows=grows)
    assert sizes == [(1.0, 2), (6.0, 2)] and record.num_tokens == 8
    assert record.capacity == 64 and record.wall == 50.0
    assert [one.first_token - one.arrival for one in record.served] == [1.0, 1.0, 6.0, 4.5]
    assert [one.finish for one in record.served] == [6.0, 6.0, 11.0, 11.0]
    live = [(sample.time, sample.live) for sample in record.usage]
    assert live[:5] == [(2.0, 30), (3.0, 32), (4.0, 12), (5.0, 13), (6.0, 0)]
    assert live[5:] == [(7.0, 10), (11.0, 0)]
    reserved = [sample.reserved for sample in record.usage]
    assert reserved[:5] == ([40, 42, 44, 46, 0] if grows else [64, 64, 64, 64, 0])


def test_static_batch_tokens_equal_those_of_the_oracle(model, oracle, exact_products) -> None:
    rng = np.random.default_rng(0)
    trace = [
        TraceRequest(
            arrival=0.0,
            prompt=rng.integers(CONFIG.vocab_size, size=length, dtype=np.int32),
            num_tokens=count,
        )
        for length, count in ((1, 9), (30, 14), (17, 1), (16, 5), (31, 20), (2, 3))
    ]
    system = StaticBatch(model, batch_size=4, max_len=64)
    system.warmup(trace)
    found = [*system.run(trace[:4])[0], *system.run(trace[4:])[0]]  # the second reuses the cache
    for one, tokens in zip(trace, found, strict=True):
        assert tokens.tolist() == oracle.continue_(one.prompt, one.num_tokens)


def test_static_batch_reports_times_and_compiles_in_warmup(model) -> None:
    trace = make_trace(7, vocab_size=CONFIG.vocab_size, max_len=64)
    system = StaticBatch(model, batch_size=3, max_len=64)
    system.warmup(trace)
    before = (static.prefill._cache_size(), static.decode._cache_size())
    start = time.perf_counter()
    _, times = system.run(trace[:3])
    assert start < times.first_token < times.finish < time.perf_counter()
    assert times.padded_len == 64
    record = serve_in_batches(
        trace, lambda batch: system.run(batch)[1], batch_size=3, max_len=64, seconds=math.inf
    )
    assert len(record.served) == 7 and record.capacity == 3 * 64
    assert before == (static.prefill._cache_size(), static.decode._cache_size())


def test_faster_attention_is_chosen(model, monkeypatch) -> None:
    system = StaticBatch(model, batch_size=2, max_len=64)
    system._cache = tuple(
        (k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)) for k, v in system._cache
    )
    seconds = {"xla": 2.0, "cudnn": 1.0}
    monkeypatch.setattr(static.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(system, "run", lambda batch: None)
    monkeypatch.setattr(system, "_trial", seconds.__getitem__)
    system.warmup(make_trace(1, vocab_size=9, max_len=64))
    assert system.implementation == "cudnn"
    seconds["cudnn"] = math.inf  # it failed
    system.warmup(make_trace(1, vocab_size=9, max_len=64))
    assert system.implementation == "xla"
