"""From the product with the projection to latents to written pages: norm, rotation, write.

For multi-head latent attention, as `rotary_write` is for K and V.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.checks import checked_array, default_promotion
from pallas_paged.decoder.checks import Rotation, checked_eps, checked_floats, checked_rotation
from pallas_paged.decoder.rotary_write import WriteImplementation, chosen_write, write
from pallas_paged.kernels.write_arrays import WriteArrays
from pallas_paged.pages.layer import LayerKV, checked_layer

__all__ = ["rotate_and_write_latents"]


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
    layer = jax.tree.map(jnp.asarray, layer)
    angles: Any = checked_rotation(rotation, num_tokens, head_dim - v_head_dim)
    arrays = WriteArrays(
        latents=x,
        slots=slots,
        k_pages=layer.k_pages,
        k_scales=layer.k_scales,
        norm=None if norm is None else checked_floats("norm", norm),
        kv_layout=layer.kv_layout,
        v_head_dim=v_head_dim,
        **angles,
    )
    if norm is not None and arrays.norm.shape != (v_head_dim,):
        raise ValueError(f"norm must be [{v_head_dim=}], got {arrays.norm.shape}")
    chosen = chosen_write(layer, implementation, interpret)
    by_steps = chosen == "xla" or not num_tokens  # a grid of 0 is an error
    return write(arrays, layer, eps=eps, interpret=interpret, by_steps=by_steps)[1]
