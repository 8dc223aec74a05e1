"""The search of configs and the table that it writes, on a CPU: no time is checked here."""

from __future__ import annotations

import json
import re

import jax
import pytest

from bench import shapes, timing, tune
from bench.shapes import uniform
from pallas_paged.kernels import tuned

KEY = {
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 96,
    "itemsize": 2,
    "num_seqs": 48,
    "max_kv_len": 5000,
}
CONFIG = {"block_k": 64, "programs_per_sm": 4, "num_warps": 2, "num_stages": 2}


@pytest.fixture(autouse=True)
def short_chains(monkeypatch) -> None:
    """Three calls to a run: on a CPU no cache need be cold."""
    monkeypatch.setattr(shapes, "_COLD_BYTES", 1)
    monkeypatch.setattr(shapes, "_MIN_CALLS", 3)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of one device with one entry, as the package would find it."""
    path = tmp_path / "tuned.json"
    entry = {"key": tuned.bucket(KEY), "config": CONFIG, "us": 9.0, "heuristic_us": 10.0}
    device = {"date": "today", "jax": "0", "decode": [entry], "ragged": []}
    path.write_text(json.dumps({"a GPU": device}))
    monkeypatch.setattr(tuned.importlib.resources, "files", lambda package: tmp_path)
    monkeypatch.setattr(tune, "TABLE", path)
    tuned._configs.cache_clear()
    yield path
    tuned._configs.cache_clear()


def test_lookup_rounds_batch_and_length_up(table) -> None:
    assert tuned.lookup("decode", "a GPU", KEY) == CONFIG
    assert tuned.lookup("decode", "a GPU", KEY | {"num_seqs": 64, "max_kv_len": 8192}) == CONFIG
    assert tuned.lookup("decode", "a GPU", KEY | {"num_seqs": 33}) == CONFIG
    for other in ({"num_seqs": 32}, {"max_kv_len": 4096}, {"head_dim": 128}, {"num_q_heads": 64}):
        assert tuned.lookup("decode", "a GPU", KEY | other) is None
    assert tuned.lookup("decode", "another GPU", KEY) is None
    assert tuned.lookup("ragged", "a GPU", KEY) is None


def test_lookup_gives_a_copy(table) -> None:
    found = tuned.lookup("decode", "a GPU", KEY)
    assert found is not None
    found["block_k"] = 1
    assert tuned.lookup("decode", "a GPU", KEY) == CONFIG


def test_the_table_of_the_package_makes_valid_configs() -> None:
    tuned._configs.cache_clear()
    shape = uniform(1, 1024)
    for (kernel, *_), config in tuned._configs().items():
        tune.to_config(tune.KERNELS[kernel], config, shape)


def test_merge_replaces_keys_and_keeps_what_is_better() -> None:
    def entry(num_seqs, us, heuristic_us=10.0):
        times = {"us": us, "heuristic_us": heuristic_us, "tried": []}
        return {"key": {"num_seqs": num_seqs}, "config": CONFIG, **times}

    old = {"jax": "0", "ragged": [1], "decode": [entry(1, 5.0), entry(2, 5.0), entry(4, 5.0)]}
    new = tune.merge(old, "decode", [entry(8, 7.123), entry(2, 9.9), entry(1, 8.0)])
    assert new["ragged"] == [1] and new["jax"] == "0"
    found = [(e["key"]["num_seqs"], e["us"]) for e in new["decode"]]
    assert found == [(1, 8.0), (4, 5.0), (8, 7.12)]
    assert "tried" not in new["decode"][0]


def test_neighbours_are_configs_that_fit_on_an_sm(monkeypatch) -> None:
    monkeypatch.setattr(tune, "num_sms", lambda: 132)
    for kernel in tune.KERNELS.values():
        for shape in kernel.shapes:
            config = kernel.heuristic(**tune.static_key(kernel, shape), num_sms=132)
            tile = tune.to_tile(config, shape)
            near = tune.neighbours(kernel, tile, shape)
            assert len(near) >= 4 and tile not in near
            assert len({tuple(other.items()) for other in near}) == len(near)
            for other in near:
                tune.to_config(kernel, other, shape)  # raises where it is none
                assert other["programs_per_sm"] * other["num_warps"] <= 64


def _fake_clock(case, variants, iterations):
    """Microseconds that depend on the config alone; some give no right result."""
    times = []
    for variant in variants:
        warps, stages = (
            int(re.search(rf"{name}=(\d+)", variant.label)[1])
            for name in ("num_warps", "num_stages")
        )
        times.append(None if stages == 1 else 10.0 * abs(warps - 8) + abs(stages - 3) + 1)
    return times


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_search_steps_to_the_fastest_config(kernel, monkeypatch) -> None:
    monkeypatch.setattr(tune, "_times", _fake_clock)
    kernel = tune.KERNELS[kernel]
    found = tune.search(kernel, kernel.tiny, implementation="xla", seconds=60.0, iterations=1)
    assert found["config"]["num_warps"] == 8 and found["config"]["num_stages"] == 3
    assert found["us"] == 1.0 and found["heuristic_us"] > 10.0
    assert found["key"] == tuned.bucket(tune.static_key(kernel, kernel.tiny))
    configs = [tuple(entry["config"].items()) for entry in found["tried"]]
    assert len(set(configs)) == len(configs) > 10


def test_search_ends_with_its_time(monkeypatch) -> None:
    monkeypatch.setattr(tune, "_times", _fake_clock)
    kernel = tune.KERNELS["decode"]
    found = tune.search(kernel, kernel.tiny, implementation="xla", seconds=0.0, iterations=1)
    near = tune.neighbours(kernel, found["tried"][0]["config"], kernel.tiny)
    assert [entry["config"] for entry in found["tried"][1:]] == near


def test_search_needs_a_right_heuristic(monkeypatch) -> None:
    monkeypatch.setattr(tune, "_times", lambda case, variants, iterations: [None] * len(variants))
    kernel = tune.KERNELS["decode"]
    with pytest.raises(RuntimeError, match="no right result"):
        tune.search(kernel, kernel.tiny, implementation="xla", seconds=1.0, iterations=1)


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_tiny_run(kernel, tmp_path, capsys, monkeypatch, table) -> None:
    def kernel_times(compiled, args, *, iterations):
        return [[("a", 8.0)] for _ in range(iterations)]

    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    monkeypatch.setattr(tune, "_STEPS", ({"num_warps": 2},))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    path = tmp_path / "tune.json"
    args = ["--kernel", kernel, "--shapes", "tiny", "--implementation", "xla", "--iterations", "1"]
    entries = tune.main([*args, "--seconds", "9", "--json", str(path), "--write"])
    assert entries["tiny"]["us"] == entries["tiny"]["heuristic_us"]
    assert json.loads(path.read_text())["shapes"]["tiny"]["config"] == entries["tiny"]["config"]
    assert "| tiny | " in capsys.readouterr().out
    written = json.loads(table.read_text())
    (device,) = set(written) - {"a GPU"}
    assert written[device][kernel] == [] and written[device]["jax"] == jax.__version__


@pytest.mark.parametrize(
    "args", [["--shapes", "9x9"], ["--iterations", "0"], ["--seconds", "0"], ["--json", "no/such"]]
)
def test_bad_arguments_end_with_status_2(args, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        tune.main(["--kernel", "decode", *args])
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err
