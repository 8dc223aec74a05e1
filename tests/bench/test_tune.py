"""The search for configs, on a CPU with a fake clock."""

import dataclasses
import json
import math
import re

import jax
import pytest

import pallas_paged as pp
from bench import tune
from pallas_paged.attention import dispatch
from pallas_paged.kernels.call import Arrays, Call
from pallas_paged.kernels.device import Device
from tests.bench.fakes import FAILED, ok
from tests.support.marks import needs_mosaic, needs_triton, slow

pytestmark = pytest.mark.usefixtures("short_chains")

SMS = 132  # of an H200


@pytest.fixture
def on_an_h200(monkeypatch) -> None:
    monkeypatch.setattr(tune, "num_sms", lambda: SMS)


@pytest.mark.usefixtures("on_an_h200")
@pytest.mark.parametrize("name", tune.KERNELS)
def test_neighbours_are_other_configs_that_fit_on_an_sm(name) -> None:
    kernel = tune.KERNELS[name]
    for shape in kernel.shapes:
        config = tune.heuristic_config(kernel, shape)
        near = tune.neighbours(kernel, config, shape)
        assert near and config not in near and len(set(near)) == len(near)
        for other in near:
            assert type(other) is type(config)
            assert kernel.fits(other, math.ceil(other.num_programs / SMS), shape)


# Fields of the fastest config of the fake clock; a single stage gives no right result.
FASTEST = {
    "decode": {"num_warps": 8, "num_stages": 3},
    "ragged": {"num_warps": 8, "num_stages": 3},
    "mosaic_sm90_ragged": {"num_consumers": 1, "num_stages": 3},
    "mosaic_sm80_decode": {"block_k": 32, "num_stages": 4},
    "mosaic_sm80_ragged": {"block_q": 128, "block_k": 32},
}


@pytest.fixture
def search(monkeypatch):
    """Searches for the config of a kernel whose time depends on the config alone."""

    def run(name: str, seconds: float = 60.0) -> dict:
        def measure_all(case, find, iterations):
            found = []
            for variant in find():
                fields = {k: int(re.search(rf"{k}=(\d+)", variant.label)[1]) for k in FASTEST[name]}
                far = sum(10.0 * abs(fields[k] - n) / n for k, n in FASTEST[name].items())
                found.append(FAILED if fields.get("num_stages") == 1 else ok(far + 1))
            return {"variants": found}

        monkeypatch.setattr(tune, "measure_all", measure_all)
        kernel = tune.KERNELS[name]
        return tune.search(kernel, kernel.tiny, implementation="xla", seconds=seconds, iterations=1)

    return run


@pytest.mark.parametrize("name", tune.KERNELS)
def test_search_steps_to_the_fastest_config(name, search) -> None:
    found = search(name)
    assert found["config"] | FASTEST[name] == found["config"]
    assert found["us"] == 1.0 and found["heuristic_us"] > 1.0
    assert found["tried"][0]["config"] == found["heuristic"]
    configs = [tuple(entry["config"].items()) for entry in found["tried"]]
    assert len(set(configs)) == len(configs) > 5


def test_a_search_ends_with_its_time_and_without_a_result_has_a_reason(search, monkeypatch) -> None:
    kernel, found = tune.KERNELS["decode"], search("decode", seconds=0.0)
    near = tune.neighbours(kernel, pp.DecodeConfig(**found["heuristic"]), kernel.tiny)
    assert [entry["config"] for entry in found["tried"][1:]] == list(map(dataclasses.asdict, near))
    monkeypatch.setattr(tune, "measure_all", lambda *args: {"variants": [FAILED, FAILED]})
    monkeypatch.setattr(tune, "neighbours", lambda kernel, config, shape: [config])
    for seconds, reason in (("1e-9", "no time left"), ("9", "RuntimeError: DecodeConfig")):
        run = tune.main(["--kernel", "decode", "--shapes", "tiny", "--seconds", seconds])
        [found] = run["shapes"]
        assert found["status"] == "failed" and found["reason"].startswith(reason)


def tune_tiny(name, path):
    """Searches for the tiny shape, writes a tuning file, and returns the result of the search."""
    args = ["--kernel", name, "--shapes", "tiny", "--implementation", "xla", "--output", str(path)]
    [found] = tune.main(args)["shapes"]
    return found


def library_config(name, monkeypatch, path):
    """The config that the library takes for the tiny shape with a tuning file."""
    monkeypatch.setenv("PALLAS_PAGED_TUNING", str(path))
    kernel, family = tune.KERNELS[name], name.rpartition("_")[0] or "triton"
    case = tune.make_case(kernel.tiny)
    arrays = Arrays(
        q=case.q,
        k_pages=case.k_pages,
        v_pages=case.v_pages,
        block_tables=case.tables[0],
        seq_lens=case.seq_lens,
        cu_q_lens=case.cu_q_lens if kernel.ragged else None,
    )
    call = Call.of(name.split("_")[-1], arrays, device=Device.here(), interpret=True)
    return dispatch.resolve(call, family).keywords["config"]


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=needs_triton) for name in ("decode", "ragged")),
        pytest.param("mosaic_sm80_decode", marks=needs_mosaic),
    ],
)
def test_the_library_takes_the_configs_of_an_output(name, search, tmp_path, monkeypatch) -> None:
    search(name)  # sets the times
    found = tune_tiny(name, tmp_path / "tuning.json")
    config = library_config(name, monkeypatch, tmp_path / "tuning.json")
    assert dataclasses.asdict(config) == found["config"] != found["heuristic"]


def test_an_output_is_added_to_and_keeps_faster_configs_only(search, tmp_path, monkeypatch) -> None:
    path, other = tmp_path / "tuning.json", {"device": "another", "config_class": "DecodeConfig"}
    path.write_text(json.dumps([other]))
    search("decode")  # sets the times
    for _ in range(2):
        found = tune_tiny("decode", path)
        first, entry = json.loads(path.read_text())
        assert first == other and entry["config"] == found["config"]
        assert entry["us"] == 1.0 < entry["heuristic_us"] and entry["jax"] == jax.__version__
    monkeypatch.setattr(tune, "neighbours", lambda kernel, config, shape: [])
    tune_tiny("decode", path)
    assert json.loads(path.read_text()) == [other]
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is no tuning file: Expecting"),
        ('{"a": 1}', "it is no list of"),
        ("[" * 100_000, "is no tuning file: maximum recursion"),
    ],
    ids=["cut", "dict", "deep"],
)
def test_another_file_is_not_overwritten(text, reason, tmp_path, capsys) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        tune_tiny("decode", path)
    assert reason in capsys.readouterr().err and path.read_text() == text


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("name", ["mosaic_sm90_ragged", *slow(["decode"])])
def test_tiny_run(name, dry_run, monkeypatch) -> None:
    kernel, configs = tune.KERNELS[name], set()
    kv_dtype = "fp8" if name == "decode" else "int8"

    def call(*args, config, **options):  # xla ignores the config
        configs.add(config)
        return kernel.call(*args, **options)

    def one_neighbour(kernel, config, shape):
        return [dataclasses.replace(config, num_stages=2 * config.num_stages)]

    monkeypatch.setitem(tune.KERNELS, name, dataclasses.replace(kernel, call=call))
    monkeypatch.setattr(tune, "neighbours", one_neighbour)
    args = ["--kernel", name, "--shapes", "tiny", "--implementation", "xla", "--iterations", "1"]
    run, tables = dry_run(tune, *args, "--kv-dtype", kv_dtype, "--seconds", "9")
    (found,) = run["shapes"]
    assert found["status"] == "ok" and found["us"] == found["heuristic_us"] == 4.0
    assert len({config.num_stages for config in configs}) == len(configs) == 2
    assert f"| {found['name']} | 4.0 | 4.0 | 1.00 |" in tables
