"""What `bench.peers_torch` reckons without torch, on a CPU."""

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

TINY_PREFILL = dataclasses.replace(TINY, name="tiny prefill", q_lens=(3, 32, 1))


def _ok(us: float) -> dict:
    spread = {"median": us, "p10": us, "p90": us}
    return {"status": "ok", "variant": "x", "relative_l2": 2e-3, "kernel_us": spread}


def test_shapes_are_decode_then_prefill() -> None:
    assert peers_torch.select([]) == [*SHAPES, *peers_torch.PREFILLS]
    assert peers_torch.select(["prefill"]) == list(peers_torch.PREFILLS)
    assert peers_torch.select(["9x9"]) == []
    square, long, append = peers_torch.PREFILLS
    assert square.num_flops == 4 * 32 * 128 * 4 * (4096 * 4097 // 2)
    assert long.num_flops == 4 * 32 * 128 * (16384 * 16385 // 2)
    assert append.num_flops == 4 * 32 * 128 * (512 * 16384 + 512 * 513 // 2)


def test_pages_are_those_of_the_case_for_jax() -> None:
    tables = make_case(TINY).tables
    for rows, table in zip(peers_torch.page_lists(TINY), tables, strict=True):
        for pages, row in zip(rows, table, strict=True):
            np.testing.assert_array_equal(pages, row[: len(pages)])
    assert [len(pages) for pages in rows] == [2, 8, 5]


def test_sample_names_queries_and_the_keys_they_see() -> None:
    # Tokens 0 to 2 are of row 0 and see 3 to 5 keys, 3 to 34 of row 1 see 1 to 32, 35 sees 17.
    found = peers_torch.sample(TINY_PREFILL)
    assert found[0] == (3, 1, 1) and found[-1] == (34, 1, 32) and len(found) == 4
    assert peers_torch.sample(TINY) == [(0, 0, 5), (2, 2, 17), (1, 1, 32)]


@pytest.mark.parametrize("shape", [TINY, TINY_PREFILL], ids=lambda shape: shape.name)
def test_peers_that_cannot_be_had_are_told(shape, monkeypatch) -> None:
    def absent(case):
        raise ImportError("no such package\nmore")

    cuda = types.SimpleNamespace(empty_cache=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(peers_torch, "TorchCase", lambda shape: None)
    monkeypatch.setattr(peers_torch, "flashinfer", absent)
    monkeypatch.setattr(peers_torch, "sdpa", lambda case: iter([("x", lambda: absent(case))]))
    options = argparse.Namespace(ours=True, implementation="xla", iterations=1)
    with ThreadPoolExecutor(1) as pool:
        found = peers_torch.measure_shape(shape, options, pool)
    results = found["results"]
    assert results["ours"]["status"] == "ok" and results["ours"]["relative_l2"] < 5e-3
    assert results["flashinfer"]["reason"] == "ImportError: no such package"
    assert results["sdpa"]["status"] == "failed" and results["sdpa"]["variants"]
    assert "FlashInfer -; torch SDPA, dense K/V -; took 1 s\n" in peers_torch._progress(found, 1.0)


def test_tables() -> None:
    decode = {"name": "8x8", "num_bytes": 2_000_000, "num_flops": 1, "decode": True}
    prefill = {"name": "big", "num_bytes": 1_000_000, "num_flops": 10**9, "decode": False}
    wrong = {"status": "wrong", "relative_l2": 0.5}
    results = {"ours": _ok(4.0), "flashinfer": _ok(6.0), "sdpa": wrong}
    meta = {"device": "a GPU", "jax": "0", "driver": "1", "date": "today", "command": "c"}
    meta |= {"torch": "2.11.0", "nvidia-cudnn-cu13": "9", "flashinfer-python": None}
    shapes = [one | {"results": results} for one in (decode, prefill)]
    lines = peers_torch.markdown({"meta": meta, "shapes": shapes}).splitlines()
    head = "K/V MB | pallas_paged | FlashInfer | torch SDPA, dense K/V |"
    assert lines[0] == f"| decode | {head}" and lines[4] == f"| causal prefill | {head}"
    assert lines[2] == "| 8x8 | 2.0 | 4.0 [2e-03] | 6.0 [2e-03], 1.50x, x | WRONG [5e-01] |"
    assert lines[6].startswith("| big | 1.0 | 250 TFLOP/s, 4.0 [2e-03] | 167 TFLOP/s, 6.0")
    assert "torch 2.11.0, nvidia-cudnn-cu13 9, flashinfer-python None." in lines


@pytest.mark.parametrize(
    "args", [["--shapes", "9x9"], ["--iterations", "0"], ["--json", "no/such/folder"]]
)
def test_bad_arguments_end_with_status_2(args, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        peers_torch.main(args)
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err


def test_without_torch_one_line_says_so(monkeypatch) -> None:
    monkeypatch.setattr(peers_torch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^error: bench\.peers_torch needs torch") as ended:
        peers_torch.main(["--shapes", "tiny"])
    assert "\n" not in str(ended.value)
