"""The prefill bench's own arithmetic, on a CPU: no time is checked here."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import measure, prefill, prefill_peers, prefill_report, shapes, timing
from bench.options import Options
from bench.prefill_shapes import SHAPES, TINY
from bench.shapes import make_case, uniform

DIMS = (4, 2, 16, 4)  # Hq, Hkv, D, page


@pytest.fixture(autouse=True)
def short_chains(monkeypatch) -> None:
    """Three calls to a run: on a CPU no cache need be cold."""
    monkeypatch.setattr(shapes, "_COLD_BYTES", 1)
    monkeypatch.setattr(shapes, "_MIN_CALLS", 3)


@pytest.fixture
def run() -> dict:
    """What a GPU might have given: a prompt, and speculation that reads more than it computes."""

    def ok(us: float, **more: int) -> dict:
        spread = {"median": us, "p10": us - 1, "p90": us + 1}
        times = {"kernel_us": spread, "wall_us": spread}
        return {"status": "ok", "relative_l2": 2e-3, "custom_calls": [], **times, **more}

    def ours(us: float, mosaic: float) -> dict:
        triton = ok(us) | {"custom_calls": ["__gpu$xla.gpu.triton"]}
        mosaic_result = ok(mosaic) | {"custom_calls": ["mosaic_gpu_v2"]}
        return {"ours": triton, "triton": triton, "mosaic": mosaic_result}

    wrong = {"status": "wrong", "relative_l2": 0.5, "reason": "off"}
    prompt = {**ours(1000.0, 800.0), "cudnn": ok(800.0), "mha": wrong}
    short = {**ours(500.0, 505.0), "cudnn": ok(500.0, num_flops=20 * 10**9)}
    found = [
        {"name": "prompt", "num_flops": 4 * 10**11, "num_bytes": 10**8, "results": prompt},
        {
            "name": "short",
            "num_flops": 10**10,
            "num_bytes": 10**9,
            "results": short | {"mha": {"status": "failed", "reason": "no"}},
        },
    ]
    meta = {"device": "a GPU", "jax": "0.0", "driver": "1", "date": "today", "command": ""}
    run = {"meta": meta, "shapes": found, "one_byte": []}
    return run | {"summary": prefill_report.summarize(run)}


def test_flops_are_the_pairs_that_the_masks_let_through() -> None:
    for options in (Options(), Options(sliding_window=5)):
        shape = uniform(2, 12, *DIMS, q_len=7, options=options)
        i, j = np.arange(5, 12)[:, None], np.arange(12)
        pairs = 2 * ((j <= i) & (i - j < (options.sliding_window or 99))).sum()
        assert shape.num_flops == 4 * 4 * 16 * pairs
    assert uniform(1, 100, *DIMS, q_len=10, options=Options(sliding_window=5)).num_bytes == (
        2 * 14 * 2 * 16 * 2
    )


def test_shapes_are_prompts_chunks_and_mixtures() -> None:
    for shape in SHAPES:
        assert len(shape.asked) == len(shape.seq_lens)
        assert all(q <= n for q, n in zip(shape.asked, shape.seq_lens, strict=True))
        assert shape.num_calls % shape.num_sets == 0
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    by_name = {shape.name: shape for shape in SHAPES}
    prompt = by_name["4x4096 32/8/128/16"]
    assert prompt.num_flops == 4 * 32 * 128 * 4 * 4096 * 4097 // 2
    chunk = by_name["8x512 after 8192 32/8/128/16"]
    assert chunk.asked == (512,) * 8 and chunk.seq_lens == (8704,) * 8


def test_sample_sees_the_first_middle_and_last_query() -> None:
    case = make_case(TINY)  # rows of 5, 32 and 17 tokens, 5, 3 and 1 of them asking
    found = set(zip(*(x.tolist() for x in case.sample()), strict=True))
    want = {(0, 0, 1), (2, 0, 3), (4, 0, 5), (5, 1, 30), (6, 1, 31), (7, 1, 32), (8, 2, 17)}
    assert found == want


OPTIONS = (
    Options(),
    Options(soft_cap=0.5),
    Options(sliding_window=4),
    Options(alibi=True),
    Options(sinks=True),
    Options(return_lse=True),
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.name or "plain")
def test_ours_is_right_and_told_apart_from_ours_without_the_option(options) -> None:
    shape = uniform(2, 24, *DIMS, q_len=24, options=options)
    case = make_case(shape)
    (right,) = prefill_peers.ours("xla", shape)
    args = measure.arguments(case, None)
    assert measure.relative_error(case, measure.chain(right.attend)(*args)) < 5e-3
    if options not in (Options(), Options(return_lse=True)):
        (plain,) = prefill_peers.ours("xla", uniform(2, 24, *DIMS, q_len=24))
        error = measure.relative_error(case, measure.chain(plain.attend)(*args))
        assert error > measure.MAX_RELATIVE_ERROR


@pytest.mark.parametrize(
    "shape",
    [
        uniform(2, 32, *DIMS, q_len=32),
        uniform(2, 32, *DIMS, q_len=32, options=Options(sliding_window=5)),
        uniform(3, 19, *DIMS, q_len=4),  # its queries see all
    ],
    ids=["prompts", "window", "chunks"],
)
def test_dense_peer_gets_the_same_question(shape) -> None:
    (peer,) = prefill_peers.cudnn_dense(shape, "xla")
    result = measure.measure_all(make_case(shape), lambda: [peer], 1)
    assert result["status"] == "ok" and result["relative_l2"] < 5e-3
    assert peer.sees_all == (shape.asked != shape.seq_lens)
    if peer.sees_all:
        assert result["num_flops"] == 4 * 4 * 16 * 3 * 4 * 19


def test_mha_peer_gets_the_same_question() -> None:
    case = make_case(uniform(2, 128, *DIMS, q_len=128))
    peer = prefill_peers.jax_mha(case.shape, interpret=True)[0]
    outs = measure.chain(peer.attend)(*measure.arguments(case, peer.prepare))
    assert measure.relative_error(case, outs) < 5e-3


def test_peers_refuse_what_they_have_not() -> None:
    for options in (Options(soft_cap=1.0), Options(alibi=True), Options(sinks=True)):
        shape = uniform(2, 32, *DIMS, q_len=32, options=options)
        for peer in (prefill_peers.cudnn_dense, prefill_peers.jax_mha):
            with pytest.raises(NotImplementedError, match=options.name):
                peer(shape)
    with pytest.raises(NotImplementedError, match="one length"):
        prefill_peers.jax_mha(TINY)


def test_summary_table_and_plot(run, tmp_path) -> None:
    assert run["summary"]["choice"] == {"shapes": 2, "right": 1, "worst": pytest.approx(1.25)}
    over = run["summary"]["over"]
    assert over["cudnn"] == {
        "geomean": pytest.approx((0.8 * 0.5) ** 0.5),
        "min": pytest.approx(0.5),
        "shapes": 2,
    }
    assert over["triton"]["geomean"] == 1.0 and over["mosaic"]["min"] == pytest.approx(0.8)
    assert "mha" not in over
    lines = prefill_report.markdown(run).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    prompt, short = (dict(zip(cells[0], row, strict=True)) for row in cells[2:])
    assert prompt["TFLOP/s"] == "400.0" and prompt["cuDNN dense, TFLOP/s"] == "500.0 [2e-03]"
    assert prompt["JAX's Triton mha, TFLOP/s"].startswith("WRONG")
    assert prompt["chosen"] == "triton (1.25 of the faster)" and short["chosen"] == "triton"
    assert prompt["pallas_paged Mosaic, TFLOP/s"] == "500.0 [2e-03]"
    assert short["GB/s"] == "2000" and short["JAX's Triton mha, TFLOP/s"] == "-"
    assert "no" in prefill_report.progress(run["shapes"][1], 1.0)
    pytest.importorskip("matplotlib")
    for chosen in (run["shapes"], run["shapes"][:1], run["shapes"][1:]):
        prefill_report.plot(run | {"shapes": chosen}, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="CUPTI"):
        prefill_report.plot(run | {"shapes": []}, tmp_path / "plot.png")


def test_tiny_run(tmp_path, capsys, monkeypatch) -> None:
    def kernel_times(compiled, args, *, iterations):
        return [[("a", 8.0)] for _ in range(iterations)]

    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    path, table = tmp_path / "bench.json", tmp_path / "bench.md"
    args = ["--shapes", "tiny", "--implementation", "xla", "--iterations", "2"]
    args += ["--kv-dtypes", "bf16"]
    prefill.main([*args, "--json", str(path), "--markdown", str(table)])
    run = json.loads(path.read_text())
    (shape,) = run["shapes"]
    assert shape["num_queries"] == 9 and shape["results"]["ours"]["relative_l2"] < 5e-3
    assert shape["results"]["ours"]["kernel_us"]["median"] == 8.0 / shape["num_calls"]
    assert "one length" in shape["results"]["mha"]["reason"]
    assert table.read_text() in capsys.readouterr().out
