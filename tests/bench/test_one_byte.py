"""The benches with one-byte K/V, on a CPU: no time is checked here."""

from __future__ import annotations

import argparse
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from bench import (
    decode,
    decode_report,
    kv_dtypes,
    measure,
    peers,
    prefill,
    prefill_report,
    prefill_shapes,
    shapes,
    timing,
    tune,
)
from bench.kv_dtypes import ONE_BYTE, with_dtype
from bench.measure import Variant
from bench.reference import reference_states
from bench.shapes import SHAPES, TINY, make_case
from tests.support.attention_oracle import attend, relative_error

LARGEST = {"int8": 127, "fp8": 448}
META = {"device": "a GPU", "jax": "0.0", "driver": "1", "date": "today", "command": ""}


@pytest.fixture(autouse=True)
def short_chains(monkeypatch) -> None:
    """Three calls to a run: on a CPU no cache need be cold."""
    monkeypatch.setattr(shapes, "_COLD_BYTES", 1)
    monkeypatch.setattr(shapes, "_MIN_CALLS", 3)


def ok(us: float, error: float = 2e-3) -> dict:
    """A right result."""
    spread = {"median": us, "p10": us - 1, "p90": us + 1}
    found = {"status": "ok", "relative_l2": error, "custom_calls": []}
    return found | {"kernel_us": spread, "wall_us": spread}


def test_scales_are_bytes_too(monkeypatch) -> None:
    monkeypatch.undo()
    for plain in SHAPES:
        per_token = 2 * plain.num_kv_heads
        assert plain.num_bytes == sum(plain.seq_lens) * per_token * 2 * plain.head_dim
        for shape, base in kv_dtypes.one_byte([plain], ["bf16", "int8", "fp8"]):
            assert base == plain.name and shape.name in (f"{base} int8", f"{base} fp8")
            assert shape.num_bytes == sum(plain.seq_lens) * per_token * (plain.head_dim + 4)
            assert shape.num_sets * shape.num_bytes >= 2 * 60e6  # twice an H200's L2
            assert shape.num_calls >= 8 and shape.num_calls % shape.num_sets == 0


def test_dtypes_that_are_asked_for() -> None:
    assert with_dtype(TINY, "bf16") is TINY
    pairs = kv_dtypes.one_byte(SHAPES[:2], ["fp8", "bf16"])
    assert [(s.kv_dtype, base) for s, base in pairs] == [
        ("float8_e4m3fn", shape.name) for shape in SHAPES[:2]
    ]


@pytest.mark.parametrize("name", ONE_BYTE)
def test_case_is_quantized_over_the_whole_range(name) -> None:
    case, plain = make_case(with_dtype(TINY, name)), make_case(TINY)
    for pages, scales, meant in zip(
        (case.k_pages, case.v_pages), case.scales, (plain.k_pages, plain.v_pages), strict=True
    ):
        assert pages.dtype == case.shape.kv_dtype and scales.shape == pages.shape[:3]
        assert pages.shape == meant.shape and plain.scales == ()
        elements = np.asarray(pages.astype(jnp.float32))
        np.testing.assert_array_equal(np.abs(elements).max(axis=-1), LARGEST[name])
        assert len(np.unique(scales)) > 20 and np.std(elements * scales[..., None]) > 0.9
    assert not jnp.array_equal(case.k_pages, case.v_pages)


@pytest.mark.parametrize("name", ONE_BYTE)
def test_reference_is_attention_on_what_the_bytes_stand_for(name) -> None:
    case = make_case(with_dtype(TINY, name))
    k, v = (
        np.asarray(pages.astype(jnp.float32), np.float64) * np.asarray(scales)[..., None]
        for pages, scales in zip((case.k_pages, case.v_pages), case.scales, strict=True)
    )
    table = case.tables[1]
    want, _ = attend(case.q, k, v, table, case.seq_lens, sm_scale=1.0)
    got, _ = reference_states(
        case.q, case.k_pages, case.v_pages, table, case.seq_lens, *case.scales
    )
    assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("name", ONE_BYTE)
def test_wrong_scales_are_told(name) -> None:
    def twice(q, k, v, block_table, seq_lens, k_scales, v_scales):
        return right(q, k, v, block_table, seq_lens, k_scales, 2 * v_scales)

    [ours] = peers.ours("xla")
    right, wrong = ours.attend, Variant(label="twice", attend=twice)
    found = measure.measure_all(make_case(with_dtype(TINY, name)), lambda: [ours, wrong], 1)
    assert [x["status"] for x in found["variants"]] == ["ok", "wrong"]
    assert found["relative_l2"] < 5e-3


@pytest.mark.parametrize("name", ONE_BYTE)
def test_jax_op_is_given_the_scales(name) -> None:
    shape = with_dtype(TINY, name)
    variant = peers.jax_op(shape)[0]
    attend = functools.partial(variant.attend, interpret=True)
    interpreted = Variant(label="", attend=attend)
    assert measure.measure_all(make_case(shape), lambda: [interpreted], 1)["status"] == "ok"


def test_who_runs_beside_ours(monkeypatch) -> None:
    monkeypatch.setattr(decode, "make_case", lambda shape: None)
    monkeypatch.setattr(decode, "compare", lambda case, finders, iterations: list(finders))
    monkeypatch.setattr(prefill, "make_case", lambda shape: None)
    monkeypatch.setattr(prefill, "compare", lambda case, finders, iterations: list(finders))
    options = argparse.Namespace(implementation=None, iterations=1, peers=True)
    for name in ONE_BYTE:
        found = decode.measure_shape(with_dtype(TINY, name), options, peers_too=True)
        assert found["results"] == ["ours", "jax_op"]
        found = prefill.measure_shape(with_dtype(prefill_shapes.TINY, name), options)
        assert found["results"] == ["ours"]


def record(base: str, name: str, num_bytes: int, **results: dict) -> dict:
    """What is said of one shape."""
    found = {"name": f"{base} {name}", "kv_dtype": kv_dtypes.NAMES[name], "base": base}
    return found | {"num_bytes": num_bytes, "num_flops": 10**9, "results": results}


def cells(text: str) -> list[dict[str, list[str]]]:
    """Rows of the first table in a text, by the names of their columns, which may be the same."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        {name: [row[i] for i, x in enumerate(head) if x == name] for name in head} for row in rows
    ]


def test_decode_table_and_summary() -> None:
    failed = {"status": "failed", "reason": "no"}
    plain = record("big", "bf16", 2_000_000, ours=ok(10.0))
    one_byte = [
        record("big", "int8", 1_100_000, ours=ok(6.0, 4e-3), jax_op=ok(15.0)),
        record("big", "fp8", 1_100_000, ours=ok(8.0), jax_op=failed),
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
    big, more = cells(text[text.index("One-byte") :])
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
    [row] = cells(prefill_report.markdown(run))
    assert row["bf16 us"] == ["-"] and row["int8 us"] == ["12.0 [2e-03]"] and "fp8 us" not in row
    run["shapes"] = [plain]
    [row] = cells(prefill_report.markdown(run).split("One-byte")[1])
    assert row["of bf16"] == ["1.20"] and row["TFLOP/s"] == ["100.0", "83.3"]


def kernel_times(compiled, args, *, iterations):
    """What a GPU's clock might say."""
    return [[("a", 8.0)] for _ in range(iterations)]


@pytest.mark.parametrize("bench", [decode, prefill])
def test_tiny_run_without_bf16(bench, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    path = tmp_path / "bench.json"
    args = ["--shapes", "tiny", "--implementation", "xla", "--no-peers", "--iterations", "1"]
    bench.main([*args, "--kv-dtypes", "int8", "fp8", "--json", str(path)])
    run = json.loads(path.read_text())
    assert run["shapes"] == [] and [x["name"] for x in run["one_byte"]] == ["tiny int8", "tiny fp8"]
    for found in run["one_byte"]:
        ours = found["results"]["ours"]
        assert found["base"] == "tiny" and ours["status"] == "ok" and ours["relative_l2"] < 5e-3
    [row] = cells(capsys.readouterr().out)
    assert row["int8 us"][0].startswith("2.0 [") and row["of bf16"] == ["-", "-"]


@pytest.mark.parametrize("kernel", ["decode", "ragged"])
def test_configs_are_searched_for_one_byte(kernel, monkeypatch) -> None:
    tried = []

    def times(case, variants, iterations):
        tried.append(case.shape)
        return [1.0] * len(variants)

    monkeypatch.setattr(tune, "_times", times)
    args = ["--kernel", kernel, "--shapes", "tiny", "--implementation", "xla"]
    entries = tune.main([*args, "--kv-dtype", "fp8"])
    assert entries["tiny fp8"]["key"]["itemsize"] == 1
    assert {shape.kv_dtype for shape in tried} == {"float8_e4m3fn"}


def test_tiles_of_one_byte_take_half_the_room() -> None:
    kernel, plain = tune.KERNELS["decode"], shapes.uniform(4, 4096)
    tile = {"block_k": 128, "num_warps": 4, "num_stages": 3, "programs_per_sm": 2}
    config = tune.to_config(kernel, tile, plain)
    assert not kernel.fits(config, 2, plain) and kernel.fits(config, 2, with_dtype(plain, "int8"))


@pytest.mark.parametrize("name", ONE_BYTE)
def test_a_tuned_call_is_right(name) -> None:
    for key in ("decode", "ragged"):
        kernel = tune.KERNELS[key]
        shape = with_dtype(kernel.tiny, name)
        config = kernel.heuristic(**tune.static_key(kernel, shape), num_sms=4)
        variant = tune.variant(kernel, config, "xla")
        assert measure.measure_all(make_case(shape), lambda: [variant], 1)["status"] == "ok"  # noqa: B023
