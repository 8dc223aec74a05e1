"""The kernels for Ampere and later as an implementation: which calls they can do, and how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pallas_paged.kernels.call import Call, Kernel
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm80 import support
from pallas_paged.kernels.mosaic_sm80.config import MosaicSm80DecodeConfig, MosaicSm80RaggedConfig

CONFIGS: dict[Kernel, type] = {"decode": MosaicSm80DecodeConfig, "ragged": MosaicSm80RaggedConfig}


def why_not(call: Call) -> str | None:
    """Return why the kernels can't do a call, interpreted or not; None if they can."""
    return mosaic_support.why_not_jax() or support.why_not_call(call)


def why_not_here(call: Call) -> str | None:
    """Return why the kernels can't do a call on its device; None if they can."""
    return support.why_not_device(call.device) or why_not(call)


def bind(call: Call, *, interpret: bool) -> Callable[..., Any]:
    """Return the function of `Arrays` and `options` that does a call."""
    from pallas_paged.kernels.mosaic_sm80 import decode, ragged

    static: dict[str, Any] = {"config": support.config_of(call), "interpret": interpret}
    if call.kernel == "decode":
        return functools.partial(decode.paged_decode, **static)
    static["with_lse"] = call.with_lse
    return functools.partial(ragged.ragged_paged_attention, **static)
