"""Multi-head latent attention: the signature of tpu-inference."""

from __future__ import annotations

import dataclasses
from typing import Any, SupportsFloat, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_paged.attention.mla import mla_attention
from pallas_paged.attention.options import Implementation
from pallas_paged.checks import (
    as_array,
    check_flag,
    default_promotion,
    static_number,
    validate_pool_size,
    validate_positive,
)
from pallas_paged.interop.rpa_cache import check_floats, check_tuning, checked_rows, new_slots
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.pool import write_kv
from pallas_paged.pages.quantization import is_quantized

_LANES = 128  # TPUs pad the latent and the rotary key to multiples of it


class MlaTuning(TypedDict, total=False):
    """Keywords that tune or debug the caller's own kernels, and change no result."""

    mask_value: Any
    chunk_prefill_size: Any
    num_kv_pages_per_block: Any
    num_queries_per_block: Any
    vmem_limit_bytes: Any
    decode_batch_size: Any
    mixed_q_split: Any
    s_dtype: Any
    two_step_flash_attention: Any
    p_same_dtype_as_v: Any
    debug_mode: Any


def get_mla_kv_cache_shape(
    total_num_pages: int, page_size: int, kv_dim: int, kv_dtype: DTypeLike
) -> tuple[int, int, int, int]:
    """Return the shape of a cache of latents: `[total_num_pages, page_size, 1, kv_dim]`.

    It is also FlashMLA's. Nothing is padded: lanes of 128 elements and words of 32 bits are needs
    of TPUs. `kv_dim` is 576 of a latent of 512 and a rotary key of 64. `kv_dtype` is taken as
    callers give it, and changes nothing.

    Raises:
        ValueError: a size is not a positive integer, or pages of this size are not supported.
    """
    validate_pool_size(total_num_pages, page_size)
    validate_positive(kv_dim=kv_dim)
    return total_num_pages, page_size, 1, kv_dim


@default_promotion()
def mla_ragged_paged_attention(
    ql_nope: ArrayLike,
    q_pe: ArrayLike,
    new_kv_c: ArrayLike,
    new_k_pe: ArrayLike,
    cache_kv: ArrayLike,
    kv_lens: ArrayLike,
    page_indices: ArrayLike,
    cu_q_lens: ArrayLike,
    distribution: ArrayLike,
    *,
    sm_scale: SupportsFloat = 1.0,
    sliding_window: int | None = None,
    soft_cap: SupportsFloat | None = None,
    q_scale: SupportsFloat | None = None,
    k_scale: SupportsFloat | None = None,
    v_scale: SupportsFloat | None = None,
    transpose_kv_cache: bool = False,
    head_major: bool = True,
    implementation: Implementation | None = None,
    interpret: bool = False,
    **tuning: Unpack[MlaTuning],
) -> tuple[jax.Array, jax.Array]:
    """Write the latents of new tokens into a cache and attend with their queries to it.

    Rows and the cache are as in `ragged_paged_attention`.

    Args:
        ql_nope: f32, bf16 or f16 `[num_q_heads, T, L]`, absorbed queries; or float8_e4m3fn, which
            are computed with as bf16.
        q_pe: `[T, num_q_heads, R]`, of the same dtype.
        new_kv_c: `[T, L]`. Into a cache of one-byte elements, latents of its dtype go as they are
            and others as `latents / k_scale`, rounded and saturated.
        new_k_pe: `[T, R]`, like `new_kv_c`.
        cache_kv: `[num_pages, page_size, 1, L + R]`, of the dtype of the queries, int8 or
            float8_e4m3fn; or of any other dtype of pages, to which queries are then rounded. The
            tokens of a page may be split over two axes, as the TPU kernels do, and L and R each
            padded to multiples of 128: attention reads the padding, and new tokens write zeros
            there. Kernels then see a rotary key of 128 elements; those for 64 alone refuse it, and
            None chooses `"xla"`.
        kv_lens, page_indices, cu_q_lens, distribution, sliding_window, soft_cap: as in
            `ragged_paged_attention`.
        sm_scale: factor of q.k. Static, as all scales are.
        q_scale, k_scale: factors of q.k, the dequantization scales of queries and of the cache;
            None means 1.
        v_scale: factor of the result; None means 1.
        transpose_kv_cache: must be False: pages of tokens in columns are not supported.
        head_major: False takes `ql_nope` and returns `out` as `[T, num_q_heads, L]`, as older
            releases of tpu-inference do.
        implementation, interpret: as in `pallas_paged.mla_attention`.
        **tuning: keywords of `MlaTuning`, not used.

    Returns:
        `(out [num_q_heads, T, L], cache_kv)`, `out` in the dtype of the queries, of one-byte
        queries in bf16. Tokens that no row owns have `out = 0`.

    Raises:
        ValueError: a shape, dtype or option breaks a rule.
        NotImplementedError: `transpose_kv_cache`, or as `pallas_paged.mla_attention`.
        TypeError: an unknown keyword.
    """
    check_tuning("mla_ragged_paged_attention", tuning, MlaTuning)
    check_flag("head_major", head_major)
    if transpose_kv_cache:
        raise NotImplementedError(f"{transpose_kv_cache=} must be False: tokens must be rows")
    given = dict(
        ql_nope=ql_nope, q_pe=q_pe, new_kv_c=new_kv_c, new_k_pe=new_k_pe, cache_kv=cache_kv
    )
    q_nope, q_pe, c, k_pe, cache = (jnp.asarray(as_array(name, x)) for name, x in given.items())
    check_floats(cache, ql_nope=q_nope, q_pe=q_pe, new_kv_c=c, new_k_pe=k_pe)
    rows = checked_rows(kv_lens, page_indices, cu_q_lens, distribution)
    lens, tables, offsets, num_seqs = rows
    sizes = _Sizes.of(q_nope, q_pe, c, k_pe, cache, head_major=head_major)
    scale, q_factor, k_factor, v_factor = (
        1.0 if x is None else static_number(name, x)
        for name, x in dict(
            sm_scale=sm_scale, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
        ).items()
    )
    quantized, one = is_quantized(cache), jnp.float32(1)
    v_head_dim, rope_dim = sizes.v_head_dim, sizes.rope_dim
    tokens = jnp.concatenate([_padded(c, v_head_dim), _padded(k_pe, rope_dim)], axis=-1)
    k_scale_of_new = None
    if quantized:
        # Latents that come quantized are elements of the cache already: their scale is 1.
        k_scale_of_new = one if c.dtype == cache.dtype else jnp.float32(k_factor)
        tokens = tokens.astype(jnp.float32)
    layer = LayerKV(
        cache.reshape(sizes.pages_shape), k_scales=k_scale_of_new, v_head_dim=v_head_dim
    )
    num_pages, page_size, _, _ = sizes.pages_shape
    slots = new_slots(c.shape[0], num_pages, page_size, *rows)
    layer = write_kv(layer, tokens[:, None], None, slots)
    if quantized:  # scales are factors of logits and of the result instead
        layer = dataclasses.replace(layer, k_scales=one)
    dtype = jnp.dtype(jnp.bfloat16) if q_nope.dtype.itemsize == 1 else q_nope.dtype
    if head_major:
        q_nope = q_nope.swapaxes(0, 1)
    q_nope, q_pe = (x.astype(dtype if quantized else cache.dtype) for x in (q_nope, q_pe))
    out = mla_attention(
        _padded(q_nope, v_head_dim),
        _padded(q_pe, rope_dim),
        layer,
        tables,
        lens,
        offsets,
        num_seqs=num_seqs,
        sm_scale=scale * q_factor * k_factor,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        implementation=implementation,
        interpret=interpret,
    )
    out = out[..., : c.shape[1]]
    if v_factor != 1:
        out = out * jnp.float32(v_factor)
    out = out.astype(dtype)
    return out.swapaxes(0, 1) if head_major else out, layer.k_pages.reshape(cache.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The sizes of a call and of its cache, which may be padded."""

    # The cache as `[num_pages, page_size, 1, v_head_dim + rope_dim]`.
    pages_shape: tuple[int, int, int, int]
    v_head_dim: int  # elements of the latent, with their padding
    rope_dim: int  # elements of the rotary key, with their padding

    @classmethod
    def of(
        cls,
        q_nope: jax.Array,
        q_pe: jax.Array,
        c: jax.Array,
        k_pe: jax.Array,
        cache: jax.Array,
        *,
        head_major: bool,
    ) -> _Sizes:
        """Return the sizes of these arrays.

        Raises:
            ValueError: shapes do not go together.
        """
        if c.ndim != 2 or k_pe.ndim != 2 or len(c) != len(k_pe):
            raise ValueError(
                f"new_kv_c.shape={c.shape} must be [T, L] and new_k_pe.shape={k_pe.shape} [T, R]"
            )
        (num_tokens, latent), (_, rope) = c.shape, k_pe.shape
        num_heads = q_pe.shape[1] if q_pe.ndim == 3 else 0
        order = (num_heads, num_tokens) if head_major else (num_tokens, num_heads)
        if q_pe.shape != (num_tokens, num_heads, rope) or q_nope.shape != (*order, latent):
            axes = "num_q_heads, T" if head_major else "T, num_q_heads"
            raise ValueError(
                f"ql_nope.shape={q_nope.shape} must be [{axes}, L={latent}] with {head_major=}, and"
                f" q_pe.shape={q_pe.shape} [T={num_tokens}, num_q_heads, R={rope}]"
            )
        padded = tuple(-(-size // _LANES) * _LANES for size in (latent, rope))
        columns = cache.shape[-1] if cache.ndim == 4 and cache.size else 0
        if columns == latent + rope:
            padded = latent, rope
        elif columns != sum(padded):
            raise ValueError(
                f"cache_kv.shape={cache.shape} must be [num_pages, page_size, 1, L + R="
                f"{latent + rope}], or end with {sum(padded)}, L and R padded to multiples of 128"
            )
        num_pages, *page, _ = cache.shape
        return cls(
            pages_shape=(num_pages, page[0] * page[1], 1, columns),
            v_head_dim=padded[0],
            rope_dim=padded[1],
        )


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Return `x` with zeros behind its last axis up to this size."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
