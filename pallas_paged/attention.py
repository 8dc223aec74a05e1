"""The one entry to attention over pages: validate, choose an implementation, call it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal, SupportsFloat, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_paged.kernels import xla
from pallas_paged.kernels.tuning import DecodeConfig, decode_config

INT32_MAX = 2**31 - 1  # slots and positions are i32
IMPLEMENTATIONS = ("triton", "triton_interpret", "mosaic_gpu", "xla")
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# Without a GPU to ask, a wave this small still makes shares that span and that split rows.
_INTERPRETED_SMS = 4


@overload
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    *,
    sm_scale: SupportsFloat | None = None,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
    config: DecodeConfig | None = None,
) -> jax.Array: ...
@overload
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    *,
    sm_scale: SupportsFloat | None = None,
    return_lse: Literal[True],
    implementation: str | None = None,
    config: DecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    *,
    sm_scale: SupportsFloat | None = None,
    return_lse: bool,
    implementation: str | None = None,
    config: DecodeConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    seq_lens,
    k_scales=None,
    v_scales=None,
    *,
    sm_scale=None,
    return_lse=False,
    implementation=None,
    config=None,
):
    """Attention of one query token per sequence over its K/V pages, read in place.

    The K/V of the current token must be in the pages already and `seq_lens` counts it. Slots past
    a row's length, pages that no row owns and table entries past a row's blocks may hold anything.
    The pages' layout and the order of the positional arguments are those of
    `jax.experimental.pallas.ops.gpu.paged_attention`, which differs in one point: it expects `q`
    scaled already, so the same call here is `sm_scale=1.0`.

    Args:
      q: f32, bf16 or f16 `[B, num_q_heads, head_dim]`.
      k_pages, v_pages: `[num_kv_heads, num_pages, page_size, head_dim]`, the dtype of `q`. Query
        head h reads KV head `h // (num_q_heads // num_kv_heads)`.
      block_tables: i32`[B, pages_per_seq]`, the page of each block of each row.
      seq_lens: i32`[B]`, tokens of each row. Lengths are taken as at least 0 and at most what
        `block_tables` can address.
      k_scales, v_scales: must be None; they hold the places that quantized pages take.
      sm_scale: factor of the logits; None means `head_dim ** -0.5`. Static.
      return_lse: also return the log-sum-exp of the logits. Static.
      implementation: `"triton"`, `"triton_interpret"` (the same kernels, interpreted on any
        device), `"xla"`, or None for the best on this platform. A named one never falls back.
      config: `DecodeConfig` of the Triton kernels, which `"xla"` has no use for; None takes the
        tuned one.

    Returns:
      out `[B, num_q_heads, head_dim]` in the dtype of `q`, or `(out, lse)` with the natural-log
      `lse` f32`[B, num_q_heads]`. A row of length 0 gives `out = 0`, `lse = -inf`.

    Raises:
      ValueError: if a shape, dtype, head count or option breaks a rule above.
      NotImplementedError: if the named implementation can't do this here, or one without gradients
        is differentiated (only `"xla"` has any); the message says why.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023; the split over K/V is Flash-Decoding's, balanced.
    """
    arrays = [_with_dtype(x) for x in (q, k_pages, v_pages, block_tables, seq_lens)]
    _validate(*arrays)
    q, k_pages, v_pages, block_tables, seq_lens = map(jnp.asarray, arrays)
    if k_scales is not None or v_scales is not None:
        raise NotImplementedError("k_scales and v_scales: quantized pages can't be read yet")
    if config is not None and not isinstance(config, DecodeConfig):
        raise ValueError(f"config={config!r} must be a DecodeConfig")
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    pages_per_seq = block_tables.shape[1]
    scale = head_dim**-0.5 if sm_scale is None else _static_number("sm_scale", sm_scale)
    platform, num_sms = _device()
    if implementation is None:
        implementation = _best_implementation(platform)

    decode = _decode_implementation(implementation, platform)
    if implementation != "xla":
        decode = functools.partial(
            decode,
            config=config
            or decode_config(
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                max_kv_len=pages_per_seq * page_size,
                num_seqs=num_seqs,
                itemsize=k_pages.dtype.itemsize,
                num_sms=num_sms,
            ),
        )
    seq_lens = jnp.clip(seq_lens, 0, pages_per_seq * page_size)
    with jax.enable_x64(False):  # the kernels count in i32 whatever the caller's integers are
        out, lse = decode(q, k_pages, v_pages, block_tables, seq_lens, sm_scale=scale)
    return (out, lse) if return_lse else out


def merge_attention_states(outs: ArrayLike, lses: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Merge attention over disjoint sets of keys into attention over their union.

    Args:
      outs: f32, bf16 or f16 `[S, ..., D]`, the S states' outputs.
      lses: f32`[S, ...]`, their natural-log log-sum-exps; -inf marks a state that saw no key,
        whose `outs` may then hold anything.

    Returns:
      `(out [..., D] in the dtype of outs, lse f32[...])`. Where no state saw a key, `out = 0` and
      `lse = -inf`.

    Raises:
      ValueError: if the shapes do not belong together or a dtype is not allowed.
    """
    return xla.merge_states(*_validate_states(_with_dtype(outs), _with_dtype(lses)))


def _validate_states(outs, lses) -> tuple[jax.Array, jax.Array]:
    if outs.dtype not in _DTYPES:
        raise ValueError(f"outs.dtype={outs.dtype.name} must be float32, bfloat16 or float16")
    if lses.dtype != jnp.float32:
        raise ValueError(f"lses.dtype={lses.dtype.name} must be float32")
    if outs.ndim < 2 or outs.shape[:-1] != lses.shape or outs.shape[0] == 0:
        raise ValueError(
            f"outs.shape={outs.shape} must be [S, ..., D] and lses.shape={lses.shape} [S, ...], "
            "with S >= 1"
        )
    return jnp.asarray(outs), jnp.asarray(lses)


def _with_dtype(x: ArrayLike) -> Any:
    # asarray would narrow a 64-bit NumPy array without a word, so dtypes are checked before it.
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def _validate(q, k_pages, v_pages, block_tables, seq_lens) -> None:
    if q.ndim != 3:
        raise ValueError(f"q.shape={q.shape} must be [B, num_q_heads, head_dim]")
    if k_pages.ndim != 4:
        raise ValueError(
            f"k_pages.shape={k_pages.shape} must be [num_kv_heads, num_pages, page_size, head_dim]"
        )
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"k_pages.shape={k_pages.shape} must equal v_pages.shape={v_pages.shape}")
    if 0 in (*q.shape, *k_pages.shape):
        raise ValueError(f"q.shape={q.shape} and k_pages.shape={k_pages.shape} must not hold a 0")
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, num_pages, page_size, kv_head_dim = k_pages.shape
    if kv_head_dim != head_dim:
        raise ValueError(f"{head_dim=} of q must equal {kv_head_dim=} of the pages")
    if head_dim > 256:
        raise ValueError(f"{head_dim=} must be at most 256")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
    if page_size > 256 or page_size & (page_size - 1):
        raise ValueError(f"{page_size=} must be a power of two in [1, 256]")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q.dtype={q.dtype.name} must be float32, bfloat16 or float16")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if pages.dtype != q.dtype:
            raise ValueError(f"{name}.dtype={pages.dtype.name} must equal q.dtype={q.dtype.name}")
    if num_pages * page_size > INT32_MAX:
        raise ValueError(f"{num_pages=} * {page_size=} must be at most {INT32_MAX}")
    if block_tables.ndim != 2 or block_tables.shape[0] != num_seqs or not block_tables.shape[1]:
        raise ValueError(
            f"block_tables.shape={block_tables.shape} must be [B, pages_per_seq] with B={num_seqs}"
        )
    pages_per_seq = block_tables.shape[1]
    if pages_per_seq * page_size > INT32_MAX:
        raise ValueError(f"{pages_per_seq=} * {page_size=} must be at most {INT32_MAX}")
    if seq_lens.shape != (num_seqs,):
        raise ValueError(f"seq_lens.shape={seq_lens.shape} must be [B] with B={num_seqs}")
    for name, ints in (("block_tables", block_tables), ("seq_lens", seq_lens)):
        if ints.dtype != jnp.int32:
            raise ValueError(f"{name}.dtype={ints.dtype.name} must be int32")


def _static_number(name: str, value: Any) -> float:
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be a static number, got a traced value")
    if isinstance(value, str | bool) or not hasattr(value, "__float__") or np.ndim(value):
        raise ValueError(f"{name}={value!r} must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be finite")
    return float(value)


def _device() -> tuple[str, int]:
    """Platform and number of SMs of the device that the trace is for."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        device = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
        if isinstance(device, str):
            device = jax.local_devices(backend=device)[0]
    # An abstract device calls it num_cores, a CUDA device core_count; others have neither.
    num_sms = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    return device.platform, num_sms if device.platform == "gpu" and num_sms else _INTERPRETED_SMS


@functools.cache  # so that it logs once
def _best_implementation(platform: str) -> str:
    implementation = "triton" if platform == "gpu" else "xla"
    logging.getLogger("pallas_paged").info("implementation=%r on %s", implementation, platform)
    return implementation


def _decode_implementation(implementation: str, platform: str):
    if implementation == "xla":
        return xla.paged_decode
    if implementation == "mosaic_gpu":
        raise NotImplementedError("implementation='mosaic_gpu': there are no such kernels yet")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be None or one of {IMPLEMENTATIONS}")
    if implementation == "triton" and platform != "gpu":
        raise NotImplementedError(
            f"implementation='triton' needs a GPU, but the device is a {platform}; "
            "'triton_interpret' runs the same kernels there"
        )
    try:
        from pallas_paged.kernels import triton_decode
    except ImportError as e:
        raise NotImplementedError(
            f"{implementation=} needs the Triton lowering of Pallas, which this JAX "
            f"({jax.__version__}) lacks: {e}"
        ) from e
    interpret = implementation == "triton_interpret"
    return _without_gradient(functools.partial(triton_decode.paged_decode, interpret=interpret))


def _without_gradient(decode: Callable) -> Callable:
    """`decode`, with an error that says so if somebody differentiates it."""

    def call(*arrays, **options):
        attend = jax.custom_vjp(functools.partial(decode, **options))

        def forward(*_):
            raise NotImplementedError(
                "paged_attention's Triton kernels have no gradient; implementation='xla' has one"
            )

        attend.defvjp(forward, lambda *_: None)
        return attend(*arrays)

    return call
