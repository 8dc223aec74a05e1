"""Pages over several devices: create a pool, list each device's pages, write tokens, copy pages.

`context_parallel` says which page lies where. Its users take these functions from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from pallas_paged.attention.arguments import check_int32
from pallas_paged.checks import (
    as_array,
    checked_array,
    default_promotion,
    pytree,
    validate_page_size,
    validate_positive,
)
from pallas_paged.pages import pool as kv_pool
from pallas_paged.pages.layer import LayerKV, checked_layer
from pallas_paged.pages.layout import KVLayout
from pallas_paged.pages.pool import KVPool, checked_copies
from pallas_paged.pages.scatter import set_pages, take_pages
from pallas_paged.pages.sharding import TENSOR_AXIS
from pallas_paged.pages.table import PageCopies

CONTEXT_AXIS = "context"
"""The mesh axis that shards pages."""


@pytree
class LocalPages:
    """The pages of rows that each device holds, from `local_pages`; one value for all layers.

    Attributes:
        block_tables: i32`[n, B, pages_per_seq]`, local pages of each row in the order of the row's
            blocks; entries past them are 0. Device d of "context" holds `block_tables[d]`.
        seq_lens: i32`[n, B]`, tokens in them.
    """

    block_tables: jax.Array
    seq_lens: jax.Array


def create_kv_pool(
    *,
    mesh: Mesh,
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    k_scales: Any = None,
    v_scales: Any = None,
    kv_layout: KVLayout = "NHD",
) -> KVPool:
    """Return a pool of zeros whose pages each device creates for itself.

    Args:
        mesh: devices, with an axis "context".
        num_pages: pages per layer over all devices, as in the page table; a multiple of the devices
            of "context".
        num_layers, num_kv_heads, page_size, head_dim, dtype, k_scales, v_scales, kv_layout: as in
            `pallas_paged.create_kv_pool`; the devices of "tensor" must divide the KV heads.

    Raises:
        ValueError: a size does not divide, or breaks a rule of `pallas_paged.create_kv_pool`.
    """
    validate_positive(num_pages=num_pages, num_kv_heads=num_kv_heads)
    for axis, name, size in (
        (CONTEXT_AXIS, "num_pages", num_pages),
        (TENSOR_AXIS, "num_kv_heads", num_kv_heads),
    ):
        parts = _checked_mesh(mesh).shape.get(axis, 1)
        if size % parts:
            raise ValueError(f"{name}={size} must be a multiple of {parts}, mesh axis {axis!r}")
    create = functools.partial(
        kv_pool.create_kv_pool,
        num_layers=num_layers,
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
        k_scales=k_scales,
        v_scales=v_scales,
        kv_layout=kv_layout,
    )
    specs = pool_specs(mesh, jax.eval_shape(create))
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return jax.jit(create, out_shardings=shardings)()


@default_promotion()
def local_pages(
    block_tables: ArrayLike, seq_lens: ArrayLike, *, page_size: int, mesh: Mesh | None = None
) -> LocalPages:
    """Return the pages of each row that each device holds, for attention to all of its tokens.

    Compute it once in a step; all layers take the same.

    Args:
        block_tables: i32`[B, pages_per_seq]`, as in `pallas_paged.paged_attention`.
        seq_lens: i32`[B]`, tokens to attend to. In front of a call of `ragged_paged_attention` they
            are those before the row's queries.
        page_size: tokens of a page.
        mesh: the pool's.

    Raises:
        ValueError: a shape or dtype is wrong, or the mesh has no axis "context".
    """
    validate_positive(page_size=page_size)
    validate_page_size(page_size)
    tables, lens = as_array("block_tables", block_tables), as_array("seq_lens", seq_lens)
    if tables.ndim != 2 or lens.shape != tables.shape[:1]:
        raise ValueError(
            f"block_tables.shape={tables.shape} must be [B, pages_per_seq] and "
            f"seq_lens.shape={lens.shape} [B]"
        )
    check_int32(block_tables=tables, seq_lens=lens)

    def select(tables: jax.Array, lens: jax.Array) -> LocalPages:
        device, num_devices = lax.axis_index(CONTEXT_AXIS), lax.axis_size(CONTEXT_AXIS)
        num_seqs, width = tables.shape
        first_token = jnp.arange(width, dtype=jnp.int32) * page_size
        num_tokens = jnp.clip(lens[:, None] - first_token, 0, page_size)  # of each block
        num_tokens = jnp.where(tables % num_devices == device, num_tokens, 0)
        is_here = num_tokens > 0
        # The order of keys does not matter, but the partial page must stay the last one.
        place = jnp.cumsum(is_here, axis=1, dtype=jnp.int32) - 1
        rows = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
        pages = jnp.zeros_like(tables)
        pages = pages.at[rows, jnp.where(is_here, place, width)].set(
            tables // num_devices, mode="drop"
        )
        seq_lens = num_tokens.sum(axis=1, dtype=jnp.int32)
        return LocalPages(block_tables=pages[None], seq_lens=seq_lens[None])

    select_on_devices = on_devices(select, mesh, (P(), P()), P(CONTEXT_AXIS))
    return select_on_devices(jnp.asarray(tables), jnp.asarray(lens))


@default_promotion()
def write_kv(
    layer: LayerKV, k: ArrayLike, v: ArrayLike, slots: ArrayLike, *, mesh: Mesh | None = None
) -> LayerKV:
    """Write the K/V of new tokens; each device writes those of its own pages.

    Args:
        layer, k, v, slots: as in `pallas_paged.write_kv`.
        mesh: the pool's.

    Raises:
        ValueError: as `pallas_paged.write_kv`, or the mesh has no axis "context".
    """
    layer = checked_layer(layer)
    slots = checked_array("slots", slots, jnp.int32, as_array("slots", slots).shape)

    def write(layer: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
        page_size = layer.page_size
        pages = _to_local(slots // page_size, layer.num_pages)
        return kv_pool.write_kv(layer, k, v, pages * page_size + slots % page_size)

    specs, tokens = pool_specs(mesh, layer), mesh_spec(mesh, None, TENSOR_AXIS)
    return on_devices(write, mesh, (specs, tokens, tokens, P()), specs)(
        layer, as_array("k", k), as_array("v", v), slots
    )


@default_promotion()
def copy_pages(pool: KVPool, copies: PageCopies, *, mesh: Mesh | None = None) -> KVPool:
    """Copy pages within every layer, also from one device to another.

    The copied pages of all layers travel to all devices of "context", by one all-reduce.

    Args:
        pool, copies: as in `pallas_paged.copy_pages`.
        mesh: the pool's.

    Raises:
        ValueError: as `pallas_paged.copy_pages`, or the mesh has no axis "context".
    """
    src, dst = checked_copies(pool, copies)

    def copy(pool: KVPool, src: jax.Array, dst: jax.Array) -> KVPool:
        num_local = pool.layers[0].num_pages
        page_axis = pool.layers[0].layout.page_axis
        num_pages = num_local * lax.axis_size(CONTEXT_AXIS)
        dst = jnp.where((src >= 0) & (src < num_pages), dst, num_pages)
        local_src, local_dst = _to_local(src, num_local), _to_local(dst, num_local)

        def read(pages: jax.Array) -> jax.Array:  # as bytes; zeros where another device has them
            if not pages.ndim:  # one scale of the layer
                return jnp.zeros(0, jnp.uint8)
            copied = take_pages(pages, page_axis, local_src, mode="fill")
            return lax.bitcast_convert_type(copied, jnp.uint8)

        def write(pages: jax.Array, copied: jax.Array) -> jax.Array:
            if not pages.ndim:
                return pages
            copied = lax.bitcast_convert_type(copied, pages.dtype)
            return set_pages(pages, page_axis, local_dst, copied)

        flat, unravel = ravel_pytree(jax.tree.map(read, pool))
        # One device has each page and the others zeros, so the sum of the bytes is exact.
        return jax.tree.map(write, pool, unravel(lax.psum(flat, CONTEXT_AXIS)))

    specs = pool_specs(mesh, pool)
    return on_devices(copy, mesh, (specs, P(), P()), specs)(pool, src, dst)


def _to_local(pages: jax.Array, num_local: int) -> jax.Array:
    """Return the local pages of global ones; `num_local` where another device has the page."""
    num_devices = lax.axis_size(CONTEXT_AXIS)
    is_here = pages % num_devices == lax.axis_index(CONTEXT_AXIS)
    return jnp.where(is_here, pages // num_devices, num_local)


def _checked_mesh(mesh: Any) -> Mesh | AbstractMesh:
    """Return the mesh of a call: the one given, or that of `jax.set_mesh` or `jax.shard_map`."""
    found: Any = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if CONTEXT_AXIS not in getattr(found, "axis_names", ()):
        raise ValueError(f"{mesh=} must be a mesh with an axis {CONTEXT_AXIS!r}")
    return found


def mesh_spec(mesh: Mesh | None, *axes: str | tuple[str, ...] | None) -> P:
    """Return a spec without the axes that the mesh lacks."""
    names = _checked_mesh(mesh).axis_names
    wanted = ((axis,) if isinstance(axis, str) else axis or () for axis in axes)
    return P(*(tuple(name for name in several if name in names) or None for several in wanted))


def pool_specs(mesh: Mesh | None, pool: Any) -> Any:
    """Return the specs of a pool or a layer: heads over "tensor", pages over "context"."""
    heads, pages = mesh_spec(mesh, TENSOR_AXIS, CONTEXT_AXIS)
    return kv_pool.pool_specs(pool, heads, pages)


def on_devices(
    function: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `function` on the parts of each device; itself inside a `jax.shard_map`."""
    if CONTEXT_AXIS in jax.sharding.get_abstract_mesh().manual_axes:
        return function
    # JAX does not see that merged states are the same on all devices.
    return jax.shard_map(
        function,
        mesh=_checked_mesh(mesh),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
