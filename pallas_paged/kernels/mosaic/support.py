"""What the Mosaic GPU kernels can't do, told before anything of Mosaic is needed."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.kernels.mosaic.config import (
    MosaicDecodeConfig,
    MosaicRaggedConfig,
    shared_memory,
    shared_memory_limit,
)

HEAD_DIMS = (64, 128, 256)
MIN_PAGE_SIZE = 8  # rows of a swizzled tile in shared memory
MAX_DECODE_GROUP = 64
_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


def why_not_jax() -> str | None:
    """Why the kernels can't be built with this JAX, or None."""
    reason = (
        "needs the Mosaic GPU lowering of Pallas as JAX 0.11 has it, which this JAX "
        f"({jax.__version__}) lacks"
    )
    try:
        from jax.experimental.pallas import mosaic_gpu as plgpu
    except ImportError as e:
        return f"{reason}: {e}"
    try:
        inspect.signature(plgpu.load).bind(None)  # 0.10 has the name, but asks for an index
    except TypeError:
        return reason
    return None


def why_not_device(
    *, platform: str, device_kind: str, compute_capability: str | None
) -> str | None:
    """Why the kernels can't run on a device, or None.

    Args:
      platform, device_kind: as JAX names them.
      compute_capability: such as "9.0"; None where nothing but the names is known.
    """
    hopper = bool(_HOPPER.search(device_kind))
    if compute_capability is not None:
        hopper = compute_capability == "9.0"
    if platform == "gpu" and hopper:
        return None
    device = device_kind if platform == "gpu" else platform
    return (
        f"needs a Hopper GPU, but the device is a {device}; "
        "'mosaic_gpu_interpret' runs the same kernels anywhere"
    )


def why_not(
    kernel: str,
    *,
    dtype: Any,
    kv_dtype: Any,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    config: MosaicDecodeConfig | MosaicRaggedConfig | None,
) -> str | None:
    """Why a kernel can't do a call, wherever it runs, or None.

    Args:
      kernel: "decode" or "ragged".
      dtype, kv_dtype: of the queries and of the pages.
      num_q_heads, num_kv_heads, head_dim, page_size: of the call.
      config: None for the one that is chosen, which fits.
    """
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype)
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {dtype.name}"
    if kv_dtype != dtype:
        return f"needs pages of q's dtype {dtype.name}, not of {kv_dtype.name}"
    if head_dim not in HEAD_DIMS:
        return f"needs a head_dim of {HEAD_DIMS}, not {head_dim}"
    if page_size < MIN_PAGE_SIZE:
        return f"needs a page_size of at least {MIN_PAGE_SIZE}, not {page_size}"
    group = num_q_heads // num_kv_heads
    if kernel == "decode" and group > MAX_DECODE_GROUP:
        return f"decodes at most {MAX_DECODE_GROUP} query heads per KV head, not {group}"
    return None if config is None else _why_not_config(config, group, head_dim, page_size, dtype)


def _why_not_config(
    config: MosaicDecodeConfig | MosaicRaggedConfig,
    group: int,
    head_dim: int,
    page_size: int,
    dtype: Any,
) -> str | None:
    block_k = config.block_k
    if block_k % page_size and page_size % block_k:
        return f"needs a {block_k=} that is a multiple or a divisor of {page_size=}"
    needed = shared_memory(config, group=group, head_dim=head_dim, itemsize=dtype.itemsize)
    limit = shared_memory_limit(1)
    if needed > limit:
        return f"has {limit} bytes of shared memory a program, and {config} takes {needed}"
    return None
