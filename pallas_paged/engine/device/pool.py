"""The pool of K/V pages of a model: its dtype, its bytes, and how large it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True)
class WindowPool:
    """Sizes of the pool of layers with a window, where other layers see all tokens.

    Attributes:
        num_pages: of each of these layers.
        num_cached: most of them that the prefix cache keeps.
        sliding_window: tokens that the layer with the largest window sees.
        kept_tokens: newest tokens of a sequence whose pages are not freed. The prefix cache takes
            the pages at the end of a prompt or an answer when the host has read it, and by then
            the next call has run.
    """

    num_pages: int
    num_cached: int
    sliding_window: int
    kept_tokens: int

    @classmethod
    def of(
        cls,
        spec: KVCacheSpec,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_scheduler_steps: int,
        enable_prefix_caching: bool,
    ) -> WindowPool | None:
        """Return what a model needs; None if all layers have a window, or none has.

        All sequences have their pages at any time, and the prefix cache as many again. So a
        sequence that has its pages in the pool of the other layers never lacks one here, and the
        scheduler counts the pages of that pool alone.

        Args:
            spec: of the model.
            page_size, max_num_seqs, max_num_batched_tokens, num_scheduler_steps,
                enable_prefix_caching: as in `EngineConfig`.
        """
        if len(spec.groups) == 1:
            return None
        window = spec.groups[1].sliding_window
        assert window is not None
        kept = window + (page_size + num_scheduler_steps if enable_prefix_caching else 0)
        # A call with chunks first frees what lies left of the kept tokens. K - 1 tokens of a
        # sequence are left, and it adds N: these are in at most (K - 2 + N) // page_size + 2 pages.
        # All N together are at most max_num_batched_tokens. Until the next such call each sequence
        # adds one token in a step, and a step frees a page of each that has one to free.
        tokens = max_num_seqs * (kept - 1) + max_num_batched_tokens
        needed = 2 * max_num_seqs + tokens // page_size
        num_cached = needed if enable_prefix_caching else 0
        return cls(
            num_pages=needed + num_cached,
            num_cached=num_cached,
            sliding_window=window,
            kept_tokens=kept,
        )


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
    if num_window_pages is not None:
        layers: dict[int, LayerKV] = {}
        for group, size in zip(spec.groups, (num_pages, num_window_pages), strict=True):
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
    num_window_pages: int | None = None,
) -> int:
    """Return how many pages fit `memory_fraction` of the free memory of every device, at least 1.

    With `num_window_pages` for the layers with a window, it is the number for the others, if that
    is more; else the number for all layers. Where a device does not report its memory, as CPUs do
    not, its part of the pool may take 1 GiB.
    """
    num_heads = max(1, spec.num_kv_heads // placements[0].num_devices)
    on_each = replace(spec, num_kv_heads=num_heads)
    rooms = [_HOST_POOL_BYTES]
    memories = [device.memory_stats() for one in placements for device in one.local_devices]
    if reported := [memory for memory in memories if memory is not None]:
        rooms = [
            int(memory_fraction * (memory["bytes_limit"] - memory["bytes_in_use"]))
            for memory in reported
        ]
    room, size = min(rooms), page_bytes(on_each, page_size=page_size, dtype=dtype)
    num_pages = max(1, room // size)
    if num_window_pages is not None and num_pages > num_window_pages:
        full, limited = (
            page_bytes(on_each.of(group), page_size=page_size, dtype=dtype)
            for group in on_each.groups
        )
        num_pages = (room - num_window_pages * limited) // full
    if placements[0].num_processes > 1:  # all create the same pool
        num_pages = int(multihost_utils.process_allgather(np.int32(num_pages)).min())
    return num_pages
