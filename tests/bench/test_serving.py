"""The serving bench on a CPU: traces, records, baselines and complete runs, but no speed."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.serving import __main__ as cli
from bench.serving import batches, report, static, transformers
from bench.serving.batches import BatchTimes, serve_in_batches
from bench.serving.compilations import Compilations
from bench.serving.engine import serve
from bench.serving.models import SHAPES, random_model, weight_bytes
from bench.serving.requests import TraceRequest, describe_trace, make_trace
from bench.serving.static import StaticBatch
from models.decoder import Decoder, engine_model
from pallas_paged.engine import Engine, EngineConfig
from tests.support.dense_oracle import CONFIG
from tests.support.marks import slow

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def tiny() -> Decoder:
    return random_model(TINY)


@pytest.fixture
def no_compiling(tiny, monkeypatch) -> None:
    """Runs of `--seconds 0` take no step, and need no warm-up."""
    monkeypatch.setattr(cli, "random_model", lambda shape: tiny)
    monkeypatch.setattr(Engine, "warmup", lambda engine, params: None)


def test_traces_have_the_stated_lengths_system_prompts_and_arrivals() -> None:
    trace = make_trace(20_000, vocab_size=2, max_len=1 << 16)
    found = describe_trace(trace)
    assert found["prompt_mean"] == pytest.approx(161, rel=0.03)
    assert found["output_mean"] == pytest.approx(338, rel=0.03)
    assert np.std(np.log([one.num_tokens for one in trace])) == pytest.approx(0.8, rel=0.02)
    clipped = make_trace(2000, vocab_size=2, max_len=2048)
    found = describe_trace(clipped)
    assert found["prompt_max"] == found["output_max"] == 1024
    assert min(len(one.prompt) for one in clipped) == 4
    quarter = describe_trace(make_trace(2000, vocab_size=2, max_len=512))
    assert quarter["output_mean"] == pytest.approx(found["output_mean"] / 4, rel=0.05)
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
    again, other = (make_trace(2000, rate=10.0, seed=seed, **sizes) for seed in (0, 1))
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(trace, again, strict=True))
    assert not all(a.num_tokens == b.num_tokens for a, b in zip(trace, other, strict=True))


BILLIONS = {"1b": 1.236, "8b": 8.030, "qwen3-0.6b": 0.596}


@pytest.mark.parametrize("name", ["1b", *slow(["8b", "qwen3-0.6b"])])
def test_sizes_of_the_models(name) -> None:
    shape, billions = SHAPES[name], BILLIONS[name]
    make = partial(Decoder, shape.config, dtype=shape.dtype)
    params = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(params, nnx.Param))
    assert sum(leaf.size for leaf in leaves) / 1e9 == pytest.approx(billions, abs=1e-3)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert shape.kv_gib * (1 << 30) == 32 * shape.max_model_len * shape.token_bytes()


def test_bytes_of_a_model_and_of_its_tokens(tiny) -> None:
    first, second = (layer.mlp.down_proj.weight[...] for layer in tiny.layers)
    assert 0.005 < float(jnp.std(first)) < 0.02 and not jnp.any(first == second)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(tiny)))
    assert weight_bytes(tiny) == total - 256 * 64 * 4  # without the input embeddings
    found = [TINY.token_bytes(name) for name in (None, "int8", "fp8")]
    assert found == [2 * 2 * 2 * 16 * 4, *[2 * 2 * 2 * (16 + 4)] * 2]


def test_compilations_are_counted_inside_the_block_only() -> None:
    function = jax.jit(lambda x: 3 * x + 1)
    inputs = [np.ones(n, np.float32) for n in (3, 4, 5)]
    with Compilations() as compilations:
        for x in (inputs[0], inputs[0], inputs[1]):
            function(x)
    function(inputs[2])
    assert compilations.count == 2
    (found,) = compilations.functions()
    assert found.pop("name") == "<lambda>" and found["count"] == 2 and min(found.values()) > 0


@pytest.fixture
def engine(tiny) -> Engine:
    """An engine of the sizes of the tiny run, so that they share compiled programs."""
    sizes = dict(num_pages=64, max_num_seqs=8, max_num_batched_tokens=128)
    return Engine(*engine_model(tiny), EngineConfig(max_model_len=TINY.max_model_len, **sizes))


@pytest.fixture(params=["alone", *slow(["over HTTP"])])
def serve_trace(request, engine):
    if request.param == "alone":
        return partial(serve, engine)
    pytest.importorskip("httptools", reason="needs the extra [server]")
    from bench.serving.http import serve_over_http

    return partial(serve_over_http, engine)


def test_engine_serves_all_of_the_trace(serve_trace, engine) -> None:
    trace = make_trace(12, vocab_size=256, max_len=64, rate=50.0)
    record = serve_trace(trace, seconds=60.0)
    assert [one.num_tokens for one in record.served] == [one.num_tokens for one in trace]
    assert record.num_tokens == sum(one.num_tokens for one in trace)
    assert record.wall >= trace[-1].arrival and record.capacity == 64 * 16
    for one in record.served:
        assert one.arrival <= one.first_token <= one.finish <= record.wall
    assert all(x.live <= x.reserved <= record.capacity for x in record.usage)
    assert any(x.live > 0 for x in record.usage) == (serve_trace.func is serve)


def test_engine_stops_at_the_time_limit(serve_trace, engine) -> None:
    late = make_trace(2, vocab_size=256, max_len=64, rate=1e-6)
    record = serve_trace(late, seconds=0.2)
    assert not record.served and 0.2 <= record.wall < 5 and record.num_tokens == 0
    if serve_trace.func is serve:  # a server that has stopped does not start again
        busy = make_trace(300, vocab_size=256, max_len=64)
        record = serve(engine, busy, seconds=0.1)
        assert len(record.served) < 300 and record.num_tokens < sum(x.num_tokens for x in busy)
        while not engine.idle:
            engine.step()
        assert engine.stats().num_aborted == 300 - len(record.served)


@pytest.mark.slow
def test_tiny_run(dry_run) -> None:
    names = ["engine", "engine_no_cache", "static"]
    args = ["--shape", "tiny", "--systems", *names, "--requests", "24"]
    args += ["--max-num-seqs", "8", "--max-num-batched-tokens", "128"]
    run, tables = dry_run(cli, *args)
    assert list(run["systems"]) == names and run["meta"]["command"].startswith("python -m")
    wanted = pytest.approx(24 * run["trace"]["output_mean"])
    for result in run["systems"].values():
        assert result["status"] == "ok" and result["num_finished"] == 24
        assert result["num_tokens"] == wanted and result["compilations"] == 0
    cached, uncached, static_batch = run["systems"].values()
    assert cached["cache_hit_rate"] > 0 == uncached["cache_hit_rate"]
    assert static_batch["utilization"] < 0.5 < cached["utilization"] < 1
    assert tables == report.markdown(run) + "\n"


@pytest.mark.usefixtures("no_compiling")
def test_int8_pages_hold_more_tokens_and_a_failing_system_does_not_stop(dry_run, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no memory\nmore")

    monkeypatch.setattr(cli, "StaticBatch", fail)
    args = ["--shape", "tiny", "--systems", "static", "engine", "--requests", "4"]
    run, tables = dry_run(cli, *args, "--seconds", "0", "--kv-cache-dtype", "int8")
    assert "static batch, contiguous cache: RuntimeError: no memory\n" in tables
    engine, budget = run["systems"]["engine"], TINY.kv_gib * 2**30
    assert engine["status"] == "ok" and engine["kv_dtype"] == "int8"
    assert run["sizes"]["capacity"] == budget // (8 * 16 * 4)  # with the model's f32
    assert engine["capacity"] == budget // (8 * (16 + 4)) // 16 * 16
    assert budget - 16 * 160 < engine["pool_bytes"] <= budget


@pytest.mark.usefixtures("no_compiling")
def test_nano_vllms_trace_has_its_own_defaults() -> None:
    sizes = ["--shape", "tiny", "--requests", "3", "--max-model-len", "24", "--kv-gib", "0.001"]
    run = cli.main(["--trace", "nano", *sizes, "--seconds", "0"])
    assert [*run["systems"]] == ["engine"] and run["systems"]["engine"]["status"] == "ok"
    assert run["trace"]["last_arrival"] == 0.0 and run["trace"]["prompt_max"] <= 12
    assert cli.parse(["--trace", "nano"]).max_num_batched_tokens == 4096


run_transformers = partial(transformers.run_transformers, TINY.config, "float32", max_len=64)


def test_transformers_runs_where_it_is_installed() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    trace = make_trace(4, vocab_size=256, max_len=64)
    result = run_transformers(trace, batch_size=3, seconds=60.0)
    assert result["status"] == "ok" and result["num_finished"] == 4
    assert result["num_tokens"] == sum(one.num_tokens for one in trace)
    assert 0.2 < result["utilization"] < 1


def _requests(*sizes: tuple[float, int, int], vocab_size: int = 2) -> list[TraceRequest]:
    draw = partial(np.random.default_rng(0).integers, vocab_size, dtype=np.int32)
    one = lambda at, size, n: TraceRequest(arrival=at, prompt=draw(size=size), num_tokens=n)  # noqa: E731
    return [one(*size) for size in sizes]


@pytest.mark.parametrize("grows", [False, True])
def test_batches_take_arrived_requests_in_order(monkeypatch, grows) -> None:
    now, sizes = 100.0, []

    def wait(seconds):
        nonlocal now
        now += seconds

    def run_batch(batch):
        sizes.append((now - 100, len(batch)))
        wait(5.0)
        return BatchTimes(first_token=now - 4, finish=now, padded_len=20)

    monkeypatch.setattr(batches.time, "perf_counter", lambda: now)
    monkeypatch.setattr(batches.time, "sleep", wait)
    trace = _requests((1.0, 10, 4), (1.0, 20, 2), (2.5, 5, 1), (90.0, 5, 1))
    record = serve_in_batches(trace, run_batch, batch_size=2, max_len=32, seconds=50.0, grows=grows)
    assert sizes == [(1.0, 2), (6.0, 1)] and record.num_tokens == 7
    assert record.capacity == 64 and record.wall == 50.0
    assert [one.first_token - one.arrival for one in record.served] == [1.0, 1.0, 4.5]
    assert [one.finish for one in record.served] == [6.0, 6.0, 11.0]
    live = [(sample.time, sample.live) for sample in record.usage]
    assert live[:5] == [(2.0, 30), (3.0, 32), (4.0, 12), (5.0, 13), (6.0, 0)]
    assert live[5:] == [(7.0, 5), (11.0, 0)]
    reserved = [sample.reserved for sample in record.usage]
    assert reserved == ([40, 42, 44, 46, 0, 20, 0] if grows else [64, 64, 64, 64, 0, 64, 0])


def test_static_batch_tokens_equal_those_of_the_oracle(model, oracle, exact_products) -> None:
    sizes = [(0, 1, 9), (0, 30, 14), (0, 17, 1), (0, 16, 5), (0, 31, 20), (0, 2, 3)]
    trace = _requests(*sizes, vocab_size=CONFIG.vocab_size)
    system = StaticBatch(model, batch_size=4, max_len=64)
    system.warmup(trace)
    found = [*system.run(trace[:4])[0], *system.run(trace[4:])[0]]  # the second reuses the cache
    for one, tokens in zip(trace, found, strict=True):
        assert tokens.tolist() == oracle.continue_(one.prompt, one.num_tokens)


def test_static_batch_reports_times_and_compiles_in_warmup(model, compilations) -> None:
    trace = make_trace(7, vocab_size=CONFIG.vocab_size, max_len=64)
    system = StaticBatch(model, batch_size=3, max_len=64)
    system.warmup(trace)
    compilations.clear()
    times = []

    def run_batch(batch):
        times.append(system.run(batch)[1])
        return times[-1]

    record = serve_in_batches(trace, run_batch, batch_size=3, max_len=64, seconds=math.inf)
    assert len(record.served) == 7 and record.capacity == 3 * 64 and not compilations
    ends = [x for one in times for x in (one.first_token, one.finish)]
    assert sorted(ends) == ends and {one.padded_len for one in times} == {64}


@pytest.mark.parametrize("seconds", [{"cudnn": 1.0}, {"cudnn": 3.0}, {}], ids=str)
def test_faster_attention_is_chosen(model, monkeypatch, seconds) -> None:
    lengths, chosen = [], "cudnn" if seconds == {"cudnn": 1.0} else "xla"

    def run(batch):  # cuDNN fails where it has no time
        lengths.append(len(batch[0].prompt))
        finish = ({"xla": 2.0} | seconds)[system.implementation]
        return [], BatchTimes(first_token=0.0, finish=finish, padded_len=64)

    graphdef, params = nnx.split(model)
    half = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    system = StaticBatch(half, batch_size=2, max_len=256)
    monkeypatch.setattr(system, "run", run)
    monkeypatch.setattr(static.jax, "default_backend", lambda: "gpu")
    system.warmup(_requests((0.0, 100, 2)))
    assert system.implementation == chosen and lengths[:2] == [64, 128]
