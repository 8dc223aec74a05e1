"""The family of Mosaic kernels for Ampere and later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from pallas_paged.kernels.call import Call, Kernel
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.family import Family
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm80 import support
from pallas_paged.kernels.mosaic_sm80.config import MosaicSm80DecodeConfig, MosaicSm80RaggedConfig


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
        return support.why_not_call(call)

    def bind(self, call: Call) -> Callable[..., Any]:
        from pallas_paged.kernels.mosaic_sm80 import decode, latent, ragged

        static: dict[str, Any] = dict(config=support.config_of(call), interpret=call.interpret)
        if call.rope_dim:
            return functools.partial(latent.latent_attention, with_lse=call.with_lse, **static)
        if call.kernel == "decode":
            return functools.partial(decode.paged_decode, **static)
        return functools.partial(ragged.ragged_paged_attention, with_lse=call.with_lse, **static)

    def bind_states(
        self, call: Call, *, writes: bool
    ) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        from pallas_paged.kernels.mosaic_sm80 import decode

        if writes or call.rope_dim:
            return None
        config = support.config_of(call)
        return (
            functools.partial(decode.decode_states, config=config, interpret=call.interpret),
            functools.partial(decode.merge_decode, dtype=call.dtype, interpret=call.interpret),
        )


MOSAIC_SM80 = MosaicSm80()
