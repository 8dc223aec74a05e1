"""Every metric by value: of counters that a test chooses, and of requests to a server."""

import asyncio
from dataclasses import fields

from pallas_paged.engine import EngineDeadError, EngineStats
from pallas_paged.server import metrics
from pallas_paged.server.metrics import Metrics
from tests.support.event_loops import in_loop
from tests.support.servers import MODEL, RunningServer, metric_values

SECONDS = "0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1.0 2.5 5.0 10.0 30.0 60.0 300.0 +Inf"
TOKENS = "1.0 4.0 16.0 64.0 256.0 1024.0 4096.0 16384.0 65536.0 262144.0 +Inf"
HISTOGRAMS = {
    "time_to_first_token_seconds": SECONDS,
    "inter_token_latency_seconds": SECONDS,
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
}
# Fields of `EngineStats` by the names of their metrics.
ENGINE = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "num_kv_cache_pages": "num_pages",
    "num_free_pages": "num_free_pages",
    "num_cached_pages": "num_cached_pages",
    "num_shared_pages": "num_shared_pages",
    "num_window_pages": "num_window_pages",
    "num_free_window_pages": "num_free_window_pages",
    "kv_cache_bytes": "pool_bytes",
    "prompt_tokens_total": "prompt_tokens",
    "prefix_cache_queries_total": "prefix_cache_queries",
    "prefix_cache_hits_total": "prefix_cache_hits",
    "generation_tokens_total": "generated_tokens",
    "computed_tokens_total": "computed_tokens",
    "num_preemptions_total": "num_preemptions",
    "num_steps_total": "num_steps",
    "num_compilations_total": "compilations",
    "spec_decode_num_drafts_total": "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens_total": "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens_total": "spec_decode_num_accepted_tokens",
}
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def some_stats(start):
    values = {field.name: start + i for i, field in enumerate(fields(EngineStats))}
    return EngineStats(**values | {"num_pages": 400, PER_POSITION: (7, 5)})


def without_histograms(values):
    return {k: v for k, v in values.items() if not k.startswith(tuple(HISTOGRAMS))}


class FakeEngine:
    """Answers `stats` with what it has: counters, an error, or a future."""

    answer, num_calls = None, 0

    async def stats(self):
        self.num_calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if isinstance(self.answer, EngineStats) else await self.answer


@in_loop
async def test_counters_of_the_engine(monkeypatch):
    monkeypatch.setattr(metrics, "ENGINE_SECONDS", 0.05)
    engine = FakeEngine()
    one = Metrics(engine, "x")

    def expected(stats, is_up=1.0):
        used = stats.num_pages - stats.num_free_pages - stats.num_cached_pages
        values = {name: getattr(stats, field) for name, field in ENGINE.items()}
        values |= {"num_used_pages": used, "kv_cache_usage_perc": used / 400, "engine_up": is_up}
        each = enumerate(getattr(stats, PER_POSITION))
        values |= {f'{PER_POSITION}_total{{position="{place}"}}': count for place, count in each}
        outcomes = ("stop", "length", "abort", "timeout", "error")
        return values | {f'request_success_total{{finished_reason="{x}"}}': 0 for x in outcomes}

    async def found():
        values = without_histograms(metric_values(await one.render()))
        return {k: v for k, v in values.items() if "created" not in k}

    engine.answer = busy = asyncio.get_running_loop().create_future()
    assert (await found()).keys() >= {"engine_up"} and "num_free_pages" not in await found()
    busy.set_result(some_stats(10))
    await asyncio.sleep(0)
    for start in (10, 50):
        engine.answer = some_stats(start)
        assert await found() == expected(engine.answer)
    num_calls = engine.num_calls
    await one.refresh(60.0)  # they are new enough
    assert engine.num_calls == num_calls
    await one.refresh(1e-9)
    assert engine.num_calls == num_calls + 1
    engine.answer = asyncio.get_running_loop().create_future()  # busy again: it compiles
    num_calls = engine.num_calls
    assert await found() == await found() == expected(some_stats(50))
    assert engine.num_calls == num_calls + 1  # which the second one waits for, too
    engine.answer.set_exception(RuntimeError("it has shut down"))
    engine.answer = RuntimeError("it has shut down")
    assert await found() == expected(some_stats(50)) and one.error is None
    engine.answer = error = EngineDeadError("dead", OSError())
    assert await found() == expected(some_stats(50), is_up=0.0) and one.error is error


def test_buckets_of_the_histograms(server):
    found = {}
    for name in server.metrics():
        name, is_bucket, le = name.partition('_bucket{le="')
        if is_bucket:
            found.setdefault(name, []).append(le.removesuffix('"}'))
    assert {name: " ".join(buckets) for name, buckets in found.items()} == HISTOGRAMS
    text = server.client.get("/metrics").text
    assert all('model_name="small"' in line for line in text.splitlines() if line[0] != "#")


def test_a_workload_by_value(tmp_path):
    """Prompts, one of them cached, answers in one piece and streamed, and refused requests."""
    with RunningServer(tmp_path) as server:
        prompt, options = "x" * 40, {"temperature": 0, "max_tokens": 6}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        for fields_ in (
            options | {"prompt": prompt, "n": 2},
            options | streamed | {"prompt": [prompt + "y", prompt + "z"]},
            {"prompt": "z", "logit_bias": {"65": 100}, "stop_token_ids": [65], "max_tokens": 1},
            {"prompt": "", "stream": True},
            {"prompt": "x" * 300},
        ):
            answer = server.client.post("/v1/completions", json=fields_)
            assert answer.status_code == (200 if fields_.get("max_tokens") else 400)
            assert ('{"cached_tokens":64}' in answer.text) == ("stream_options" in fields_)
        server.wait_until_idle()
        assert server.client.get("/none").status_code == 404
        assert server.client.get("/metrics").headers["content-type"].startswith("text/plain")
        values = server.metrics()

    assert values['request_success_total{finished_reason="length"}'] == 2
    assert values['request_success_total{finished_reason="stop"}'] == 1
    assert values['http_errors_total{status="400"}'] == 2
    assert values['http_errors_total{status="404"}'] == 1
    numbers = [40, 41, 41, 1], [12, 6, 6, 1]  # of each prompt: its tokens, and new ones
    for name, tokens in zip(("prompt", "generation"), numbers, strict=True):
        assert values[f"request_{name}_tokens_count"] == 4
        assert values[f"request_{name}_tokens_sum"] == sum(tokens)
        assert values[f"{name}_tokens_total"] == sum(tokens)
        for limit in (1, 16, 64):
            bucket = values[f'request_{name}_tokens_bucket{{le="{limit}.0"}}']
            assert bucket == sum(one <= limit for one in tokens)
    assert values["prefix_cache_queries_total"] == sum(numbers[0])
    assert values["prefix_cache_hits_total"] == 64  # two pages, twice
    # The model sees no last token of a completion, and the last of a prompt for each completion.
    assert values["computed_tokens_total"] == sum(numbers[0]) - 64 + 1 + 2 * 5 + 2 * 5
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert values[f"{name}_seconds_count"] == 4 and 0 < values[f"{name}_seconds_sum"] < 60
    assert values["e2e_request_latency_seconds_sum"] > values["time_to_first_token_seconds_sum"]
    assert values["time_to_first_token_seconds_sum"] > values["request_queue_time_seconds_sum"]
    assert 2 <= values["inter_token_latency_seconds_count"] <= 10
    idle = ("num_requests_running", "num_requests_waiting", "num_used_pages", "num_shared_pages")
    idle += ("kv_cache_usage_perc", "num_preemptions_total")
    assert [values[name] for name in idle] == [0] * 6
    assert values["num_kv_cache_pages"] == 64 == values["num_free_pages"] + 2
    assert values["num_cached_pages"] == 2
    # Steps with chunks, of 8 rows, and of one, where the other of a request has ended before.
    assert values["num_compilations_total"] in (2, 3)
    spec = MODEL.kv_cache_spec
    assert values["kv_cache_bytes"] == 64 * 16 * 2 * spec.num_kv_heads * spec.head_dim * 4
    assert values["num_steps_total"] > 10 and values["engine_up"] == 1
