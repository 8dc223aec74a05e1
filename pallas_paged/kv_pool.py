"""Where K/V bytes live: create, write, copy pages.

Each layer has its own pair of arrays: slices of one stacked [num_layers, ...] array would be copied
in every step of a compiled loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from pallas_paged.page_table import (
    PageCopies,
    checked_array,
    validate_pool_size,
    validate_positive,
)
from pallas_paged.quantization import LARGEST, checked_scales, is_one_byte, quantize, token_scales
from pallas_paged.validation import static_number

POOL_DTYPES = ("float32", "bfloat16", "float16", *LARGEST)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class KVPool:
    """The pages of all layers; which page holds what is in the `PageTable`.

    Attributes:
        k_pages: per layer, [num_kv_heads, num_pages, page_size, head_dim].
        v_pages: per layer, the same shape.
        k_scales: of int8 and float8_e4m3fn pages, per layer what an element counts for:
            float32[num_kv_heads, num_pages, page_size], one for each token and head, or float32[],
            one for all. Else None.
        v_scales: like k_scales.
    """

    k_pages: tuple[jax.Array, ...]
    v_pages: tuple[jax.Array, ...]
    k_scales: tuple[jax.Array, ...] | None = None
    v_scales: tuple[jax.Array, ...] | None = None


def create_kv_pool(
    *,
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    k_scales: Sequence[float] | None = None,
    v_scales: Sequence[float] | None = None,
) -> KVPool:
    """Returns a pool of zeros; one-byte pages with scales of 0, or with the scales given.

    Args:
        num_layers: layers, each with its own arrays.
        num_pages: pages per layer, as in the page table.
        num_kv_heads: K/V heads.
        page_size: tokens per page, a power of two from 1 to 256.
        head_dim: elements per head.
        dtype: float32, bfloat16 or float16; int8 or float8_e4m3fn, which are half as large or less
            but for a float32 scale for each token and head, of its K and of its V.
        k_scales: with one-byte pages a positive number for each layer, as some checkpoints bring
            them: they take the place of the tokens' own scales, and nothing writes them.
        v_scales: like k_scales.

    Raises:
        ValueError: a size is not a positive integer, the page size, number of slots or dtype is
            not allowed, or the scales are not two lists of num_layers positive finite numbers.
    """
    validate_pool_size(num_pages, page_size)
    validate_positive(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
    dtype = jnp.dtype(dtype)
    if dtype.name not in POOL_DTYPES:
        raise ValueError(f"dtype={dtype.name} must be one of {', '.join(POOL_DTYPES)}")
    shape = (num_kv_heads, num_pages, page_size, head_dim)
    has_scales = dtype.name in LARGEST
    if not has_scales and (k_scales is not None or v_scales is not None):
        raise ValueError(f"k_scales and v_scales must be None with pages of {dtype}")
    if (k_scales is None) != (v_scales is None):
        raise ValueError("k_scales and v_scales must be given both, or neither")

    def layers(shape: tuple[int, ...], dtype: DTypeLike) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

    def scales(name: str, given: Sequence[float] | None) -> tuple[jax.Array, ...] | None:
        if given is not None:
            return _layer_scales(name, given, num_layers)
        return layers(shape[:-1], jnp.float32) if has_scales else None

    return KVPool(
        k_pages=layers(shape, dtype),
        v_pages=layers(shape, dtype),
        k_scales=scales("k_scales", k_scales),
        v_scales=scales("v_scales", v_scales),
    )


@overload
def write_kv(
    k_pages: ArrayLike, v_pages: ArrayLike, k: ArrayLike, v: ArrayLike, slots: ArrayLike
) -> tuple[jax.Array, jax.Array]: ...


@overload
def write_kv(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slots: ArrayLike,
    k_scales: ArrayLike,
    v_scales: ArrayLike,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...


def write_kv(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slots: ArrayLike,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
) -> tuple[jax.Array, ...]:
    """Writes the K/V of new tokens into one layer's pages, in place where those are donated.

    Into one-byte pages a token of a head goes as `round(x / scale)`, ties to even, saturated at 127
    (int8) or 448 (float8_e4m3fn). Its scale, max|x| over that, is written too; K and V have each
    their own. Tokens so small that the scale is no normal float32 become zeros, with a scale of 0.
    One with NaN or infinity in it has a scale of NaN, and so is NaN as a whole. Under one scale for
    all infinities saturate, and NaN stays NaN in float8_e4m3fn but becomes 0 in int8.

    Args:
        k_pages: [num_kv_heads, num_pages, page_size, head_dim], of a dtype as in `create_kv_pool`.
        v_pages: the same shape and dtype.
        k: floating [T, num_kv_heads, head_dim], cast or quantized to the dtype of the pages.
        v: floating, the same shape.
        slots: int32[T] from `slot_mapping`. Slots outside [0, num_pages * page_size) are dropped;
            what a slot that is named twice then holds is undefined.
        k_scales: of one-byte pages: float32[num_kv_heads, num_pages, page_size], or float32[] to
            quantize all tokens with. Else None.
        v_scales: like k_scales.

    Returns:
        (k_pages, v_pages), and with one-byte pages (k_pages, v_pages, k_scales, v_scales).

    Raises:
        ValueError: wrong shape or dtype, or scales where there should be none or the other way.
    """
    k_pages, v_pages, k, v = map(jnp.asarray, (k_pages, v_pages, k, v))
    for name, array in dict(k_pages=k_pages, v_pages=v_pages, k=k, v=v).items():
        pages = name.endswith("pages")
        if not jnp.issubdtype(array.dtype, jnp.floating) and not (pages and is_one_byte(array)):
            raise ValueError(f"{name} must be floating{' or int8' * pages}, got {array.dtype}")
    if k_pages.ndim != 4 or v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            "k_pages and v_pages must be [num_kv_heads, num_pages, page_size, head_dim], alike, "
            f"got {k_pages.dtype}{k_pages.shape} and {v_pages.dtype}{v_pages.shape}"
        )
    num_kv_heads, _, _, head_dim = k_pages.shape
    if k.ndim != 3 or k.shape[1:] != (num_kv_heads, head_dim) or v.shape != k.shape:
        raise ValueError(
            f"k and v must be [T, {num_kv_heads=}, {head_dim=}] like the pages, "
            f"got {k.shape} and {v.shape}"
        )
    slots = checked_array("slots", slots, jnp.int32, (k.shape[0],))
    scales = checked_scales(k_pages, k_scales, v_scales)
    if not scales:
        return _write(k_pages, k, slots), _write(v_pages, v, slots)
    (k_pages, k_new), (v_pages, v_new) = (
        _write_quantized(*x, slots) for x in ((k_pages, scales[0], k), (v_pages, scales[1], v))
    )
    return k_pages, v_pages, k_new, v_new


def copy_pages(pool: KVPool, copies: PageCopies) -> KVPool:
    """Copies pages within every layer as `fork` and `truncate` ask, in place if pool is donated.

    All pages are read before any is written.

    Args:
        pool: the pool.
        copies: pages to copy; an entry with a source or destination that is no page is dropped.

    Raises:
        ValueError: wrong dtype, or sources and destinations differ in shape.
    """
    shape = jnp.shape(copies.src_pages)
    src = checked_array("copies.src_pages", copies.src_pages, jnp.int32, shape).ravel()
    dst = checked_array("copies.dst_pages", copies.dst_pages, jnp.int32, shape).ravel()

    def copy(pages: jax.Array) -> jax.Array:  # [num_kv_heads, num_pages, ...]
        if not pages.ndim:  # a scale of all pages
            return pages
        num_pages = pages.shape[1]
        heads = jnp.arange(pages.shape[0], dtype=jnp.int32)[:, None]
        to = jnp.where((src >= 0) & (src < num_pages), dst, num_pages)
        # The barrier keeps XLA from fusing the gather into the scatter: one kernel that reads and
        # writes the pool can't work in place, and copies all of it.
        copied = lax.optimization_barrier(pages.at[heads, src].get(mode="clip"))
        return pages.at[heads, to].set(copied, mode="drop", wrap_negative_indices=False)

    return jax.tree.map(copy, pool)


def _write(pages: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
    num_kv_heads, num_pages, page_size, *dims = pages.shape
    # Heads are indexed too: XLA's GPU compiler moves the scattered axes to the front, so that a
    # scatter along the slots alone would transpose the pool.
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None]
    flat = pages.reshape(num_kv_heads, num_pages * page_size, *dims)
    flat = flat.at[heads, slots].set(
        tokens.swapaxes(0, 1).astype(pages.dtype), mode="drop", wrap_negative_indices=False
    )
    return flat.reshape(pages.shape)


def _write_quantized(
    pages: jax.Array, scales: jax.Array, tokens: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`pages` and `scales` with the tokens in them, and their scales unless one is for all."""
    if not scales.ndim:
        return _write(pages, quantize(tokens, scales, pages.dtype), slots), scales
    new = token_scales(tokens, pages.dtype)  # [T, num_kv_heads]
    pages = _write(pages, quantize(tokens, new, pages.dtype), slots)
    return pages, _write(scales, new, slots)


def _layer_scales(name: str, given: Sequence[float], num_layers: int) -> tuple[jax.Array, ...]:
    numbers = [static_number(f"{name}[{layer}]", x) for layer, x in enumerate(given)]
    least = float(jnp.finfo(jnp.float32).tiny)  # a subnormal may count as 0
    if len(numbers) != num_layers or not all(x >= least for x in numbers):
        raise ValueError(f"{name}={numbers} must be {num_layers=} numbers, each at least {least:g}")
    return tuple(jnp.float32(x) for x in numbers)
