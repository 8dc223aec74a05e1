"""The parts of `bench.peers_torch` that need neither torch nor a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bench import peers_torch
from bench.shapes import SHAPES, TINY, make_case
from tests.bench.fakes import META, ok, wrong
from tests.support.marks import slow

TINY_PREFILL = dataclasses.replace(TINY, name="tiny prefill", q_lens=(3, 32, 1))


def test_shapes_are_decode_then_prefill() -> None:
    assert peers_torch.select([]) == [*SHAPES, *peers_torch.PREFILLS]
    assert peers_torch.select(["prefill"]) == list(peers_torch.PREFILLS)
    assert peers_torch.select(["9x9"]) == []
    flops = {shape.name: shape.num_flops for shape in peers_torch.PREFILLS}
    square, long, append = (
        flops[f"prefill {name} 32/8/128/16"] for name in ("4x4096", "1x16384", "1x512 after 16384")
    )
    assert square == 4 * 32 * 128 * 4 * (4096 * 4097 // 2)
    assert long == 4 * 32 * 128 * (16384 * 16385 // 2)
    assert append == 4 * 32 * 128 * (512 * 16384 + 512 * 513 // 2)


@pytest.mark.usefixtures("short_chains")
def test_page_lists_are_those_of_make_case() -> None:
    tables = make_case(TINY).tables
    for rows, table in zip(peers_torch.page_lists(TINY), tables, strict=True):
        for pages, row in zip(rows, table, strict=True):
            np.testing.assert_array_equal(pages, row[: len(pages)])
    assert [len(pages) for pages in rows] == [2, 8, 5]


def test_sample_counts_the_keys_of_each_query() -> None:
    # Tokens 0 to 2 of row 0 see 3 to 5 keys, 3 to 34 of row 1 see 1 to 32, 35 of row 2 sees 17.
    found = peers_torch.sample(TINY_PREFILL)
    assert found[0] == (3, 1, 1) and found[-1] == (34, 1, 32) and len(found) == 4
    assert peers_torch.sample(TINY) == [(0, 0, 5), (2, 2, 17), (1, 1, 32)]


@pytest.mark.usefixtures("short_chains", "clock")
@pytest.mark.parametrize("shape", [TINY, *slow([TINY_PREFILL])], ids=lambda shape: shape.name)
def test_missing_peers_have_reasons(shape, monkeypatch) -> None:
    def absent(case):
        raise ImportError("no such package\nmore")

    cuda = types.SimpleNamespace(empty_cache=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(peers_torch, "TorchCase", lambda shape: None)
    monkeypatch.setattr(peers_torch, "flashinfer", absent)
    monkeypatch.setattr(peers_torch, "sdpa", lambda case: iter([("x", lambda: absent(case))]))
    args = argparse.Namespace(ours=True, implementation="xla", iterations=1)
    with ThreadPoolExecutor(1) as pool:
        found = peers_torch.measure_shape(shape, args, pool)
    results = found["results"]
    assert results["ours"]["status"] == "ok" and results["ours"]["relative_l2"] < 5e-3
    assert results["flashinfer"]["reason"] == "ImportError: no such package"
    assert results["sdpa"]["status"] == "failed" and results["sdpa"]["variants"]
    assert "FlashInfer -; torch SDPA, dense K/V -; took 1 s\n" in peers_torch._progress(found, 1.0)


def test_tables() -> None:
    decode = {"name": "8x8", "num_bytes": 2_000_000, "num_flops": 1, "decode": True}
    prefill = {"name": "big", "num_bytes": 1_000_000, "num_flops": 10**9, "decode": False}
    results = {"ours": ok(4.0), "flashinfer": ok(6.0, variant="x"), "sdpa": wrong()}
    meta = META | {"torch": "2.11.0", "nvidia-cudnn-cu13": "9", "flashinfer-python": None}
    shapes = [one | {"results": results} for one in (decode, prefill)]
    lines = peers_torch.markdown({"meta": meta, "shapes": shapes}).splitlines()
    head = "K/V MB | pallas_paged | FlashInfer | torch SDPA, dense K/V |"
    assert lines[0] == f"| decode | {head}" and lines[4] == f"| causal prefill | {head}"
    assert lines[2] == "| 8x8 | 2.0 | 4.0 [2e-03] | 6.0 [2e-03], 1.50x, x | WRONG [5e-01] |"
    assert lines[6].startswith("| big | 1.0 | 250 TFLOP/s, 4.0 [2e-03] | 167 TFLOP/s, 6.0")
    assert "torch 2.11.0, nvidia-cudnn-cu13 9, flashinfer-python None." in lines


def test_missing_torch_is_one_line(monkeypatch) -> None:
    monkeypatch.setattr(peers_torch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^error: bench\.peers_torch needs torch") as ended:
        peers_torch.main(["--shapes", "tiny"])
    assert "\n" not in str(ended.value)
