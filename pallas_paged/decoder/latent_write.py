"""From the product with the projection to latents to written pages: norm, rotation, write.

For multi-head latent attention, as `rotary_write` is for K and V.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.checks import checked_array, default_promotion, static_number
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.decoder.rotary_write import Rotation, checked_floats, checked_rotation, rotate
from pallas_paged.pages.layer import LayerKV, checked_layer
from pallas_paged.pages.pool import write_kv

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

    Returns:
        The layer with the new tokens.

    Raises:
        ValueError: the layer is not of latents, a shape or dtype is wrong, or quantized pages lack
            scales.
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
    num_tokens, eps = x.shape[0], static_number("eps", eps)
    if eps < 0:
        raise ValueError(f"{eps=} must be at least 0")
    slots = checked_array("slots", slots, jnp.int32, (num_tokens,))
    latent, key = x[:, :v_head_dim], x[:, v_head_dim:]
    if norm is not None:
        weight = checked_floats("norm", norm)
        if weight.shape != (v_head_dim,):
            raise ValueError(f"norm must be [{v_head_dim=}], got {weight.shape}")
        latent = rms_norm(latent, weight, eps)
    angles = checked_rotation(rotation, num_tokens, head_dim - v_head_dim)
    if angles:
        key = rotate(key, **angles)
    return write_kv(layer, jnp.concatenate([latent, key], axis=1)[:, None], None, slots)
