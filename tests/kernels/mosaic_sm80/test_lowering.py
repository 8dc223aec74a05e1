"""The kernels for Ampere and later, lowered for each architecture that they run on.

No GPU is needed. Lowering decides which copies and conversions exist on the architecture, and how
registers hold each matrix.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.devices import lower_for_cuda
from tests.support.marks import slow

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
NUM_PAGES = 1009  # no other size is 1009, so it marks the pool in the lowered text


@pytest.fixture
def architecture(request, monkeypatch):
    """Lowers for this architecture; without a GPU, Mosaic takes (9, 0)."""
    monkeypatch.setattr(utils, "_infer_arch", lambda: request.param)
    return request.param


def shapes_of(head_dim, kv_dtype, dtype, group, page_size, num_tokens):
    """Shapes of the arrays of a call on 4 rows, and of its scales."""
    kv_dtype = jnp.dtype(kv_dtype)
    shape = jax.ShapeDtypeStruct
    pages = shape((2, NUM_PAGES, page_size, head_dim), kv_dtype)
    arrays = [
        shape((num_tokens or 4, 2 * group, head_dim), dtype),
        pages,
        pages,
        shape((4, 512 // page_size), jnp.int32),
        shape((4,), jnp.int32),
    ]
    if num_tokens:
        arrays.append(shape((5,), jnp.int32))
    scales = {}
    if kv_dtype.itemsize == 1:
        scales = dict.fromkeys(("k_scales", "v_scales"), shape(pages.shape[:3], jnp.float32))
    return arrays, scales


def check(architecture, function, arrays, scales, **options):
    """No Ampere kernel has what only Hopper has, and no operation makes or copies a pool."""
    call = partial(function, implementation="mosaic_sm80", return_lse=True, **options)

    def run(arrays, scales):  # a new function: JAX remembers what it lowered
        return call(*arrays, **scales)

    text = lower_for_cuda(run, arrays, scales).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    if architecture < (9, 0):  # from there on, Mosaic begins every kernel so
        assert not [word for word in HOPPER_ONLY if word in text]
    allowed = ("func.func", " call @", "sharding_constraint", "custom_call", "reshape", "bitcast")
    pool = [line for line in text.splitlines() if f"x{NUM_PAGES}x" in line]
    assert all(any(word in line for word in allowed) for line in pool)


PER_HEAD = np.ones(8, np.float32)
OPTIONS = dict(sliding_window=100, soft_cap=30.0, alibi_slopes=PER_HEAD, sinks=PER_HEAD)


@pytest.mark.parametrize(("architecture", "kv_dtype"), CALLS, indirect=["architecture"], ids=str)
def test_decode(architecture, kv_dtype):
    arrays, scales = shapes_of(128, kv_dtype, jnp.bfloat16, 4, 16, None)
    check(architecture, pp.paged_attention, arrays, scales, **OPTIONS)


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
    arrays, scales = shapes_of(head_dim, kv_dtype, jnp.bfloat16, 20, 1, None)
    check(architecture, pp.paged_attention, arrays, scales, fixed_split_size=128)


@pytest.mark.parametrize(("architecture", "kv_dtype"), CALLS, indirect=["architecture"], ids=str)
def test_ragged(architecture, kv_dtype):
    arrays, scales = shapes_of(128, kv_dtype, jnp.bfloat16, 4, 16, 203)
    check(architecture, pp.ragged_paged_attention, arrays, scales, **OPTIONS)


@pytest.mark.parametrize("architecture", [(8, 0)], indirect=True, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [(80, "bfloat16"), (256, "int8"), *slow([(64, "int8"), (512, "bfloat16")])],
)
def test_ragged_head_dims(architecture, head_dim, kv_dtype):
    arrays, scales = shapes_of(
        head_dim, kv_dtype, jnp.float16 if kv_dtype == "int8" else kv_dtype, 5, 1, 64
    )
    check(architecture, pp.ragged_paged_attention, arrays, scales, fixed_split_size=128)
