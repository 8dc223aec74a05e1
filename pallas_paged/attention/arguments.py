"""Checks of the arguments of attention, made while tracing; errors name the value and the rule."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.checks import (
    INT32_MAX,
    as_array,
    static_integer,
    static_number,
    validate_page_size,
)
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.pages.layout import PageLayout, checked_layout, checked_pages
from pallas_paged.pages.quantization import LARGEST, checked_scales, is_quantized

_LARGEST_HEAD_DIM = 512
_LEAST_CAP = 1e-30  # logits are divided by it
_SPLIT_MULTIPLE = 64  # every kernel has a block size that divides it
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def checked_arrays(
    *,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_tables: Any,
    seq_lens: Any,
    k_scales: Any,
    v_scales: Any,
    alibi_slopes: Any,
    sinks: Any,
    kv_layout: Any,
    one_query_a_row: bool,
) -> Arrays:
    """Return the arrays that every entry takes, checked against each other.

    Args:
        q, k_pages, v_pages, block_tables, seq_lens, k_scales, v_scales, alibi_slopes, sinks: as the
            entries take them.
        kv_layout: the order of the axes of pages and scales.
        one_query_a_row: q is `[B, Hq, D]`; else `[T, Hq, D]` with any T.

    Raises:
        ValueError: a shape, dtype or head count breaks a rule of `paged_attention`.
    """
    layout = checked_layout(kv_layout)
    pages = checked_pages(layout, k_pages, v_pages)
    arrays: dict[str, Any] = dict(q=q, block_tables=block_tables, seq_lens=seq_lens)
    arrays = {name: as_array(name, x) for name, x in arrays.items()}
    arrays["block_tables"] = _by_rows(arrays["block_tables"], arrays["seq_lens"])
    _check_queries(arrays["q"], "B" if one_query_a_row else "T")
    shape = _check_pages(layout, pages, **arrays)
    if one_query_a_row and arrays["q"].shape[:1] != arrays["seq_lens"].shape:
        raise ValueError(
            f"q.shape={arrays['q'].shape} and seq_lens.shape={arrays['seq_lens'].shape} must have "
            "the same batch size"
        )
    scales = checked_scales(pages[0], k_scales, v_scales, layout.scale_shape(shape))
    num_q_heads = arrays["q"].shape[1]
    k, *v = (layout.with_all_axes(jnp.asarray(x)) for x in pages)
    return Arrays(
        **{name: jnp.asarray(x) for name, x in arrays.items()},
        k_pages=k,
        v_pages=v[0] if v else None,
        kv_layout=layout.name,
        alibi_slopes=_checked_per_head("alibi_slopes", alibi_slopes, num_q_heads),
        sinks=_checked_per_head("sinks", sinks, num_q_heads),
        **dict(zip(("k_scales", "v_scales"), scales, strict=False)),
    )


def _check_queries(q: Any, first_axis: str) -> None:
    if q.ndim != 3:
        raise ValueError(f"q.shape={q.shape} must be [{first_axis}, num_q_heads, head_dim]")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q.dtype={q.dtype.name} must be float32, bfloat16 or float16")


def _check_pages(
    layout: PageLayout, pages: tuple[Any, ...], q: Any, block_tables: Any, seq_lens: Any
) -> tuple[int, ...]:
    """Return the shape of the pages with all axes of the layout."""
    k_pages, v_pages = pages[0], pages[-1]
    shape = layout.full_shape(k_pages.shape)
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"k_pages.shape={k_pages.shape} must equal v_pages.shape={v_pages.shape}")
    if 0 in (*q.shape, *k_pages.shape):
        raise ValueError(f"q.shape={q.shape} and k_pages.shape={k_pages.shape} must not hold a 0")
    _, num_q_heads, head_dim = q.shape
    num_kv_heads, num_pages, page_size, kv_head_dim = (layout.size(shape, x) for x in "HPND")
    if kv_head_dim != head_dim:
        raise ValueError(f"{head_dim=} of q must equal {kv_head_dim=} of the pages")
    if head_dim > _LARGEST_HEAD_DIM:
        raise ValueError(f"{head_dim=} must be at most {_LARGEST_HEAD_DIM}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
    validate_page_size(page_size)
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if x.dtype != q.dtype and not is_quantized(x):
            raise ValueError(
                f"{name}.dtype={x.dtype.name} must equal q.dtype={q.dtype.name}, or be one of"
                f" {', '.join(LARGEST)}"
            )
    if k_pages.dtype != v_pages.dtype:
        raise ValueError(f"k_pages.dtype={k_pages.dtype} must equal v_pages.dtype={v_pages.dtype}")
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
    return shape


def _by_rows(block_tables: Any, seq_lens: Any) -> Any:
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


def checked_tree_mask(tree_mask: Any, num_seqs: int) -> jax.Array | None:
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


def of_first_rows(arrays: Arrays, num_seqs: Any) -> Arrays:
    """Return `arrays` with rows from `num_seqs` i32`[]` on empty, whatever they hold.

    `num_seqs` may be None, for all rows.
    """
    if num_seqs is None:
        return arrays
    count = as_array("num_seqs", num_seqs)
    if count.shape != () or count.dtype != jnp.int32:
        raise ValueError(f"num_seqs {count.dtype.name}{list(count.shape)} must be int32[]")
    rows = jnp.arange(arrays.num_seqs, dtype=jnp.int32)
    arrays = dataclasses.replace(arrays, seq_lens=jnp.where(rows < count, arrays.seq_lens, 0))
    if arrays.cu_q_lens is None:
        return arrays
    # Offsets are made to rise later, so that those rows begin and end where the last row ends.
    ends = jnp.arange(arrays.num_seqs + 1, dtype=jnp.int32)
    return dataclasses.replace(arrays, cu_q_lens=jnp.where(ends <= count, arrays.cu_q_lens, 0))


def check_causal(causal: Any, *, has_tree: bool) -> None:
    """Raise ValueError unless `causal` is a bool, and True beside a tree mask."""
    if not isinstance(causal, bool):
        raise ValueError(f"{causal=} must be True or False")
    if has_tree and not causal:
        raise ValueError(f"{causal=} excludes a tree_mask, which stands in place of causality")


def logit_options(
    head_dim: int,
    *,
    sm_scale: Any = None,
    soft_cap: Any = None,
    sliding_window: Any = None,
    q_scale: Any = None,
    causal: bool = True,
) -> LogitOptions:
    """Return the static options of the logits, checked."""
    scale = head_dim**-0.5 if sm_scale is None else static_number("sm_scale", sm_scale)
    if q_scale is not None:
        scale = static_number("sm_scale * q_scale", scale * static_number("q_scale", q_scale))
    cap = None if soft_cap is None else static_number("soft_cap", soft_cap)
    if cap is not None and cap < _LEAST_CAP:
        raise ValueError(f"{soft_cap=} must be positive, and at least {_LEAST_CAP:g}")
    window = None if sliding_window is None else static_integer("sliding_window", sliding_window)
    return LogitOptions(sm_scale=scale, soft_cap=cap, sliding_window=window, causal=causal)


def checked_fixed_split_size(value: Any) -> int | None:
    """Return a fixed split size, a positive multiple of 64 up to 2**30, or None."""
    if value is None:
        return None
    size = static_integer("fixed_split_size", value)
    if size % _SPLIT_MULTIPLE or size > 2**30:
        raise ValueError(
            f"fixed_split_size={value!r} must be a multiple of {_SPLIT_MULTIPLE}, at most 2**30"
        )
    return size


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
