"""The benches with int8 and fp8 K/V: their tables and tiny runs."""

from __future__ import annotations

import pytest

from bench import decode, decode_report, kv_dtypes, prefill, prefill_report
from bench.report import ONE_BYTE_TITLE
from tests.bench.fakes import FAILED, META, by_column, ok
from tests.support.marks import slow


def record(base: str, name: str, num_bytes: int, **results: dict) -> dict:
    """The record of one shape."""
    found = {"name": f"{base} {name}", "kv_dtype": kv_dtypes.NAMES[name], "base": base}
    return found | {"num_bytes": num_bytes, "num_flops": 10**9, "results": results}


def test_decode_table_and_summary() -> None:
    plain = record("big", "bf16", 2_000_000, ours=ok(10.0))
    one_byte = [
        record("big", "int8", 1_100_000, ours=ok(6.0, error=4e-3), jax_op=ok(15.0)),
        record("big", "fp8", 1_100_000, ours=ok(8.0), jax_op=FAILED),
        record("more", "int8", 550_000, ours=ok(4.0)),
    ]
    floors = [
        {"num_bytes": n, "status": "ok", "kernel_us": {"median": us}}
        for n, us in ((4_000_000, 16.0), (2_000_000, 9.0), (1_100_000, 5.0), (550_000, 3.0))
    ]
    plain["name"] = "big"
    run = {"meta": META, "floors": floors, "shapes": [plain], "one_byte": one_byte, "options": []}
    run |= decode_report.summarize(floors, [plain], one_byte)
    assert run["summary"]["one_byte"] == {
        "int8": {
            "of_bf16": {"geomean": pytest.approx(0.6), "shapes": 1},
            "floor_over": {"geomean": pytest.approx((5 / 6 * 3 / 4) ** 0.5), "shapes": 2},
            "speedup": {"geomean": pytest.approx(2.5), "shapes": 1},
        },
        "fp8": {
            "of_bf16": {"geomean": pytest.approx(0.8), "shapes": 1},
            "floor_over": {"geomean": pytest.approx(5 / 8), "shapes": 1},
            "speedup": {"geomean": None, "shapes": 0},
        },
    }
    text = decode_report.markdown(run)
    big, more = by_column(text.split(ONE_BYTE_TITLE)[1])
    assert big["K/V MB"] == ["1.1"] and big["bf16 us"] == ["10.0"]
    assert big["int8 us"] == ["6.0 [4e-03]"] and big["fp8 us"] == ["8.0 [2e-03]"]
    assert big["of bf16"] == ["0.60", "0.80"]
    assert big["floor over it"] == ["0.90", "0.83", "0.62"]
    assert big["GB/s"] == ["183", "138"] and big["% of ceiling"] == ["73.3", "55.0"]
    assert big["JAX's own op, int8"] == ["15.0 [2e-03]"] and big["JAX's own op, fp8"] == ["-"]
    assert more["bf16 us"] == ["-"] and more["of bf16"] == ["-", "-"]
    assert more["int8 us"] == ["4.0 [2e-03]"] and more["fp8 us"] == ["-"]
    assert "- int8 takes 0.600 of bf16's time in the geometric mean of 1 shapes." in text
    assert "JAX's own op takes 2.50 times ours with int8" in text and "ours with fp8" not in text


def test_prefill_table() -> None:
    plain = record("big", "bf16", 1, ours=ok(10.0)) | {"name": "big"}
    one_byte = [record("big", "int8", 1, ours=ok(12.0))]
    run = {"meta": META, "shapes": [], "one_byte": one_byte}
    run["summary"] = prefill_report.summarize(run)
    [row] = by_column(prefill_report.markdown(run))
    assert row["bf16 us"] == ["-"] and row["int8 us"] == ["12.0 [2e-03]"] and "fp8 us" not in row
    run["shapes"] = [plain]
    [row] = by_column(prefill_report.markdown(run).split(ONE_BYTE_TITLE)[1])
    assert row["of bf16"] == ["1.20"] and row["TFLOP/s"] == ["100.0", "83.3"]


@pytest.mark.usefixtures("short_chains", "clock")
@pytest.mark.parametrize("bench", [decode, *slow([prefill])])
def test_tiny_run_without_bf16(bench, dry_run) -> None:
    args = ["--shapes", "tiny", "--implementation", "xla", "--no-peers", "--iterations", "1"]
    run, tables = dry_run(bench, *args, "--kv-dtypes", "int8", "fp8")
    assert run["shapes"] == [] and [x["name"] for x in run["one_byte"]] == ["tiny int8", "tiny fp8"]
    for found in run["one_byte"]:
        ours = found["results"]["ours"]
        assert found["base"] == "tiny" and ours["status"] == "ok" and ours["relative_l2"] < 5e-3
    [row] = by_column(tables)
    assert row["int8 us"][0].startswith("4.0 [") and row["of bf16"] == ["-", "-"]
