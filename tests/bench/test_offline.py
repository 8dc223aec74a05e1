"""The benches of an offline workload and of a trainer's calls, on a CPU."""

from __future__ import annotations

import json

import pytest

from bench import offline, trainer
from bench.serving.requests import nano_vllm_trace
from tests.bench.fakes import META, rows


def test_workload_is_that_of_nano_vllm() -> None:
    trace = nano_vllm_trace(256, min_len=100, max_len=1024, vocab_size=151936)
    assert {100 <= len(one.prompt) <= 1024 for one in trace} == {True}
    assert sum(one.num_tokens for one in trace) == 133966  # as nano-vllm reports
    assert max(one.prompt.max() for one in trace) <= 10000
    assert all(one.params.temperature == 0.6 and one.params.ignore_eos for one in trace)


def _offline(*more: str) -> list[str]:
    sizes = ["--requests", "5", "--max-len", "12", "--max-num-seqs", "4", "--kv-gib", "0.001"]
    return ["--shape", "tiny", *sizes, "--max-num-batched-tokens", "16", "--runs", "1", *more]


@pytest.mark.slow  # compiles the steps of an engine
def test_offline_run_in_this_process(tmp_path, capsys) -> None:
    path = tmp_path / "offline.json"
    run = offline.main(_offline("--here", "--json", str(path)))
    assert json.loads(path.read_text()) == run
    found = run["starts"]["here"]
    assert found["ready_s"] == pytest.approx(sum(found["parts_s"].values()))
    (one,) = found["runs"]
    assert one["compilations"] == 0 and one["num_calls"] <= one["num_steps"]
    assert one["tokens_per_s"] == one["output_tokens"] / one["seconds"]
    names = {row[0] for row in rows(capsys.readouterr().out)}
    assert {"ready after s", "- warm-up", "compilations in the run"} <= names


@pytest.mark.slow
def test_offline_starts_cold_and_then_warm() -> None:
    starts = offline.main(_offline())["starts"]
    cold, warm = starts["cold"], starts["warm"]
    assert cold["from_cache"] == 0 < warm["from_cache"] == warm["compilations"]
    assert cold["parts_s"]["imports"] > 0 < warm["parts_s"]["imports"]


@pytest.mark.slow  # compiles the steps of an engine
def test_trainer_run(tmp_path, capsys, exact_products) -> None:
    path = tmp_path / "trainer.json"
    args = ["--shape", "tiny", "--num-seqs", "2", "--prompt-len", "5", "--max-tokens", "6"]
    args += ["--max-num-batched-tokens", "16", "--json", str(path)]
    run = trainer.main(args)
    assert json.loads(path.read_text()) == run
    for one in run["results"]:
        assert one["compilations"] == 0 or one["case"] == "score, the first time"
    (score,) = (one for one in run["results"] if one["case"] == "score")
    assert score["max_error"] < 1e-4 and score["num_tokens"] == 22
    assert [row[0] for row in rows(capsys.readouterr().out)].count("generate after it") == 2


def test_memory_of_a_trainer_run_in_mib() -> None:
    one = {"case": "sleep", "ms": 2.0, "compilations": 0, "max_error": 1e-3, "mean_error": 1e-4}
    one |= {"bytes_before": 3 << 20, "bytes_after": 1 << 20}
    run = {"shape": "tiny", "num_seqs": 2, "weight_bytes": 1 << 20, "results": [one]}
    assert "| sleep | 2.00 | - | 0 | 3 | 1 |" in trainer.markdown(run | {"meta": META})
