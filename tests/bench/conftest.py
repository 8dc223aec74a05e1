"""Fixtures of the benches' tests, which run on a CPU and check no times."""

from __future__ import annotations

import json

import pytest

from bench import shapes, timing


@pytest.fixture(scope="module")
def short_chains():
    """Runs of 2 calls over 2 sets of pages: on a CPU no cache need be cold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "_COLD_BYTES", 1)
        patch.setattr(shapes, "_MIN_CALLS", 2)
        yield


@pytest.fixture
def clock(monkeypatch) -> None:
    """Each run has one kernel of 8 microseconds and a wall time of 9; a read takes 1."""

    def kernel_times(compiled, args, *, iterations):
        return [[("a", 8.0)] for _ in range(iterations)]

    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    monkeypatch.setattr(timing, "floor_times", lambda size, **how: timing.Spread.of([1.0]))
    monkeypatch.setattr(timing, "wall_times", lambda compiled, args, *, iterations: [9.0])


@pytest.fixture
def dry_run(tmp_path, capsys):
    """Runs a bench; returns its numbers and tables, which it writes to files and prints too."""

    def run(bench, *args: str) -> tuple[dict, str]:
        files = {name: tmp_path / name for name in ("json", "markdown")}
        paths = [x for name, path in files.items() for x in (f"--{name}", str(path))]
        found, tables = bench.main([*args, *paths]), files["markdown"].read_text()
        assert json.loads(files["json"].read_text()) == json.loads(json.dumps(found))
        assert tables in capsys.readouterr().out
        return found, tables

    return run
