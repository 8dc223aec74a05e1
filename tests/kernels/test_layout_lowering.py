"""The kernels lower for CUDA with every page layout, and no operation makes or copies a pool."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from pallas_paged.kernels.kv_layout import LAYOUTS
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_options import TREE_MASK
from tests.support.devices import lower_for_cuda
from tests.support.marks import slow
from tests.support.programs import Program

NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 4099, 16, 2, 64
HALF = NUM_PAGES * PAGE_SIZE * NUM_KV_HEADS * HEAD_DIM // 2  # words of K or of V
PER_HEAD = np.ones(8, np.float32)
OPTIONS = dict(
    sliding_window=100, soft_cap=30.0, alibi_slopes=PER_HEAD, sinks=PER_HEAD, return_lse=True
)
VIEWS = re.compile(
    r"func\.func|^\s*return| call @|stablehlo\.(reshape|bitcast_convert|custom_call)|"
    r"sdy\.sharding_constraint"
)


def program(kernel, implementation, dtype, kv_dtype, kv_layout):
    is_ragged = kernel == "ragged"
    return Program(
        function=kernel,
        implementation=implementation,
        num_tokens=40 if is_ragged else 0,
        max_kv_len=512,
        num_q_heads=8,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        dtype=dtype,
        kv_dtype=None if kv_dtype == dtype else kv_dtype,
        kv_layout=kv_layout,
        options=OPTIONS | ({"tree_mask": TREE_MASK} if is_ragged else {}),
    )


def pool_operations(text: str) -> list[str]:
    """The lines of a program with as many elements as a pool, but for views and kernels."""

    def size(shape: str) -> int:
        return int(np.prod([int(n) for n in re.findall(r"(\d+)x", shape)] or [0]))

    large = (
        line.strip()
        for line in text.splitlines()
        if any(size(shape) >= HALF for shape in re.findall(r"tensor<((?:\d+x)+)", line))
    )
    return [line for line in large if not VIEWS.search(line)]


CALLS = [
    ("decode", "triton", "bfloat16", "bfloat16"),
    ("ragged", "triton", "bfloat16", "bfloat16"),
    ("decode", "triton", "bfloat16", "int8"),
    ("ragged", "triton", "float16", "float8_e4m3fn"),
    ("decode", "mosaic_gpu", "bfloat16", "bfloat16"),
    ("ragged", "mosaic_gpu", "bfloat16", "bfloat16"),
    ("decode", "triton", "float32", "float32"),
    ("ragged", "triton", "float32", "float32"),
    ("decode", "triton", "float16", "float8_e4m3fn"),
    ("ragged", "triton", "bfloat16", "int8"),
    ("cascade", "triton", "bfloat16", "bfloat16"),
    ("cascade", "triton", "bfloat16", "int8"),
    ("cascade", "mosaic_gpu", "bfloat16", "bfloat16"),
]
# Every kernel with half of the layouts.
FIRST, SECOND = list(LAYOUTS)[::2], list(LAYOUTS)[1::2]
QUICK = [
    *((*CALLS[i], layout) for i in (0, 3, 4) for layout in FIRST),
    *((*CALLS[i], layout) for i in (1, 2, 5) for layout in SECOND),
]
ALL = [(*call, layout) for call in CALLS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("kernel", "implementation", "dtype", "kv_dtype", "kv_layout"),
    [*QUICK, *slow(x for x in ALL if x not in QUICK)],
)
def test_no_pool_is_copied(kernel, implementation, dtype, kv_dtype, kv_layout):
    if implementation == "mosaic_gpu" and mosaic_support.why_not_jax():
        pytest.skip(mosaic_support.why_not_jax())
    text = program(kernel, implementation, dtype, kv_dtype, kv_layout).text()
    assert "custom_call @" in text
    assert pool_operations(text) == []


def test_a_copy_of_a_pool_would_be_seen():
    call, arrays = program("decode", "triton", "bfloat16", "bfloat16", "NHD").call_and_shapes()

    def transposed(arrays):
        pages = {name: arrays[name].swapaxes(0, 1) for name in ("k_pages", "v_pages")}
        return call(arrays | pages)

    pages = arrays["k_pages"]
    pages = jax.ShapeDtypeStruct((PAGE_SIZE, NUM_PAGES, *pages.shape[2:]), pages.dtype)
    arrays |= dict.fromkeys(("k_pages", "v_pages"), pages)
    assert len(pool_operations(lower_for_cuda(transposed, arrays).as_text())) == 2
