"""Shardings of pools and page tables on a mesh.

Pages are sharded over KV heads. Page tables, slots and batches, which are small, are replicated.
Attention, `write_kv` and `copy_pages` then run on each device's heads, under plain `jit`.
"""

from __future__ import annotations

import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_paged.checks import validate_positive
from pallas_paged.pages.layout import KVLayout, PageLayout, checked_layout

__all__ = ["TENSOR_AXIS", "kv_head_repeats", "kv_pool_sharding", "page_table_sharding"]

TENSOR_AXIS = "tensor"
"""The mesh axis that shards heads."""


def kv_pool_sharding(
    mesh: Mesh | AbstractMesh, axis: str = TENSOR_AXIS, *, kv_layout: KVLayout = "NHD"
) -> NamedSharding:
    """Return the sharding of K/V pages over KV heads, along the mesh axis `axis`.

    For `create_kv_pool`, and for any array with KV heads on the same axis, such as scales of tokens
    in all layouts but `"2NHD"`. Pages are replicated over other axes of the mesh.

    Raises:
        ValueError: the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"{axis=} must be one of the mesh's axes {mesh.axis_names}")
    head_axis = checked_layout(kv_layout).head_axis
    return NamedSharding(mesh, PartitionSpec(*[None] * head_axis, axis))


def page_table_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a `PageTable`, of slots and of batches: replicated."""
    return NamedSharding(mesh, PartitionSpec())


def kv_head_repeats(*, num_q_heads: int, num_kv_heads: int, num_devices: int) -> int:
    """Return how often a pool holds each KV head, so that every device has as many heads.

    1 where the devices divide the KV heads. Where there are more devices than KV heads, a pool of
    `num_kv_heads * repeats` heads has one on each device; `jnp.repeat(x, repeats, axis=1)` makes
    the K and V `[T, num_kv_heads * repeats, head_dim]` that are written to it.

    Raises:
        ValueError: a number is not a positive integer, the devices do not divide the query heads,
            or neither divide the KV heads nor are a multiple of them.
    """
    validate_positive(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, num_devices=num_devices)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
    if num_q_heads % num_devices:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_devices=}")
    if num_kv_heads % num_devices and num_devices % num_kv_heads:
        raise ValueError(f"{num_devices=} must divide {num_kv_heads=} or be a multiple of it")
    return max(1, num_devices // num_kv_heads)


def head_axes(spec: PartitionSpec, layout: PageLayout) -> Any:
    """Return the mesh axes that shard KV heads in a spec of a layout's pages."""
    return spec[layout.head_axis] if len(spec) > layout.head_axis else None


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def check_pool_sharding(sharding: Any, layout: PageLayout, num_kv_heads: int) -> None:
    """Raise ValueError unless a sharding divides the KV heads of pages of a layout evenly."""
    if not isinstance(sharding, NamedSharding) or any(
        names and axis != layout.head_axis for axis, names in enumerate(sharding.spec)
    ):
        raise ValueError(f"{sharding=} must be a NamedSharding of the KV heads alone")
    axes = head_axes(sharding.spec, layout)
    num_parts = math.prod(sharding.mesh.shape[name] for name in mesh_axes(axes))
    if num_kv_heads % num_parts:
        raise ValueError(
            f"{num_kv_heads=} must be a multiple of the {num_parts} devices of mesh axis {axes!r}; "
            "a pool can hold every KV head several times, see "
            "pallas_paged.pages.sharding.kv_head_repeats"
        )
