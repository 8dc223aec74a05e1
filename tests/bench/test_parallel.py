"""The bench of several GPUs, on CPU devices."""

from __future__ import annotations

import json

import jax
import pytest

from bench import parallel, parallel_calls
from tests.bench.fakes import rows
from tests.support.marks import slow

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
TINY = ["--tiny", "--devices", "1", "2", "--iterations", "1"]


WAYS = {
    "attention": [(1, "jit"), (2, "jit"), (2, "shard_map")],
    "context": [(1, "one pool"), (2, "context")],
    "sums": [(2, "default")],
}


@pytest.mark.parametrize("part", ["context", *slow(["attention", "sums"])])
def test_calls_on_one_device_and_on_two(part, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(parallel_calls, "SUMS", ((2, 32),))
    path = tmp_path / "parallel.json"
    run = parallel.main([*TINY, "--parts", part, "--json", str(path)])
    assert json.loads(path.read_text()) == run
    found = [(one["devices"], one["way"]) for one in run[part]]
    assert found[: len(WAYS[part])] == WAYS[part]
    head, *body = rows(capsys.readouterr().out)
    assert len(body) == len(found) and head[1:3] == ["GPUs", "way"]
    if part != "sums":
        assert all(one["relative_l2"] < 1e-2 for one in run[part])


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
