"""Quantized pools around 2^31 and 2^32 elements: written, copied and read at both ends.

XLA's scatters and gathers index heads and slots with int32, which suffices. The offsets that XLA
and the kernels compute from these indices must be wider.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close, assert_same_bits, decode, ragged
from tests.support.attention_cases import Case
from tests.support.quantized_cases import Quantized

CASE = Case(
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
    seq_lens=(300, 17, 130),
    pages_per_seq=32,
    dtype="bfloat16",
    q_lens=(40, 17, 1),
)
SIZE = 8 * 16 * 128  # elements of a page in all heads
IMPLEMENTATIONS = ("triton", "xla")


def _memory() -> int:
    if jax.default_backend() != "gpu":
        return 0
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)


pytestmark = pytest.mark.skipif(_memory() < 24 << 30, reason="needs a GPU with 24 GiB")


@dataclass(frozen=True)
class BigPool:
    """A pool of `num_pages` with the pages of `CASE` spread evenly from end to end."""

    num_pages: int
    kv_dtype: str

    def __str__(self) -> str:
        return f"{self.num_pages}-{self.kv_dtype}"

    @property
    def places(self) -> np.ndarray:
        """The page in this pool for each page of the case."""
        _, k_pages, *_ = CASE.make()
        return np.linspace(0, self.num_pages - 1, k_pages.shape[1], dtype=np.int32)

    def pool(self) -> pp.KVPool:
        """A pool of zeros."""
        return pp.create_kv_pool(
            num_layers=1,
            num_pages=self.num_pages,
            num_kv_heads=CASE.num_kv_heads,
            page_size=CASE.page_size,
            head_dim=CASE.head_dim,
            dtype=self.kv_dtype,
        )


POOLS = [
    BigPool(2**17 - 1, "int8"),  # just below 2^31 elements
    BigPool(2**17 + 1, "int8"),
    BigPool(2**17 + 1, "float8_e4m3fn"),
    BigPool(3 * 2**30 // SIZE, "int8"),
    BigPool(2**18 + 1, "int8"),  # just beyond 2^32
    BigPool(2**18 + 1, "float8_e4m3fn"),
]


@partial(jax.jit, donate_argnums=0)
def write(pool: pp.KVPool, k: jax.Array, v: jax.Array, slots: jax.Array) -> pp.KVPool:
    """The pool with tokens in its only layer."""
    [layer] = pool.layers
    return pp.KVPool(layers=(pp.write_kv(layer, k, v, slots),))


copy = jax.jit(pp.copy_pages, donate_argnums=0)


def arrays_of(pool: pp.KVPool) -> tuple[jax.Array, ...]:
    """K, V and their scales, of the only layer."""
    [layer] = pool.layers
    assert layer.k_scales is not None and layer.v_scales is not None
    return layer.k_pages, layer.v_pages, layer.k_scales, layer.v_scales


def calls(pool: pp.KVPool, places: np.ndarray) -> list[tuple]:
    """Both attention functions, each with its call on a pool where the pages are at `places`."""
    q, _, _, tables, lens, ends = CASE.make(poison=False)
    k_pages, v_pages, *scales = arrays_of(pool)
    cache = k_pages, v_pages, places[tables], lens
    newest = q[ends[1:] - 1]
    return [(decode, (newest, *cache, *scales)), (ragged, (q, *cache, ends, *scales))]


def oracles(kv_dtype: str) -> list[tuple]:
    """The same calls on dequantized values, for the oracle."""
    _, (q, *cache, ends) = Quantized(case=CASE, kv_dtype=kv_dtype, v_size=1.0).make(poison=False)
    return [(q[ends[1:] - 1], *cache), (q, *cache, ends)]


def tokens() -> tuple[np.ndarray, ...]:
    """K and V `f32[T, Hkv, D]` of all slots of the case's pages; zeros in unused slots."""
    _, k_pages, v_pages, *_ = replace(CASE, dtype="float32").make(poison=False)
    return tuple(
        x.reshape(CASE.num_kv_heads, -1, CASE.head_dim).swapaxes(0, 1) for x in (k_pages, v_pages)
    )


@jax.jit
def count(pool: pp.KVPool) -> list[jax.Array]:
    """Elements of each array that are not zero."""
    return [jnp.count_nonzero(x) for x in arrays_of(pool)]


@pytest.mark.parametrize("big", POOLS, ids=str)
def test_written_read_and_copied(big):
    places, offsets = big.places, np.arange(CASE.page_size, dtype=np.int32)
    slots = (places[:, None] * CASE.page_size + offsets).ravel()
    pool = write(big.pool(), *tokens(), slots)
    # No scale and no element is outside the case's pages.
    counts = [int(n) for n in count(pool)]
    assert counts[2:] == [sum(CASE.seq_lens) * CASE.num_kv_heads] * 2
    for pages, written in zip(arrays_of(pool)[:2], counts, strict=False):
        assert jnp.count_nonzero(pages[:, places]) == written > 0

    outs = []
    for (function, arrays), meant in zip(calls(pool, places), oracles(big.kv_dtype), strict=True):
        for implementation in IMPLEMENTATIONS:
            outs.append(function(*arrays, implementation=implementation))
            assert_close(outs[-1], meant, CASE.tolerance)

    # Swap both ends, so all pages must be read before any is written.
    pool = copy(pool, pp.PageCopies(src_pages=places, dst_pages=places[::-1]))
    assert [int(n) for n in count(pool)] == counts
    for function, arrays in calls(pool, places[::-1]):
        for implementation in IMPLEMENTATIONS:
            assert_same_bits(function(*arrays, implementation=implementation), outs.pop(0))


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_nothing_copies_the_pool(kv_dtype):
    big = BigPool(2**18 + 1, kv_dtype)
    pool = jax.eval_shape(big.pool)
    new = jax.ShapeDtypeStruct((64, CASE.num_kv_heads, CASE.head_dim), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((64,), jnp.int32)
    programs = [
        write.lower(pool, new, new, slots),
        copy.lower(pool, pp.PageCopies(src_pages=slots, dst_pages=slots)),
        *(f.lower(*x, implementation="triton") for f, x in calls(pool, big.places)),
    ]
    for lowered in programs:
        found = lowered.compile().memory_analysis()
        made = found.output_size_in_bytes - found.alias_size_in_bytes
        assert found.temp_size_in_bytes + made < 64 << 20
