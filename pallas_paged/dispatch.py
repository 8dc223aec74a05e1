"""Which implementation runs, and for what device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

from pallas_paged.kernels import xla

IMPLEMENTATIONS = ("triton", "triton_interpret", "mosaic_gpu", "xla")
# Without a GPU to ask, a wave this small still makes shares that span and that split rows.
_INTERPRETED_SMS = 4


def device() -> tuple[str, int]:
    """Platform and number of SMs of the device that the trace is for."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        device = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
        if isinstance(device, str):
            device = jax.local_devices(backend=device)[0]
    # An abstract device calls it num_cores, a CUDA device core_count; others have neither.
    num_sms = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    return device.platform, num_sms if device.platform == "gpu" and num_sms else _INTERPRETED_SMS


@functools.cache  # so that it logs once
def best_implementation(platform: str) -> str:
    """What None means on a platform."""
    implementation = "triton" if platform == "gpu" else "xla"
    logging.getLogger("pallas_paged").info("implementation=%r on %s", implementation, platform)
    return implementation


def find(function: str, implementation: str | None, config: Any) -> Callable[..., Any]:
    """The implementation of `paged_decode` or `ragged_paged_attention` to call.

    Args:
      function: its name in the modules of `kernels`.
      implementation: as the caller named it.
      config: of the Triton kernels, which "xla" has no use for.

    Raises:
      ValueError: if there is no implementation of that name.
      NotImplementedError: if it can't run here.
    """
    platform, _ = device()
    if implementation is None:
        implementation = best_implementation(platform)
    if implementation == "xla":
        return getattr(xla, function)
    if implementation == "mosaic_gpu":
        raise NotImplementedError("implementation='mosaic_gpu': there are no such kernels yet")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be None or one of {IMPLEMENTATIONS}")
    if implementation == "triton" and platform != "gpu":
        raise NotImplementedError(
            f"implementation='triton' needs a GPU, but the device is a {platform}; "
            "'triton_interpret' runs the same kernels there"
        )
    try:
        from pallas_paged.kernels import triton_decode, triton_ragged
    except ImportError as e:
        raise NotImplementedError(
            f"{implementation=} needs the Triton lowering of Pallas, which this JAX "
            f"({jax.__version__}) lacks: {e}"
        ) from e
    module = triton_decode if function == "paged_decode" else triton_ragged
    interpret = implementation == "triton_interpret"
    return _without_gradient(
        functools.partial(getattr(module, function), config=config, interpret=interpret)
    )


def _without_gradient(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`attend`, with an error that says so if somebody differentiates it."""

    def call(*arrays, **options):
        function = jax.custom_vjp(functools.partial(attend, **options))

        def forward(*_):
            raise NotImplementedError(
                "the Triton kernels of attention have no gradient; implementation='xla' has one"
            )

        function.defvjp(forward, lambda *_: None)
        return function(*arrays)

    return call
