"""The bench of page layouts: a tiny run."""

from __future__ import annotations

import json

import pytest

from bench import layouts
from tests.bench.fakes import by_column
from tests.support.marks import slow


@pytest.mark.usefixtures("short_chains", "clock")
@pytest.mark.parametrize("names", [("HPND", "NH2D"), *slow([(layouts.LAYOUTS,)])], ids=" ".join)
def test_every_layout_is_right_and_timed(names, tmp_path) -> None:
    path, table = tmp_path / "bench.json", tmp_path / "bench.md"
    args = ["--shapes", "tiny", "--implementation", "xla", "--iterations", "2", "--layouts", *names]
    layouts.main([*args, "--json", str(path), "--markdown", str(table)])
    (shape,) = json.loads(path.read_text())["shapes"]
    assert list(shape["layouts"]) == list(names)
    for results in shape["layouts"].values():
        assert results["xla"]["status"] == "ok" and results["xla"]["relative_l2"] < 5e-3
    [row] = by_column(table.read_text())
    assert all(row[name][0].endswith("1.000") for name in names)
