"""The arrays that hold K/V: create a pool, write tokens, copy pages.

Each layer has its own arrays: slices of one stacked [num_layers, ...] array would be copied in
every step of a compiled loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from pallas_paged.checks import (
    as_array,
    checked_array,
    checked_dtype,
    default_promotion,
    pytree,
    validate_pool_size,
    validate_positive,
)
from pallas_paged.pages.layer import POOL_DTYPES, LayerKV, checked_layer, with_leaves
from pallas_paged.pages.layout import KVLayout, checked_layout
from pallas_paged.pages.quantization import LARGEST, checked_layer_scales, quantize, token_scales
from pallas_paged.pages.scatter import set_pages, set_tokens, take_pages
from pallas_paged.pages.sharding import check_pool_sharding, head_axes
from pallas_paged.pages.table import PageCopies


@pytree
class KVPool:
    """The pages of all layers. The `PageTable` says which row owns which page.

    Attributes:
        layers: one `LayerKV` per layer, of one dtype; `create_kv_pool` makes all of one shape.
    """

    layers: tuple[LayerKV, ...]


def create_kv_pool(
    *,
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: DTypeLike,
    k_scales: Sequence[float] | None = None,
    v_scales: Sequence[float] | None = None,
    kv_layout: KVLayout = "NHD",
    sharding: NamedSharding | None = None,
) -> KVPool:
    """Return a pool of zeros; int8 and fp8 pages have scales of 0, or the scales given.

    Args:
        num_layers: layers, each with its own arrays.
        num_pages: pages per layer, as in the page table.
        num_kv_heads: K/V heads.
        page_size: tokens per page, a power of two from 1 to 256.
        head_dim: elements per head.
        v_head_dim: of multi-head latent attention: elements of the latent, the first of `head_dim`.
            One array holds K and V then, see `LayerKV`.
        dtype: float32, bfloat16, float16, int8 or float8_e4m3fn. The last two take a float32 scale
            for each token and head besides, one for K and one for V.
        k_scales: with int8 and fp8 pages, one positive number per layer, as calibrated checkpoints
            have them. They replace the scales of tokens, and `write_kv` leaves them as they are.
        v_scales: like `k_scales`; None of latents.
        kv_layout: the order of the axes of the pages, as in `LayerKV`.
        sharding: how the KV heads are sharded over a mesh, from `kv_pool_sharding` for
            the same layout. Each device creates its own heads, so the pool may be larger than any
            one of them. In a program of several processes all of them call. None means one device.

    Raises:
        ValueError: a size is not a positive integer, the page size, number of slots or dtype is
            not allowed, the scales are not two lists of num_layers positive finite numbers, or the
            sharding shards another axis than the heads or does not divide them.
    """
    validate_pool_size(num_pages, page_size)
    validate_positive(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
    num_layers, num_pages, num_kv_heads = int(num_layers), int(num_pages), int(num_kv_heads)
    page_size, head_dim = int(page_size), int(head_dim)  # NumPy's integers would overflow
    element = checked_dtype(dtype, POOL_DTYPES)
    quantized = element.name in LARGEST
    if not quantized and (k_scales is not None or v_scales is not None):
        raise ValueError(f"k_scales and v_scales must be None with pages of {element}")
    if v_head_dim is not None and v_scales is not None:
        raise ValueError(f"v_scales must be None with {v_head_dim=}: k_scales are those of V, too")
    if v_head_dim is None and (k_scales is None) != (v_scales is None):
        raise ValueError("k_scales and v_scales must be given both, or neither")
    layout = checked_layout(kv_layout)
    shape = layout.shape(H=num_kv_heads, P=num_pages, N=page_size, D=head_dim)
    scale_shape = layout.scale_shape(layout.full_shape(shape))
    one_array = layout.one_array or v_head_dim is not None
    layer_scales: list[Iterable[float | None]] = [
        [None] * num_layers if given is None else checked_layer_scales(name, given, num_layers)
        for name, given in (("k_scales", k_scales), ("v_scales", v_scales))
    ]

    def scale(given: float | None) -> jax.Array | None:
        if given is not None:
            return jnp.float32(given)
        return jnp.zeros(scale_shape, jnp.float32) if quantized else None

    def create() -> KVPool:
        return KVPool(
            layers=tuple(
                LayerKV(
                    k_pages=jnp.zeros(shape, element),
                    v_pages=None if one_array else jnp.zeros(shape, element),
                    k_scales=scale(k_scale),
                    v_scales=None if v_head_dim is not None else scale(v_scale),
                    kv_layout=layout.name,
                    v_head_dim=v_head_dim,
                )
                for k_scale, v_scale in zip(*layer_scales, strict=True)
            )
        )

    if sharding is None:
        return create()
    check_pool_sharding(sharding, layout, num_kv_heads)
    specs = pool_specs(jax.eval_shape(create), head_axes(sharding.spec, layout))
    shardings = jax.tree.map(lambda spec: NamedSharding(sharding.mesh, spec), specs)
    return jax.jit(create, out_shardings=shardings)()


def pool_specs(pool: Any, heads: Any, pages: Any = None) -> Any:
    """Return the specs of a pool or a layer that is sharded over these axes of a mesh.

    Args:
        pool: a `KVPool`, a `LayerKV` or their shapes.
        heads, pages: mesh axes that shard the KV heads and the pages, or None.
    """

    def of_layer(layer: LayerKV) -> LayerKV:
        def spec(x: Any, axes: str) -> Any:
            if x is None:
                return None
            last = max(axes.index("H"), axes.index("P")) if x.ndim else -1
            return PartitionSpec(*({"H": heads, "P": pages}.get(a) for a in axes[: last + 1]))

        layout = layer.layout
        of_pages = (spec(x, layout.given_axes) for x in (layer.k_pages, layer.v_pages))
        of_scales = (spec(x, layout.scale_axes) for x in (layer.k_scales, layer.v_scales))
        return with_leaves(layer, (*of_pages, *of_scales))

    return jax.tree.map(of_layer, pool, is_leaf=lambda x: isinstance(x, LayerKV))


@default_promotion()
def write_kv(layer: LayerKV, k: ArrayLike, v: ArrayLike | None, slots: ArrayLike) -> LayerKV:
    """Write the K/V of new tokens into the pages of a layer, in place where those are donated.

    Into int8 and fp8 pages a token of a head goes as `round(x / scale)`, ties to even, saturated at
    127 (int8) or 448 (float8_e4m3fn). Its scale, max|x| over that, is written too, one for K and
    one for V. Tokens so small that the scale is no normal float32 become zeros, with a scale of 0.
    A token with NaN or infinity in it has a scale of NaN, and so all of it is NaN. Under one scale
    for the layer, infinities saturate, and NaN stays NaN in float8_e4m3fn but becomes 0 in int8.

    Args:
        layer: pages, and scales if they are int8 or fp8.
        k: floating `[T, num_kv_heads, head_dim]`, cast or quantized to the dtype of the pages.
        v: floating, the same shape, but with the head_dim of V where the pages have one of its own;
            None with pages of latents, whose V is a part of K.
        slots: i32`[T]` from `slot_mapping`. Slots outside [0, num_pages * page_size) are dropped;
            a slot that is named twice holds anything.

    Returns:
        The layer with the new tokens.

    Raises:
        ValueError: `layer` is not a LayerKV, a shape or dtype is wrong, or quantized pages lack
            scales.
    """
    layer = checked_layer(layer)
    if layer.is_latent and v is not None:
        raise ValueError(f"v must be None with v_head_dim={layer.v_head_dim}: V is a part of k")
    given = {"k": k} if layer.is_latent else {"k": k, "v": v}
    tokens = {name: as_array(name, x) for name, x in given.items()}
    for name, x in tokens.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating, got {x.dtype}")
    num_kv_heads, head_dim, dim_of_v = layer.num_kv_heads, layer.head_dim, layer.dim_of_v
    shapes = [x.shape for x in tokens.values()]
    num_tokens = shapes[0][0] if shapes[0] else 0
    expected = [(num_tokens, num_kv_heads, dim) for dim in (head_dim, dim_of_v)]
    if shapes != expected[: len(shapes)]:
        of_v = "" if layer.is_latent or dim_of_v == head_dim else f", of v head_dim={dim_of_v},"
        raise ValueError(
            f"{' and '.join(tokens)} must be [T, {num_kv_heads=}, {head_dim=}]{of_v} like the "
            f"pages, got {' and '.join(map(str, shapes))}"
        )
    slots = checked_array("slots", slots, jnp.int32, (num_tokens,))
    layer, *new = jax.tree.map(jnp.asarray, (layer, *tokens.values()))
    write = _write_latents if layer.is_latent else _write
    return _on_each_device(write, layer, tuple(new), (slots,))


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
    src, dst = checked_copies(pool, copies)

    def copy(layer: LayerKV, src: jax.Array, dst: jax.Array) -> LayerKV:
        axis = layer.layout.page_axis

        def of(x: jax.Array) -> jax.Array:
            if not x.ndim:  # one scale of the layer
                return x
            num_pages = x.shape[axis]
            to = jnp.where((src >= 0) & (src < num_pages), dst, num_pages)
            # The barrier keeps XLA from fusing the gather into the scatter: one kernel that reads
            # and writes the pool can't work in place, and copies all of it.
            return set_pages(x, axis, to, lax.optimization_barrier(take_pages(x, axis, src)))

        return jax.tree.map(of, layer)

    layers = (jax.tree.map(jnp.asarray, checked_layer(layer)) for layer in pool.layers)
    return KVPool(layers=tuple(_on_each_device(copy, x, (), (src, dst)) for x in layers))


def checked_copies(pool: Any, copies: Any) -> tuple[jax.Array, jax.Array]:
    """Return the pages `(src, dst)` i32`[n]` of copies in a pool, checked."""
    for name, value, kind in (("pool", pool, KVPool), ("copies", copies, PageCopies)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    shape = as_array("copies.src_pages", copies.src_pages).shape
    src = checked_array("copies.src_pages", copies.src_pages, jnp.int32, shape).ravel()
    dst = checked_array("copies.dst_pages", copies.dst_pages, jnp.int32, shape).ravel()
    return src, dst


def _on_each_device(
    function: Callable[..., LayerKV],
    layer: LayerKV,
    tokens: tuple[jax.Array, ...],
    integers: tuple[jax.Array, ...],
) -> LayerKV:
    """Return `function(layer, *tokens, *integers)`, on an explicit mesh by each device for itself.

    On other meshes XLA divides the work over the KV heads.

    Args:
        tokens: `[T, num_kv_heads, head_dim]`.
    """
    sharding = jax.typeof(layer.k_pages).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return function(layer, *tokens, *integers)
    heads = head_axes(sharding.spec, layer.layout)
    specs, by_heads = pool_specs(layer, heads), PartitionSpec(None, heads)
    in_specs = (specs, *[by_heads] * len(tokens), *[PartitionSpec()] * len(integers))
    given = jax.tree.map(
        lambda x, spec: jax.reshard(x, NamedSharding(sharding.mesh, spec)),
        (layer, *tokens, *integers),
        in_specs,
    )
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=in_specs, out_specs=specs)(*given)


def _write(layer: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    """Return the layer with the tokens `[T, num_kv_heads, head_dim]`."""
    layout = layer.layout
    k, k_scales = _stored(layer, k, layer.k_scales, slots)
    v, v_scales = _stored(layer, v, layer.v_scales, slots)
    k_pages, v_pages = layer.k_pages, layer.v_pages
    if v_pages is not None:
        k_pages = set_tokens(k_pages, layout.axes, slots, k)
        v_pages = set_tokens(v_pages, layout.axes, slots, v)
    else:
        both = jnp.stack([k, v], axis=2 if layout.merged else 1)
        if layout.merged:
            both = both.reshape(both.shape[0], -1, both.shape[-1])
        k_pages = set_tokens(k_pages, layout.given_axes, slots, both)
    return replace(layer, k_pages=k_pages, v_pages=v_pages, k_scales=k_scales, v_scales=v_scales)


def _write_latents(layer: LayerKV, k: jax.Array, slots: jax.Array) -> LayerKV:
    """Return the layer with the tokens `[T, num_kv_heads, head_dim]`."""
    k, k_scales = _stored(layer, k, layer.k_scales, slots)
    k_pages = set_tokens(layer.k_pages, layer.layout.axes, slots, k)
    return replace(layer, k_pages=k_pages, k_scales=k_scales)


def _stored(
    layer: LayerKV, x: jax.Array, scales: jax.Array | None, slots: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Return tokens as pages store them, and the layer's scales with theirs."""
    dtype = layer.k_pages.dtype
    if scales is None:
        return x.astype(dtype), None
    if not scales.ndim:
        return quantize(x, scales, dtype), scales
    new = token_scales(x, dtype)  # [T, num_kv_heads]
    return quantize(x, new, dtype), set_tokens(scales, layer.layout.scale_axes, slots, new)
