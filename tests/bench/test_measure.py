"""The data of a shape, the reference, the errors of variants, and the choice of the best one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from bench.decode import cascade, peers
from bench.measuring import calls, measure, timing
from bench.measuring.kv_dtypes import with_dtype
from bench.measuring.measure import Variant
from bench.measuring.shapes import TINY, make_case
from tests.bench.fakes import FAILED, WRONG, ok
from tests.support import raw

pytestmark = pytest.mark.usefixtures("short_chains")


@pytest.mark.parametrize("shape", [TINY, cascade.TINY], ids=["decode", "cascade"])
def test_rows_and_sets_share_only_the_pages_of_a_prefix(shape) -> None:
    case = make_case(shape)
    shared = shape.shared_prefix // shape.page_size
    assert (case.tables[:, :, :shared] == case.tables[:, :1, :shared]).all()
    used = [table[0, :shared] for table in case.tables]
    for table in case.tables:
        for row, length in enumerate(shape.seq_lens):
            used.append(table[row, shared : -(-length // shape.page_size)])
    pages = np.concatenate(used)
    assert sorted(pages) == list(range(case.k_pages.shape[1])) and list(pages) != sorted(pages)
    more = [[8], [0, 3]] if shape.shared_prefix else []
    assert [x.tolist() for x in case.lens] == [list(shape.seq_lens), *more]


def test_sample_has_the_first_middle_and_last_query() -> None:
    shape = dataclasses.replace(TINY, q_lens=(5, 3, 1))  # of rows of 5, 32 and 17 tokens
    found = set(shape.sample())
    want = {(0, 0, 1), (2, 0, 3), (4, 0, 5), (5, 1, 30), (6, 1, 31), (7, 1, 32), (8, 2, 17)}
    assert found == want


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("fp8", 448)])
def test_quantized_pages_use_the_whole_range(name, largest) -> None:
    case = make_case(with_dtype(TINY, name))
    for pages, scales in zip((case.k_pages, case.v_pages), case.scales.values(), strict=True):
        assert pages.dtype == case.shape.kv_dtype and scales.shape == pages.shape[:3]
        elements = np.asarray(pages, np.float32)
        np.testing.assert_array_equal(np.abs(elements).max(axis=-1), largest)
        assert len(np.unique(scales)) > 20 and np.std(elements * scales[..., None]) > 0.9
    assert not jnp.array_equal(case.k_pages, case.v_pages)


def test_wrong_and_failing_variants_have_reasons() -> None:
    def constant(value):
        return lambda q, k, v, block_table, seq_lens: jnp.full_like(q, value) + q * 0

    def raises(*args):
        raise NotImplementedError("not here\nsecond line")

    variants = [
        Variant(label="nan", attend=constant(np.nan)),
        Variant(label="raises", attend=raises),
        Variant(label="off", attend=constant(0.1)),
    ]
    result = measure.measure_all(make_case(TINY), lambda: variants, 1)
    assert result["status"] == "wrong" and "kernel_us" not in result
    assert [found["status"] for found in result["variants"]] == ["wrong", "failed", "wrong"]
    assert result["variants"][1]["reason"] == "NotImplementedError: not here"
    assert measure.measure_all(make_case(TINY), raises, 1)["status"] == "failed"


def test_variants_get_the_scales(monkeypatch) -> None:
    def twice(*args, k_scales, v_scales):
        return ours.attend(*args, k_scales=k_scales, v_scales=2 * v_scales)

    def no_times(compiled, args, **how):
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(timing, "kernel_times", no_times)
    monkeypatch.setattr(timing, "wall_times", lambda compiled, args, *, iterations: [6.0])
    case = make_case(with_dtype(TINY, "int8"))
    [ours] = peers.ours(pp.paged_attention, "xla")
    jax_op = functools.partial(peers.jax_op(case.shape)[0].attend, interpret=True)
    variants = [ours, dataclasses.replace(ours, attend=twice), Variant(label="", attend=jax_op)]
    found = measure.measure_all(case, lambda: variants, 1)
    assert [x["status"] for x in found["variants"]] == ["ok", "wrong", "ok"]
    assert found["relative_l2"] < 5e-3 and found["wall_us"]["median"] == 6 / case.shape.num_calls
    assert found["kernel_us"] is None and found["reason"] == "RuntimeError: no CUPTI"


def test_equal_programs_are_measured_once(monkeypatch) -> None:
    timed = []

    def kernel_times(compiled, args, *, iterations):
        timed.append(compiled)
        return [[("a", 8.0)]]

    monkeypatch.setattr(timing, "kernel_times", kernel_times)

    def find(implementation, sm_scale=1.0):
        def attend(*args):
            return raw.paged_attention(*args, sm_scale=sm_scale, implementation=implementation)

        return lambda: [Variant(label=str(implementation), attend=attend)]

    finders = {"ours": find(None), "xla": find("xla"), "off": find("xla", 1.001)}
    found = measure.compare(make_case(TINY), finders, 1)
    assert [found[name]["variant"] for name in finders] == ["None", "xla", "xla"]
    assert len(timed) == (2 if jax.default_backend() == "cpu" else 3)
    assert found["off"]["relative_l2"] != found["xla"]["relative_l2"]
    assert calls.chosen(found["xla"]) == "xla"


CALLS = {"mosaic_gpu_v2": "mosaic", "__gpu$xla.gpu.triton": "triton", "cu_threefry": "xla"}


def test_results_name_their_implementation_and_the_best_is_the_fastest_right_one() -> None:
    assert {call: calls.chosen(ok(1.0, call)) for call in CALLS} == CALLS
    assert calls.chosen(None) == calls.chosen(FAILED) == "-"
    slow, fast = ok(9), ok(5) | {"kernel_us": None}
    assert measure.best([FAILED, WRONG, slow, fast]) is fast
    assert measure.best([FAILED, WRONG]) is WRONG
