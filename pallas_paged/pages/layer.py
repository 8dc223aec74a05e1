"""The pages of one layer, as attention, writes and copies take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pallas_paged.checks import as_array, static_integer, validate_page_size
from pallas_paged.pages.layout import KVLayout, PageLayout, checked_layout
from pallas_paged.pages.quantization import LARGEST, check_scales, is_quantized

POOL_DTYPES = ("float32", "bfloat16", "float16", *LARGEST)


@dataclass(frozen=True, eq=False)
class LayerKV:
    """The pages of one layer: a pytree of arrays, which wraps and checks raw ones.

    Attributes:
        k_pages: float32, bfloat16, float16, int8 or float8_e4m3fn pages of a shape by `kv_layout`.
            A page has 1, 2, 4 ... or 256 tokens.
        v_pages: same dtype and shape, but for a head_dim that may be smaller than that of K; None
            where `k_pages` hold K and V, and of latents.
        k_scales: of int8 and float8_e4m3fn pages, the dequantization scales (value = element *
            scale), as `write_kv` writes them: one for each token and head, f32 in the order of axes
            of `kv_layout` without head_dim and without K and V, or one for the layer, f32`[]`. None
            with other pages. The Triton kernels with bf16 or f16 queries multiply weights by V's
            scales in f16: scales from 2**-64 to 2**50 are safe, so V from 1e-17 to 1e17.
        v_scales: like `k_scales`, also where K and V share an array; None of latents.
        kv_layout: the order of the axes of the pages. N are tokens of a page, H KV heads:

            - `"NHD"`: `[num_pages, page_size, num_kv_heads, head_dim]`, as vLLM, FlashInfer and
              EasyDeL have it.
            - `"HND"`: `[num_pages, num_kv_heads, page_size, head_dim]`, FlashInfer, TensorRT-LLM.
            - `"HPND"`: `[num_kv_heads, num_pages, page_size, head_dim]`, JAX's deprecated op.
            - `"2NHD"`: one array of K and V, `[num_pages, 2, page_size, num_kv_heads, head_dim]`,
              vLLM, FlashInfer.
            - `"NH2D"`: one array, `[num_pages, page_size, 2 * num_kv_heads, head_dim]`, of heads
              K0 V0 K1 V1 and so on: ragged paged attention "v3", Levanter.

            Each is read in place. Static.
        v_head_dim: None, or of multi-head latent attention, for `mla_attention`: pages of latents,
            whose V are the first `v_head_dim` elements of K. They have no `v_pages` and no
            `v_scales`, and a layout without K and V in one array. Static.

    Raises:
        ValueError: the arrays do not fit the layout or each other. A pytree that is rebuilt from
            leaves is checked where it is used.
    """

    k_pages: jax.Array
    v_pages: jax.Array | None = None
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None
    kv_layout: KVLayout = "NHD"
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in _LEAVES:  # lists become arrays
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_array(name, given))
        checked_layer(self)
        if self.v_head_dim is not None:
            object.__setattr__(self, "v_head_dim", int(self.v_head_dim))

    @property
    def layout(self) -> PageLayout:
        return checked_layout(self.kv_layout)

    @property
    def pages(self) -> tuple[Any, ...]:
        """The arrays of pages: K and V, or the one that holds both."""
        return (self.k_pages,) if self.one_array else (self.k_pages, self.v_pages)

    @property
    def one_array(self) -> bool:
        """Whether one array holds K and V, and `v_pages` is None."""
        return self.is_latent or self.layout.one_array

    @property
    def is_latent(self) -> bool:
        """Whether V are the first elements of K."""
        return self.v_head_dim is not None

    @property
    def num_kv_heads(self) -> int:
        return self._size("H")

    @property
    def num_pages(self) -> int:
        return self._size("P")

    @property
    def page_size(self) -> int:
        return self._size("N")

    @property
    def head_dim(self) -> int:
        return self._size("D")

    @property
    def dim_of_v(self) -> int:
        """Elements of V of a head, where K have `head_dim`."""
        if self.v_pages is None:
            return self.v_head_dim or self.head_dim
        return self.v_pages.shape[-1]

    def _size(self, letter: str) -> int:
        return self.layout.size(self.layout.full_shape(self.k_pages.shape), letter)


_LEAVES = ("k_pages", "v_pages", "k_scales", "v_scales")
_STATIC = ("kv_layout", "v_head_dim")


def _static_of(layer: LayerKV) -> tuple[Any, ...]:
    return tuple(getattr(layer, name) for name in _STATIC)


def _rebuild(static: tuple[Any, ...], leaves: Any) -> LayerKV:
    """Return a layer of any leaves, such as shapes or shardings."""
    layer = object.__new__(LayerKV)
    vars(layer).update(zip((*_LEAVES, *_STATIC), (*leaves, *static), strict=True))
    return layer


def with_leaves(layer: LayerKV, leaves: Any) -> LayerKV:
    """Return a layer like `layer` of any leaves, which are not checked."""
    return _rebuild(_static_of(layer), leaves)


jax.tree_util.register_pytree_with_keys(
    LayerKV,
    lambda x: ([(jax.tree_util.GetAttrKey(n), getattr(x, n)) for n in _LEAVES], _static_of(x)),
    _rebuild,
    lambda x: ([getattr(x, n) for n in _LEAVES], _static_of(x)),
)


def checked_layer(layer: Any) -> LayerKV:
    """Return a layer if its arrays fit its layout and each other.

    Raises:
        ValueError: they don't, or it is no `LayerKV`.
    """
    if not isinstance(layer, LayerKV):
        raise ValueError(
            f"layer must be a LayerKV, got {type(layer).__name__}: LayerKV(k_pages, v_pages) wraps "
            "raw arrays"
        )
    layout, v_pages = layer.layout, layer.v_pages
    if layer.one_array and v_pages is not None:
        given = f"kv_layout={layout.name!r}"
        if layer.is_latent:
            given = f"v_head_dim={layer.v_head_dim}"
        raise ValueError(f"v_pages must be None with {given}, where k_pages hold K and V")
    k_pages = as_array("k_pages", layer.k_pages)
    v_pages = k_pages if layer.one_array else as_array("v_pages", v_pages)
    shape = layout.full_shape(k_pages.shape)
    if layer.is_latent:
        _check_latents(layer, layout.size(shape, "D"))
    (*_, head_dim), (*_, dim_of_v) = k_pages.shape, v_pages.shape or (0,)
    if k_pages.shape[:-1] != v_pages.shape[:-1] or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"k_pages {k_pages.dtype}{list(k_pages.shape)} and v_pages "
            f"{v_pages.dtype}{list(v_pages.shape)} must have one dtype, and one shape but for the "
            "head_dim"
        )
    if not 0 < dim_of_v <= head_dim:
        raise ValueError(f"head_dim={dim_of_v} of v_pages must be from 1 to {head_dim=} of k_pages")
    if k_pages.dtype.name not in POOL_DTYPES:
        raise ValueError(
            f"k_pages.dtype={k_pages.dtype.name} must be one of {', '.join(POOL_DTYPES)}"
        )
    page_size = layout.size(shape, "N")
    try:
        validate_page_size(page_size)
    except ValueError as e:
        raise ValueError(
            f"{e}: k_pages.shape={k_pages.shape} is {layout.shape_rule} with "
            f"kv_layout={layout.name!r}"
        ) from None
    v_scales = layer.k_scales if layer.is_latent else layer.v_scales
    check_scales(k_pages, layer.k_scales, v_scales, layout.scale_shape(shape))
    return layer


def _check_latents(layer: LayerKV, head_dim: int) -> None:
    v_head_dim, layout = static_integer("v_head_dim", layer.v_head_dim), layer.layout
    if layout.one_array:
        raise ValueError(f"kv_layout={layout.name!r} has V of its own, so v_head_dim must be None")
    if v_head_dim >= head_dim:
        raise ValueError(
            f"{v_head_dim=} must be less than {head_dim=} of the pages: V are the first elements "
            "of K, and the others take part in logits alone"
        )
    if layer.v_scales is not None:
        raise ValueError(f"v_scales must be None with {v_head_dim=}: k_scales are those of V, too")
    if layer.k_scales is None and is_quantized(layer.k_pages):
        raise ValueError(f"pages of {layer.k_pages.dtype} need k_scales")
