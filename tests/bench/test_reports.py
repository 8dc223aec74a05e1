"""Summaries, tables and charts of results that a GPU might have given."""

from __future__ import annotations

import pytest

from bench import (
    decode_report,
    decode_step,
    kv_dtypes,
    peers_torch,
    prefill_report,
    quality,
)
from bench.report import ONE_BYTE_TITLE
from bench.serving import gap
from bench.serving import report as serving_report
from bench.serving.record import Record, Served, Usage
from bench.serving.requests import describe_trace, make_trace
from tests.bench.fakes import FAILED, META, WRONG, by_column, ok, ours, rows

GIB = 1 << 30


def record(name: str, num_bytes: int, num_flops: int = 10**9, **results: dict) -> dict:
    """The record of one shape."""
    return {"name": name, "num_bytes": num_bytes, "num_flops": num_flops, "results": results}


def one_byte(base: str, name: str, num_bytes: int, **results: dict) -> dict:
    """The record of one shape with int8 or fp8 K/V."""
    found = record(f"{base} {name}", num_bytes, **results)
    return found | {"kv_dtype": kv_dtypes.NAMES[name], "base": base}


@pytest.fixture
def decode_run() -> dict:
    """Two shapes, two options, and int8 and fp8 K/V of the first shape and of one more."""
    jax_op = ok(600)
    big = ours("mosaic", triton=310, mosaic=300) | {"jax_op": jax_op, "xla_gather": WRONG}
    small = ours("triton", triton=4, mosaic=3.2) | {"jax_op": ok(10), "xla_gather": FAILED}
    base = {"base": {"name": "big", "results": big}}
    capped = ours("mosaic", triton=310, mosaic=330) | {"jax_op": jax_op}
    floors = [
        {"num_bytes": size, "status": "ok", "kernel_us": {"median": us}}
        for size, us in ((GIB, 240.0), (GIB, 250.0), (1 << 20, 2.0), (GIB // 2, 150.0), (9, 60.0))
    ]
    run = {
        "meta": META,
        "floors": floors,
        "shapes": [record("big", GIB, **big), record("small", 1 << 20, **small)],
        "options": [
            record("big soft_cap=50", GIB, **capped) | base,
            record("big fixed_split_size=512", GIB, triton=ok(341), mosaic=FAILED) | base,
        ],
        "one_byte": [
            one_byte("big", "int8", GIB // 2, ours=ok(180.0, error=4e-3), jax_op=ok(450.0)),
            one_byte("big", "fp8", GIB // 2, ours=ok(240.0), jax_op=FAILED),
            one_byte("more", "int8", 9, ours=ok(80.0)),
        ],
    }
    return run | decode_report.summarize(floors, run["shapes"], run["one_byte"])


@pytest.fixture
def prefill_run() -> dict:
    """A prompt, speculation, which reads more than it computes, and int8 K/V of the prompt."""
    prompt = {**ours("triton", triton=1000.0, mosaic=800.0), "cudnn": ok(800.0), "mha": WRONG}
    short = {**ours("triton", triton=500.0, mosaic=505.0), "mha": FAILED}
    short["cudnn"] = ok(500.0, num_flops=20 * 10**9)
    found = [record("prompt", 10**8, 4 * 10**11, **prompt), record("short", 10**9, 10**10, **short)]
    run = {"meta": META, "shapes": found, "one_byte": [one_byte("prompt", "int8", 1, ours=ok(12))]}
    return run | {"summary": prefill_report.summarize(run)}


@pytest.fixture
def step_run() -> dict:
    kernels = [{"name": "gemm", "us": 75.0, "launches": 4.0}]
    kernels.append({"name": "paged_decode", "us": 25.0, "launches": 1.0})
    one = {"model": "1b", "case": "greedy", "num_seqs": 1, "context": 2100.0, "wall_us": 150.0}
    one |= {"kernel_us": 100.0, "kernels": kernels, "limit_us": 60.0, "kv_cache_dtype": "bfloat16"}
    one |= {"order": [("gemm", 75.0), ("paged_decode", 25.0)]}
    one |= {"parts_us": gap.times_of(kernels), "weight_bytes": 50e6, "kv_bytes": 10e6}
    return {"meta": META, "results": [one]}


@pytest.fixture
def serving_run(step_run) -> dict:
    usage = [Usage(time=float(i), live=10 * i, reserved=100, waits=False) for i in range(5)]
    served = [Served(arrival=0.0, first_token=0.5, finish=4.5, num_tokens=9)] * 8
    extra = {"compilations": 0, "preemptions": 7, "cache_hit_rate": 0.25}
    systems = {
        name: Record(
            served=served, usage=usage, wall=5.0, num_tokens=count, capacity=100, extra=extra
        ).summarize()
        for name, count in (("static", 1000), ("engine", 2500))
    }
    return {
        "meta": META,
        "shape": "1b",
        "sizes": {"kv_gib": 2.0, "capacity": 65536, "max_len": 2048},
        "trace": describe_trace(make_trace(3, vocab_size=9, max_len=2048)),
        "systems": {"transformers": {"status": "failed", "reason": "no torch"}, **systems},
        "decode_step": step_run["results"][0],
    }


def test_summary_of_decode(decode_run) -> None:
    assert decode_run["read_ceiling_gbps"] == pytest.approx(GIB / 240 / 1e3)
    summary = decode_run["summary"]
    assert summary["floor_over_geomean"] == {
        "ours": pytest.approx((250 / 300 * 2 / 4) ** 0.5),
        "triton": pytest.approx((250 / 310 * 2 / 4) ** 0.5),
        "mosaic": pytest.approx((250 / 300 * 2 / 3.2) ** 0.5),
    }
    assert summary["floor_over_shapes"] == {"ours": 2, "triton": 2, "mosaic": 2}
    assert summary["choice"] == {"shapes": 2, "right": 1, "worst": pytest.approx(4 / 3.2)}
    assert summary["speedup_geomean"] == {"jax_op": pytest.approx((2 * 2.5) ** 0.5)}
    assert summary["speedup_min"] == {"jax_op": pytest.approx(2.0)}
    found = {
        dtype: [(one["geomean"], one["shapes"]) for one in ratios.values()]
        for dtype, ratios in summary["one_byte"].items()
    }
    floors = (150 / 180 * 60 / 80) ** 0.5, 150 / 240
    approx = pytest.approx
    assert found["int8"] == [(approx(0.6), 1), (approx(floors[0]), 2), (approx(2.5), 1)]
    assert found["fp8"] == [(approx(0.8), 1), (approx(floors[1]), 1), (None, 0)]


def test_tables_of_decode(decode_run) -> None:
    text = decode_report.markdown(decode_run)
    big, small = by_column(text)
    assert big["floor"] == ["250.0"] and big["kernel us (p10 to p90)"] == ["300.0 (299.0 to 301.0)"]
    assert big["% of ceiling"] == ["80.0"] and big["GB/s"] == ["3579"]
    assert big["chosen"] == ["mosaic"] and small["chosen"] == ["triton (1.25 of the faster)"]
    assert big["pallas_paged Triton"] == ["310.0 [2e-03]"] and big["vs JAX's op"] == ["2.00x"]
    assert big["XLA gather"] == ["WRONG [5e-01]"] and small["XLA gather"] == ["-"]
    assert "2.24 times ours (at least 2.00)" in text and "(within 2%) on 1 of 2 shapes" in text
    *_, capped, split = rows(text)
    assert capped[:3] == ["big soft_cap=50", "1073.7", "mosaic (1.06 of the faster)"]
    assert capped[3::3] == ["310.0 (309.0 to 311.0)", "330.0 (329.0 to 331.0)", "600.0 [2e-03]"]
    assert capped[5::3] == ["1.00", "1.10"] and capped[-1] == "big"
    assert split[2] == "-" and split[5:9] == ["1.10", "FAILED", "-", "-"]
    big, more = by_column(text.split(ONE_BYTE_TITLE)[1])
    assert big["int8 us"] == ["180.0 [4e-03]"] and big["bf16 us"] == ["300.0"]
    assert big["of bf16"] == ["0.60", "0.80"] and big["floor over it"] == ["0.83", "0.83", "0.62"]
    assert big["GB/s"] == ["2983", "2237"] and big["% of ceiling"] == ["66.7", "50.0"]
    assert big["JAX's own op, int8"] == ["450.0 [2e-03]"] and big["JAX's own op, fp8"] == ["-"]
    assert more["bf16 us"] == ["-"] and more["of bf16"] == ["-", "-"] and more["fp8 us"] == ["-"]


def test_summary_and_tables_of_prefill(prefill_run) -> None:
    summary = prefill_run["summary"]
    assert summary["choice"] == {"shapes": 2, "right": 1, "worst": pytest.approx(1.25)}
    mean = pytest.approx((0.8 * 0.5) ** 0.5)
    assert summary["over"]["cudnn"] == {"geomean": mean, "min": pytest.approx(0.5), "shapes": 2}
    assert summary["over"]["mosaic"]["min"] == pytest.approx(0.8) and "mha" not in summary["over"]
    text = prefill_report.markdown(prefill_run)
    prompt, short = by_column(text)
    assert prompt["TFLOP/s"] == ["400.0"] and prompt["cuDNN dense, TFLOP/s"] == ["500.0 [2e-03]"]
    assert short["GB/s"] == ["2000"] and short["ours over it"][2:] == ["0.50", "-"]
    assert prompt["JAX's Triton mha, TFLOP/s"] == ["WRONG [5e-01]"]
    assert prompt["chosen"] == ["triton (1.25 of the faster)"] and short["chosen"] == ["triton"]
    [row] = by_column(text.split(ONE_BYTE_TITLE)[1])
    assert row["bf16 us"] == ["1000.0"] and row["int8 us"] == ["12.0 [2e-03]"]
    assert row["of bf16"] == ["0.01"] and row["TFLOP/s"] == ["400.0", "83.3"]


def test_tables_of_torch_peers() -> None:
    results = {"ours": ok(4.0), "flashinfer": ok(6.0, variant="x"), "sdpa": WRONG}
    shapes = [
        record("8x8", 2_000_000, 1, **results) | {"decode": True},
        record("big", 1_000_000, 10**9, **results) | {"decode": False},
    ]
    meta = META | {"torch": "2.11.0", "nvidia-cudnn-cu13": "9", "flashinfer-python": None}
    text = peers_torch.markdown({"meta": meta, "shapes": shapes})
    times = "4.0 [2e-03]", "6.0 [2e-03], 1.50x, x"
    rates = f"250 TFLOP/s, {times[0]}", f"167 TFLOP/s, {times[1]}"
    head, decode, _, prefill = rows(text)
    assert head == ["decode", "K/V MB", *(peers_torch.NAMES[name] for name in results)]
    assert decode == ["8x8", "2.0", *times, "WRONG [5e-01]"]
    assert prefill == ["big", "1.0", *rates, "WRONG [5e-01]"]
    assert "torch 2.11.0, nvidia-cudnn-cu13 9, flashinfer-python None." in text


def test_tables_of_serving(serving_run) -> None:
    text = serving_report.markdown(serving_run)
    engine, static, transformers = by_column(text)
    assert engine["tokens/s"] == ["500"] and static["tokens/s"] == ["200"]
    assert engine["x static"] == ["2.50"] and engine["per token ms"] == ["500.0 / 500.0"]
    assert engine["memory utilisation"] == ["20.0%"] and engine["cache hits"] == ["25.0%"]
    assert transformers["tokens/s"] == ["-"] and "- transformers generate: no torch" in text
    assert "| 1 x 2100 | bfloat16 | 150 | 100 | 5 | 60 | 2.50 | 25 | 15 | 0 | 50 |" in text
    assert "| 75.0 | 4 | gemm |" in text


def test_tables_of_a_decode_step(step_run) -> None:
    text = decode_step.markdown(step_run, 1)
    assert "| 1b, 1 x 2100 | greedy | 150 | 100 | 5 | 60 | 2.50 | 25 | 15 | 0 | 50 |" in text
    assert "| 75.0 | 4 | gemm |" in text and "| 25.0 | 1 |" not in text
    assert "attention takes 25.0 us (25%)" in text and "| 2 | 25.00 | paged_decode |" in text


def test_nats_are_per_byte_and_perplexity_per_token() -> None:
    kv = {name: {"nats": 2.0, "top1": 1.0, "kl": 0.0} for name in quality.NAMES}
    kv["int8"] = {"nats": 2.1, "top1": 0.5, "kl": 0.01}
    found = {"checkpoint": "c", "dtype": "bfloat16", "window": 8, "kv": kv}
    found |= {"num_tokens": 10, "num_bytes": 40, "shape": "tiny"}
    text = quality.markdown({"meta": META, "checkpoint": found, "random": found})
    assert "| int8 | 0.52500 | 8.1662 | 1.10517 | 50.000% | 1.00e-02 |" in text
    assert "| bf16 | 0.50000 | 7.3891 | 1.00000 | - | - |" in text
    assert "| int8 | 50.000% | 1.00e-02 |" in text


@pytest.mark.parametrize(
    ("name", "plot", "without_times", "error"),
    [
        ("decode_run", decode_report.plot, {"floors": []}, "CUPTI"),
        ("prefill_run", prefill_report.plot, {"shapes": []}, "CUPTI"),
        ("serving_run", serving_report.plot, {"systems": {}}, "nothing to plot"),
        ("step_run", decode_step.plot, {"results": []}, "nothing to plot"),
    ],
    ids=["decode", "prefill", "serving", "decode step"],
)
def test_chart_is_a_png_and_needs_times(
    name, plot, without_times, error, request, tmp_path
) -> None:
    run = request.getfixturevalue(name)
    with pytest.raises(ValueError, match=error):
        plot(run | without_times, tmp_path / "none.png")
    pytest.importorskip("matplotlib")
    plot(run, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
