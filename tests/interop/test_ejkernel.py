"""ejkernel calls the implementations that are registered with it; its own are the reference."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_cases import Case
from tests.support.attention_oracle import relative_error
from tests.support.rpa_cases import RpaCase, expected

ops = pytest.importorskip("ejkernel.modules.operations")

from ejkernel.kernels import Backend, Platform, kernel_registry  # noqa: E402

from pallas_paged.interop import ejkernel as ours  # noqa: E402

CASE = Case(seq_lens=(17, 5, 1, 30), q_lens=(1, 5, 1, 13), pages_per_seq=5)
SLOPES = np.float32([0.5, 0.25, 0.125, 0.06])
# Options of attention, and the place among its arguments of a number per head.
UNIFIED = {
    "plain": ({}, None),
    "scale": (dict(softmax_scale=0.3), None),
    "window": (dict(sliding_window=7), None),
    "cap": (dict(logits_soft_cap=2.0), None),
    "alibi": ({}, 6),
    "sinks": ({}, 8),
}


@pytest.fixture
def registered(monkeypatch):
    """The functions of this library in ejkernel's registry, for one test."""
    before = {name: list(specs) for name, specs in kernel_registry._registry.items()}
    monkeypatch.setattr(kernel_registry, "_registry", before)
    ours.register()


def unified_arguments():
    q, k, v, table, lens, offsets = CASE.make(poison=False)
    k, v = (np.ascontiguousarray(np.moveaxis(x, 0, 2)) for x in (k, v))
    table = np.where(np.arange(5) * 8 < lens[:, None], table, -1).astype(np.int32)
    return [jnp.asarray(x) for x in (q, k, v, lens, table, offsets)]


def reference_of(name):
    specs = kernel_registry._registry[name]
    return next(x for x in specs if not x.priority and x.platform == Platform.XLA).implementation


def test_signatures_are_equal():
    """In names, order, kinds and defaults; annotations differ, and ejkernel would warn of that."""
    for function in (ours.unified_attention, ours.ragged_page_attention_v3):
        for spec in kernel_registry._registry[function.__name__]:
            theirs, mine = (inspect.signature(f) for f in (spec.implementation, function))
            assert [(x.name, x.kind, x.default) for x in mine.parameters.values()] == [
                (x.name, x.kind, x.default) for x in theirs.parameters.values()
            ]


def test_the_registry_chooses_ours_which_refuses_a_bias(registered):
    for function in (ours.unified_attention, ours.ragged_page_attention_v3):
        for platform, backend in ((Platform.XLA, "cpu"), (Platform.TRITON, "gpu")):
            chosen = kernel_registry.get(function.__name__, platform, backend)
            assert chosen.__wrapped__ is function
    kernel_registry.get("unified_attention", Platform.CUDA, Backend.GPU)
    arrays = unified_arguments()
    bias = jnp.zeros((len(arrays[0]),) * 2, jnp.float32)
    with pytest.raises(Exception, match="qq_bias is not supported"):
        ops.unified_attention(*arrays, None, bias)


@pytest.mark.parametrize(("options", "place"), UNIFIED.values(), ids=UNIFIED)
def test_unified_attention(options, place, registered):
    arrays = [*unified_arguments(), None, None, None]
    if place is not None:
        arrays[place] = jnp.asarray(SLOPES)
    actual = ops.unified_attention(*arrays, **options)
    meant = np.float64(reference_of("unified_attention")(*arrays, **options))
    assert relative_error(actual, meant) < 1e-5


def test_ragged_page_attention_v3(registered):
    case = RpaCase(head_dim=128, padding=0, dead_rows=0)
    arrays = case.make()
    arrays["page_indices"] = np.clip(arrays["page_indices"], 0, len(arrays["kv_cache"]) - 1)
    out, cache, _ = expected(arrays, sm_scale=0.1)
    cut = arrays["kv_cache"].reshape(*arrays["kv_cache"].shape[:2], 4, 1, 128)
    values = [jnp.asarray(x) for x in (arrays | dict(kv_cache=cut)).values()]
    actual, new = ops.ragged_page_attention_v3(*values, softmax_scale=0.1)
    assert relative_error(actual, out) < 1e-5
    np.testing.assert_array_equal(np.asarray(new).reshape(cache.shape), cache)
    meant, _ = reference_of("ragged_page_attention_v3")(*values, softmax_scale=0.1)
    assert relative_error(actual, np.float64(meant)) < 1e-5
