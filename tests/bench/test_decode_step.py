"""The bench of one decode step of a model, on a CPU."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from bench import decode_step
from bench.serving import gap, step
from tests.bench.fakes import META, rows

TINY = ["--shapes", "tiny", "--rows", "2", "--length", "16", "--steps", "4"]


def test_kernels_in_order_have_median_times() -> None:
    runs = [[("a", 2.0), ("b", 3.0), ("a", 4.0)], [("a", 9.0), ("a", 5.0), ("b", 4.0)]]
    runs.append([("b", 9.0), ("a", 3.0), ("a", 4.0)])
    times = [one for run in runs for one in run]
    assert step.ordered(times, 3) == [["a", 3.0], ["b", 4.0], ["a", 4.0]]
    assert step.ordered(times[:-1], 3) is None


def test_steps_of_a_profile_are_counted_by_the_decode_kernel() -> None:
    counts = {"paged_decode": 31, "paged_decode_merge": 32, "gemm": 160}
    assert step.recorded_steps(counts, 16) == 2
    assert step.recorded_steps({"gemm": 160}, 16) == 0


def test_ways_to_run_differ_by_their_steps_and_their_sampling(dry_run, monkeypatch) -> None:
    """Without an engine: what each way asks of it, and what the tables show."""
    asked = []

    def measure(decoder, params, **sizes):
        asked.append((len(params), params[0].temperature, sizes.get("num_scheduler_steps")))
        found = {"num_seqs": len(params), "context": 20.0, "wall_us": 150.0, "kernel_us": None}
        return found | {"limit_us": None, "kernels": None, "reason": f"no. {len(asked)}"}

    for name in ("measure_step", "measure_generate"):
        monkeypatch.setattr(decode_step, name, measure)
    monkeypatch.setattr(decode_step, "_load", lambda name: None)
    modes = ["--modes", "step", "sampled loop", "generate"]
    _, tables = dry_run(decode_step, *TINY, *modes, "--num-scheduler-steps", "4")
    assert asked == [(2, 0.0, 1), (2, 0.8, 4), (2, 0.0, 4)]
    names = [row[:2] for row in rows(tables)]
    assert names[1:] == [["tiny, 2 x 20", way] for way in ("step", "sampled loop", "generate")]
    assert "No kernel times: no. 1." in tables
    decode_step.main([*TINY, "--sampling"])
    assert [one[1] for one in asked[3:]] == [0.0, 0.8, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.slow  # compiles the steps of three engines
def test_every_way_to_run_is_measured_on_the_cpu(dry_run) -> None:
    modes = ["--modes", "step", "sampled loop", "generate"]
    run, tables = dry_run(decode_step, *TINY, *modes, "--num-scheduler-steps", "4")
    single, several, generate = run["results"]
    assert single["steps_per_call"] == 1 < several["steps_per_call"] <= 4
    assert single["context"] > 16 and generate["context"] == 16 + 6
    assert single["kv_bytes"] == 2 * single["context"] * 2 * 2 * 2 * 16 * 4
    on_gpu = jax.default_backend() == "gpu"
    for result in run["results"]:
        assert result["num_seqs"] == 2 and (result["limit_us"] is not None) == on_gpu
    assert (single["kernels"] is not None) == on_gpu and generate["kernels"] is None
    names = [row[1] for row in rows(tables)]
    assert names[1:] == ["step", "sampled loop", "generate"]


@pytest.mark.slow
def test_every_way_to_sample_is_measured_on_the_cpu() -> None:
    run = decode_step.main([*TINY, "--num-scheduler-steps", "2", "--sampling"])
    assert [one["case"] for one in run["results"]] == [*decode_step._SAMPLING]


def test_tables_of_kernels() -> None:
    kernels = [{"name": "gemm", "us": 75.0, "launches": 4.0}]
    kernels.append({"name": "paged_decode", "us": 25.0, "launches": 1.0})
    one = {"model": "1b", "case": "greedy", "num_seqs": 1, "context": 2100.0, "wall_us": 150.0}
    one |= {"kernel_us": 100.0, "kernels": kernels, "limit_us": 60.0}
    one |= {"order": [("gemm", 75.0), ("paged_decode", 25.0)]}
    one |= {"parts_us": gap.times_of(kernels), "weight_bytes": 50e6, "kv_bytes": 10e6}
    text = decode_step.markdown({"meta": META, "results": [one]}, 1)
    assert "| 1b, 1 x 2100 | greedy | 150 | 100 | 5 | 60 | 2.50 | 25 | 15 | 0 | 50 |" in text
    assert "| 75.0 | 4 | gemm |" in text and "| 25.0 | 1 |" not in text
    assert "attention takes 25.0 us (25%)" in text and "| 2 | 25.00 | paged_decode |" in text


def test_the_gap_of_a_step_is_divided_into_its_parts():
    f = jax.jit(lambda x: jnp.sin(x) @ x)
    f(jnp.ones((4, 4)))  # its program is found by the names of its instructions
    (module,) = f.lower(jnp.ones((4, 4))).compile().runtime_executable().hlo_modules()
    names = re.findall(r"%([\w.]+) = .*dot_general", module.to_string())
    kernels = [{"name": names[-1].replace(".", "_"), "us": 50.0}, {"name": "paged_x", "us": 30.0}]
    kernels += [{"name": "loop_fusion", "us": 5.0}, {"name": "nvjet_tst", "us": 20.0}]
    parts = gap.times_of(kernels)
    assert parts == {"attention": 30.0, "products": 70.0, "rest": 5.0}
    result = {"parts_us": parts, "kernel_us": 105.0, "wall_us": 125.0, "limit_us": 80.0}
    result |= {"weight_bytes": 3e9, "kv_bytes": 1e9}
    over = gap.gap_of(result)
    assert over == {"products": 10.0, "attention": 10.0, "rest": 5.0, "launches": 20.0}
    assert sum(over.values()) == result["wall_us"] - result["limit_us"]
    assert gap.gap_of(result | {"limit_us": None}) is None
