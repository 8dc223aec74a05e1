"""The Mosaic kernels as an implementation: which calls they can do, and the function for a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pallas_paged.kernels.call import Call, Kernel
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90 import support
from pallas_paged.kernels.mosaic_sm90.config import (
    MosaicDecodeConfig,
    MosaicRaggedConfig,
    decode_config,
    ragged_config,
)

CONFIGS: dict[Kernel, type] = {"decode": MosaicDecodeConfig, "ragged": MosaicRaggedConfig}


def why_not(call: Call) -> str | None:
    """Return why the kernels can't do a call, interpreted or not; None if they can."""
    return mosaic_support.why_not_jax() or support.why_not_call(call)


def why_not_here(call: Call) -> str | None:
    """Return why the kernels can't do a call on its device; None if they can."""
    return support.why_not_device(call.device) or why_not(call)


def bind(call: Call, *, interpret: bool) -> Callable[..., Any]:
    """Return the function of `Arrays` and `options` that does a call."""
    from pallas_paged.kernels.mosaic_sm90 import decode, ragged

    heuristics: dict[Kernel, Callable[..., Any]] = {
        "decode": decode_config,
        "ragged": ragged_config,
    }
    static: dict[str, Any] = {
        "config": call.choose_config(heuristics),
        "interpret": interpret,
    }
    if call.kernel == "decode":
        return functools.partial(decode.paged_decode, **static)
    static["with_lse"] = call.with_lse
    return functools.partial(ragged.ragged_paged_attention, **static)


def bind_states(
    call: Call, *, writes: bool, interpret: bool
) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the function that makes the states of a decode call, and that which merges them.

    None if the kernel is to write the newest tokens as well.
    """
    from pallas_paged.kernels.mosaic_sm90 import decode

    if writes:
        return None
    config = call.choose_config({"decode": decode_config})
    return (
        functools.partial(decode.decode_states, config=config, interpret=interpret),
        functools.partial(decode.merge_states, dtype=call.dtype, interpret=interpret),
    )
