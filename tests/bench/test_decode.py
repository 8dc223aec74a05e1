"""The decode bench: its implementations, summary, tables, chart and a tiny run."""

from __future__ import annotations

import argparse

import pytest

from bench import decode, decode_report, peers, prefill, prefill_shapes, report, timing
from bench.kv_dtypes import ONE_BYTE, with_dtype
from bench.shapes import OPTION_PAIRS, TINY
from tests.bench.fakes import FAILED, META, ok, ours, rows, wrong

GIB = 1 << 30


@pytest.fixture
def run() -> dict:
    """Results of two shapes of 1 GiB and 1 MiB, and of two options."""
    big = {
        "name": "big",
        "num_bytes": GIB,
        "results": {
            **ours("mosaic", triton=310, mosaic=300),
            "jax_op": ok(600),
            "xla_gather": wrong(),
        },
    }
    small = {
        "name": "small",
        "num_bytes": 1 << 20,
        "results": {
            **ours("triton", triton=4, mosaic=3.2),
            "jax_op": ok(10),
            "xla_gather": FAILED,
        },
    }
    floors = [
        {"num_bytes": size, "status": "ok", "kernel_us": {"median": us}}
        for size, us in ((GIB, 240.0), (GIB, 250.0), (1 << 20, 2.0))
    ]
    capped = {
        "name": "big soft_cap=50",
        "num_bytes": GIB,
        "results": {**ours("mosaic", triton=310, mosaic=330), "jax_op": ok(600)},
        "base": {"name": "big", "results": big["results"]},
    }
    split = {
        "name": "big fixed_split_size=512",
        "num_bytes": GIB,
        "results": {"triton": ok(341, "__gpu$xla.gpu.triton"), "mosaic": FAILED},
        "base": capped["base"],
    }
    shapes = [big, small]
    tables = {"shapes": shapes, "options": [capped, split], "one_byte": []}
    return {"meta": META, "floors": floors, **tables} | decode_report.summarize(floors, shapes, [])


def test_both_implementations_are_compared_unless_one_is_named() -> None:
    every = {"ours": None, "triton": "triton", "mosaic": "mosaic_gpu"}
    assert peers.implementations(None, TINY) == every
    assert peers.implementations("xla", TINY) == {"ours": "xla"}


def test_implementations_and_peers_by_shape(monkeypatch) -> None:
    for bench in (decode, prefill):
        monkeypatch.setattr(bench, "make_case", lambda shape: None)
        monkeypatch.setattr(bench, "compare", lambda case, finders, iterations: list(finders))
    args = argparse.Namespace(implementation=None, iterations=1, peers=True)

    def found(shape, *, with_peers=True):
        return decode.measure_shape(shape, args, with_peers=with_peers)["results"]

    every = ["ours", "triton", "mosaic"]
    for shape, base in OPTION_PAIRS:
        assert found(shape, with_peers=False) == every
        assert found(base) == [*every, "jax_op", "xla_gather", "cudnn_paged"]
    for name in ONE_BYTE:
        assert found(with_dtype(TINY, name)) == ["ours", "jax_op"]
        tiny = with_dtype(prefill_shapes.TINY, name)
        assert prefill.measure_shape(tiny, args)["results"] == ["ours"]
    args.implementation = "triton"
    assert found(OPTION_PAIRS[0][0], with_peers=False) == ["ours"]


def test_summary_and_table(run) -> None:
    ceiling = GIB / 240 / 1e3
    assert run["read_ceiling_gbps"] == pytest.approx(ceiling)
    summary = run["summary"]
    assert summary["floor_over_geomean"] == {
        "ours": pytest.approx((250 / 300 * 2 / 4) ** 0.5),
        "triton": pytest.approx((250 / 310 * 2 / 4) ** 0.5),
        "mosaic": pytest.approx((250 / 300 * 2 / 3.2) ** 0.5),
    }
    assert summary["floor_over_shapes"] == {"ours": 2, "triton": 2, "mosaic": 2}
    assert summary["choice"] == {"shapes": 2, "right": 1, "worst": pytest.approx(4 / 3.2)}
    assert summary["speedup_geomean"] == {"jax_op": pytest.approx((2 * 2.5) ** 0.5)}
    assert summary["speedup_min"] == {"jax_op": pytest.approx(2.0)}
    text = decode_report.markdown(run)
    lines, cells = text.splitlines(), rows(text)
    assert len({len(row) for row in cells[:3]}) == len({len(row) for row in cells[3:]}) == 1
    big, small = (dict(zip(cells[0], row, strict=True)) for row in cells[1:3])
    assert big["K/V MB"] == "1073.7" and big["floor"] == "250.0"
    assert big["kernel us (p10 to p90)"] == "300.0 (299.0 to 301.0)"
    assert big["% of ceiling"] == "80.0" and big["GB/s"] == "3579"
    assert big["chosen"] == "mosaic" and small["chosen"] == "triton (1.25 of the faster)"
    assert big["pallas_paged Triton"] == "310.0 [2e-03]"
    assert small["pallas_paged Mosaic"] == "3.2 [2e-03]"
    assert big["XLA gather"].startswith("WRONG") and big["vs JAX's op"] == "2.00x"
    assert small["XLA gather"] == "-"
    assert "2.24 times ours (at least 2.00)" in lines[-1]
    assert "faster implementation (within 2%) on 1 of 2 shapes, and takes at most 1.25" in lines[-2]
    capped, split = cells[4:]
    assert capped[:3] == ["big soft_cap=50", "1073.7", "mosaic (1.06 of the faster)"]
    assert capped[3::3] == ["310.0 (309.0 to 311.0)", "330.0 (329.0 to 331.0)", "600.0 [2e-03]"]
    assert capped[5::3] == ["1.00", "1.10"] and capped[-1] == "big"
    assert split[2] == "-" and split[5:9] == ["1.10", "FAILED", "-", "-"]
    assert "WRONG" in decode_report.progress(run, run["shapes"][0], 1.0)
    assert "pallas_paged Mosaic: no" in decode_report.progress(run, run["options"][1], 1.0)


def test_charts_show_implementations_and_mark_nones_choice(run) -> None:
    assert report.to_show(["ours", "triton", "mosaic", "jax_op"]) == ["triton", "mosaic", "jax_op"]
    assert report.to_show(["ours", "jax_op"]) == ["ours", "jax_op"]
    marks = [report.mark(run["shapes"][0], name) for name in ("triton", "mosaic", "jax_op")]
    assert marks == ["", "*", ""]


def test_plot_is_a_png(run, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    decode_report.plot(run, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_times_says_so(run, tmp_path) -> None:
    with pytest.raises(ValueError, match="CUPTI"):
        decode_report.plot(run | {"floors": run["floors"][:1]}, tmp_path / "plot.png")


@pytest.mark.usefixtures("short_chains")
@pytest.mark.parametrize("with_kernel_times", [False, True])
def test_tiny_run(with_kernel_times, dry_run, monkeypatch) -> None:
    def no_times(*args, **kwargs):
        raise RuntimeError("no CUPTI")

    def kernel_times(compiled, args, *, iterations):
        return [[("a", 8.0 + i), ("b", 8.0), ("a", 0.0)] for i in range(iterations)]

    def floor_times(num_bytes, **kwargs):
        return timing.Spread.of([1.0])

    monkeypatch.setattr(timing, "kernel_times", kernel_times if with_kernel_times else no_times)
    monkeypatch.setattr(timing, "floor_times", floor_times if with_kernel_times else no_times)
    args = ["--shapes", "tiny", "--implementation", "xla", "--no-peers", "--iterations", "3"]
    args += ["--kv-dtypes", "bf16"] + ["--no-options"] * (not with_kernel_times)
    run, _ = dry_run(decode, *args)
    tables = {"shapes", "options", "one_byte"}
    assert set(run) == {"meta", "floors", *tables, "read_ceiling_gbps", "summary"}
    assert run["meta"]["command"].startswith("python -m bench.decode --shapes tiny --impl")
    (shape,) = run["shapes"]
    ours = shape["results"]["ours"]
    assert ours["status"] == "ok" and ours["relative_l2"] < 5e-3 and ours["wall_us"]["median"] > 0
    calls = TINY.num_calls
    if with_kernel_times:
        (option,) = run["options"]
        assert option["results"]["ours"]["relative_l2"] < 5e-3 and option["base"]["name"] == "tiny"
        assert ours["kernel_us"]["median"] == pytest.approx(17 / calls)
        assert ours["kernels"] == {"a": round(9 / calls, 3), "b": round(8 / calls, 3)}
        assert ours["kernels_per_run"] == 3
        assert run["summary"]["floor_over_geomean"] == {"ours": pytest.approx(calls / 17)}
    else:
        assert ours["kernel_us"] is None and ours["reason"] == "RuntimeError: no CUPTI"
        assert run["read_ceiling_gbps"] is None
