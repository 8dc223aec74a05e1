"""The kernels lower for CUDA with every page layout, and no operation makes or copies a pool."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels.kv_layout import LAYOUTS
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_options import TREE_MASK
from tests.support.devices import lower_for_cuda
from tests.support.marks import slow

NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 4099, 16, 2, 64
HALF = NUM_PAGES * PAGE_SIZE * NUM_KV_HEADS * HEAD_DIM // 2  # words of K or of V
PER_HEAD = np.ones(8, np.float32)
OPTIONS = dict(
    sliding_window=100, soft_cap=30.0, alibi_slopes=PER_HEAD, sinks=PER_HEAD, return_lse=True
)
ENTRIES = {
    "decode": (pp.paged_attention, {}),
    "ragged": (pp.ragged_paged_attention, {"cu_q_lens": 5}),
    "cascade": (pp.cascade_attention, {"prefix_lens": 2, "cu_group_sizes": 3}),
}
VIEWS = re.compile(
    r"func\.func|^\s*return| call @|stablehlo\.(reshape|bitcast_convert|custom_call)|"
    r"sdy\.sharding_constraint"
)


def shapes_of(layout, kernel, dtype, kv_dtype):
    """The arrays of a call, by name."""

    def of(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    shape = layout.shape(H=NUM_KV_HEADS, P=NUM_PAGES, N=PAGE_SIZE, D=HEAD_DIM)
    pages = of(*shape, dtype=kv_dtype)
    call = dict(
        q=of(40 if kernel == "ragged" else 4, 8, HEAD_DIM, dtype=dtype),
        k_pages=pages,
        v_pages=None if layout.one_array else pages,
        block_tables=of(4, 32),
        seq_lens=of(4),
        **{name: of(size) for name, size in ENTRIES[kernel][1].items()},
    )
    if pages.dtype.itemsize == 1:
        scales = of(*layout.scale_shape(layout.full_shape(shape)), dtype="float32")
        call |= dict(k_scales=scales, v_scales=scales)
    return call


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
# Every kernel with every layout: those of Triton with half of the layouts over pages of each kind.
FIRST, SECOND = list(LAYOUTS)[::2], list(LAYOUTS)[1::2]
QUICK = [
    *((*call, layout) for call in CALLS[0:2] for layout in FIRST),
    *((*call, layout) for call in CALLS[2:4] for layout in SECOND),
    *((*call, layout) for call in CALLS[4:6] for layout in LAYOUTS),
]
ALL = [(*call, layout) for call in CALLS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("kernel", "implementation", "dtype", "kv_dtype", "kv_layout"),
    [*QUICK, *slow(x for x in ALL if x not in QUICK)],
)
def test_no_pool_is_copied(kernel, implementation, dtype, kv_dtype, kv_layout):
    if implementation == "mosaic_gpu" and mosaic_support.why_not_jax():
        pytest.skip(mosaic_support.why_not_jax())
    options = OPTIONS | ({"tree_mask": TREE_MASK} if kernel == "ragged" else {})

    def call(arrays):
        return ENTRIES[kernel][0](
            **arrays, kv_layout=kv_layout, implementation=implementation, **options
        )

    arrays = shapes_of(LAYOUTS[kv_layout], kernel, dtype, kv_dtype)
    text = lower_for_cuda(call, arrays).as_text()
    assert "custom_call @" in text
    assert pool_operations(text) == []


def test_a_copy_of_a_pool_would_be_seen():
    layout = LAYOUTS["NHD"]
    arrays = shapes_of(layout, "decode", "bfloat16", "bfloat16")

    def call(arrays):
        pages = {name: arrays[name].transpose(2, 0, 1, 3) for name in ("k_pages", "v_pages")}
        return pp.paged_attention(**arrays | pages, implementation="triton")

    assert len(pool_operations(lower_for_cuda(call, arrays).as_text())) == 2
