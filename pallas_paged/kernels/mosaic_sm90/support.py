"""What the kernels for Hopper can't do, and what fits into shared memory.

Importing this module does not import Mosaic; `shared_memory` does.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_paged.kernels.call import Arrays, Call
from pallas_paged.kernels.device import INTERPRET_INSTEAD, Device
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90.config import MosaicSm90RaggedConfig

HEAD_DIMS = (64, 128, 256)  # of 512, two blocks of 64 tokens of K and V would take 256 KB
LATENT_DIMS = (512, 64)  # of the latent, and of the rotary key behind it
GRADIENT_HEAD_DIMS = (64, 128)
MIN_PAGE_SIZE = 8  # rows of a swizzled tile in shared memory


def why_not_device(device: Device) -> str | None:
    """Return why the kernels can't run on a device, or None."""
    if device.is_hopper:
        return None
    is_gpu = device.platform == "gpu"
    found = f"the GPU is a {device.kind!r}" if is_gpu else f"the platform is {device.platform!r}"
    return f"needs a Hopper GPU, but {found}: {INTERPRET_INSTEAD}"


def why_not_call(call: Call) -> str | None:
    """Return why the ragged kernel can't do a call, or None. A config may need Mosaic."""
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {call.dtype.name}"
    one_byte = call.kv_dtype in (jnp.int8, jnp.float8_e4m3fn) and call.v_head_dim is None
    if call.kv_dtype != call.dtype and not one_byte:
        return f"needs pages of q's dtype {call.dtype.name}, not of {call.kv_dtype.name}"
    if call.head_dim not in HEAD_DIMS and call.v_head_dim is None:
        return f"needs a head_dim of {HEAD_DIMS}, not {call.head_dim}"
    if call.page_size < MIN_PAGE_SIZE:
        return f"needs a page_size of at least {MIN_PAGE_SIZE}, not {call.page_size}"
    return None if call.config is None else _why_not_config(call)  # a chosen config fits


def why_not_latents(call: Call) -> str | None:
    """Return why a call should be left to the kernel of latents for Ampere, or None."""
    if (call.head_dim, call.rope_dim) != LATENT_DIMS:
        return f"needs latents of {LATENT_DIMS} elements, not {(call.head_dim, call.rope_dim)}"
    # With more than 64 heads two programs copy half of a page each, for both.
    page_size = MIN_PAGE_SIZE * (2 if call.num_q_heads > 64 else 1)
    if call.page_size < page_size:
        return f"needs a page_size of at least {page_size}, not {call.page_size}"
    # Measured on an H200, 2026-11: with 16 rows of the 64 that a wgmma has, Ampere's takes 3 to 29%
    # less time where rows are split or leave SMs idle, and 4 to 6% more elsewhere.
    num_tokens, num_seqs = call.sizes.get("num_tokens", 0), call.sizes["num_seqs"]
    if call.num_q_heads <= 16 and num_tokens <= num_seqs:
        return "has tiles of 64 rows"
    return None


def why_no_gradient(arrays: Arrays) -> str | None:
    """Return why the kernels should leave the gradient of a call to those of Triton, or None."""
    reason = mosaic_support.why_not_jax()
    if reason is not None:
        return reason
    dtype, head_dim = arrays.q.dtype, arrays.head_dim
    if dtype not in (jnp.bfloat16, jnp.float16) or arrays.k_pages.dtype != dtype:
        return "needs bfloat16 or float16, of q and of pages"
    if head_dim not in GRADIENT_HEAD_DIMS or arrays.page_size < MIN_PAGE_SIZE:
        return f"needs a head_dim of {GRADIENT_HEAD_DIMS} and pages of {MIN_PAGE_SIZE} tokens"
    options = (arrays.alibi_slopes, arrays.tree_mask, arrays.q_positions)
    if any(x is not None for x in options):
        return "has no ALiBi, tree masks and cascades"
    if arrays.q.shape[0] * arrays.group < 128 * arrays.num_seqs:
        return "has tiles of 128 query rows, and an average sequence has fewer"
    num_pages = arrays.layout.size(arrays.k_pages.shape, "P")
    if arrays.block_tables.size > 2 * num_pages:
        return "has f32 sums for each entry of the block tables, and there are few pages"
    return None


def _why_not_config(call: Call) -> str | None:
    config, page_size = call.config, call.page_size
    block_k = config.block_k
    if block_k % page_size and page_size % block_k:
        return f"needs a {block_k=} that is a multiple or a divisor of {page_size=}"
    converts = call.kv_dtype.itemsize == 1
    if converts and config.num_consumers > 2:
        return f"needs num_consumers=1 or 2 with pages of {call.kv_dtype.name}"
    # With four warpgroups a thread starts with 128 registers, and 256 columns of a product would
    # take all of them.
    if converts and config.num_consumers > 1 and max(block_k, call.head_dim) > 192:
        return (
            f"needs a block_k and a head_dim of at most 192 with pages of {call.kv_dtype.name} "
            f"and num_consumers=2, not {block_k=} and head_dim={call.head_dim}"
        )
    needed = shared_memory(
        config,
        group=call.group,
        head_dim=call.head_dim,
        v_head_dim=call.v_head_dim,
        kv_dtype=call.kv_dtype,
    )
    return mosaic_support.why_not_memory(call, config, needed)


def shared_memory(
    config: MosaicSm90RaggedConfig,
    *,
    group: int,
    head_dim: int,
    v_head_dim: int | None = None,
    kv_dtype: Any = jnp.bfloat16,
) -> int:
    """Return the bytes of shared memory that a program of the ragged kernel needs. Imports Mosaic.

    Queries have 16-bit elements.
    """
    from pallas_paged.kernels.mosaic_sm90 import ragged

    one_byte = jnp.dtype(kv_dtype).itemsize == 1
    # The page size changes only how often a barrier is arrived at.
    sizes: Any = {"group": group, "head_dim": head_dim, "v_head_dim": v_head_dim}
    sizes |= {"page_size": config.block_k, "dtype": jnp.bfloat16}
    sizes |= {"kv_dtype": kv_dtype if one_byte else jnp.bfloat16}
    types = ragged.scratch_types(config, **sizes)
    return mosaic_support.shared_memory_bytes(types, ragged.COMPILER_PARAMS)
