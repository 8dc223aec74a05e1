"""The family of Mosaic kernels for Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pallas_paged.kernels.call import Arrays, Call, Kernel
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.family import Family
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90 import support
from pallas_paged.kernels.mosaic_sm90.config import (
    MosaicDecodeConfig,
    MosaicRaggedConfig,
    decode_config,
    ragged_config,
)

_HEURISTICS: dict[Kernel, Callable[..., Any]] = {"decode": decode_config, "ragged": ragged_config}


class _MosaicSm90(Family):
    name = "mosaic_sm90"
    configs: ClassVar[Mapping[Kernel, type]] = {
        "decode": MosaicDecodeConfig,
        "ragged": MosaicRaggedConfig,
    }

    def why_not_device(self, device: Device) -> str | None:
        return support.why_not_device(device)

    def why_not_jax(self) -> str | None:
        return mosaic_support.why_not_jax()

    def why_not_call(self, call: Call) -> str | None:
        return support.why_not_call(call)

    def why_no_gradient(self, arrays: Arrays) -> str | None:
        return support.why_no_gradient(arrays)

    def bind(self, call: Call) -> Callable[..., Any]:
        from pallas_paged.kernels.mosaic_sm90 import decode, ragged

        static: dict[str, Any] = dict(
            config=call.choose_config(_HEURISTICS), interpret=call.interpret
        )
        if call.kernel == "decode":
            return functools.partial(decode.paged_decode, **static)
        return functools.partial(ragged.ragged_paged_attention, with_lse=call.with_lse, **static)

    def bind_states(
        self, call: Call, *, writes: bool
    ) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        from pallas_paged.kernels.mosaic_sm90 import decode

        if writes:
            return None
        config = call.choose_config(_HEURISTICS)
        return (
            functools.partial(decode.decode_states, config=config, interpret=call.interpret),
            functools.partial(decode.merge_states, dtype=call.dtype, interpret=call.interpret),
        )

    def gradients(self) -> Callable[..., Any]:
        from pallas_paged.kernels.mosaic_sm90 import backward

        return backward.gradients


MOSAIC_SM90 = _MosaicSm90()
