"""The pool of K/V pages of a model: its dtype, its bytes, and how large it may be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from pallas_paged.engine.device.placement import Placement
from pallas_paged.engine.model import KVCacheSpec
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.pool import KVPool, create_kv_pool
from pallas_paged.pages.sharding import page_table_sharding

KV_CACHE_DTYPES = {
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}
_HOST_POOL_BYTES = 2**30  # largest pool where the device does not report its memory, as on CPUs


def pool_dtype(spec: KVCacheSpec, kv_cache_dtype: str | None) -> jnp.dtype:
    """Return the dtype of the pages.

    Args:
        spec: of the model.
        kv_cache_dtype: a name of `KV_CACHE_DTYPES`; None takes the dtype of the model.

    Raises:
        ValueError: it is neither the dtype of the model nor int8 or fp8.
    """
    own = jnp.dtype(spec.dtype)
    if kv_cache_dtype is None:
        return own
    dtype = jnp.dtype(KV_CACHE_DTYPES[kv_cache_dtype])
    if dtype != own and dtype.itemsize > 1:
        raise ValueError(f"{kv_cache_dtype=} must be int8, fp8 or the model's dtype, {own.name}")
    return dtype


def create_pool(
    spec: KVCacheSpec,
    *,
    num_pages: int,
    num_window_pages: int | None = None,
    page_size: int,
    dtype: DTypeLike,
    sharding: NamedSharding | None = None,
) -> KVPool:
    """Return a pool of zeros; an fp8 pool takes the scales of a calibrated checkpoint, if any.

    Args:
        spec, num_pages, page_size, dtype: sizes, as in `create_kv_pool`.
        num_window_pages: of each layer with a window, of `WindowPool`; None: as of the others.
        sharding: of the KV heads over a mesh, or None. Latents, which all heads share, are
            replicated there.
    """
    if len(spec.groups) > 1:
        layers: dict[int, LayerKV] = {}
        sizes = num_pages, num_pages if num_window_pages is None else num_window_pages
        for group, size in zip(spec.groups, sizes, strict=True):
            pool = create_pool(
                spec.of(group), num_pages=size, page_size=page_size, dtype=dtype, sharding=sharding
            )
            layers |= zip(group.layers, pool.layers, strict=True)
        return KVPool(layers=tuple(layers[index] for index in range(spec.num_layers)))
    if sharding is not None and spec.v_head_dim is not None:
        sharding = page_table_sharding(sharding.mesh)
    # They were calibrated for the range of float8; in int8, tokens have scales of their own.
    calibrated = jnp.dtype(dtype) == jnp.float8_e4m3fn and spec.k_scales is not None
    return create_kv_pool(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        num_kv_heads=spec.num_kv_heads,
        page_size=page_size,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        dtype=dtype,
        k_scales=spec.k_scales if calibrated else None,
        v_scales=spec.v_scales if calibrated else None,
        sharding=sharding,
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
    spec: KVCacheSpec,
    *,
    page_size: int,
    dtype: DTypeLike,
    memory_fraction: float,
    placements: Sequence[Placement],
    draft_bytes: int = 0,
) -> int:
    """Return how many pages fit `memory_fraction` of the free memory of every device, at least 1.

    `draft_bytes` are those of a draft model for each page, on each device.
    Where a device does not report its memory, as CPUs do not, its part of the pool may take 1 GiB.
    """
    on_each = spec.on_each(placements[0].num_devices)
    rooms = [_HOST_POOL_BYTES]
    memories = [device.memory_stats() for one in placements for device in one.local_devices]
    if reported := [memory for memory in memories if memory is not None]:
        rooms = [
            int(memory_fraction * (memory["bytes_limit"] - memory["bytes_in_use"]))
            for memory in reported
        ]
    of_page = page_bytes(on_each, page_size=page_size, dtype=dtype) + draft_bytes
    num_pages = max(1, min(rooms) // of_page)
    if placements[0].num_processes > 1:  # all create the same pool
        num_pages = int(multihost_utils.process_allgather(np.int32(num_pages)).min())
    return num_pages
