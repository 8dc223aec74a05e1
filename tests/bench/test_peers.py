"""The implementations that the benches compare, and their data, without torch and a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import pallas_paged as pp
from bench import decode, measure, peers, peers_torch, prefill, prefill_peers, prefill_shapes
from bench.kv_dtypes import ONE_BYTE, with_dtype
from bench.options import Options
from bench.shapes import OPTION_PAIRS, SHAPES, TINY, make_case, uniform

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


@pytest.mark.slow  # the interpreted kernel of JAX
def test_mha_peer_attends_to_the_same_tokens() -> None:
    case = make_case(uniform(2, 128, **SIZES, q_len=128))
    peer = prefill_peers.jax_mha(case.shape, interpret=True)[0]
    outs = measure.chain(peer.attend)(*measure.arguments(case, peer))
    assert measure.relative_error(case, outs) < 5e-3


@pytest.mark.parametrize("peer", [prefill_peers.cudnn_dense, prefill_peers.jax_mha])
@pytest.mark.parametrize("name", ["soft_cap", "alibi", "sinks"])
def test_peers_refuse_unsupported_options(peer, name) -> None:
    with pytest.raises(NotImplementedError, match=name):
        peer(uniform(2, 32, **SIZES, q_len=32, options=Options(**{name: True})))


def test_shapes_pages_and_samples_of_torch_are_those_of_ours() -> None:
    assert peers_torch.select([]) == [*SHAPES, *peers_torch.PREFILLS]
    assert peers_torch.select(["prefill"]) == list(peers_torch.PREFILLS)
    for rows, table in zip(peers_torch.page_lists(TINY), make_case(TINY).tables, strict=True):
        for pages, row in zip(rows, table, strict=True):
            np.testing.assert_array_equal(pages, row[: len(pages)])
        assert [len(pages) for pages in rows] == [2, 8, 5]
    # Tokens 0 to 2 of row 0 see 3 to 5 keys, 3 to 34 of row 1 see 1 to 32, 35 of row 2 sees 17.
    found = peers_torch.sample(dataclasses.replace(TINY, q_lens=(3, 32, 1)))
    assert found[0] == (3, 1, 1) and found[-1] == (34, 1, 32) and len(found) == 4
    assert peers_torch.sample(TINY) == [(0, 0, 5), (2, 2, 17), (1, 1, 32)]


@pytest.mark.usefixtures("clock")
def test_missing_peers_of_torch_have_reasons_and_missing_torch_is_one_line(monkeypatch) -> None:
    def absent(case):
        raise ImportError("no such package\nmore")

    cuda = types.SimpleNamespace(empty_cache=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(peers_torch, "TorchCase", lambda shape: None)
    monkeypatch.setattr(peers_torch, "flashinfer", absent)
    monkeypatch.setattr(peers_torch, "sdpa", lambda case: iter([("x", lambda: absent(case))]))
    args = argparse.Namespace(ours=True, implementation="xla", iterations=1)
    with ThreadPoolExecutor(1) as pool:
        results = peers_torch.measure_shape(TINY, args, pool)["results"]
    assert results["ours"]["status"] == "ok" and results["ours"]["relative_l2"] < 5e-3
    assert results["flashinfer"]["reason"] == "ImportError: no such package"
    assert results["sdpa"]["status"] == "failed" and results["sdpa"]["variants"]
    monkeypatch.setattr(peers_torch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^error: bench\.peers_torch needs torch[^\n]*$"):
        peers_torch.main(["--shapes", "tiny"])
