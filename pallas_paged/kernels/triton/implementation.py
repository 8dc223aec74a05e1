"""The Triton kernels as an implementation: which calls they can do, and the function for a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_paged.kernels.call import Call, Device, Kernel
from pallas_paged.kernels.triton.config import (
    DecodeConfig,
    RaggedConfig,
    decode_config,
    next_power_of_2,
    ragged_config,
    writing_decode_config,
)

CONFIGS: dict[Kernel, type] = {"decode": DecodeConfig, "ragged": RaggedConfig}
_HEURISTICS: dict[Kernel, Callable[..., Any]] = {"decode": decode_config, "ragged": ragged_config}
# Bytes of shared memory of a program, by compute capability. Others have those of Hopper or more.
_SHARED_MEMORY = {"8.0": 166912, "8.7": 166912, "8.6": 101376, "8.9": 101376, "12.0": 101376}


def why_not(call: Call) -> str | None:
    """Return why the kernels can't do a call, interpreted or not; None if they can."""
    if reason := why_not_jax():
        return reason
    if call.kv_dtype.itemsize == 1 and call.head_dim % 2:
        return f"needs an even head_dim with pages of {call.kv_dtype.name}, not {call.head_dim}"
    return None


def why_not_here(call: Call) -> str | None:
    """Return why the kernels can't do a call on its device; None if they can."""
    return why_not_device(call.device, call.kv_dtype) or why_not(call)


def why_not_jax() -> str | None:
    """Return why the kernels can't be built with this JAX, or None."""
    try:
        from pallas_paged.kernels.triton import decode, ragged  # noqa: F401
    except ImportError as e:
        return f"needs the Triton lowering of Pallas, which this JAX ({jax.__version__}) lacks: {e}"
    return None


def why_not_device(device: Device, kv_dtype: DTypeLike) -> str | None:
    """Return why the kernels can't run on a device with pages of a dtype, or None."""
    if device.platform != "gpu":
        return (
            f"needs a GPU, but the device has the platform {device.platform!r}; "
            "'triton_interpret' runs the same kernels there"
        )
    capability = device.compute_capability
    known = capability is not None and tuple(map(int, capability.split(".")))
    if known and known < (8, 9) and kv_dtype == jnp.float8_e4m3fn:  # PTX lacks the conversion
        return f"needs compute capability 8.9 with pages of float8_e4m3fn, not {capability}"
    return None


def bind(call: Call, *, interpret: bool) -> Callable[..., Any]:
    """Return the function of `Arrays` and `options` that does a call."""
    from pallas_paged.kernels.triton import decode, ragged

    config = call.choose_config(_HEURISTICS)
    if call.kernel == "decode":
        return functools.partial(decode.paged_decode, config=config, interpret=interpret)
    if call.config is None and not interpret:
        config = _that_fits(config, call)
    return functools.partial(ragged.ragged_paged_attention, config=config, interpret=interpret)


def bind_states(
    call: Call, *, writes: bool, interpret: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function that makes the states of a decode call, and that which merges them."""
    from pallas_paged.kernels.triton import decode

    config = call.choose_config(_HEURISTICS)
    if writes:
        config = writing_decode_config(config, num_sms=call.device.num_sms, **call.sizes)
    return (
        functools.partial(decode.decode_states, config=config, interpret=interpret),
        functools.partial(decode.merge_states, dtype=call.dtype, interpret=interpret),
    )


def _that_fits(config: RaggedConfig, call: Call) -> RaggedConfig:
    """Return a config with as many rows in a tile as fit into the device's shared memory."""
    limit = _SHARED_MEMORY.get(call.device.compute_capability or "")
    if limit is None:
        return config
    row_bytes = next_power_of_2(call.head_dim) * call.dtype.itemsize
    block_q = config.block_q
    # The tile of queries, and what the compiler keeps of K and V and of the weights: measured.
    while block_q > 16 and (block_q + 3 * config.block_k) * row_bytes > limit:
        block_q //= 2
    return dataclasses.replace(config, block_q=block_q)
