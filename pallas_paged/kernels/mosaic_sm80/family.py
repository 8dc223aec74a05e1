"""The family of Mosaic kernels for Ampere and later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp

from pallas_paged.kernels.call import Call, Kernel
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.family import Family
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm80.config import (
    LATENT_COLUMNS,
    MosaicSm80DecodeConfig,
    MosaicSm80RaggedConfig,
)
from pallas_paged.kernels.mosaic_sm80.heuristics import (
    decode_config,
    decode_shared_memory,
    latent_config,
    latent_shared_memory,
    ragged_config,
    ragged_shared_memory,
)

_COPY_BYTES = 16  # of one asynchronous copy
_RAGGED_HEAD_DIM_STEP = 16  # elements of a product


class MosaicSm80(Family):
    name = "mosaic_sm80"
    configs: ClassVar[dict[Kernel, type]] = {
        "decode": MosaicSm80DecodeConfig,
        "ragged": MosaicSm80RaggedConfig,
    }
    reads_latents = True
    v_head_dims = mosaic_support.V_HEAD_DIMS

    def why_not_device(self, device: Device) -> str | None:
        return device.why_not(least="8.0")

    def why_not_jax(self) -> str | None:
        return mosaic_support.why_not_jax()

    def why_not_call(self, call: Call) -> str | None:
        if call.dtype not in (jnp.bfloat16, jnp.float16):
            return f"needs bfloat16 or float16, not {call.dtype.name}"
        if call.kv_dtype not in (call.dtype, jnp.int8, jnp.float8_e4m3fn):
            return (
                f"needs pages of q's dtype {call.dtype.name}, int8 or float8_e4m3fn, not of "
                f"{call.kv_dtype.name}"
            )
        return _why_not_latents(call) if call.rope_dim else _why_not_heads(call)

    def bind(self, call: Call) -> Callable[..., Any]:
        if call.kernel == "decode" and not call.rope_dim:
            return self.bind_decode(call)
        from pallas_paged.kernels.mosaic_sm80 import latent, ragged

        static: dict[str, Any] = dict(config=_config_of(call), interpret=call.interpret)
        if call.rope_dim:
            return functools.partial(latent.latent_attention, with_lse=call.with_lse, **static)
        return functools.partial(ragged.ragged_paged_attention, with_lse=call.with_lse, **static)

    def bind_states(
        self, call: Call, *, writes: bool
    ) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        if writes or call.rope_dim:
            return None
        from pallas_paged.kernels.mosaic.decode_merge import merge_decode
        from pallas_paged.kernels.mosaic_sm80.decode import decode_states

        return (
            functools.partial(decode_states, config=_config_of(call), interpret=call.interpret),
            functools.partial(merge_decode, dtype=call.dtype, interpret=call.interpret),
        )


MOSAIC_SM80 = MosaicSm80()


def _why_not_heads(call: Call) -> str | None:
    if call.v_head_dim is not None and call.kv_dtype != call.dtype:
        return f"needs pages of q's dtype {call.dtype.name}, not of {call.kv_dtype.name}"
    if call.head_dim * call.kv_dtype.itemsize % _COPY_BYTES:
        elements = _COPY_BYTES // call.kv_dtype.itemsize
        return (
            f"needs a head_dim that is a multiple of {elements} with pages of "
            f"{call.kv_dtype.name}, not {call.head_dim}"
        )
    if call.kernel == "ragged" and call.head_dim % _RAGGED_HEAD_DIM_STEP:
        return (
            f"needs a head_dim that is a multiple of {_RAGGED_HEAD_DIM_STEP} for ragged queries, "
            f"not {call.head_dim}"
        )
    config = _config_of(call)
    v_head_dim = call.v_head_dim or call.head_dim
    if getattr(config, "rows_per_warpgroup", 0) > 64 and v_head_dim > 128:
        return (
            "has registers for 64 query rows of a warpgroup, not for "
            f"{config.rows_per_warpgroup}, with head_dim={v_head_dim}"
        )
    sizes: dict[str, Any] = dict(head_dim=call.head_dim, itemsize=call.kv_dtype.itemsize)
    if call.kernel == "decode":
        needed = decode_shared_memory(config, group=call.group, **sizes)
    else:
        needed = ragged_shared_memory(config, v_head_dim=call.v_head_dim, **sizes)
    return mosaic_support.why_not_memory(call, config, needed)


def _why_not_latents(call: Call) -> str | None:
    itemsize = call.kv_dtype.itemsize
    if call.num_kv_heads != 1:
        return f"needs latents of 1 KV head, not {call.num_kv_heads}"
    columns = LATENT_COLUMNS * 2 // itemsize
    if call.head_dim % columns:
        return (
            f"needs a v_head_dim that is a multiple of {columns} with pages of "
            f"{call.kv_dtype.name}, not {call.head_dim}"
        )
    if call.rope_dim * itemsize % _COPY_BYTES:
        elements = _COPY_BYTES // itemsize
        return (
            f"needs a head_dim that is a multiple of {elements}, "
            f"not {call.head_dim + call.rope_dim}"
        )
    config = _config_of(call)
    needed = latent_shared_memory(
        config, head_dim=call.head_dim, rope_dim=call.rope_dim, itemsize=itemsize
    )
    return mosaic_support.why_not_memory(call, config, needed)


def _config_of(call: Call) -> Any:
    """Return the config given by the caller, or what the heuristic chooses for the device."""
    if call.rope_dim:
        return call.choose_config({"decode": latent_config, "ragged": latent_config})
    heuristics: dict[Kernel, Callable[..., Any]]
    heuristics = {"decode": decode_config, "ragged": ragged_config}
    return call.choose_config(heuristics)
