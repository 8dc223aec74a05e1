"""The serving bench as a whole, on a CPU: its counts, files and charts, but no speed."""

from __future__ import annotations

import json
import math
import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.serving import cli, report, transformers
from bench.serving.compilations import Compilations
from bench.serving.engine import serve
from bench.serving.models import SHAPES, ServingShape, random_model, weight_bytes
from bench.serving.requests import describe_trace, make_trace
from models.decoder import Decoder
from models.engine_model import engine_model
from pallas_paged.engine import Engine, EngineConfig
from tests.bench.fakes import META, rows
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


@pytest.mark.parametrize(
    ("name", "billions"), [("1b", 1.236), *slow([("8b", 8.030), ("qwen3-0.6b", 0.596)])]
)
def test_sizes_of_the_models(name, billions) -> None:
    assert SHAPES["1b"].token_bytes() == 32 << 10 and SHAPES["8b"].token_bytes() == 128 << 10
    shape = SHAPES[name]
    make = partial(Decoder, shape.config, dtype=shape.dtype)
    params = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(params, nnx.Param))
    assert sum(leaf.size for leaf in leaves) / 1e9 == pytest.approx(billions, abs=1e-3)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert shape.kv_gib * (1 << 30) == 32 * shape.max_model_len * shape.token_bytes()


def test_weight_bytes_exclude_the_input_embeddings(tiny) -> None:
    first, second = (layer.mlp.down_proj.weight[...] for layer in tiny.layers)
    assert 0.005 < float(jnp.std(first)) < 0.02 and not jnp.any(first == second)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(tiny)))
    assert weight_bytes(tiny) == total - 256 * 64 * 4


def test_compilations_are_counted_inside_the_block_only() -> None:
    function = jax.jit(lambda x: 3 * x + 1)
    inputs = [np.ones(n, np.float32) for n in (3, 4, 5)]
    with Compilations() as compilations:
        function(inputs[0])
        function(inputs[0])
        function(inputs[1])
    function(inputs[2])
    assert compilations.count == 2
    (function,) = compilations.functions()
    assert function["count"] == 2 and function["name"] == "<lambda>"
    assert min(function[f"{phase}_s"] for phase in ("trace", "lower", "compile")) > 0


def _engine(model: Decoder) -> Engine:
    """An engine of the sizes of the tiny run, so that they share compiled programs."""
    config = EngineConfig(
        num_pages=64,
        max_num_seqs=8,
        max_model_len=TINY.max_model_len,
        max_num_batched_tokens=128,
    )
    return Engine(*engine_model(model), config)


def test_engine_serves_the_whole_trace(tiny) -> None:
    trace = make_trace(12, vocab_size=256, max_len=64, rate=50.0)
    record = serve(_engine(tiny), trace, seconds=60.0)
    assert [one.num_tokens for one in record.served] == [one.num_tokens for one in trace]
    assert record.num_tokens == sum(one.num_tokens for one in trace)
    assert record.wall >= trace[-1].arrival and record.capacity == 64 * 16
    for one in record.served:
        assert one.arrival <= one.first_token <= one.finish <= record.wall
    assert record.usage and all(x.live <= x.reserved <= record.capacity for x in record.usage)
    assert any(x.live > 0 for x in record.usage)


def test_engine_over_http_serves_the_whole_trace(tiny) -> None:
    pytest.importorskip("httptools", reason="needs the extra [server]")
    from bench.serving.http import serve_over_http

    trace = make_trace(12, vocab_size=256, max_len=64, rate=50.0)
    record = serve_over_http(_engine(tiny), trace, vocab_size=256, seconds=60.0)
    assert [one.num_tokens for one in record.served] == [one.num_tokens for one in trace]
    assert record.num_tokens == sum(one.num_tokens for one in trace)
    for one in record.served:
        assert one.arrival <= one.first_token <= one.finish <= record.wall
    engine = _engine(tiny)
    busy = make_trace(300, vocab_size=256, max_len=64)
    record = serve_over_http(engine, busy, vocab_size=256, seconds=0.1)
    assert len(record.served) < 300 and engine.idle


def test_engine_stops_at_the_time_limit(tiny) -> None:
    engine = _engine(tiny)
    late = make_trace(2, vocab_size=256, max_len=64, rate=1e-6)
    record = serve(engine, late, seconds=0.2)
    assert not record.served and 0.2 <= record.wall < 5 and record.num_tokens == 0
    busy = make_trace(300, vocab_size=256, max_len=64)
    record = serve(engine, busy, seconds=0.1)
    assert len(record.served) < 300 and record.num_tokens < sum(x.num_tokens for x in busy)
    while not engine.idle:
        engine.step()
    assert engine.stats().num_aborted == 300 - len(record.served)


@pytest.mark.slow
def test_tiny_run(tmp_path, capsys) -> None:
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "markdown")}
    names = ["engine", "engine_no_cache", "static"]
    args = ["--shape", "tiny", "--systems", *names, "--requests", "24", "--decode-step"]
    args += ["--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--step-steps", "5"]
    run = cli.main([*args, *(x for name in files for x in (f"--{name}", str(files[name])))])
    saved = json.loads(files["json"].read_text())
    assert list(saved["systems"]) == names and saved["meta"]["command"].startswith("python -m")
    num_tokens = {result["num_tokens"] for result in saved["systems"].values()}
    assert len(num_tokens) == 1 and num_tokens.pop() == pytest.approx(
        24 * saved["trace"]["output_mean"]
    )
    for result in saved["systems"].values():
        assert result["status"] == "ok" and result["num_finished"] == 24
        assert result["compilations"] == 0
    cached, static = saved["systems"]["engine"], saved["systems"]["static"]
    assert cached["cache_hit_rate"] > 0 == saved["systems"]["engine_no_cache"]["cache_hit_rate"]
    assert static["utilization"] < 0.5 < cached["utilization"] < 1
    step = saved["decode_step"]
    assert step["wall_us"] > 0 and step["context"] > 256 and step["num_seqs"] == 4
    assert step["kv_bytes"] == 4 * step["context"] * TINY.token_bytes()
    assert files["markdown"].read_text() == report.markdown(run)
    assert files["markdown"].read_text() in capsys.readouterr().out


@pytest.mark.usefixtures("no_compiling")
def test_failure_of_a_system_is_reported_and_the_others_go_on(monkeypatch, capsys) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("no memory\nmore")

    monkeypatch.setattr(cli, "StaticBatch", fail)
    args = ["--shape", "tiny", "--systems", "static", "engine", "--requests", "2"]
    run = cli.main([*args, "--seconds", "0"])
    assert run["systems"]["engine"]["status"] == "ok"
    out = capsys.readouterr().out
    assert "static batch, contiguous cache: RuntimeError: no memory\n" in out


def _result(rate: float, **more: object) -> dict:
    spread = {"p50": 0.5, "p99": 2.0}
    result = {"status": "ok", "wall_s": 10.0, "num_finished": 8, "tokens_per_s": rate}
    result |= {"requests_per_s": 0.8, "ttft_s": spread, "tpot_s": spread, "latency_s": spread}
    usage = [{"time": float(i), "live": 10 * i, "reserved": 100} for i in range(5)]
    memory = {
        "utilization": 0.25,
        "live_of_budget": None,
        "live_of_budget_under_load": 0.5,
        "usage": usage,
        "capacity": 100,
    }
    return result | memory | {"latencies": [1.0, 2.0, 4.0]} | more


@pytest.fixture
def run() -> dict:
    """Results that a GPU might have given."""
    sizes = {"kv_gib": 2.0, "capacity": 65536, "max_len": 2048}
    trace = make_trace(3, vocab_size=9, max_len=2048)
    kernels = [{"name": f"k{i}", "us": 9.0 - i / 10, "launches": 16.0} for i in range(30)]
    step = {"num_seqs": 64, "context": 2100.0, "wall_us": 2400.0, "kernel_us": 2200.0}
    step |= {"kv_cache_dtype": "bfloat16", "limit_us": 2000.0}
    return {
        "meta": META,
        "shape": "1b",
        "sizes": sizes,
        "trace": describe_trace(trace),
        "systems": {
            "transformers": {"status": "failed", "reason": "no torch"},
            "static": _result(1000.0, compilations=0),
            "engine": _result(2500.0, preemptions=7, cache_hit_rate=0.25, compilations=0),
        },
        "decode_step": step | {"kernels": kernels},
    }


def test_tables(run) -> None:
    text = report.markdown(run)
    lines, cells = text.splitlines(), rows(text)
    by_name = {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[1:4]}
    assert list(by_name) == [report.NAMES[name] for name in ("engine", "static", "transformers")]
    engine = by_name["engine"]
    assert engine["x static"] == "2.50" and engine["per token ms"] == "500.0 / 2000.0"
    assert engine["memory utilisation"] == "25.0%" and engine["preemptions"] == "7"
    assert by_name["transformers generate"]["tokens/s"] == "-"
    assert "- transformers generate: no torch" in lines
    assert "| 64 x 2100 | bfloat16 | 2400 | 2200 | 480 | 2000 | 1.20 | - | - | - | - |" in lines
    assert "| 9.0 | 16 | k0 |" in lines and "| 6.6 | 16 | k24 |" in lines and "k25" not in text


def test_chart(run, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    report.plot(run, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    run["systems"] = {"transformers": run["systems"]["transformers"]}
    with pytest.raises(ValueError, match="nothing to plot"):
        report.plot(run, tmp_path / "none.png")


def test_invalid_trace_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^error: .*num_requests=0") as ended:
        cli.main(["--shape", "tiny", "--requests", "0"])
    assert "\n" not in str(ended.value)


class _Exit:
    """End the process that unpickles this."""

    def __reduce__(self):
        return os._exit, (3,)


def _transformers(trace, **sizes) -> dict:
    return transformers.run_transformers(TINY.config, "float32", trace, **sizes)


def test_transformers_runs_where_it_is_installed() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    trace = make_trace(4, vocab_size=256, max_len=64)
    result = _transformers(trace, batch_size=3, max_len=64, seconds=60.0)
    assert result["status"] == "ok" and result["num_finished"] == 4
    assert result["num_tokens"] == sum(one.num_tokens for one in trace)
    assert 0.2 < result["utilization"] < 1


def test_missing_transformers_has_a_reason(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "torch", None)

    class Sender:
        def send(self, result: dict) -> None:
            self.result = result

    sender = Sender()
    transformers._work(sender, TINY.config, "float32", [], 1, 64, math.inf)
    assert sender.result["status"] == "failed" and "torch" in sender.result["reason"]


@pytest.mark.slow  # starts a process
def test_process_that_dies_has_a_reason() -> None:
    result = _transformers(_Exit(), batch_size=1, max_len=64, seconds=1.0)
    assert result == {"status": "failed", "reason": "its process ended with 3"}


def test_token_bytes_include_scales() -> None:
    shape = ServingShape(config=TINY.config, dtype=jnp.float16, kv_gib=1.0)
    assert shape.token_bytes() == 2 * 2 * 2 * 16 * 2
    for name in ("int8", "fp8"):
        assert shape.token_bytes(name) == 2 * 2 * 2 * (16 + 4)


@pytest.mark.usefixtures("no_compiling")
def test_int8_pages_hold_more_tokens_in_the_same_memory(capsys, monkeypatch) -> None:
    steps: list[dict] = []
    monkeypatch.setattr(cli, "measure_step", lambda *args, **options: steps.append(options))
    args = ["--shape", "tiny", "--systems", "engine", "--requests", "4", "--decode-step"]
    args += ["--seconds", "0"]
    run = cli.main([*args, "--kv-cache-dtype", "int8"])
    engine, budget = run["systems"]["engine"], TINY.kv_gib * 2**30
    assert engine["status"] == "ok" and engine["kv_dtype"] == steps[0]["kv_cache_dtype"] == "int8"
    assert run["sizes"]["capacity"] == budget // (8 * 16 * 4)  # with the model's f32
    assert engine["capacity"] == budget // (8 * (16 + 4)) // 16 * 16
    assert budget - 16 * 160 < engine["pool_bytes"] <= budget
    assert f"| engine | int8 | {engine['capacity']} | 0 |" in capsys.readouterr().out


@pytest.mark.usefixtures("no_compiling")
def test_nano_vllms_trace_has_its_own_defaults() -> None:
    sizes = ["--shape", "tiny", "--requests", "3", "--max-model-len", "24", "--kv-gib", "0.001"]
    run = cli.main(["--trace", "nano", *sizes, "--seconds", "0"])
    assert [*run["systems"]] == ["engine"] and run["systems"]["engine"]["status"] == "ok"
    assert run["trace"]["last_arrival"] == 0.0 and run["trace"]["prompt_max"] <= 12
    assert cli.parse(["--trace", "nano"]).shape == "qwen3-0.6b"
    assert cli.parse(["--trace", "nano"]).max_num_batched_tokens == 4096
