"""Quantized pools around 2^31 and 2^32 elements: written, copied and read at both ends.

XLA's scatters and gathers index heads and slots with int32, which suffices. The offsets that XLA
and the kernels compute from these indices must be wider.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close, assert_same_bits, decode, ragged
from tests.support.attention_cases import Case
from tests.support.quantized_cases import Quantized

SIZES = dict(num_kv_heads=8, page_size=16, head_dim=128)
CASE = Case(
    **SIZES, num_q_heads=16, seq_lens=(300, 17, 130), q_lens=(40, 17, 1), pages_per_seq=32,
    dtype="bfloat16",
)  # fmt: skip
ELEMENTS = 8 * 16 * 128  # of a page in all heads
NAMES = ("k_pages", "v_pages", "k_scales", "v_scales")


def _memory() -> int:
    if jax.default_backend() != "gpu":
        return 0
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)


pytestmark = pytest.mark.skipif(_memory() < 24 << 30, reason="needs a GPU with 24 GiB")


@partial(jax.jit, donate_argnums=0)
def write(pool, k, v, slots):
    """The pool with tokens in its only layer."""
    [layer] = pool.layers
    return pp.KVPool(layers=(pp.write_kv(layer, k, v, slots),))


copy = jax.jit(pp.copy_pages, donate_argnums=0)


def arrays_of(pool):
    """K, V and their scales, of the only layer."""
    [layer] = pool.layers
    return [getattr(layer, name) for name in NAMES]


def make_pool(num_pages, kv_dtype):
    sizes = dict(SIZES, num_layers=1, num_pages=num_pages)
    return pp.create_kv_pool(dtype=kv_dtype, kv_layout="HPND", **sizes)


def places_in(num_pages):
    """The page of such a pool for each page of the case: evenly from end to end."""
    return np.linspace(0, num_pages - 1, CASE.make()[1].shape[1], dtype=np.int32)


def calls(pool, places):
    """Both attention functions, each with its call on a pool where the pages are at `places`."""
    q, _, _, tables, lens, ends = CASE.make(poison=False)
    k_pages, v_pages, *scales = arrays_of(pool)
    cache = k_pages, v_pages, places[tables], lens
    return [
        (decode, (q[ends[1:] - 1], *cache, *scales)),
        (ragged, (q, *cache, ends, *scales)),
    ]


@jax.jit
def count(pool):
    """Elements of each array that are not zero."""
    return [jnp.count_nonzero(x) for x in arrays_of(pool)]


@pytest.mark.parametrize(
    ("num_pages", "kv_dtype"),
    [
        (2**17 - 1, "int8"),  # just below 2^31 elements
        (2**17 + 1, "int8"),
        (2**17 + 1, "float8_e4m3fn"),
        (3 * 2**30 // ELEMENTS, "int8"),
        (2**18 + 1, "int8"),  # just beyond 2^32
        (2**18 + 1, "float8_e4m3fn"),
    ],
)
def test_written_read_and_copied(num_pages, kv_dtype):
    places = places_in(num_pages)
    slots = (places[:, None] * CASE.page_size + np.arange(CASE.page_size, dtype=np.int32)).ravel()
    pages = replace(CASE, dtype="float32").make(poison=False)[1:3]
    tokens = (x.reshape(CASE.num_kv_heads, -1, CASE.head_dim).swapaxes(0, 1) for x in pages)
    pool = write(make_pool(num_pages, kv_dtype), *tokens, slots)
    # No scale and no element is outside the case's pages.
    counts = [int(n) for n in count(pool)]
    assert counts[2:] == [sum(CASE.seq_lens) * CASE.num_kv_heads] * 2
    for pages, written in zip(arrays_of(pool)[:2], counts, strict=False):
        assert jnp.count_nonzero(pages[:, places]) == written > 0

    meant = Quantized(case=CASE, kv_dtype=kv_dtype, v_size=1.0).make(poison=False)[1]
    newest = meant[0][meant[-1][1:] - 1]
    outs = []
    for (function, arrays), exact in zip(
        calls(pool, places), [(newest, *meant[1:-1]), meant], strict=True
    ):
        for implementation in ("triton", "xla"):
            outs.append(function(*arrays, implementation=implementation))
            assert_close(outs[-1], exact, CASE.tolerance)

    # Swap both ends, so all pages must be read before any is written.
    pool = copy(pool, pp.PageCopies(src_pages=places, dst_pages=places[::-1]))
    assert [int(n) for n in count(pool)] == counts
    for function, arrays in calls(pool, places[::-1]):
        for implementation in ("triton", "xla"):
            assert_same_bits(function(*arrays, implementation=implementation), outs.pop(0))


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_nothing_copies_the_pool(kv_dtype):
    pool = jax.eval_shape(lambda: make_pool(2**18 + 1, kv_dtype))
    new = jax.ShapeDtypeStruct((64, CASE.num_kv_heads, CASE.head_dim), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((64,), jnp.int32)
    programs = [
        write.lower(pool, new, new, slots),
        copy.lower(pool, pp.PageCopies(src_pages=slots, dst_pages=slots)),
        *(f.lower(*x, implementation="triton") for f, x in calls(pool, places_in(2**18 + 1))),
    ]
    for lowered in programs:
        found = lowered.compile().memory_analysis()
        made = found.output_size_in_bytes - found.alias_size_in_bytes
        assert found.temp_size_in_bytes + made < 64 << 20
