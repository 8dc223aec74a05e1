"""The KV cache of a model: its sizes for each token, its pool, and how large that may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_paged.kv_pool import KVPool, create_kv_pool

KV_CACHE_DTYPES = {
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}
_HOST_POOL_BYTES = 2**30  # largest pool where the device does not report its memory, as on CPUs


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What a model stores for each token.

    Attributes:
        num_layers: layers with K and V.
        num_kv_heads: K/V heads of a layer.
        head_dim: elements of a head.
        dtype: of K and V as the model computes them.
        sliding_windows: for each layer, how many tokens a query sees, itself included; None for a
            layer without a window, or for all layers. Where every layer has a window, the engine
            frees the pages left of the largest.
        k_scales, v_scales: for each layer, the scale of a checkpoint that was calibrated for fp8,
            or None.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeLike
    sliding_windows: tuple[int | None, ...] | None = None
    k_scales: tuple[float, ...] | None = None
    v_scales: tuple[float, ...] | None = None

    @property
    def sliding_window(self) -> int | None:
        """Tokens that the layer with the largest window sees; None if a layer sees all."""
        windows = [window for window in self.sliding_windows or () if window is not None]
        return max(windows) if len(windows) == self.num_layers else None


def pool_dtype(spec: KVCacheSpec, kv_cache_dtype: str | None) -> jnp.dtype:
    """Return the dtype of the pages.

    Args:
        spec: of the model.
        kv_cache_dtype: a name of `KV_CACHE_DTYPES`; None takes the dtype of the model.

    Raises:
        ValueError: another name, or neither the dtype of the model nor int8 or fp8.
    """
    own = jnp.dtype(spec.dtype)
    if kv_cache_dtype is None:
        return own
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        names = ", ".join(KV_CACHE_DTYPES)
        raise ValueError(f"{kv_cache_dtype=} must be one of {names}, or None")
    dtype = jnp.dtype(KV_CACHE_DTYPES[kv_cache_dtype])
    if dtype != own and dtype.itemsize > 1:
        raise ValueError(f"{kv_cache_dtype=} must be int8, fp8 or the model's dtype, {own.name}")
    return dtype


def create_pool(spec: KVCacheSpec, *, num_pages: int, page_size: int, dtype: DTypeLike) -> KVPool:
    """Return a pool of zeros; an fp8 pool takes the scales of a calibrated checkpoint, if any."""
    # They were calibrated for the range of float8; in int8, tokens have scales of their own.
    calibrated = jnp.dtype(dtype) == jnp.float8_e4m3fn and spec.k_scales is not None
    return create_kv_pool(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        num_kv_heads=spec.num_kv_heads,
        page_size=page_size,
        head_dim=spec.head_dim,
        dtype=dtype,
        k_scales=spec.k_scales if calibrated else None,
        v_scales=spec.v_scales if calibrated else None,
    )


def pool_bytes(pool: KVPool) -> int:
    """Return the bytes of K, V and their scales in all layers, of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))


def page_bytes(spec: KVCacheSpec, *, page_size: int, dtype: DTypeLike) -> int:
    """Return the bytes that each page adds to the pool; sizes as in `create_pool`."""
    make = partial(create_pool, spec, page_size=page_size, dtype=dtype)
    one, two = (pool_bytes(jax.eval_shape(partial(make, num_pages=n))) for n in (1, 2))
    return two - one


def pages_that_fit(
    spec: KVCacheSpec, *, page_size: int, dtype: DTypeLike, memory_fraction: float
) -> int:
    """Return how many pages fit `memory_fraction` of the free memory of the device, at least 1.

    Where the device does not report its memory, as on CPUs, the pool may take 1 GiB.
    """
    memory = jax.devices()[0].memory_stats()
    room = _HOST_POOL_BYTES
    if memory is not None:
        room = int(memory_fraction * (memory["bytes_limit"] - memory["bytes_in_use"]))
    return max(1, room // page_bytes(spec, page_size=page_size, dtype=dtype))
