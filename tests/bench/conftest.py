"""Fixtures of the benches' tests, which run on a CPU and check no times."""

import pytest

from bench.measuring import cli, shapes, timing


@pytest.fixture(scope="module")
def short_chains():
    """Runs of 2 calls over 2 sets of pages: on a CPU no cache need be cold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes.Shape, "num_sets", 2)
        patch.setattr(shapes.Shape, "num_calls", 2)
        yield


@pytest.fixture
def clock(monkeypatch) -> None:
    """Runs take 8 microseconds in the median, in kernels `a`, `b`, `a`, and 9 by the wall."""

    def kernel_times(compiled, args, *, iterations):
        middle = (iterations - 1) / 2
        return [[("a", 5.0 + i - middle), ("b", 2.0), ("a", 1.0)] for i in range(iterations)]

    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    monkeypatch.setattr(timing, "floor_times", lambda size, **how: timing.spread([1.0]))
    monkeypatch.setattr(timing, "wall_times", lambda compiled, args, *, iterations: [9.0])


@pytest.fixture
def dry_run(tmp_path, capsys):
    """Runs a bench; returns its numbers, which it writes to a file, and the tables it prints."""

    def run(bench, *args: str) -> tuple[dict, str]:
        path = tmp_path / "run.json"
        found = bench.main([*args, "--json", str(path)])
        assert path.read_text() == cli.as_json(found)
        return found, capsys.readouterr().out

    return run
