"""Checks of the arguments of attention, made while tracing; errors name the value and the rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.checks import INT32_MAX, as_array
from pallas_paged.kernels.call import Arrays
from pallas_paged.pages.layer import LayerKV, checked_layer
from pallas_paged.pages.quantization import LARGEST, is_quantized

_LARGEST_HEAD_DIM = 512
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def checked_arrays(
    q: Any,
    layer: Any,
    block_tables: Any,
    seq_lens: Any,
    options: Mapping[str, Any],
    *,
    cu_q_lens: Any = None,
    q_pe: Any = None,
) -> Arrays:
    """Return the arrays of a call, checked against each other.

    Args:
        q, layer, block_tables, seq_lens: as the entries take them.
        options: `alibi_slopes`, `sinks`, `tree_mask` and `num_seqs` are taken from there.
        cu_q_lens: of ragged calls; None means one query for each sequence.
        q_pe: of `mla_attention`, where the layer must be of latents; else None.

    Raises:
        ValueError: a shape, dtype or head count breaks a rule of `paged_attention`.
    """
    layer = checked_layer(layer)
    layout, pages = layer.layout, layer.pages
    q_name = "q" if q_pe is None else "q_nope"
    arrays: dict[str, Any] = dict(
        q=as_array(q_name, q),
        block_tables=as_array("block_tables", block_tables),
        seq_lens=as_array("seq_lens", seq_lens),
    )
    _refuse_symbolic_sizes(dict(arrays, k_pages=pages[0]), is_ragged=cu_q_lens is not None)
    arrays["block_tables"] = _by_sequences(arrays["block_tables"], arrays["seq_lens"])
    _check_queries(q_name, arrays["q"], "B" if cu_q_lens is None else "T")
    _check_pages(layer, **arrays, rope_dim=_checked_rope_dim(layer, arrays["q"], q_pe))
    shape, lens_shape = arrays["q"].shape, arrays["seq_lens"].shape
    if cu_q_lens is None and shape[:1] != lens_shape:
        raise ValueError(
            f"{q_name}.shape={shape} and seq_lens.shape={lens_shape} must have the same batch size"
        )
    num_q_heads, num_seqs = arrays["q"].shape[1], arrays["seq_lens"].shape[0]
    k, *v = (layout.with_all_axes(jnp.asarray(x)) for x in pages)
    found = Arrays(
        **{name: jnp.asarray(x) for name, x in arrays.items()},
        q_pe=None if q_pe is None else jnp.asarray(q_pe),
        k_pages=k,
        v_pages=v[0] if v else None,
        kv_layout=layout.name,
        alibi_slopes=_checked_per_head("alibi_slopes", options.get("alibi_slopes"), num_q_heads),
        sinks=_checked_per_head("sinks", options.get("sinks"), num_q_heads),
        tree_mask=_checked_tree_mask(options.get("tree_mask"), num_seqs),
        k_scales=None if layer.k_scales is None else jnp.asarray(layer.k_scales),
        v_scales=None if layer.v_scales is None else jnp.asarray(layer.v_scales),
    )
    if cu_q_lens is not None:
        offsets = checked_offsets("cu_q_lens", cu_q_lens, num_seqs)
        found = dataclasses.replace(found, cu_q_lens=offsets)
    return _mask_from(found, options.get("num_seqs"))


def _refuse_symbolic_sizes(arrays: dict[str, Any], *, is_ragged: bool) -> None:
    """Raise NotImplementedError where a size is symbolic that must be a number."""
    for name, x in arrays.items():
        free_axes = 0 if is_ragged or name == "k_pages" else 1  # the sequences of decoding
        if not all(isinstance(size, int | np.integer) for size in x.shape[free_axes:]):
            raise NotImplementedError(
                f"{name}.shape={x.shape} must be numbers: of symbolic sizes, attention takes the "
                "sequences of paged_attention alone"
            )


def _check_queries(name: str, q: Any, first_axis: str) -> None:
    if q.ndim != 3:
        raise ValueError(f"{name}.shape={q.shape} must be [{first_axis}, num_q_heads, head_dim]")
    if q.dtype not in _DTYPES:
        raise ValueError(f"{name}.dtype={q.dtype.name} must be float32, bfloat16 or float16")


def _checked_rope_dim(layer: LayerKV, q: Any, q_pe: Any) -> int:
    """Return the elements of `q_pe`, or 0 without it, if the layer is made for such queries."""
    if q_pe is None:
        if layer.is_latent:
            raise ValueError(
                f"a layer of latents, v_head_dim={layer.v_head_dim}, is read by mla_attention"
            )
        return 0
    v_head_dim = layer.v_head_dim
    if v_head_dim is None:
        raise ValueError(
            "mla_attention reads a layer of latents: LayerKV(k_pages, v_head_dim=...), whose V are "
            "the first v_head_dim elements of K"
        )
    if q_pe.ndim != 3 or q_pe.shape[:2] != q.shape[:2] or q_pe.dtype != q.dtype:
        raise ValueError(
            f"q_pe {q_pe.dtype.name}{list(q_pe.shape)} must have the tokens, heads and dtype of "
            f"q_nope {q.dtype.name}{list(q.shape)}"
        )
    rope_dim = layer.head_dim - v_head_dim
    if q.shape[2] != v_head_dim or q_pe.shape[2] != rope_dim:
        raise ValueError(
            f"q_nope.shape={q.shape} and q_pe.shape={q_pe.shape} must end with {v_head_dim=} and "
            f"the other {rope_dim} of head_dim={layer.head_dim} of the pages"
        )
    return q_pe.shape[2]


def _check_pages(
    layer: LayerKV, q: Any, block_tables: Any, seq_lens: Any, *, rope_dim: int
) -> None:
    if 0 in (*q.shape, *layer.k_pages.shape):
        raise ValueError(
            f"q.shape={q.shape} and k_pages.shape={layer.k_pages.shape} must not hold a 0"
        )
    _, num_q_heads, head_dim = q.shape
    num_kv_heads, num_pages, page_size = layer.num_kv_heads, layer.num_pages, layer.page_size
    rule = f"the pages are {layer.layout.shape_rule} with kv_layout={layer.kv_layout!r}"
    if layer.head_dim != head_dim + rope_dim:
        raise ValueError(f"{head_dim=} of q must equal head_dim={layer.head_dim}: {rule}")
    if head_dim > _LARGEST_HEAD_DIM:
        raise ValueError(f"{head_dim=} must be at most {_LARGEST_HEAD_DIM}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}: {rule}")
    if layer.k_pages.dtype != q.dtype and not is_quantized(layer.k_pages):
        raise ValueError(
            f"k_pages.dtype={layer.k_pages.dtype.name} must equal q.dtype={q.dtype.name}, or be one"
            f" of {', '.join(LARGEST)}"
        )
    if num_pages * page_size > INT32_MAX:
        raise ValueError(f"{num_pages=} * {page_size=} must be at most {INT32_MAX}")
    if seq_lens.ndim != 1 or not seq_lens.shape[0]:
        raise ValueError(f"seq_lens.shape={seq_lens.shape} must be [B] with B >= 1")
    num_seqs = seq_lens.shape[0]
    if block_tables.ndim != 2 or block_tables.shape[0] != num_seqs or not block_tables.shape[1]:
        raise ValueError(
            f"block_tables.shape={block_tables.shape} must be [B, pages_per_seq] or"
            f" [B * pages_per_seq] with B={num_seqs}"
        )
    pages_per_seq = block_tables.shape[1]
    if pages_per_seq * page_size > INT32_MAX:
        raise ValueError(f"{pages_per_seq=} * {page_size=} must be at most {INT32_MAX}")
    check_int32(block_tables=block_tables, seq_lens=seq_lens)


def _by_sequences(block_tables: Any, seq_lens: Any) -> Any:
    """Return flat tables `[B * N]` as `[B, N]`; other shapes as they are, checked elsewhere."""
    num_seqs, size = seq_lens.size, block_tables.size
    flat = block_tables.ndim == 1 and num_seqs and size and size % num_seqs == 0
    return block_tables.reshape(num_seqs, -1) if flat else block_tables


def check_int32(**arrays: Any) -> None:
    """Raise ValueError unless every one of the named arrays is int32."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name}.dtype={array.dtype.name} must be int32")


def _checked_per_head(name: str, values: Any, num_q_heads: int) -> jax.Array | None:
    """Return `values` f32`[num_q_heads]`, or None."""
    if values is None:
        return None
    array = as_array(name, values)
    if array.shape != (num_q_heads,) or array.dtype != jnp.float32:
        raise ValueError(
            f"{name} {array.dtype.name}{list(array.shape)} must be float32[num_q_heads] with"
            f" {num_q_heads=}"
        )
    return jnp.asarray(array)


def checked_offsets(name: str, offsets: Any, count: int) -> jax.Array:
    """Return `offsets` i32`[count + 1]`: where each of `count` parts begins, and the end."""
    array = as_array(name, offsets)
    if array.shape != (count + 1,):
        raise ValueError(
            f"{name}.shape={array.shape} must be ({count + 1},): 0, then the end of each of {count}"
            " sequences or groups"
        )
    check_int32(**{name: array})
    return jnp.asarray(array)


def _checked_tree_mask(tree_mask: Any, num_seqs: int) -> jax.Array | None:
    """Return `tree_mask` bool`[B, max_q, max_q]`, or None."""
    if tree_mask is None:
        return None
    mask = as_array("tree_mask", tree_mask)
    shape = mask.shape
    if mask.dtype != jnp.bool or len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
        raise ValueError(f"tree_mask {mask.dtype.name}{list(shape)} must be bool[B, n, n]")
    if shape[0] != num_seqs:
        raise ValueError(f"tree_mask.shape={shape} must begin with B={num_seqs}")
    if math.prod(shape) > INT32_MAX:  # offsets into it are i32
        raise ValueError(f"tree_mask.shape={shape} must hold at most {INT32_MAX} elements")
    return jnp.asarray(mask)


def checked_prefix_lens(prefix_lens: Any) -> jax.Array:
    """Return `prefix_lens` i32`[num_groups]` with at least one group."""
    array = as_array("prefix_lens", prefix_lens)
    if array.ndim != 1 or not array.shape[0]:
        raise ValueError(f"prefix_lens.shape={array.shape} must be [num_groups], at least one")
    check_int32(prefix_lens=array)
    return jnp.asarray(array)


def _mask_from(arrays: Arrays, num_seqs: Any) -> Arrays:
    """Return `arrays` with sequences from `num_seqs` i32`[]` on empty; None changes nothing."""
    if num_seqs is None:
        return arrays
    count = as_array("num_seqs", num_seqs)
    if count.shape != () or count.dtype != jnp.int32:
        raise ValueError(f"num_seqs {count.dtype.name}{list(count.shape)} must be int32[]")
    rows = jnp.arange(arrays.num_seqs, dtype=jnp.int32)
    arrays = dataclasses.replace(arrays, seq_lens=jnp.where(rows < count, arrays.seq_lens, 0))
    if arrays.cu_q_lens is None:
        return arrays
    # Offsets are made to rise later, so those sequences begin and end where the last one ends.
    ends = jnp.arange(arrays.num_seqs + 1, dtype=jnp.int32)
    return dataclasses.replace(arrays, cu_q_lens=jnp.where(ends <= count, arrays.cu_q_lens, 0))


def check_states(outs: Any, lses: Any) -> None:
    """Raise ValueError unless these are outputs `[S, ..., D]` and log-sum-exps f32`[S, ...]`."""
    if outs.dtype not in _DTYPES:
        raise ValueError(f"outs.dtype={outs.dtype.name} must be float32, bfloat16 or float16")
    if lses.dtype != jnp.float32:
        raise ValueError(f"lses.dtype={lses.dtype.name} must be float32")
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or outs.shape[0] == 0:
        raise ValueError(
            f"outs.shape={outs.shape} must be [S, ..., D] and lses.shape={lses.shape} [S, ...], "
            "with S >= 1"
        )
