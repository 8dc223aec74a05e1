"""Int8 and fp8 K/V: which dtypes, what a scale is, how tokens are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.checks import as_array, checked_array, static_number

# Largest value of each dtype; the largest |x| of a token is mapped to it.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def is_quantized(pages: Any) -> bool:
    """Return whether pages are int8 or float8_e4m3fn."""
    return jnp.dtype(pages.dtype).name in LARGEST


def check_scales(
    k_pages: Any, k_scales: ArrayLike | None, v_scales: ArrayLike | None, shape: tuple[int, ...]
) -> None:
    """Check that scales belong to pages.

    None belong to pages that are not quantized. Else both are f32 of `shape`, or both f32`[]`.

    Args:
        shape: of scales of tokens, as `PageLayout.scale_shape` gives it.

    Raises:
        ValueError: quantized pages without scales, others with them, or a wrong shape or dtype.
    """
    dtype = jnp.dtype(k_pages.dtype).name
    if not is_quantized(k_pages):
        if k_scales is None and v_scales is None:
            return
        raise ValueError(f"k_scales and v_scales must be None with pages of {dtype}")
    if k_scales is None or v_scales is None:
        missing = [n for n, x in (("k_scales", k_scales), ("v_scales", v_scales)) if x is None]
        raise ValueError(f"pages of {dtype} need {' and '.join(missing)}")
    k, v = as_array("k_scales", k_scales), as_array("v_scales", v_scales)
    if k.ndim == v.ndim == 0:
        shape = ()
    checked_array("k_scales", k, jnp.float32, shape)
    checked_array("v_scales", v, jnp.float32, shape)


def checked_layer_scales(name: str, given: Any, num_layers: int) -> list[float]:
    """Return scales of layers, a positive number for each, or raise ValueError."""
    least = float(jnp.finfo(jnp.float32).tiny)  # a subnormal may be flushed to 0
    rule = f"{num_layers=} numbers, each at least {least:g}"
    scalar = not isinstance(given, Iterable) or not getattr(given, "ndim", 1)
    if scalar or isinstance(given, str | bytes):
        raise ValueError(f"{name}={given!r} must be {rule}")
    numbers = [static_number(f"{name}[{layer}]", x) for layer, x in enumerate(given)]
    if len(numbers) != num_layers or not all(x >= least for x in numbers):
        raise ValueError(f"{name}={numbers} must be {rule}")
    return numbers


def token_scales(tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return a scale for each token `[..., head_dim]`: f32`[...]`, largest |x| / `LARGEST`.

    Tokens whose scale would be less than the smallest normal f32, zeros among them, have 0. NaN or
    an infinity makes the scale NaN, so that it shows in the result: an int8 has no NaN.
    """
    largest = jnp.abs(tokens.astype(jnp.float32)).max(axis=-1)
    return scales_of(largest, dtype)


def scales_of(largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the scales f32`[...]` of tokens whose largest |x| are f32`[...]`."""
    scales = largest / LARGEST[dtype.name]
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0.0, scales)
    return jnp.where(jnp.isfinite(largest), scales, jnp.nan)


def quantize(
    tokens: jax.Array,
    scales: jax.Array,
    dtype: jnp.dtype,
    round_half_to_even: Callable[[jax.Array], jax.Array] = jnp.round,
) -> jax.Array:
    """Return `tokens / scales`, rounded to nearest, ties to even, saturated at `LARGEST`.

    Args:
        tokens: floating `[..., head_dim]`.
        scales: f32`[...]` or f32`[]`; where 0 or NaN, the result is 0.
        dtype: int8, where NaN becomes 0, or float8_e4m3fn, where NaN stays NaN.
        round_half_to_even: of f32; kernels have their own.
    """
    scales = scales[..., None]
    scaled = tokens.astype(jnp.float32) / jnp.where(scales > 0, scales, 1.0)
    scaled = jnp.where(scales > 0, scaled, 0.0)
    is_nan = jnp.isnan(scaled)  # Triton's bounds of a NaN are numbers
    scaled = jnp.clip(scaled, -LARGEST[dtype.name], LARGEST[dtype.name])
    if dtype == jnp.int8:
        scaled = round_half_to_even(scaled)
    return jnp.where(is_nan, 0.0 if dtype == jnp.int8 else jnp.nan, scaled).astype(dtype)
