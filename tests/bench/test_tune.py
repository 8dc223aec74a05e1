"""The search of configs and the table that it writes, on a CPU: no time is checked here."""

from __future__ import annotations

import dataclasses
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


def test_kernels_are_those_of_the_table() -> None:
    assert tuple(tune.KERNELS) == tuned.KERNELS


def test_tiles_count_programs_as_the_table_does(monkeypatch) -> None:
    monkeypatch.setattr(tune, "num_sms", lambda: 132)
    shape = uniform(4, 4096)  # of 8 KV heads
    for name, per_sm, num_programs in (("mosaic_decode", 1, 16), ("mosaic_ragged", 1, 132)):
        kernel = tune.KERNELS[name]
        config = kernel.heuristic(**tune.static_key(kernel, shape), num_sms=132)
        tile = tune.to_tile(kernel, config, shape)
        assert config.num_programs == num_programs and tile["programs_per_sm"] == per_sm
        assert tune.to_config(kernel, tile, shape) == config


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


@pytest.mark.parametrize("name", tune.KERNELS)
def test_neighbours_are_configs_that_fit_on_an_sm(name, monkeypatch) -> None:
    monkeypatch.setattr(tune, "num_sms", lambda: 132)
    kernel = tune.KERNELS[name]
    for shape in kernel.shapes:
        config = kernel.heuristic(**tune.static_key(kernel, shape), num_sms=132)
        tile = tune.to_tile(kernel, config, shape)
        near = tune.neighbours(kernel, tile, shape)
        assert near and tile not in near
        assert len({tuple(other.items()) for other in near}) == len(near)
        for other in near:
            config = tune.to_config(kernel, other, shape)  # raises where it is none
            assert kernel.fits(config, other["programs_per_sm"], shape)


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("decode", {"block_k": 64, "num_warps": 16, "num_stages": 2, "programs_per_sm": 4}),
        ("decode", {"block_k": 128, "num_warps": 4, "num_stages": 3, "programs_per_sm": 1}),
        ("mosaic_decode", {"block_k": 64, "num_stages": 3, "programs_per_sm": 2}),
    ],
)
def test_what_an_sm_cannot_hold_is_no_neighbour(name, tile) -> None:
    kernel, shape = tune.KERNELS[name], uniform(4, 4096)
    wide = tile | {"programs_per_sm": 2 * tile["programs_per_sm"]}
    assert wide not in tune.neighbours(kernel, tile, shape)
    assert kernel.fits(tune.to_config(kernel, tile, shape), tile["programs_per_sm"], shape)


# What the fastest config of a fake clock has; it gives nothing right with a single stage.
FASTEST = {
    "decode": {"num_warps": 8, "num_stages": 3},
    "ragged": {"num_warps": 8, "num_stages": 3},
    "mosaic_decode": {"block_k": 64, "num_stages": 4},
    "mosaic_ragged": {"num_consumers": 1, "num_stages": 3},
}


def _fake_clock(name: str):
    """Microseconds that depend on the config alone."""

    def times(case, variants, iterations):
        found = []
        for variant in variants:
            fields = {k: int(re.search(rf"{k}=(\d+)", variant.label)[1]) for k in FASTEST[name]}
            far = sum(10.0 * abs(fields[k] - n) / n for k, n in FASTEST[name].items())
            found.append(None if fields["num_stages"] == 1 else far + 1)
        return found

    return times


@pytest.mark.parametrize("name", tune.KERNELS)
def test_search_steps_to_the_fastest_config(name, monkeypatch) -> None:
    monkeypatch.setattr(tune, "_times", _fake_clock(name))
    kernel = tune.KERNELS[name]
    found = tune.search(kernel, kernel.tiny, implementation="xla", seconds=60.0, iterations=1)
    assert found["config"] | FASTEST[name] == found["config"]
    assert found["us"] == 1.0 and found["heuristic_us"] > 1.0
    assert found["key"] == tuned.bucket(tune.static_key(kernel, kernel.tiny))
    configs = [tuple(entry["config"].items()) for entry in found["tried"]]
    assert len(set(configs)) == len(configs) > 5


def test_search_ends_with_its_time(monkeypatch) -> None:
    monkeypatch.setattr(tune, "_times", _fake_clock("decode"))
    kernel = tune.KERNELS["decode"]
    found = tune.search(kernel, kernel.tiny, implementation="xla", seconds=0.0, iterations=1)
    near = tune.neighbours(kernel, found["tried"][0]["config"], kernel.tiny)
    assert [entry["config"] for entry in found["tried"][1:]] == near


def test_search_needs_a_right_heuristic(monkeypatch) -> None:
    monkeypatch.setattr(tune, "_times", lambda case, variants, iterations: [None] * len(variants))
    kernel = tune.KERNELS["decode"]
    with pytest.raises(RuntimeError, match="no right result"):
        tune.search(kernel, kernel.tiny, implementation="xla", seconds=1.0, iterations=1)


@pytest.mark.parametrize("name", tune.KERNELS)
def test_tiny_run(name, tmp_path, capsys, monkeypatch, table) -> None:
    def kernel_times(compiled, args, *, iterations):
        return [[("a", 8.0)] for _ in range(iterations)]

    kernel, configs = tune.KERNELS[name], []

    def call(*args, config, **options):  # a CPU has no use for the config
        configs.append(config)
        return kernel.call(*args, **options)

    monkeypatch.setitem(tune.KERNELS, name, dataclasses.replace(kernel, call=call))
    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    monkeypatch.setattr(tune, "_STEPS", ({"num_stages": 2},))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    path = tmp_path / "tune.json"
    args = ["--kernel", name, "--shapes", "tiny", "--implementation", "xla", "--iterations", "1"]
    entries = tune.main([*args, "--seconds", "9", "--json", str(path), "--write"])
    assert entries["tiny"]["us"] == entries["tiny"]["heuristic_us"]
    assert json.loads(path.read_text())["shapes"]["tiny"]["config"] == entries["tiny"]["config"]
    assert "| tiny | " in capsys.readouterr().out
    assert {type(config) for config in configs} == {kernel.config}
    assert len({config.num_stages for config in configs}) == 2
    written = json.loads(table.read_text())
    (device,) = set(written) - {"a GPU"}
    assert written[device][name] == [] and written[device]["jax"] == jax.__version__


@pytest.mark.parametrize(
    "args", [["--shapes", "9x9"], ["--iterations", "0"], ["--seconds", "0"], ["--json", "no/such"]]
)
def test_bad_arguments_end_with_status_2(args, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        tune.main(["--kernel", "decode", *args])
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err
