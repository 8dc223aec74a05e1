"""The benches' own arithmetic, on a CPU: no time is checked here."""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from bench import decode, decode_report, measure, peers, report, timing
from bench.measure import Variant
from bench.reference import reference_states
from bench.shapes import OPTION_PAIRS, SHAPES, TINY, make_case, select_shapes

GIB = 1 << 30


def _ok(us: float, *custom_calls: str, error: float = 2e-3) -> dict:
    spread = {"median": us, "p10": us - 1, "p90": us + 1}
    times = {"kernel_us": spread, "wall_us": spread}
    return {"status": "ok", "relative_l2": error, "custom_calls": list(custom_calls), **times}


def _ours(chosen: str, triton: float, mosaic: float) -> dict:
    found = {"triton": _ok(triton, "__gpu$xla.gpu.triton"), "mosaic": _ok(mosaic, "mosaic_gpu_v2")}
    return {"ours": found[chosen], **found}


@pytest.fixture
def run() -> dict:
    """What a GPU might have given: two shapes of 1 GiB and 1 MiB."""
    big = {
        "name": "big",
        "num_bytes": GIB,
        "results": {
            **_ours("mosaic", triton=310, mosaic=300),
            "jax_op": _ok(600),
            "xla_gather": _ok(10, error=0.5) | {"status": "wrong"},
        },
    }
    failed = {"status": "failed", "reason": "no"}
    small = {
        "name": "small",
        "num_bytes": 1 << 20,
        "results": {
            **_ours("triton", triton=4, mosaic=3.2),
            "jax_op": _ok(10),
            "xla_gather": failed,
        },
    }
    floors = [
        {"num_bytes": GIB, "status": "ok", "kernel_us": {"median": 240.0}},
        {"num_bytes": GIB, "status": "ok", "kernel_us": {"median": 250.0}},
        {"num_bytes": 1 << 20, "status": "ok", "kernel_us": {"median": 2.0}},
    ]
    meta = {"device": "a GPU", "jax": "0.0", "driver": "1", "date": "today", "command": ""}
    shapes = [big, small]
    capped = {
        "name": "big soft_cap=50",
        "num_bytes": GIB,
        "results": {**_ours("mosaic", triton=310, mosaic=330), "jax_op": _ok(600)},
        "base": {"name": "big", "results": big["results"]},
    }
    split = {
        "name": "big fixed_split_size=512",
        "num_bytes": GIB,
        "results": {"triton": _ok(341, "__gpu$xla.gpu.triton"), "mosaic": failed},
        "base": capped["base"],
    }
    return {
        "meta": meta,
        "floors": floors,
        "shapes": shapes,
        "options": [capped, split],
        "one_byte": [],
        **decode_report.summarize(floors, shapes, []),
    }


def test_shapes_are_those_of_the_issue() -> None:
    uniform = "1x1024 1x8192 1x32768 1x131072 8x2048 8x8192 16x32768 64x1024 64x4096 128x2048"
    heads = "32/32/128/16 32/1/128/16 64/8/128/16 32/8/64/16 16/8/256/16 32/8/128/64"
    names = [f"{name} 32/8/128/16" for name in (*uniform.split(), "256x1024")]
    names += [f"64x4096 {name}" for name in heads.split()]
    assert [shape.name for shape in SHAPES] == [*names, "64 ragged 32/8/128/16"]
    for shape in SHAPES[:-1]:
        lens, dims = shape.name.split()
        num_seqs, length = map(int, lens.split("x"))
        assert shape.seq_lens == (length,) * num_seqs
        got = shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.page_size
        assert got == tuple(map(int, dims.split("/")))
    ragged = SHAPES[-1].seq_lens
    assert len(ragged) == 64 and min(ragged) >= 64 and max(ragged) < 16384
    # Log-uniform: half of the rows are shorter than the geometric mean of the bounds.
    assert 20 < sum(n < 1024 for n in ragged) < 44


def test_bytes_and_sets() -> None:
    by_name = {shape.name: shape for shape in SHAPES}
    assert by_name["64x4096 32/8/128/16"].num_bytes == 2 * 64 * 4096 * 8 * 128 * 2
    for shape in SHAPES:
        assert shape.num_sets * shape.num_bytes >= 2 * 60e6  # twice an H200's L2
        assert shape.num_sets * shape.num_bytes <= 4 * GIB
        assert shape.num_calls >= 8 and shape.num_calls % shape.num_sets == 0
        assert shape.pages_per_seq * shape.page_size >= max(shape.seq_lens)


def test_option_shapes_and_what_they_are_beside() -> None:
    names = {shape.name: base.name for shape, base in OPTION_PAIRS}
    heads = "32/8/128/16"
    options = "soft_cap=50 alibi sinks return_lse fixed_split_size=512 fixed_split_size=1024"
    assert names == {
        **{f"64x4096 {heads} {option}": f"64x4096 {heads}" for option in options.split()},
        f"64x32768 {heads} sliding_window=1024": f"64x1024 {heads}",
        f"16x32768 {heads} sliding_window=1024": f"16x1024 {heads}",
    }
    for shape, base in OPTION_PAIRS:
        assert shape.num_bytes == base.num_bytes  # of windows, not of rows
        assert shape.num_sets * shape.num_bytes >= 2 * 60e6  # twice an H200's L2
    chosen = decode.select_pairs(["window", "tiny"])
    assert [shape.name for shape, _ in chosen] == [*list(names)[-2:], "tiny options"]


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        (None, "DecodeConfig"),
        ("triton", "DecodeConfig"),
        ("mosaic_gpu", "MosaicDecodeConfig"),
        ("mosaic_gpu_interpret", "MosaicDecodeConfig"),
    ],
)
def test_fixed_splits_are_configs_of_their_kind(implementation, kind) -> None:
    for shape, _ in OPTION_PAIRS:
        dims = {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
        config, fixed_split_size = (
            shape.options.config(implementation, **dims),
            shape.options.fixed_split_size,
        )
        assert (config is None) == (fixed_split_size is None)
        if config is not None:
            assert type(config) is getattr(pp, kind) and config.fixed_split_size == fixed_split_size


def test_both_implementations_are_compared_unless_one_is_named() -> None:
    every = {"ours": None, "triton": "triton", "mosaic": "mosaic_gpu"}
    assert peers.implementations(None, TINY) == every
    assert peers.implementations("xla", TINY) == {"ours": "xla"}


def test_a_config_of_one_kind_leaves_no_choice(monkeypatch) -> None:
    monkeypatch.setattr(decode, "make_case", lambda shape: None)
    monkeypatch.setattr(decode, "compare", lambda case, finders, iterations: list(finders))
    for shape, base in OPTION_PAIRS:
        named = ["triton", "mosaic"]
        ours = named if shape.options.fixed_split_size else ["ours", *named]
        options = argparse.Namespace(implementation=None, iterations=1)
        found = decode.measure_shape(shape, options, peers_too=False)
        assert found["results"] == ours
        found = decode.measure_shape(base, options, peers_too=True)
        assert found["results"] == ["ours", *named, "jax_op", "xla_gather", "cudnn_paged"]
        options.implementation = "triton"
        assert decode.measure_shape(shape, options, peers_too=False)["results"] == ["ours"]


def test_select_shapes() -> None:
    assert select_shapes([]) == list(SHAPES)
    assert [s.name for s in select_shapes(["tiny", "1x1024"])] == ["1x1024 32/8/128/16", "tiny"]
    assert select_shapes(["1x77"]) == []


def test_case_scatters_disjoint_pages() -> None:
    case = make_case(TINY)
    used = np.concatenate(
        [
            table[row, : -(-length // TINY.page_size)]
            for table in case.tables
            for row, length in enumerate(TINY.seq_lens)
        ]
    )
    assert sorted(used) == list(range(case.k_pages.shape[1]))
    assert list(used) != sorted(used)


def test_reference_is_attention() -> None:
    case = make_case(TINY)
    table = jnp.asarray(case.tables[1])
    got, _ = reference_states(case.q, case.k_pages, case.v_pages, table, case.seq_lens)
    group = TINY.num_q_heads // TINY.num_kv_heads
    for row, length in enumerate(TINY.seq_lens):
        for head in range(TINY.num_q_heads):
            pages = [
                np.asarray(x[head // group], np.float64)[case.tables[1, row]].reshape(
                    -1, TINY.head_dim
                )[:length]
                for x in (case.k_pages, case.v_pages)
            ]
            p = np.exp(pages[0] @ np.asarray(case.q[row, head], np.float64))
            np.testing.assert_allclose(got[row, head], p @ pages[1] / p.sum(), rtol=1e-4, atol=1e-5)


def test_wrong_and_failing_variants_are_told() -> None:
    case = make_case(TINY)

    def constant(value):
        return lambda q, k, v, block_table, seq_lens: jnp.full_like(q, value) + q * 0

    def raises(*args):
        raise NotImplementedError("not here\nsecond line")

    wrong = [Variant(label="x", attend=constant(np.nan)), Variant(label="r", attend=raises)]
    result = measure.measure_all(case, lambda: wrong, 1)
    assert result["status"] == "wrong" and "kernel_us" not in result
    assert result["variants"][1]["reason"] == "NotImplementedError: not here"
    assert measure.measure_all(case, raises, 1)["status"] == "failed"
    off = [Variant(label="x", attend=constant(0.1))]
    assert measure.measure_all(case, lambda: off, 1)["status"] == "wrong"


def test_one_program_is_measured_once(monkeypatch) -> None:
    timed = []

    def kernel_times(compiled, args, *, iterations):
        timed.append(compiled)
        return [[("a", 8.0)]]

    monkeypatch.setattr(timing, "kernel_times", kernel_times)

    def find(implementation, sm_scale=1.0):
        def attend(q, k, v, block_table, seq_lens):
            return pp.paged_attention(
                q, k, v, block_table, seq_lens, sm_scale=sm_scale, implementation=implementation
            )

        return lambda: [Variant(label=str(implementation), attend=attend)]

    finders = {"ours": find(None), "xla": find("xla"), "off": find("xla", 1.001)}
    found = measure.compare(make_case(TINY), finders, 1)
    assert [found[name]["variant"] for name in finders] == ["None", "xla", "xla"]
    assert len(timed) == (2 if jax.default_backend() == "cpu" else 3)
    assert found["off"]["relative_l2"] != found["xla"]["relative_l2"]
    assert report.chosen(found["xla"]) == "xla"


@pytest.mark.parametrize(
    ("targets", "name"),
    [
        (["mosaic_gpu_v2"], "mosaic"),
        (["__gpu$xla.gpu.triton"], "triton"),
        (["triton_kernel_call"], "triton"),
        (["cu_threefry2x32_ffi"], "xla"),
        ([], "xla"),
    ],
)
def test_choice_is_told_by_the_kernels_of_the_program(targets, name) -> None:
    assert report.chosen(_ok(1.0, *targets)) == name
    for absent in (None, {"status": "failed", "reason": "no"}):
        assert report.chosen(absent) == "-"


def test_best_variant_is_the_fastest_right_one() -> None:
    slow, fast = _ok(9), _ok(5)
    wrong = {"status": "wrong", "relative_l2": 1.0}
    failed = {"status": "failed"}
    assert measure.best([failed, wrong, slow, fast]) is fast
    assert measure.best([failed, wrong]) is wrong


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
    lines = decode_report.markdown(run).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:9]]
    assert len({len(row) for row in cells[:4]}) == len({len(row) for row in cells[5:]}) == 1
    big, small = (dict(zip(cells[0], row, strict=True)) for row in cells[2:4])
    assert big["K/V MB"] == "1073.7" and big["floor"] == "250.0"
    assert big["kernel us (p10 to p90)"] == "300.0 (299.0 to 301.0)"
    assert big["% of ceiling"] == "80.0" and big["GB/s"] == "3579"
    assert big["chosen"] == "mosaic" and small["chosen"] == "triton (1.25 of the faster)"
    assert (
        big["pallas_paged Triton"] == "310.0 [2e-03]"
        and small["pallas_paged Mosaic"] == "3.2 [2e-03]"
    )
    assert big["XLA gather"].startswith("WRONG") and big["vs JAX's op"] == "2.00x"
    assert small["XLA gather"] == "-"
    assert "2.24 times ours (at least 2.00)" in lines[-1]
    assert "faster one (within 2%) on 1 of 2 shapes, and takes at most 1.25" in lines[-2]
    capped, split = cells[7:]
    assert capped[:3] == ["big soft_cap=50", "1073.7", "mosaic (1.06 of the faster)"]
    assert capped[3::3] == ["310.0 (309.0 to 311.0)", "330.0 (329.0 to 331.0)", "600.0 [2e-03]"]
    assert capped[5::3] == ["1.00", "1.10"] and capped[-1] == "big"
    assert split[2] == "-" and split[5:9] == ["1.10", "FAILED", "-", "-"]
    assert "WRONG" in decode_report.progress(run, run["shapes"][0], 1.0)
    assert "pallas_paged Mosaic: no" in decode_report.progress(run, run["options"][1], 1.0)


def test_charts_draw_the_implementations_and_mark_the_choice(run) -> None:
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


@pytest.mark.parametrize("start", [0, 5])
def test_read_kernel_reads_each_block_once(start) -> None:
    block, num_blocks, num_programs = 32, 7, 3
    x = jax.random.randint(jax.random.key(0), (12 * block,), -(1 << 20), 1 << 20, jnp.int32)
    prev = jnp.arange(num_programs, dtype=jnp.int32)
    first = jnp.array([start], jnp.int32)
    options = {"num_bytes": 4 * block * num_blocks, "block": block, "num_warps": 4}
    out = timing.read(x, first, prev, interpret=True, **options)
    want = x[start * block : (start + num_blocks) * block].sum() + prev.sum()
    assert out.sum() == want


@pytest.mark.parametrize("with_kernel_times", [False, True])
def test_tiny_run(with_kernel_times, tmp_path, capsys, monkeypatch) -> None:
    def no_times(*args, **kwargs):
        raise RuntimeError("no CUPTI")

    def kernel_times(compiled, args, *, iterations):
        return [[("a", 8.0 + i), ("b", 8.0), ("a", 0.0)] for i in range(iterations)]

    def floor_times(num_bytes, **kwargs):
        return timing.Spread.of([1.0])

    monkeypatch.setattr(timing, "kernel_times", kernel_times if with_kernel_times else no_times)
    monkeypatch.setattr(timing, "floor_times", floor_times if with_kernel_times else no_times)
    path, table = tmp_path / "bench.json", tmp_path / "bench.md"
    args = ["--shapes", "tiny", "--implementation", "xla", "--no-peers", "--iterations", "3"]
    args += ["--kv-dtypes", "bf16"]
    decode.main([*args, "--json", str(path), "--markdown", str(table)])
    run = json.loads(path.read_text())
    tables = {"shapes", "options", "one_byte"}
    assert set(run) == {"meta", "floors", *tables, "read_ceiling_gbps", "summary"}
    assert run["meta"]["command"].startswith("python -m bench.decode --shapes tiny --impl")
    (shape,), (option,) = run["shapes"], run["options"]
    assert option["results"]["ours"]["relative_l2"] < 5e-3 and option["base"]["name"] == "tiny"
    ours = shape["results"]["ours"]
    assert ours["status"] == "ok" and ours["relative_l2"] < 5e-3 and ours["wall_us"]["median"] > 0
    assert table.read_text() in capsys.readouterr().out
    calls = TINY.num_calls
    if with_kernel_times:
        assert ours["kernel_us"]["median"] == pytest.approx(17 / calls)
        assert ours["kernels"] == {"a": round(9 / calls, 3), "b": round(8 / calls, 3)}
        assert ours["kernels_per_run"] == 3
        assert run["summary"]["floor_over_geomean"] == {"ours": pytest.approx(calls / 17)}
    else:
        assert ours["kernel_us"] is None and ours["reason"] == "RuntimeError: no CUPTI"
        assert run["read_ceiling_gbps"] is None


@pytest.mark.parametrize(
    "args", [["--shapes", "9x9"], ["--iterations", "0"], ["--json", "no/such/folder"]]
)
def test_bad_arguments_end_with_status_2(args, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        decode.main(args)
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err
