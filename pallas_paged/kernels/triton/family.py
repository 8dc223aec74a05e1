"""The family of kernels by Pallas' Triton lowering."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_paged.kernels.call import Arrays, Call, Kernel
from pallas_paged.kernels.device import HOPPER_SHARED_MEMORY, Device
from pallas_paged.kernels.family import Family
from pallas_paged.kernels.triton.config import (
    DecodeConfig,
    RaggedConfig,
    decode_config,
    most_shared_memory,
    next_power_of_2,
    ragged_config,
    writing_decode_config,
)

_HEURISTICS: dict[Kernel, Callable[..., Any]] = {"decode": decode_config, "ragged": ragged_config}


class _Triton(Family):
    name = "triton"
    configs: ClassVar[Mapping[Kernel, type]] = {"decode": DecodeConfig, "ragged": RaggedConfig}

    def why_not_device(self, device: Device) -> str | None:
        return device.why_not()

    def why_not_jax(self) -> str | None:
        try:
            from pallas_paged.kernels.triton import decode, ragged  # noqa: F401
        except ImportError as e:
            return (
                "needs the Triton lowering of Pallas, which this JAX "
                f"({jax.__version__}) lacks: {e}"
            )
        return None

    def why_not_call(self, call: Call) -> str | None:
        fp8 = call.kv_dtype == jnp.float8_e4m3fn
        if fp8 and not call.interpret and (reason := call.device.why_not(least="8.9")):
            return f"{reason}, with pages of {call.kv_dtype.name}"  # PTX lacks the conversion
        if call.kv_dtype.itemsize == 1 and call.head_dim % 2:
            return f"needs an even head_dim with pages of {call.kv_dtype.name}, not {call.head_dim}"
        # The f32 sums of a program of decoding pass through shared memory: measured, 256 KB for 128
        # rows of 512 elements.
        rows, limit = next_power_of_2(max(call.group, 16)), call.device.shared_memory
        needed = rows * next_power_of_2(call.head_dim) * 4
        if call.kernel == "decode" and not call.interpret and needed > limit:
            return (
                f"needs {needed} bytes of shared memory to decode {call.group} query heads per KV "
                f"head with head_dim={call.head_dim}; a program has {limit}"
            )
        return None

    def why_not_tuned(self, call: Call) -> str | None:
        limit = call.device.shared_memory
        rows = getattr(call.config, "block_q", call.group)
        sizes = dict(head_dim=call.head_dim, itemsize=call.kv_dtype.itemsize)
        needed = most_shared_memory(call.config, rows=rows, **sizes)
        if not call.interpret and needed > limit:  # which Triton finds when it compiles
            return f"may need {needed} bytes of shared memory for {call.config}; it has {limit}"
        return self.why_not(call)

    def why_no_gradient(self, arrays: Arrays) -> str | None:
        return None

    def bind(self, call: Call) -> Callable[..., Any]:
        if call.kernel == "decode":
            return self.bind_decode(call)
        from pallas_paged.kernels.triton.ragged import ragged_paged_attention

        config = call.choose_config(_HEURISTICS)
        if call.config is None and not call.interpret:
            config = _that_fits(config, call)
        return functools.partial(ragged_paged_attention, config=config, interpret=call.interpret)

    def bind_states(
        self, call: Call, *, writes: bool
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        from pallas_paged.kernels.triton import decode, merge

        config = call.choose_config(_HEURISTICS)
        if writes:
            config = writing_decode_config(config, call.for_heuristics)
        return (
            functools.partial(decode.decode_states, config=config, interpret=call.interpret),
            functools.partial(merge.merge_decode, dtype=call.dtype, interpret=call.interpret),
        )

    def gradients(self) -> Callable[..., Any]:
        from pallas_paged.kernels.triton import backward

        return backward.gradients


TRITON = _Triton()


def _that_fits(config: RaggedConfig, call: Call) -> RaggedConfig:
    """Return a config whose tiles fit into the device's shared memory and registers."""
    if call.dtype.itemsize == 4:
        # f32 products run without the matrix unit, unrolled: with tiles of 128 x 64 and head_dim 80
        # ptxas takes two minutes and spills 200 KB; with those of 32 x 16, seconds and 28 bytes.
        most, num_warps = (32, 4) if call.head_dim <= 256 else (16, 8)
        block_q = min(config.block_q, most)
        config = dataclasses.replace(config, block_q=block_q, block_k=16, num_warps=num_warps)
    limit, unlimited = call.device.shared_memory, HOPPER_SHARED_MEMORY  # fits what Hopper has
    row_bytes = next_power_of_2(call.head_dim) * call.dtype.itemsize
    block_q = config.block_q
    # The tile of queries, and what the compiler keeps of K and V and of the weights: measured.
    while limit < unlimited and block_q > 16 and (block_q + 3 * config.block_k) * row_bytes > limit:
        block_q //= 2
    return dataclasses.replace(config, block_q=block_q)
