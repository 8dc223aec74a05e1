"""The prefill bench: the library and its peers, summary, table, charts and a tiny run."""

from __future__ import annotations

import pytest

import pallas_paged as pp
from bench import measure, peers, prefill, prefill_peers, prefill_report
from bench.options import Options
from bench.prefill_shapes import TINY
from bench.shapes import make_case, uniform
from tests.bench.fakes import FAILED, META, ok, ours, rows, wrong
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("short_chains")

SIZES = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}


@pytest.fixture
def run() -> dict:
    """Results of a prompt, and of speculation, which reads more than it computes."""
    prompt = {**ours("triton", triton=1000.0, mosaic=800.0), "cudnn": ok(800.0), "mha": wrong()}
    short = {**ours("triton", triton=500.0, mosaic=505.0), "mha": FAILED}
    short["cudnn"] = ok(500.0, num_flops=20 * 10**9)
    found = [
        {"name": "prompt", "num_flops": 4 * 10**11, "num_bytes": 10**8, "results": prompt},
        {"name": "short", "num_flops": 10**10, "num_bytes": 10**9, "results": short},
    ]
    run = {"meta": META, "shapes": found, "one_byte": []}
    return run | {"summary": prefill_report.summarize(run)}


OPTIONS = [
    Options(soft_cap=0.5, sliding_window=4, alibi=True, sinks=True, return_lse=True),
    *slow(
        [
            Options(),
            Options(soft_cap=0.5),
            Options(sliding_window=4),
            Options(alibi=True),
            Options(sinks=True),
            Options(return_lse=True),
            Options(fixed_split_size=64),
        ]
    ),
]


@pytest.fixture(scope="module")
def outs_without_options(short_chains):
    case = make_case(uniform(2, 24, **SIZES, q_len=24))
    (plain,) = peers.ours(pp.ragged_paged_attention, "xla")
    return measure.chain(plain.attend)(*measure.arguments(case, None))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.name or "plain")
def test_ours_is_right_and_without_the_option_wrong(options, outs_without_options) -> None:
    case = make_case(uniform(2, 24, **SIZES, q_len=24, options=options))
    (right,) = peers.ours(pp.ragged_paged_attention, "xla", options)
    outs = measure.chain(right.attend)(*measure.arguments(case, None))
    assert measure.relative_error(case, outs) < 5e-3
    if options.soft_cap or options.sliding_window or options.alibi or options.sinks:
        error = measure.relative_error(case, outs_without_options)
        assert error > measure.MAX_RELATIVE_ERROR


@pytest.mark.parametrize(
    "shape",
    [
        uniform(2, 32, **SIZES, q_len=32, options=Options(sliding_window=5)),
        uniform(3, 19, **SIZES, q_len=4),  # its queries see all
        *slow([uniform(2, 32, **SIZES, q_len=32)]),
    ],
    ids=["window", "chunks", "prompts"],
)
@pytest.mark.usefixtures("clock")
def test_dense_peer_attends_to_the_same_tokens(shape) -> None:
    (peer,) = prefill_peers.cudnn_dense(shape, "xla")
    result = measure.measure_all(make_case(shape), lambda: [peer], 1)
    assert result["status"] == "ok" and result["relative_l2"] < 5e-3
    assert peer.sees_all == (shape.q_lens != shape.seq_lens)
    if peer.sees_all:
        assert result["num_flops"] == 4 * 4 * 16 * 3 * 4 * 19


@pytest.mark.slow  # the interpreted kernel of JAX
def test_mha_peer_attends_to_the_same_tokens() -> None:
    case = make_case(uniform(2, 128, **SIZES, q_len=128))
    peer = prefill_peers.jax_mha(case.shape, interpret=True)[0]
    outs = measure.chain(peer.attend)(*measure.arguments(case, peer.prepare))
    assert measure.relative_error(case, outs) < 5e-3


def test_peers_refuse_unsupported_options_and_lengths() -> None:
    for options in (Options(soft_cap=1.0), Options(alibi=True), Options(sinks=True)):
        shape = uniform(2, 32, **SIZES, q_len=32, options=options)
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
    head, *body = rows(prefill_report.markdown(run))
    prompt, short = (dict(zip(head, row, strict=True)) for row in body)
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


@pytest.mark.usefixtures("clock")
def test_tiny_run(dry_run) -> None:
    args = ["--shapes", "tiny", "--implementation", "xla", "--iterations", "2"]
    args += ["--kv-dtypes", "bf16"]
    run, _ = dry_run(prefill, *args)
    (shape,) = run["shapes"]
    assert shape["num_queries"] == 9 and shape["results"]["ours"]["relative_l2"] < 5e-3
    assert shape["results"]["ours"]["kernel_us"]["median"] == 8.0 / shape["num_calls"]
    assert "one length" in shape["results"]["mha"]["reason"]
