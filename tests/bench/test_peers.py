"""The implementations that the benches compare, and their data, without torch and a GPU."""

import argparse

import pytest

import pallas_paged as pp
from bench.decode import __main__ as decode
from bench.decode import peers
from bench.measuring import measure
from bench.measuring.kv_dtypes import ONE_BYTE, with_dtype
from bench.measuring.options import Options
from bench.measuring.shapes import OPTION_PAIRS, TINY, make_case, uniform
from bench.prefill import __main__ as prefill
from bench.prefill import peers as prefill_peers
from bench.prefill import shapes as prefill_shapes

pytestmark = pytest.mark.usefixtures("short_chains")

SIZES = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}


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
    assert prefill.measure_shape(prefill_shapes.TINY, args)["results"] == [*every, "cudnn", "mha"]
    for name in ONE_BYTE:
        assert found(with_dtype(TINY, name)) == [*every, "jax_op"]
        tiny = with_dtype(prefill_shapes.TINY, name)
        assert prefill.measure_shape(tiny, args)["results"] == every
    assert peers.implementations(None)["mosaic"] == "mosaic_sm90"
    assert peers.implementations("xla") == {"ours": "xla"}


def test_ours_is_right_with_options_and_wrong_without() -> None:
    options = Options(soft_cap=0.5, sliding_window=4, alibi=True, sinks=True, return_lse=True)
    case = make_case(uniform(2, 24, **SIZES, q_len=24, options=options))
    errors = []
    for given in (options, Options()):
        [variant] = peers.ours(pp.ragged_paged_attention, "xla", given)
        outs = measure.chain(variant.attend)(*measure.arguments(case, variant))
        errors.append(measure.relative_error(case, outs))
    assert errors[0] < 5e-3 and errors[1] > measure.MAX_RELATIVE_ERROR


@pytest.mark.parametrize(
    "shape",
    [
        uniform(2, 32, **SIZES, q_len=32, options=Options(sliding_window=5)),
        uniform(3, 19, **SIZES, q_len=4),  # its queries see all
    ],
    ids=["window", "chunks"],
)
@pytest.mark.usefixtures("clock")
def test_dense_peer_attends_to_the_same_tokens(shape) -> None:
    [peer] = prefill_peers.cudnn_dense(shape, "xla")
    result = measure.measure_all(make_case(shape), lambda: [peer], 1)
    assert result["status"] == "ok" and result["relative_l2"] < 5e-3
    assert peer.sees_all == (shape.q_lens != shape.seq_lens)
    assert not peer.sees_all or result["num_flops"] == 4 * 4 * 16 * 3 * 4 * 19
