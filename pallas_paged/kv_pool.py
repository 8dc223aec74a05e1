"""The arrays that hold K/V: create a pool, write tokens, copy pages.

Each layer has its own arrays: slices of one stacked [num_layers, ...] array would be copied in
every step of a compiled loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from pallas_paged.checks import (
    as_array,
    checked_array,
    default_promotion,
    static_number,
    validate_pool_size,
    validate_positive,
)
from pallas_paged.page_table import PageCopies
from pallas_paged.quantization import LARGEST, checked_scales, quantize, token_scales

POOL_DTYPES = ("float32", "bfloat16", "float16", *LARGEST)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class LayerKV:
    """The pages of one layer.

    Attributes:
        k_pages: `[num_kv_heads, num_pages, page_size, head_dim]`.
        v_pages: same shape and dtype.
        k_scales: of int8 and float8_e4m3fn pages, the dequantization scales (value = element *
            scale): f32`[num_kv_heads, num_pages, page_size]`, one for each token and head, or
            f32`[]`, one for the layer. Else None.
        v_scales: like `k_scales`.
    """

    k_pages: jax.Array
    v_pages: jax.Array
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class KVPool:
    """The pages of all layers. The `PageTable` says which row owns which page.

    Attributes:
        layers: one `LayerKV` per layer, all of the same shapes and dtypes.
    """

    layers: tuple[LayerKV, ...]


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
    sharding: NamedSharding | None = None,
) -> KVPool:
    """Return a pool of zeros; int8 and fp8 pages have scales of 0, or the scales given.

    Args:
        num_layers: layers, each with its own arrays.
        num_pages: pages per layer, as in the page table.
        num_kv_heads: K/V heads.
        page_size: tokens per page, a power of two from 1 to 256.
        head_dim: elements per head.
        dtype: float32, bfloat16, float16, int8 or float8_e4m3fn. The last two take a float32 scale
            for each token and head besides, one for K and one for V.
        k_scales: with int8 and fp8 pages, one positive number per layer, as calibrated checkpoints
            have them. They replace the scales of tokens, and `write_kv` leaves them as they are.
        v_scales: like `k_scales`.
        sharding: how the KV heads are cut over the devices of a mesh, from `kv_pool_sharding`. Each
            device creates its own heads, so the pool may be larger than any one of them. In a
            program of several processes all of them call. None means one device.

    Raises:
        ValueError: a size is not a positive integer, the page size, number of slots or dtype is
            not allowed, the scales are not two lists of num_layers positive finite numbers, or the
            sharding cuts another axis than the heads or does not divide them.
    """
    validate_pool_size(num_pages, page_size)
    validate_positive(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
    element = _checked_dtype(dtype)
    quantized = element.name in LARGEST
    if not quantized and (k_scales is not None or v_scales is not None):
        raise ValueError(f"k_scales and v_scales must be None with pages of {element}")
    if (k_scales is None) != (v_scales is None):
        raise ValueError("k_scales and v_scales must be given both, or neither")
    shape = (num_kv_heads, num_pages, page_size, head_dim)
    layer_scales: list[Iterable[float | None]] = [
        [None] * num_layers if given is None else _layer_scales(name, given, num_layers)
        for name, given in (("k_scales", k_scales), ("v_scales", v_scales))
    ]

    def scale(given: float | None) -> jax.Array | None:
        if given is not None:
            return jnp.float32(given)
        return jnp.zeros(shape[:-1], jnp.float32) if quantized else None

    def create() -> KVPool:
        return KVPool(
            layers=tuple(
                LayerKV(
                    k_pages=jnp.zeros(shape, element),
                    v_pages=jnp.zeros(shape, element),
                    k_scales=scale(k_scale),
                    v_scales=scale(v_scale),
                )
                for k_scale, v_scale in zip(*layer_scales, strict=True)
            )
        )

    if sharding is None:
        return create()
    _check_sharding(sharding, num_kv_heads)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    shardings = jax.tree.map(lambda x: sharding if x.ndim else whole, jax.eval_shape(create))
    return jax.jit(create, out_shardings=shardings)()


@default_promotion()
def write_kv(layer: LayerKV, k: ArrayLike, v: ArrayLike, slots: ArrayLike) -> LayerKV:
    """Write the K/V of new tokens into the pages of a layer, in place where those are donated.

    Into int8 and fp8 pages a token of a head goes as `round(x / scale)`, ties to even, saturated at
    127 (int8) or 448 (float8_e4m3fn). Its scale, max|x| over that, is written too, one for K and
    one for V. Tokens so small that the scale is no normal float32 become zeros, with a scale of 0.
    A token with NaN or infinity in it has a scale of NaN, and so is NaN as a whole. Under one scale
    for the layer, infinities saturate, and NaN stays NaN in float8_e4m3fn but becomes 0 in int8.

    Args:
        layer: pages, and scales if they are int8 or fp8.
        k: floating `[T, num_kv_heads, head_dim]`, cast or quantized to the dtype of the pages.
        v: floating, the same shape.
        slots: i32`[T]` from `slot_mapping`. Slots outside [0, num_pages * page_size) are dropped;
            what a slot holds that is named twice is undefined.

    Returns:
        The layer with the new tokens.

    Raises:
        ValueError: `layer` is not a LayerKV, a shape or dtype is wrong, or quantized pages lack
            scales.
    """
    if not isinstance(layer, LayerKV):
        raise ValueError(f"layer must be a LayerKV, got {type(layer).__name__}")
    k_pages = as_array("layer.k_pages", layer.k_pages)
    v_pages = as_array("layer.v_pages", layer.v_pages)
    if k_pages.dtype.name not in POOL_DTYPES:
        allowed = ", ".join(POOL_DTYPES)
        raise ValueError(f"k_pages.dtype={k_pages.dtype.name} must be one of {allowed}")
    if k_pages.ndim != 4 or v_pages.shape != k_pages.shape or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            "k_pages and v_pages must be [num_kv_heads, num_pages, page_size, head_dim], alike, "
            f"got {k_pages.dtype}{k_pages.shape} and {v_pages.dtype}{v_pages.shape}"
        )
    tokens = {name: as_array(name, x) for name, x in (("k", k), ("v", v))}
    for name, x in tokens.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got {x.dtype}")
    k_pages, v_pages = jnp.asarray(k_pages), jnp.asarray(v_pages)
    tokens = {name: jnp.asarray(x) for name, x in tokens.items()}
    num_kv_heads, _, _, head_dim = k_pages.shape
    shape = tokens["k"].shape
    if len(shape) != 3 or shape[1:] != (num_kv_heads, head_dim) or tokens["v"].shape != shape:
        raise ValueError(
            f"k and v must be [T, {num_kv_heads=}, {head_dim=}] like the pages, "
            f"got {shape} and {tokens['v'].shape}"
        )
    slots = checked_array("slots", slots, jnp.int32, (shape[0],))
    scales = checked_scales(k_pages, layer.k_scales, layer.v_scales)
    if not scales:
        k_pages = _write(k_pages, tokens["k"], slots)
        return LayerKV(k_pages=k_pages, v_pages=_write(v_pages, tokens["v"], slots))
    k_pages, k_scales = _write_quantized(k_pages, scales[0], tokens["k"], slots)
    v_pages, v_scales = _write_quantized(v_pages, scales[1], tokens["v"], slots)
    return LayerKV(k_pages=k_pages, v_pages=v_pages, k_scales=k_scales, v_scales=v_scales)


@default_promotion()
def copy_pages(pool: KVPool, copies: PageCopies) -> KVPool:
    """Copy pages within every layer as `fork` and `truncate` ask, in place if pool is donated.

    All pages are read before any is written.

    Args:
        pool: the pool.
        copies: pages to copy; an entry with a source or destination outside the pool is dropped.

    Raises:
        ValueError: `pool` is not a KVPool, a dtype is wrong, or the shapes of the copies differ.
    """
    if not isinstance(pool, KVPool):
        raise ValueError(f"pool must be a KVPool, got {type(pool).__name__}")
    shape = as_array("copies.src_pages", copies.src_pages).shape
    src = checked_array("copies.src_pages", copies.src_pages, jnp.int32, shape).ravel()
    dst = checked_array("copies.dst_pages", copies.dst_pages, jnp.int32, shape).ravel()

    def copy(pages: jax.Array) -> jax.Array:  # [num_kv_heads, num_pages, ...]
        if not pages.ndim:  # a scale of the whole layer
            return pages
        num_pages = pages.shape[1]
        to = jnp.where((src >= 0) & (src < num_pages), dst, num_pages)
        copied = per_head(lambda pages, src: pages.at[src].get(mode="clip"), pages, src)
        # The barrier keeps XLA from fusing the gather into the scatter: one kernel that reads and
        # writes the pool can't work in place, and copies all of it.
        return set_per_head(pages, to, lax.optimization_barrier(copied))

    return jax.tree.map(copy, pool)


def _write(pages: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
    num_kv_heads, num_pages, page_size, *dims = pages.shape
    flat = pages.reshape(num_kv_heads, num_pages * page_size, *dims)
    return set_per_head(flat, slots, tokens.swapaxes(0, 1).astype(pages.dtype)).reshape(pages.shape)


def set_per_head(x: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    """Return `x [Hkv, N, ...]` with `values [Hkv, T, ...]` at the places i32[T] of each head."""

    def put(x: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
        return x.at[places].set(values, mode="drop", wrap_negative_indices=False)

    return per_head(put, x, places, values)


def per_head(
    function: Callable[..., jax.Array], x: jax.Array, places: jax.Array, *values: jax.Array
) -> jax.Array:
    """Return `function(x[h], places, *(v[h] for v in values))` of every head h.

    Heads are a batch dimension of the gather or scatter, its indices included. On a mesh each
    device then works on its own heads. A head among the indices would gather the new tokens of all
    heads on each device, and one without indices of its own is an axis of the window: XLA's GPU
    compiler moves the scattered axes in front of it, and so transposes the pool.
    """
    places = jnp.broadcast_to(places, (x.shape[0], places.size))
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:  # vmap wants all to be sharded alike
        heads = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
        places = jax.reshard(places, heads)
        values = tuple(jax.reshard(value, heads) for value in values)
    return jax.vmap(function)(x, places, *values)


def _write_quantized(
    pages: jax.Array, scales: jax.Array, tokens: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return `pages` and `scales` with the tokens; one scale for the layer stays as it is."""
    if not scales.ndim:
        return _write(pages, quantize(tokens, scales, pages.dtype), slots), scales
    new = token_scales(tokens, pages.dtype)  # [T, num_kv_heads]
    pages = _write(pages, quantize(tokens, new, pages.dtype), slots)
    return pages, _write(scales, new, slots)


def _checked_dtype(dtype: Any) -> jnp.dtype:
    allowed = ", ".join(POOL_DTYPES)
    try:
        element = None if dtype is None else jnp.dtype(dtype)  # NumPy takes None for float64
    except TypeError:
        element = None
    if element is None or element.name not in POOL_DTYPES:
        name = repr(dtype) if element is None else element.name
        raise ValueError(f"dtype={name} must be one of {allowed}")
    return element


def _check_sharding(sharding: Any, num_kv_heads: int) -> None:
    if not isinstance(sharding, NamedSharding) or any(sharding.spec[1:]):
        raise ValueError(f"{sharding=} must be a NamedSharding that cuts the KV heads alone")
    axes = sharding.spec[0] if sharding.spec else None
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    num_parts = math.prod(sharding.mesh.shape[name] for name in names)
    if num_kv_heads % num_parts:
        raise ValueError(
            f"{num_kv_heads=} must be a multiple of the {num_parts} devices of mesh axis {axes!r}; "
            "a pool can hold every KV head several times, see pallas_paged.sharding.kv_head_repeats"
        )


def _layer_scales(name: str, given: Any, num_layers: int) -> list[float]:
    least = float(jnp.finfo(jnp.float32).tiny)  # a subnormal may be flushed to 0
    rule = f"{num_layers=} numbers, each at least {least:g}"
    scalar = not isinstance(given, Iterable) or not getattr(given, "ndim", 1)
    if scalar or isinstance(given, str | bytes):
        raise ValueError(f"{name}={given!r} must be {rule}")
    numbers = [static_number(f"{name}[{layer}]", x) for layer, x in enumerate(given)]
    if len(numbers) != num_layers or not all(x >= least for x in numbers):
        raise ValueError(f"{name}={numbers} must be {rule}")
    return numbers
