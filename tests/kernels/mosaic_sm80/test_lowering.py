"""The kernels for Ampere and later, lowered for each architecture that they run on.

No GPU is needed. Lowering decides which copies and conversions exist on the architecture, and how
registers hold each matrix.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from tests.support.marks import slow
from tests.support.programs import Program

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from jax.experimental.mosaic.gpu import utils

ARCHITECTURES = [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)]
KV_DTYPES = ["bfloat16", "int8", "float8_e4m3fn"]
FEW = [(ARCHITECTURES[i], KV_DTYPES[i % 3]) for i in range(5)]
CALLS = [*FEW, *slow(x for x in itertools.product(ARCHITECTURES, KV_DTYPES) if x not in FEW)]
HOPPER_ONLY = (
    "wgmma",
    "nvvm.mbarrier",
    "try_wait",
    "griddepcontrol",
    "cp.async.bulk",
    "nvvm.elect",
)


@pytest.fixture
def architecture(request, monkeypatch):
    """Lowers for this architecture; without a GPU, Mosaic takes (9, 0)."""
    monkeypatch.setattr(utils, "_infer_arch", lambda: request.param)
    return request.param


def check(architecture, function, head_dim, kv_dtype, group, page_size, options, **sizes):
    """No Ampere kernel has what only Hopper has, and no operation makes or copies a pool."""
    sizes |= dict(num_q_heads=2 * group, num_kv_heads=2, head_dim=head_dim, page_size=page_size)
    sizes |= dict(max_kv_len=512, kv_dtype=None if kv_dtype == "bfloat16" else kv_dtype)
    how = dict(function=function, implementation="mosaic_sm80")
    text = Program(**how, **sizes, options=dict(return_lse=True) | options).text()
    assert text.count("custom_call @mosaic_gpu") == 2
    if architecture < (9, 0):  # from there on, Mosaic begins every kernel so
        assert not [word for word in HOPPER_ONLY if word in text]
    allowed = ("func.func", " call @", "sharding_constraint", "custom_call", "reshape", "bitcast")
    pool = [line for line in text.splitlines() if "x1009x" in line]
    assert all(any(word in line for word in allowed) for line in pool)


PER_HEAD = np.ones(8, np.float32)
OPTIONS = dict(sliding_window=100, soft_cap=30.0, alibi_slopes=PER_HEAD, sinks=PER_HEAD)


@pytest.mark.parametrize(("architecture", "kv_dtype"), CALLS, indirect=["architecture"], ids=str)
def test_decode(architecture, kv_dtype):
    check(architecture, "decode", 128, kv_dtype, 4, 16, OPTIONS)


@pytest.mark.parametrize("architecture", [(8, 0)], indirect=True, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [
        *((80, "int8"), (192, "bfloat16")),
        *slow(
            x
            for x in itertools.product((64, 80, 112, 192, 256), KV_DTYPES[:2])
            if x not in ((80, "int8"), (192, "bfloat16"))
        ),
    ],
)
def test_decode_head_dims(architecture, head_dim, kv_dtype):
    check(architecture, "decode", head_dim, kv_dtype, 20, 1, dict(fixed_split_size=128))


@pytest.mark.parametrize(("architecture", "kv_dtype"), CALLS, indirect=["architecture"], ids=str)
def test_ragged(architecture, kv_dtype):
    check(architecture, "ragged", 128, kv_dtype, 4, 16, OPTIONS, num_tokens=203)


@pytest.mark.parametrize("architecture", [(8, 0)], indirect=True, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [(80, "bfloat16"), (256, "int8"), *slow([(64, "int8"), (512, "bfloat16")])],
)
def test_ragged_head_dims(architecture, head_dim, kv_dtype):
    sizes = dict(num_tokens=64, dtype="float16" if kv_dtype == "int8" else "bfloat16")
    check(architecture, "ragged", head_dim, kv_dtype, 5, 1, dict(fixed_split_size=128), **sizes)
