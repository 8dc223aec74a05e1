"""What the entries to attention refuse: static mistakes, told with their values."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.quantization import LARGEST, is_one_byte

INT32_MAX = 2**31 - 1  # slots and positions are i32
F32_BOUND = 1e38  # so that a number times log2(e) is an f32 too
LEAST_CAP = 1e-30  # logits are divided by it
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def with_dtype(x: ArrayLike) -> Any:
    """`x` as something that has a dtype, narrowed by nobody."""
    # asarray would narrow a 64-bit NumPy array without a word, so dtypes are checked before it.
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def check_queries(q, name: str) -> None:
    """q is `[name, num_q_heads, head_dim]` of a dtype that the kernels take."""
    if q.ndim != 3:
        raise ValueError(f"q.shape={q.shape} must be [{name}, num_q_heads, head_dim]")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q.dtype={q.dtype.name} must be float32, bfloat16 or float16")


def check_one_query_each(q, seq_lens) -> None:
    """There are as many queries as rows."""
    if q.shape[:1] != seq_lens.shape:
        raise ValueError(f"q.shape={q.shape} and seq_lens.shape={seq_lens.shape} must agree in B")


def check_pages(q, k_pages, v_pages, block_tables, seq_lens) -> None:
    """Pages, tables and lengths fit one another and the heads of q."""
    if k_pages.ndim != 4:
        raise ValueError(
            f"k_pages.shape={k_pages.shape} must be [num_kv_heads, num_pages, page_size, head_dim]"
        )
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"k_pages.shape={k_pages.shape} must equal v_pages.shape={v_pages.shape}")
    if 0 in (*q.shape, *k_pages.shape):
        raise ValueError(f"q.shape={q.shape} and k_pages.shape={k_pages.shape} must not hold a 0")
    _, num_q_heads, head_dim = q.shape
    num_kv_heads, num_pages, page_size, kv_head_dim = k_pages.shape
    if kv_head_dim != head_dim:
        raise ValueError(f"{head_dim=} of q must equal {kv_head_dim=} of the pages")
    if head_dim > 256:
        raise ValueError(f"{head_dim=} must be at most 256")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
    if page_size > 256 or page_size & (page_size - 1):
        raise ValueError(f"{page_size=} must be a power of two in [1, 256]")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dtype != q.dtype and not is_one_byte(pages):
            raise ValueError(
                f"{name}.dtype={pages.dtype.name} must equal q.dtype={q.dtype.name}, or be one of"
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
            f"block_tables.shape={block_tables.shape} must be [B, pages_per_seq] with B={num_seqs}"
        )
    pages_per_seq = block_tables.shape[1]
    if pages_per_seq * page_size > INT32_MAX:
        raise ValueError(f"{pages_per_seq=} * {page_size=} must be at most {INT32_MAX}")
    check_integers(block_tables=block_tables, seq_lens=seq_lens)


def check_integers(**arrays) -> None:
    """Every one of the named arrays is i32."""
    for name, ints in arrays.items():
        if ints.dtype != jnp.int32:
            raise ValueError(f"{name}.dtype={ints.dtype.name} must be int32")


def check_per_head(name: str, values: ArrayLike | None, num_q_heads: int) -> jax.Array | None:
    """`values` f32`[num_q_heads]`, or None."""
    if values is None:
        return None
    array = with_dtype(values)
    if array.shape != (num_q_heads,) or array.dtype != jnp.float32:
        raise ValueError(
            f"{name} {array.dtype.name}{list(array.shape)} must be float32[num_q_heads] with"
            f" {num_q_heads=}"
        )
    return jnp.asarray(array)


def check_ends(name: str, ends: ArrayLike, count: int) -> jax.Array:
    """`ends` i32`[count + 1]`: where parts begin and end."""
    array = with_dtype(ends)
    if array.shape != (count + 1,):
        raise ValueError(
            f"{name}.shape={array.shape} must be ({count + 1},): 0, then where each of {count}"
            " sequences or groups ends"
        )
    check_integers(**{name: array})
    return jnp.asarray(array)


def check_tree_mask(tree_mask: ArrayLike | None, num_seqs: int) -> jax.Array | None:
    """`tree_mask` bool`[B, max_q, max_q]`, or None."""
    if tree_mask is None:
        return None
    mask = with_dtype(tree_mask)
    shape = mask.shape
    if mask.dtype != jnp.bool or len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
        raise ValueError(f"tree_mask {mask.dtype.name}{list(shape)} must be bool[B, n, n]")
    if shape[0] != num_seqs:
        raise ValueError(f"tree_mask.shape={shape} must begin with B={num_seqs}")
    if math.prod(shape) > INT32_MAX:  # offsets into it are i32
        raise ValueError(f"tree_mask.shape={shape} must hold at most {INT32_MAX} elements")
    return jnp.asarray(mask)


def static_number(name: str, value: Any) -> float:
    """A finite number that is known while tracing."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be a static number, got a traced value")
    complex_number = isinstance(value, complex | np.complexfloating)
    if isinstance(value, str | bool) or complex_number or not hasattr(value, "__float__"):
        raise ValueError(f"{name}={value!r} must be a number")
    if np.ndim(value):
        raise ValueError(f"{name}={value!r} must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) < F32_BOUND:
        raise ValueError(f"{name}={value!r} must be finite, and less than {F32_BOUND:g} in size")
    return number


def static_window(value: Any) -> int | None:
    """A sliding window: None or an integer >= 1 that is known while tracing."""
    if value is None:
        return None
    number = static_number("sliding_window", value)
    if number != int(number) or number < 1:
        raise ValueError(f"sliding_window={value!r} must be an integer that is at least 1")
    return int(min(number, INT32_MAX))


def logit_options(
    head_dim: int, *, sm_scale: Any, soft_cap: Any, sliding_window: Any
) -> LogitOptions:
    """The static options of the logits, checked."""
    scale = head_dim**-0.5 if sm_scale is None else static_number("sm_scale", sm_scale)
    cap = None if soft_cap is None else static_number("soft_cap", soft_cap)
    if cap is not None and cap < LEAST_CAP:
        raise ValueError(f"{soft_cap=} must be positive, and at least {LEAST_CAP:g}")
    return LogitOptions(sm_scale=scale, soft_cap=cap, sliding_window=static_window(sliding_window))


def check_states(outs, lses) -> None:
    """Outputs `[S, ..., D]` and log-sum-exps `[S, ...]` of the same states."""
    if outs.dtype not in _DTYPES:
        raise ValueError(f"outs.dtype={outs.dtype.name} must be float32, bfloat16 or float16")
    if lses.dtype != jnp.float32:
        raise ValueError(f"lses.dtype={lses.dtype.name} must be float32")
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or outs.shape[0] == 0:
        raise ValueError(
            f"outs.shape={outs.shape} must be [S, ..., D] and lses.shape={lses.shape} [S, ...], "
            "with S >= 1"
        )
