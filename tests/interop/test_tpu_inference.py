"""tpu-inference's reference of ragged paged attention "v3" against ours, and the caches of both.

Its kernels are plain modules, but its package imports vLLM: stand-ins take the place of that.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.interop import ragged_paged_attention
from tests.support.attention_oracle import relative_error
from tests.support.rpa_cases import RpaCase

CASE = RpaCase(padding=0)
OPTIONS = {
    "plain": {},
    "window": dict(sliding_window=9),
    "cap": dict(soft_cap=2.0),
    "not causal": dict(use_causal_mask=False),
    "scales": dict(q_scale=0.5, k_scale=0.25, v_scale=2.0),
}


@pytest.fixture(scope="module")
def kernel():
    """The module of the kernel, with its reference."""
    spec = importlib.util.find_spec("tpu_inference")
    if spec is None:
        pytest.skip("could not import 'tpu_inference'")
    before = dict(sys.modules)
    names = ("tpu_inference", "tpu_inference.logger", "tpu_inference.utils")
    package, logger, utils = map(types.ModuleType, names)
    package.__path__ = spec.submodule_search_locations
    logger.init_logger = logging.getLogger
    utils.get_device_name = lambda *_, **__: "TPU v6e"
    sys.modules |= {module.__name__: module for module in (package, logger, utils)}
    yield importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
    for name in sys.modules.keys() - before.keys():
        if name.startswith("tpu_inference"):
            del sys.modules[name]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_kv_heads", "tolerance"),
    [("float32", 64, 2, 1e-5), ("bfloat16", 128, 3, 2e-2)],
)
def test_equals_the_reference(dtype, head_dim, num_kv_heads, tolerance, options, kernel):
    sizes = dict(head_dim=head_dim, num_kv_heads=num_kv_heads, num_q_heads=6)
    case = dataclasses.replace(CASE, dtype=dtype, **sizes)
    arrays = case.make()
    pages = arrays["kv_cache"]
    shape = kernel.get_kv_cache_shape(*pages.shape[:2], num_kv_heads, head_dim, dtype)
    padded = np.pad(pages, ((0, 0),) * 3 + ((0, shape[-1] - head_dim),)).reshape(shape)
    tokens = sum(case.q_lens)
    arrays |= dict(kv_cache=padded, page_indices=np.clip(arrays["page_indices"], 0, len(pages) - 1))
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    if "q_scale" in options and dtype == "bfloat16":
        tolerance = 3e-2  # the reference rounds the queries once more
    meant, cache = kernel.ref_ragged_paged_attention(**arrays, **options, sm_scale=0.1)
    out, actual = ragged_paged_attention(**arrays, **options, sm_scale=0.1)
    assert relative_error(out[:tokens], np.float64(meant[:tokens])) < tolerance
    np.testing.assert_array_equal(actual, cache)
