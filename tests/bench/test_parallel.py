"""The bench of several GPUs, on CPU devices."""

from __future__ import annotations

import json

import jax
import pytest

from bench import parallel, parallel_calls
from tests.bench.fakes import rows

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
TINY = ["--tiny", "--devices", "1", "2", "--iterations", "1"]


def test_calls_on_one_device_and_on_two(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(parallel_calls, "SUMS", ((2, 32),))
    path = tmp_path / "parallel.json"
    run = parallel.main([*TINY, "--parts", "attention", "context", "sums", "--json", str(path)])
    assert json.loads(path.read_text()) == run
    found = [(part, one["devices"], one["way"]) for part in run for one in _results(run, part)]
    assert found[:5] == [
        ("attention", 1, "jit"),
        ("attention", 2, "jit"),
        ("attention", 2, "shard_map"),
        ("context", 1, "one pool"),
        ("context", 2, "context"),
    ]
    assert all(one["relative_l2"] < 1e-2 for one in run["attention"] + run["context"])
    assert run["sums"][0]["way"] == "default" and run["sums"][0]["devices"] == 2
    cells = rows(capsys.readouterr().out)
    assert cells[0] == ["shape", "GPUs", "way", "us a call", "speedup", "GB/s of each GPU"]


@pytest.mark.slow
def test_steps_and_serving_on_one_device_and_on_two() -> None:
    sizes = ["--shapes", "tiny", "--serving-shape", "tiny", "--rows", "2", "--length", "16"]
    sizes += ["--steps", "4", "--requests", "4", "--max-len", "16", "--kv-gib", "0.001"]
    sizes += ["--max-num-batched-tokens", "32"]
    run = parallel.main([*TINY, "--parts", "steps", "serving", *sizes])
    assert [(one["model"], one["devices"]) for one in run["steps"]] == [("tiny", 1), ("tiny", 2)]
    assert all(one["wall_us"] > 0 for one in run["steps"])
    assert [(one["tensor_parallel"], one["data_parallel"]) for one in run["serving"]] == [
        (1, 1),
        (2, 1),
        (1, 2),
    ]


def _results(run, part):
    return run[part] if part in ("attention", "context") else []
