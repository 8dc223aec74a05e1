"""From the product with the projection to latents to written pages: norm, rotation, write.

For multi-head latent attention, as `rotary_write` is for K and V.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.attention.partition import Axes, ShardingRule
from pallas_paged.checks import checked_array, default_promotion
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.decoder.rotary_write import (
    Rotation,
    WriteImplementation,
    checked_eps,
    checked_floats,
    checked_rotation,
    chosen_write,
    rotate,
    write_kernel,
)
from pallas_paged.pages.layer import LayerKV, checked_layer
from pallas_paged.pages.layout import AXIS_NAMES, LAYOUTS, KVLayout
from pallas_paged.pages.pool import write_kv

__all__ = ["rotate_and_write_latents"]

_WRITTEN = "k_pages", "k_scales"
_AXES: dict[str, Axes] = {
    "latents": ("num_tokens", "head_dim"),
    "slots": ("num_tokens",),
    "cos": ("num_tokens", "num_angles"),
    "sin": ("num_tokens", "num_angles"),
    "norm": ("v_head_dim",),
}


@default_promotion()
def rotate_and_write_latents(
    layer: LayerKV,
    latents: ArrayLike,
    slots: ArrayLike,
    *,
    rotation: Rotation | None = None,
    norm: ArrayLike | None = None,
    eps: float = 1e-6,
    implementation: WriteImplementation | None = None,
    interpret: bool = False,
) -> LayerKV:
    """Norm new latents, rotate their keys, and write both to the pages, for `mla_attention`.

    Into int8 and fp8 pages they go as `write_kv` quantizes: one scale for a latent and its key.

    Args:
        layer: pages of latents, of one head. They are updated in place where they are donated.
        latents: floating `[T, head_dim]`, of each token its latent of `v_head_dim` elements and its
            rotary key, such as the product with `kv_a_proj_with_mqa` of DeepSeek.
        slots: i32`[T]` from `slot_mapping`. Slots outside [0, num_pages * page_size) are dropped;
            a slot that is named twice gets undefined values.
        rotation: cosines and sines of the tokens' angles, f32`[T, R / 2]` or f32`[T, 1, R / 2]`,
            with R up to the elements of the key. They rotate its pairs (i, i + R / 2); elements
            from R on stay. None: the keys are rotated already.
        norm: floating `[v_head_dim]`, weight of an RMS norm of the latents; None: no norm.
        eps: epsilon of the norm.
        implementation: `"triton"`, a kernel on a GPU; `"xla"`; or None for the best. Static.
        interpret: run the kernel of `"triton"` interpreted, on any device. Static.

    Returns:
        The layer with the new tokens.

    Raises:
        ValueError: the layer is not of latents, a shape or dtype is wrong, or quantized pages lack
            scales.
        NotImplementedError: the implementation can't do this call; the message says why.
    """
    layer, x = checked_layer(layer), checked_floats("latents", latents)
    head_dim, v_head_dim, num_kv_heads = layer.head_dim, layer.v_head_dim, layer.num_kv_heads
    if v_head_dim is None or num_kv_heads != 1:
        raise ValueError(
            f"layer with {v_head_dim=} and {num_kv_heads=} must be of latents, with v_head_dim and "
            "one head: LayerKV(k_pages, v_head_dim=...)"
        )
    if x.ndim != 2 or x.shape[1] != head_dim:
        raise ValueError(f"latents must be [T, {head_dim=}] like the pages, got {x.shape}")
    num_tokens, eps = x.shape[0], checked_eps(eps)
    slots = checked_array("slots", slots, jnp.int32, (num_tokens,))
    arrays = {"latents": x, "slots": slots, "k_pages": layer.k_pages}
    if layer.k_scales is not None:
        arrays["k_scales"] = layer.k_scales
    arrays |= checked_rotation(rotation, num_tokens, head_dim - v_head_dim)
    if norm is not None:
        arrays["norm"] = checked_floats("norm", norm)
        if arrays["norm"].shape != (v_head_dim,):
            raise ValueError(f"norm must be [{v_head_dim=}], got {arrays['norm'].shape}")
    chosen = chosen_write(layer, implementation, interpret)
    local = _LocalWrite(
        names=tuple(arrays),
        kv_layout=layer.kv_layout,
        v_head_dim=v_head_dim,
        eps=eps,
        interpret=interpret,
    )
    run = local.steps if chosen == "xla" or not num_tokens else write_kernel(local)
    written = run(*arrays.values())  # a grid of 0 is an error
    return dataclasses.replace(layer, **dict(zip(_WRITTEN, written, strict=False)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LocalWrite:
    """The kernel on the arrays of one device.

    Attributes:
        names: of the arrays that it takes, in order.
        kv_layout, v_head_dim: of the layer.
        eps, interpret: as in `rotate_and_write_latents`.
    """

    names: tuple[str, ...]
    kv_layout: KVLayout
    v_head_dim: int
    eps: float
    interpret: bool
    one_device = False

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Return the pages, and their scales if each token has its own."""
        from pallas_paged.decoder.kernels.latent_write import rotate_and_write

        with default_promotion(), jax.enable_x64(False):
            given, how = self._call(arrays)
            return rotate_and_write(*given, **how, eps=self.eps, interpret=self.interpret)

    def steps(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Return the results of the kernel, by separate steps."""
        (layer, latents, slots), how = self._call(arrays)
        latent, key = latents[:, : self.v_head_dim], latents[:, self.v_head_dim :]
        for norm in how["norm"]:  # one or none
            latent = rms_norm(latent, norm, self.eps)
        if how["rotation"]:
            key = rotate(key, *how["rotation"])
        new = jnp.concatenate([latent, key], axis=1)[:, None]
        layer = write_kv(layer, new, None, slots)
        written = (getattr(layer, name) for name in _WRITTEN)
        return tuple(x for x in written if x is not None and x.ndim)

    def rule(self, arrays: tuple[jax.Array, ...]) -> ShardingRule:
        layout, axes = LAYOUTS[self.kv_layout], dict(_AXES)
        for name, letters in zip(_WRITTEN, (layout.axes, layout.scale_axes), strict=True):
            axes[name] = tuple(AXIS_NAMES[letter] for letter in letters)
        given = dict(zip(self.names, arrays, strict=True))
        if "k_scales" in given and not given["k_scales"].ndim:
            axes["k_scales"] = ()
        return ShardingRule(
            names=self.names,
            inputs=tuple(axes[name] for name in self.names),
            outputs=tuple(axes[name] for name in _WRITTEN if name in given and axes[name]),
            shardable_axes=("num_kv_heads",),
        )

    def _call(self, arrays: tuple[jax.Array, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the layer, the latents and their slots; and the rotation and the norm, or ()."""
        given = dict(zip(self.names, arrays, strict=True))
        layer = LayerKV(
            given["k_pages"],
            k_scales=given.get("k_scales"),
            kv_layout=self.kv_layout,
            v_head_dim=self.v_head_dim,
        )
        names = dict(rotation=("cos", "sin"), norm=("norm",))
        how = {key: tuple(given[x] for x in each if x in given) for key, each in names.items()}
        return (layer, given["latents"], given["slots"]), how
