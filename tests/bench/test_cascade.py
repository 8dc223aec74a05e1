"""The cascade bench: a tiny run."""

from __future__ import annotations

import json

import pytest

from bench import cascade
from tests.bench.fakes import by_column


@pytest.mark.usefixtures("short_chains", "clock")
def test_tiny_run(tmp_path, capsys) -> None:
    path, table = tmp_path / "bench.json", tmp_path / "bench.md"
    args = ["--shapes", "tiny", "--implementation", "xla", "--iterations", "2"]
    cascade.main([*args, "--json", str(path), "--markdown", str(table)])
    (shape,) = json.loads(path.read_text())["shapes"]
    for result in shape["results"].values():
        assert result["status"] == "ok" and result["relative_l2"] < 5e-3
        assert result["kernel_us"]["median"] == pytest.approx(8 / shape["num_calls"])
    [row] = by_column(table.read_text())
    assert row["floor"] == ["1.0"] and row["speedup"] == ["1.00"]
    assert table.read_text() in capsys.readouterr().out
