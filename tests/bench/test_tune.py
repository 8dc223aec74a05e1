"""The search for configs, on a CPU with a fake clock."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

import pallas_paged as pp
from bench import measure, tune
from bench.kv_dtypes import with_dtype
from bench.shapes import make_case, uniform
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("short_chains")

DECODE = {"block_k": 64, "num_warps": 4, "num_stages": 2}


@pytest.fixture
def sms(monkeypatch) -> int:
    """The number of SMs of an H200."""
    monkeypatch.setattr(tune, "num_sms", lambda: 132)
    return 132


@pytest.mark.parametrize("name", tune.KERNELS)
def test_neighbours_are_other_configs_that_fit_on_an_sm(name, sms) -> None:
    kernel = tune.KERNELS[name]
    for shape in kernel.shapes:
        config = tune.heuristic_config(kernel, shape)
        near = tune.neighbours(kernel, config, shape)
        assert near and config not in near and len(set(near)) == len(near)
        for other in near:
            assert type(other) is type(config)
            assert kernel.fits(other, math.ceil(other.num_programs / sms), shape)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("decode", pp.DecodeConfig(**DECODE | {"num_warps": 16}, num_programs=4 * 132)),
        ("decode", pp.DecodeConfig(**DECODE | {"block_k": 128, "num_stages": 3}, num_programs=132)),
        ("mosaic_decode", pp.MosaicDecodeConfig(block_k=64, num_stages=3, num_programs=2 * 132)),
        (
            "mosaic_sm80_decode",
            pp.MosaicSm80DecodeConfig(block_k=64, num_stages=3, num_programs=2 * 132),
        ),
    ],
)
def test_configs_too_large_for_an_sm_are_not_neighbours(name, config, sms) -> None:
    kernel, shape = tune.KERNELS[name], uniform(4, 4096)
    per_sm = config.num_programs // sms
    wide = dataclasses.replace(config, num_programs=2 * config.num_programs)
    assert kernel.fits(config, per_sm, shape) and not kernel.fits(wide, 2 * per_sm, shape)
    assert wide not in tune.neighbours(kernel, config, shape)


def test_int8_tiles_take_half_the_memory() -> None:
    kernel, plain = tune.KERNELS["decode"], uniform(4, 4096)
    config = pp.DecodeConfig(block_k=128, num_warps=4, num_stages=3, num_programs=264)
    assert not kernel.fits(config, 2, plain) and kernel.fits(config, 2, with_dtype(plain, "int8"))


# Fields of the fastest config of the fake clock; a single stage gives no right result.
FASTEST = {
    "decode": {"num_warps": 8, "num_stages": 3},
    "ragged": {"num_warps": 8, "num_stages": 3},
    "mosaic_decode": {"block_k": 64, "num_stages": 4},
    "mosaic_ragged": {"num_consumers": 1, "num_stages": 3},
    "mosaic_sm80_decode": {"block_k": 32, "num_stages": 4},
    "mosaic_sm80_ragged": {"block_q": 128, "block_k": 32},
}


def _fake_times(name: str):
    """Microseconds that depend on the config alone."""

    def times(case, variants, iterations):
        found = []
        for variant in variants:
            fields = {k: int(re.search(rf"{k}=(\d+)", variant.label)[1]) for k in FASTEST[name]}
            far = sum(10.0 * abs(fields[k] - n) / n for k, n in FASTEST[name].items())
            found.append(None if fields.get("num_stages") == 1 else far + 1)
        return found

    return times


def _search(name: str, seconds: float = 60.0) -> dict:
    kernel = tune.KERNELS[name]
    return tune.search(kernel, kernel.tiny, implementation="xla", seconds=seconds, iterations=1)


@pytest.mark.parametrize("name", tune.KERNELS)
def test_search_steps_to_the_fastest_config(name, monkeypatch) -> None:
    monkeypatch.setattr(tune, "_times", _fake_times(name))
    found = _search(name)
    assert found["config"] | FASTEST[name] == found["config"]
    assert found["us"] == 1.0 and found["heuristic_us"] > 1.0
    assert found["tried"][0]["config"] == found["heuristic"]
    configs = [tuple(entry["config"].items()) for entry in found["tried"]]
    assert len(set(configs)) == len(configs) > 5


def test_search_ends_with_its_time(monkeypatch) -> None:
    monkeypatch.setattr(tune, "_times", _fake_times("decode"))
    kernel, found = tune.KERNELS["decode"], _search("decode", seconds=0.0)
    near = tune.neighbours(kernel, pp.DecodeConfig(**found["heuristic"]), kernel.tiny)
    assert [entry["config"] for entry in found["tried"][1:]] == list(map(dataclasses.asdict, near))


def test_search_needs_a_right_heuristic(monkeypatch) -> None:
    monkeypatch.setattr(tune, "_times", lambda case, variants, iterations: [None] * len(variants))
    with pytest.raises(RuntimeError, match="no right result"):
        _search("decode")


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("mosaic_ragged", "bf16"), *slow([("decode", "fp8")])]
)
def test_tiny_run(name, kv_dtype, dry_run, monkeypatch) -> None:
    kernel, configs = tune.KERNELS[name], set()

    def call(*args, config, **options):  # xla ignores the config
        configs.add(config)
        return kernel.call(*args, **options)

    monkeypatch.setitem(tune.KERNELS, name, dataclasses.replace(kernel, call=call))
    monkeypatch.setattr(tune, "_STEPS", ({"num_stages": 2},))
    args = ["--kernel", name, "--shapes", "tiny", "--implementation", "xla", "--iterations", "1"]
    run, tables = dry_run(tune, *args, "--kv-dtype", kv_dtype, "--seconds", "9")
    (found,) = run["shapes"]
    assert found["status"] == "ok" and found["us"] == found["heuristic_us"]
    assert len({config.num_stages for config in configs}) == len(configs) == 2
    assert f"| {found['name']} | " in tables


def test_without_time_the_reason_is_given(capsys) -> None:
    run = tune.main(["--kernel", "decode", "--shapes", "tiny", "--seconds", "1e-9"])
    assert run["shapes"] == [{"name": "tiny", "status": "failed", "reason": "no time left"}]
    assert "no time left" in capsys.readouterr().err


@pytest.mark.usefixtures("clock")
def test_variants_with_a_config_get_the_scales() -> None:
    kernel = tune.KERNELS["ragged"]
    shape = with_dtype(kernel.tiny, "int8")
    variant = tune.variant(kernel, tune.heuristic_config(kernel, shape), "xla")
    assert measure.measure_all(make_case(shape), lambda: [variant], 1)["status"] == "ok"
