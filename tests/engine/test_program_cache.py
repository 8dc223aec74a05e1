"""Compiled steps in files: a later engine with the same key traces nothing; and full disks."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from pallas_paged.engine import Engine, EngineConfig, sources_key
from pallas_paged.engine.device import program as program_cache
from pallas_paged.engine.device.program import ProgramCache
from tests.support.engine_calls import MODEL, SIZES, greedy, weights
from tests.support.plain_model import PlainModel

ROOT = Path(__file__).parents[2]
DEVICE = jax.devices()[0]
ARGUMENTS = np.arange(3.0, dtype=np.float32), {"n": np.int32(2)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the steps, on a CPU too. JAX keeps nothing: a CPU can't save what it loads."""
    monkeypatch.setattr(program_cache, "_PLATFORMS", ("cpu", "gpu"))
    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1000)
    reset_cache()
    yield tmp_path / "pallas_paged-steps"
    for name, value in before.items():
        jax.config.update(name, value)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    reset_cache()


def make_cache(key="one", *parts):
    return ProgramCache.of(SimpleNamespace(cache_key=key), parts, DEVICE)


def save(cache, arguments=ARGUMENTS):
    cache.save(arguments, jax.jit(lambda x, y: x + y["n"]).lower(*arguments).compile())


@dataclasses.dataclass(frozen=True)
class Keyed(PlainModel):
    """A model with a `cache_key`; models of two runs are not equal."""

    run: str
    traced: tuple[list[str]] = dataclasses.field(default_factory=lambda: ([],), compare=False)
    cache_key = "keyed"

    def __call__(self, *arguments):
        self.traced[0].append(self.run.split()[0])
        return super().__call__(*arguments)


@pytest.mark.parametrize("max_tokens", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_later_engine_loads_its_steps_and_does_not_call_the_model(folder, max_tokens):
    """With one token there is one step to compile, which takes long enough."""
    sizes = {field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)}
    tokens = []
    for run in ("saves", "loads"):
        model = Keyed(**sizes | dict(num_layers=1), run=f"{run} {max_tokens}")
        engine = Engine(model, weights(model), EngineConfig(**SIZES | dict(implementation=None)))
        (output,) = engine.generate([[1, 2, 3]], greedy(max_tokens=max_tokens), progress=False)
        tokens.append(output.outputs[0].token_ids)
        assert set(model.traced[0]) == ({"saves"} if run == "saves" else set())
    assert tokens[0] == tokens[1]


def test_a_saved_program_runs_with_other_arguments_of_the_same_types(folder):
    save(make_cache())
    program = make_cache().load(ARGUMENTS)
    np.testing.assert_array_equal(program(jnp.ones(3), {"n": np.int32(5)}), np.full(3, 6.0))


@pytest.mark.parametrize(
    "arguments",
    [
        (np.zeros(4, np.float32), {"n": np.int32(2)}),
        (np.zeros(3, np.float16), {"n": np.int32(2)}),
        (np.zeros(3, np.float32), {"m": np.int32(2)}),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_arguments_of_another_type_are_not_served(folder, arguments):
    save(make_cache())
    assert make_cache().load(arguments) is None


def test_another_key_part_or_setting_is_not_served(folder, monkeypatch):
    save(make_cache("one", "xla"))
    assert make_cache("one", "xla").load(ARGUMENTS)
    assert make_cache("two", "xla").load(ARGUMENTS) is None
    assert make_cache("one", "triton").load(ARGUMENTS) is None
    with jax.default_matmul_precision("tensorfloat32"):
        assert make_cache("one", "xla").load(ARGUMENTS) is None
    with monkeypatch.context() as patch:
        patch.setattr(program_cache, "tuning_key", lambda: "of another tuning file")
        assert make_cache("one", "xla").load(ARGUMENTS) is None
    monkeypatch.setenv("XLA_FLAGS", "--another")
    assert make_cache("one", "xla").load(ARGUMENTS) is None


def test_there_is_no_cache_without_a_key_a_folder_or_a_gpu(folder, monkeypatch):
    assert make_cache() and make_cache(None) is None
    with monkeypatch.context() as patch:
        patch.setattr(program_cache, "_PLATFORMS", ())
        assert make_cache() is None
    for name, value in (
        ("jax_compilation_cache_dir", "gs://bucket"),
        ("jax_compilation_cache_dir", None),
        ("jax_enable_compilation_cache", False),
    ):
        jax.config.update(name, value)
        assert make_cache() is None


def test_a_damaged_file_costs_a_warning_and_is_replaced(folder, caplog):
    save(make_cache())
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert make_cache().load(ARGUMENTS) is None
    assert f"{path} can't be loaded" in caplog.text
    save(make_cache())
    assert make_cache().load(ARGUMENTS) and list(folder.iterdir()) == [path]


def test_a_folder_that_takes_no_files_costs_a_warning(folder, caplog):
    folder.write_text("a file")
    save(make_cache())
    assert f"a compiled step can't be kept in {folder}" in caplog.text


def test_a_program_that_cannot_be_serialized_is_not_kept(folder, caplog):
    with caplog.at_level(logging.INFO, logger="pallas_paged"):
        make_cache().save(ARGUMENTS, SimpleNamespace(_executable=None))
    assert "can't be serialized" in caplog.text
    assert not folder.exists()


def test_the_key_of_sources_follows_their_contents(tmp_path, monkeypatch):
    for name, text in (("one", "A = 1\n"), ("same", "A = 1\n"), ("other", "A = 2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert sources_key("one") == sources_key("same") != sources_key("other")
    with pytest.raises(ValueError, match="package='no_such_package' must be"):
        sources_key("no_such_package")


# Most bytes of a file: a write beyond that fails as on a full disk, after a part of it.
SERVE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.engine_calls import greedy, make_engine, serve, tokens_of
engine = make_engine(modes=[SamplingMode()])
print(tokens_of(serve(engine, [[1, 2, 3]], greedy(max_tokens=5), check=False)))
"""


def serve(folder, most_bytes):
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-c", SERVE, str(most_bytes)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_a_full_disk_for_the_compilation_cache_costs_warnings_only(tmp_path):
    """Also later, when the entries are found that were cut off."""
    full, later = serve(tmp_path, 2000), serve(tmp_path, 10**9)
    assert "Error writing persistent compilation cache entry" in full.stderr
    assert "Error reading persistent compilation cache entry" in later.stderr
    assert full.stdout == later.stdout != ""
