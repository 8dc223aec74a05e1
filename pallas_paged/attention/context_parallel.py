"""Context parallelism: the pages of a row lie on several devices, and each attends to its own.

For rows too long for one device, and for fewer KV heads than devices. The functions have the names
of those that they replace, and take a `mesh` besides:

    pool = context_parallel.create_kv_pool(mesh=mesh, ...)
    pages = context_parallel.local_pages(table.block_tables, lens, page_size=16, mesh=mesh)
    for each layer:
        layer = context_parallel.write_kv(layer, k, v, slots, mesh=mesh)
        out = context_parallel.paged_attention(q, layer, pages, mesh=mesh)

The mesh has an axis "context", and may have an axis "tensor", which shards heads. Page p of
the page table lies on device `p % n` of the n devices of "context", and is its local page `p // n`.
The page axis of a pool is sharded over "context", so each device holds its local pages in order.
The page table, slots and tokens are replicated.

Call the functions under `jax.jit`, or inside a `jax.shard_map` over all axes of the mesh. There the
arrays are the device's parts, and `mesh` is not needed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from pallas_paged.attention import dispatch
from pallas_paged.attention.arguments import checked_arrays
from pallas_paged.attention.context_pages import (
    CONTEXT_AXIS,
    LocalPages,
    copy_pages,
    create_kv_pool,
    local_pages,
    mesh_spec,
    on_devices,
    pool_specs,
    write_kv,
)
from pallas_paged.attention.options import (
    AttentionOptions,
    RaggedAttentionOptions,
    check_names,
    static_options,
)
from pallas_paged.checks import INT32_MAX, as_array, check_flag, default_promotion
from pallas_paged.kernels import xla
from pallas_paged.kernels.call import Arrays
from pallas_paged.pages import pool as kv_pool
from pallas_paged.pages.layer import LayerKV, checked_layer
from pallas_paged.pages.sharding import TENSOR_AXIS

__all__ = [
    "CONTEXT_AXIS",
    "LocalPages",
    "copy_pages",
    "create_kv_pool",
    "local_pages",
    "paged_attention",
    "ragged_paged_attention",
    "write_kv",
]

# A device does not know the positions of its keys, nor how other devices split theirs.
_REFUSED = (
    "num_seqs",
    "sliding_window",
    "alibi_slopes",
    "fixed_split_size",
    "causal",
    "tree_mask",
    "expected_seqs",
)


@default_promotion()
def paged_attention(
    q: ArrayLike,
    layer: LayerKV,
    pages: LocalPages,
    *,
    mesh: Mesh | None = None,
    shard_heads: bool = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """Attend with one query token per sequence; each device reads its own pages.

    One all-gather over "context" brings every device the results and log-sum-exps of the others,
    and each device merges them. Partial results are rounded to the dtype of `q`, as in
    `cascade_attention`. There are no sliding windows and no ALiBi: a device does not know the
    positions of its keys.

    Args:
        q: `[B, num_q_heads, head_dim]`, replicated over "context".
        layer: a layer of a pool from `create_kv_pool`.
        pages: from `local_pages`, for all tokens of the rows.
        mesh: the pool's.
        shard_heads: shard the heads of the result over "tensor" and then "context", for an output
            projection that is sharded alike. An all-to-all then moves the n-th part of what the
            all-gather would. The devices must divide the query heads.
        **options: `sm_scale`, `soft_cap`, `sinks`, `implementation`, `interpret` and `config` of
            `AttentionOptions`. The config is for the calls of the single devices.

    Returns:
        As `pallas_paged.paged_attention`; replicated over "context", or its heads sharded.

    Raises:
        ValueError: as `pallas_paged.paged_attention`, or the mesh has no axis "context".
        NotImplementedError: as `pallas_paged.paged_attention`; also where it is differentiated.

    Source: states merged over devices as in Shyam et al., "Tree Attention", 2024; heads left
    sharded as in Bhatia et al., "Helix Parallelism", 2025.
    """
    check_names("context_parallel.paged_attention", options, AttentionOptions, *_REFUSED)
    _check_types(layer, pages)
    check_flag("shard_heads", shard_heads)

    def attend(tokens: Any, layer: Any, pages: Any, _: None, sinks: Any) -> jax.Array:
        arrays = _checked(tokens[0], layer, pages, sinks)
        state = dispatch.attend(
            "decode",
            dataclasses.replace(arrays, sinks=None),  # they join once, in the merge
            static_options(arrays.head_dim, options),
        )
        return _merge(_exchange(*state, shard_heads), arrays.sinks)

    given = as_array("q", q), layer, pages, None, options.get("sinks")
    return _on_devices(attend, mesh, given, shard_heads=shard_heads)


@default_promotion()
def ragged_paged_attention(
    q: ArrayLike,
    layer: LayerKV,
    pages: LocalPages,
    cu_q_lens: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    mesh: Mesh | None = None,
    shard_heads: bool = False,
    **options: Unpack[RaggedAttentionOptions],
) -> jax.Array:
    """Attend with any number of newest tokens per sequence: prompts, or chunks of them.

    Each device attends to its own pages of older tokens. All devices attend to the new tokens, from
    `k` and `v`: a device has those of every `n`th page only, and causality needs their positions.
    One all-gather over "context" and a merge follow, as in `paged_attention`. It moves the results
    of all T tokens, so a chunk of some thousand tokens is better than a long prompt at once.

    Args:
        q: `[T, num_q_heads, head_dim]`, replicated over "context".
        layer: a layer of a pool from `create_kv_pool`, with or without the new tokens.
        pages: from `local_pages`, for the tokens before the queries: `seq_lens - q_lens`.
        cu_q_lens: i32`[B + 1]`, as in `pallas_paged.ragged_paged_attention`.
        k, v: `[T, num_kv_heads, head_dim]`, the K/V of the same tokens, as `write_kv` takes them.
            Quantized pages make the same numbers of them here.
        mesh, shard_heads, **options: as in `paged_attention`.

    Returns:
        As `pallas_paged.ragged_paged_attention`; replicated over "context", or its heads sharded.

    Raises:
        ValueError: as `pallas_paged.ragged_paged_attention`, or the mesh has no axis "context".
        NotImplementedError: as `paged_attention`.
    """
    function, allowed = "context_parallel.ragged_paged_attention", RaggedAttentionOptions
    check_names(function, options, allowed, *_REFUSED)
    _check_types(layer, pages)
    check_flag("shard_heads", shard_heads)
    tokens = {name: as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    shapes = {name: tuple(x.shape) for name, x in tokens.items()}
    if any(len(shape) != 3 or shape[0] != shapes["q"][0] for shape in shapes.values()):
        raise ValueError(f"q, k and v must be [T, heads, head_dim] of the same T, got {shapes}")

    def attend(tokens: Any, layer: Any, pages: Any, cu_q_lens: Any, sinks: Any) -> jax.Array:
        q, k, v = tokens
        arrays = _checked(q, layer, pages, sinks, cu_q_lens)
        how = static_options(arrays.head_dim, options)
        attend_to = functools.partial(dispatch.attend, "ragged", how=how)
        without_sinks = dataclasses.replace(arrays, sinks=None)  # they join once, in the merge
        all_older = jnp.full(q.shape[0], INT32_MAX, jnp.int32)
        older = attend_to(dataclasses.replace(without_sinks, q_positions=all_older))
        newest = attend_to(
            dataclasses.replace(without_sinks, **_pages_of_new(k, v, layer, arrays.cu_q_lens))
        )
        return _merge(_exchange(*older, shard_heads), arrays.sinks, newest)

    offsets = as_array("cu_q_lens", cu_q_lens)
    given = *tokens.values(), layer, pages, offsets, options.get("sinks")
    return _on_devices(attend, mesh, given, shard_heads=shard_heads)


def _on_devices(
    attend: Callable[..., jax.Array], mesh: Mesh | None, given: Any, *, shard_heads: bool
) -> jax.Array:
    """Return `attend(*given)`: arrays of tokens, a layer, pages, offsets or None, and sinks."""
    *tokens, layer, pages, offsets, sinks = given
    heads, sinks_spec = mesh_spec(mesh, None, TENSOR_AXIS), mesh_spec(mesh, TENSOR_AXIS)
    in_specs = [heads] * len(tokens), pool_specs(mesh, layer), P(CONTEXT_AXIS), P(), sinks_spec
    out_spec = mesh_spec(mesh, None, (TENSOR_AXIS, CONTEXT_AXIS)) if shard_heads else heads
    sinks = None if sinks is None else as_array("sinks", sinks)
    return on_devices(attend, mesh, in_specs, out_spec)(tokens, layer, pages, offsets, sinks)


def _check_types(layer: Any, pages: Any) -> None:
    checked_layer(layer)
    if not isinstance(pages, LocalPages):
        raise ValueError(f"pages must be LocalPages, got {type(pages).__name__}")


def _checked(
    q: jax.Array,
    layer: LayerKV,
    pages: LocalPages,
    sinks: jax.Array | None,
    cu_q_lens: jax.Array | None = None,
) -> Arrays:
    """Return the arrays of a device's call, checked."""
    tables, lens = pages.block_tables[0], pages.seq_lens[0]
    options: Mapping[str, Any] = {"sinks": sinks}
    return checked_arrays(q, layer, tables, lens, options, cu_q_lens=cu_q_lens)


def _pages_of_new(
    k: jax.Array, v: jax.Array, layer: LayerKV, cu_q_lens: jax.Array
) -> dict[str, Any]:
    """Return arrays of a call over the new tokens alone, in pages of their own."""
    num_tokens, num_seqs = k.shape[0], cu_q_lens.size - 1
    page_size, layout = layer.page_size, layer.layout
    offsets = dispatch.rising_offsets(cu_q_lens, num_tokens)
    # Page b + (tokens before row b) // page_size is behind all pages of the row before.
    first_page = jnp.arange(num_seqs, dtype=jnp.int32) + offsets[:-1] // page_size
    width = -(-num_tokens // page_size)
    num_pages = width + num_seqs

    def empty(x: jax.Array) -> jax.Array:
        shape = list(x.shape)
        shape[layout.page_axis : layout.page_axis + 1] = [num_pages] if x.ndim else []
        return jnp.zeros(shape, x.dtype) if x.ndim else x

    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = jnp.searchsorted(offsets[1:], tokens, side="right", method="compare_all")
    starts = jnp.append(first_page * page_size - offsets[:-1], num_pages * page_size)
    new = kv_pool.write_kv(jax.tree.map(empty, layer), k, v, starts[rows] + tokens)
    return dict(
        k_pages=layout.with_all_axes(new.k_pages),
        v_pages=new.v_pages,
        k_scales=new.k_scales,
        v_scales=new.v_scales,
        block_tables=first_page[:, None] + jnp.arange(width, dtype=jnp.int32),
        seq_lens=offsets[1:] - offsets[:-1],
    )


def _exchange(out: jax.Array, lse: jax.Array, shard_heads: bool) -> tuple[jax.Array, jax.Array]:
    """Return the states of all devices on a new first axis, of all heads or of the device's share.

    Args:
        out: `[T, num_q_heads, D]` of this device.
        lse: f32`[T, num_q_heads]`.
        shard_heads: as in `paged_attention`.
    """
    (_, num_heads, head_dim), words_of_lse = out.shape, 4 // out.dtype.itemsize
    word = jnp.dtype(f"uint{8 * out.dtype.itemsize}")
    num_devices = lax.axis_size(CONTEXT_AXIS)
    if shard_heads and num_heads % num_devices:
        raise ValueError(
            f"{shard_heads=} needs query heads, here {num_heads}, that {num_devices=} divide"
        )

    @jax.custom_vjp  # the derivative of bits would be zeros
    def exchange(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        # As integers in one array, for one collective: the small ones of decoding cost the same.
        lse_words = lax.bitcast_convert_type(lse, word).reshape(*lse.shape, words_of_lse)
        words = jnp.concatenate([lax.bitcast_convert_type(out, word), lse_words], axis=-1)
        if shard_heads:
            words = lax.all_to_all(
                words[None], CONTEXT_AXIS, split_axis=2, concat_axis=0, tiled=True
            )
        else:
            words = lax.all_gather(words, CONTEXT_AXIS)
        lse_words = words[..., head_dim:] if words_of_lse > 1 else words[..., head_dim]
        outs = lax.bitcast_convert_type(words[..., :head_dim], out.dtype)
        return outs, lax.bitcast_convert_type(lse_words, jnp.float32)

    def forward(*_: Any) -> Any:
        raise NotImplementedError("context-parallel attention has no gradient")

    exchange.defvjp(forward, lambda *_: ())
    return exchange(out, lse)


def _merge(
    states: tuple[jax.Array, jax.Array],
    sinks: jax.Array | None,
    newest: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Return the output of all `states`, of `newest`, the same on all devices, and of sinks."""
    outs, lses = states
    num_heads = lses.shape[2]

    def share(x: jax.Array, axis: int) -> jax.Array:  # the heads that the states have
        first = lax.axis_index(CONTEXT_AXIS) * num_heads
        return (
            x if x.shape[axis] == num_heads else lax.dynamic_slice_in_dim(x, first, num_heads, axis)
        )

    if newest is not None:
        outs, lses = (
            jnp.concatenate([several, share(one, 1)[None]])
            for several, one in zip(states, newest, strict=True)
        )
    return xla.merge_states(outs, lses, sinks=None if sinks is None else share(sinks, 0))[0]
