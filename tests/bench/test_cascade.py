"""The cascade bench's own arithmetic, on a CPU: no time is checked here."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import cascade, timing
from bench.shapes import make_case


def test_rows_share_the_pages_of_their_prefix_only() -> None:
    shape = cascade.TINY
    case = make_case(shape)
    shared = shape.shared_prefix // shape.page_size
    assert (case.tables[:, :, :shared] == case.tables[:, :1, :shared]).all()
    used = [table[0, :shared] for table in case.tables]
    for table in case.tables:
        for row, length in enumerate(shape.seq_lens):
            used.append(table[row, shared : -(-length // shape.page_size)])
    assert sorted(np.concatenate(used)) == list(range(case.k_pages.shape[1]))
    assert [x.tolist() for x in case.lens] == [list(shape.seq_lens), [8], [0, 3]]


def test_bytes_count_the_prefix_once() -> None:
    by_name = {shape.name: shape for shape in cascade.SHAPES}
    for prefix in (8192, 32768):
        for own in (128, 1024):
            shape = by_name[f"64x{own} after {prefix} shared 32/8/128/16"]
            assert shape.num_bytes == 2 * (prefix + 64 * own) * 8 * 128 * 2
            assert shape.seq_lens == (prefix + own,) * 64
            assert 2 * 60e6 <= shape.num_sets * shape.num_bytes <= 1 << 32  # twice an H200's L2


def test_tiny_run(tmp_path, capsys, monkeypatch) -> None:
    def kernel_times(compiled, args, *, iterations):
        return [[("a", 16.0)] for _ in range(iterations)]

    def floor_times(num_bytes, **kwargs):
        return timing.Spread.of([2.0])

    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    monkeypatch.setattr(timing, "floor_times", floor_times)
    path, table = tmp_path / "bench.json", tmp_path / "bench.md"
    args = ["--shapes", "tiny", "--implementation", "xla", "--iterations", "2"]
    cascade.main([*args, "--json", str(path), "--markdown", str(table)])
    (shape,) = json.loads(path.read_text())["shapes"]
    for result in shape["results"].values():
        assert result["status"] == "ok" and result["relative_l2"] < 5e-3
        assert result["kernel_us"]["median"] == pytest.approx(16 / shape["num_calls"])
    lines = table.read_text().splitlines()
    head, row = ([cell.strip() for cell in lines[i].strip("|").split("|")] for i in (0, 2))
    found = dict(zip(head[:5] + head[-1:], row[:5] + row[-1:], strict=True))
    assert found["floor"] == "2.0" and found["speedup"] == "1.00"
    assert table.read_text() in capsys.readouterr().out
