"""The function that MaxText imports from tpu-inference, on meshes; MaxText itself is not needed."""

from __future__ import annotations

import importlib
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_paged.interop import maxtext
from tests.support.marks import slow
from tests.support.rpa_cases import RpaCase, assert_equal_results, expected

CASE = RpaCase(padding=0, dead_rows=0)
NAME = "tpu_inference.layers.common.attention_interface"


def mesh_of(**axes):
    if len(jax.devices()) < np.prod([*axes.values()]):
        pytest.skip("needs more devices")
    devices = jax.devices()[: np.prod([*axes.values()])]
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def attend(mesh, arrays, rest=(None, 1.0)):
    def call(*arrays):
        return maxtext.sharded_ragged_paged_attention(mesh, *arrays, *rest)

    return jax.jit(call)(*arrays.values())


SLOW = slow([dict(data=1, model=1), dict(data=1, model=2)])


@pytest.mark.parametrize("axes", [dict(tensor=2), *SLOW])
def test_heads_over_devices(axes):
    arrays = CASE.make()
    sinks = np.float32([0.5, -1, 2, 0])
    rest = (sinks, 0.3, 9, None, None, 0.5, True)
    results = attend(mesh_of(**axes), arrays, rest)
    meant = expected(arrays, sinks=sinks, sm_scale=0.3, sliding_window=9, v_scale=0.5)
    assert_equal_results(results, meant, 1e-5)


def test_rows_over_devices():
    """Each part of the data has its own rows, pages, offsets and distribution."""
    parts = [CASE.make(seed=seed) for seed in (0, 1)]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    out, cache = attend(mesh_of(data=2, model=2), arrays)
    for index, part in enumerate(parts):
        results = (np.split(np.asarray(x), 2)[index] for x in (out, cache))
        assert_equal_results(results, expected(part), 1e-5)


def test_more_devices_than_heads():
    """The cache has each head twice; results are those of the heads once."""
    arrays = CASE.make()
    out, cache, _ = expected(arrays)
    pages = arrays["kv_cache"]
    pairs = pages.reshape(*pages.shape[:2], 2, 2, -1)
    given = arrays | dict(kv_cache=np.repeat(pairs, 2, axis=2))
    actual, new = attend(mesh_of(data=1, model=4), given)
    assert_equal_results((actual, np.asarray(new)[:, :, ::2]), (out, cache), 1e-5)


def test_install_puts_the_function_where_maxtext_looks(monkeypatch):
    for count in range(1, 5):
        monkeypatch.delitem(sys.modules, ".".join(NAME.split(".")[:count]), raising=False)
    before = set(sys.modules)
    maxtext.install()
    module = importlib.import_module(NAME)
    assert module.sharded_ragged_paged_attention is maxtext.sharded_ragged_paged_attention
    for name in set(sys.modules) - before:
        del sys.modules[name]
