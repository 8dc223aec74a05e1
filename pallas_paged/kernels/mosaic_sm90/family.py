"""The family of Mosaic kernels for Hopper: those for Ampere, but for ragged queries and latents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from pallas_paged.kernels.call import Arrays, Call, Kernel
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.mosaic_sm80.family import MosaicSm80
from pallas_paged.kernels.mosaic_sm90 import support
from pallas_paged.kernels.mosaic_sm90.config import MosaicSm90RaggedConfig, ragged_config


class _MosaicSm90(MosaicSm80):
    """Decoding is bound by reading K/V, which wgmma and TMA do not make faster: it is Ampere's."""

    name = "mosaic_sm90"
    configs: ClassVar[dict[Kernel, type]] = MosaicSm80.configs | {"ragged": MosaicSm90RaggedConfig}

    def why_not_device(self, device: Device) -> str | None:
        return support.why_not_device(device)

    def why_not_call(self, call: Call) -> str | None:
        is_of_ampere = call.kernel == "decode" or call.rope_dim
        return super().why_not_call(call) if is_of_ampere else support.why_not_call(call)

    def why_no_gradient(self, arrays: Arrays) -> str | None:
        return support.why_no_gradient(arrays)

    def bind(self, call: Call) -> Callable[..., Any]:
        if call.rope_dim and support.why_not_latents(call) is None:
            from pallas_paged.kernels.mosaic_sm90 import latent

            return functools.partial(
                latent.mla_attention,
                num_programs=call.device.num_sms,
                fixed_split_size=call.fixed_split_size,
                with_lse=call.with_lse,
                interpret=call.interpret,
            )
        if call.kernel == "decode" or call.rope_dim:
            return super().bind(call)
        from pallas_paged.kernels.mosaic_sm90 import ragged

        return functools.partial(
            ragged.ragged_paged_attention,
            config=call.choose_config({"ragged": ragged_config}),
            with_lse=call.with_lse,
            interpret=call.interpret,
        )

    def gradients(self) -> Callable[..., Any]:
        from pallas_paged.kernels.mosaic_sm90 import backward

        return backward.gradients


MOSAIC_SM90 = _MosaicSm90()
