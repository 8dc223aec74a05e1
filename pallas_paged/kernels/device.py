"""Facts about the device that a call is compiled for."""

from __future__ import annotations

import dataclasses
import math
import re

import jax

INTERPRET_INSTEAD = "interpret=True runs the same kernels on any device"
# Interpreted kernels have no GPU to ask. A wave this small still has ranges of work that cover
# several sequences, and sequences that are split.
_INTERPRETED_SMS = 4
_HOPPER = "9.0"
_HOPPER_NAMES = re.compile(r"\bG?H(20|100|200|800)\b")
# KB of shared memory that a program can have, by compute capability.
_SHARED_MEMORY = {"8.0": 163, "8.7": 163, _HOPPER: 227, "10.0": 227, "10.3": 227}
_LEAST_SHARED_MEMORY = 99  # of other capabilities from 8.0
HOPPER_SHARED_MEMORY = _SHARED_MEMORY[_HOPPER] * 1024  # bytes
# GB/s that a kernel reads of device memory, by a name within the kind: measured, as the read
# ceiling of `bench.decode`. Of other cards an SM reads as much as one of an H100, which has 132.
_READ_GBPS = {"H200": 4400, "H100": 2950}
_READ_GBPS_OF_AN_SM = _READ_GBPS["H100"] / 132
# TFLOP/s of products of bf16, of an SM of Hopper: 70% of the 989 of a data sheet.
_TFLOPS_OF_AN_SM = 0.7 * 989 / 132


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """The properties of a device that choose kernels and their configs."""

    platform: str  # as JAX names it
    kind: str  # as JAX names it
    num_sms: int  # streaming multiprocessors; a small number where kernels are interpreted
    # Such as "9.0"; None where there is none or JAX does not know it.
    compute_capability: str | None

    @classmethod
    def here(cls) -> Device:
        """Return the device that is traced for."""
        device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        if device is None:
            device = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
            if isinstance(device, str):
                device = jax.local_devices(backend=device)[0]
        # An abstract device calls it num_cores, a CUDA device core_count; others have neither.
        num_sms = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
        return cls(
            platform=device.platform,
            kind=device.device_kind,
            num_sms=num_sms if device.platform == "gpu" and num_sms else _INTERPRETED_SMS,
            compute_capability=getattr(device, "compute_capability", None),
        )

    @property
    def is_hopper(self) -> bool:
        """Whether it is a Hopper GPU, by its capability or else by its name."""
        if self.platform != "gpu":
            return False
        if self.compute_capability is None:
            return bool(_HOPPER_NAMES.search(self.kind))
        return self.compute_capability == _HOPPER

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a program can have; where unknown, those of Hopper."""
        capability = self.compute_capability or _HOPPER
        return _SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY) * 1024

    @property
    def read_gbps(self) -> float:
        """GB/s at which kernels read device memory; where unknown, as an H100 for each SM."""
        rates = (rate for name, rate in _READ_GBPS.items() if name in self.kind)
        return next(rates, self.num_sms * _READ_GBPS_OF_AN_SM)

    def free_tokens(self, bytes_per_weight: float) -> float:
        """Return how many tokens a product with weights takes before it computes longer than reads.

        Infinite where there is no GPU, whose rates are not known.
        """
        if self.platform != "gpu":
            return math.inf
        tflops = self.num_sms * _TFLOPS_OF_AN_SM
        return bytes_per_weight * 1e12 * tflops / (2 * 1e9 * self.read_gbps)

    def why_not(self, *, least: str | None = None) -> str | None:
        """Return why it is no GPU of this compute capability or a later one, or None.

        A GPU of an unknown capability passes.
        """
        if self.platform != "gpu":
            return f"needs a GPU, but the platform is {self.platform!r}: {INTERPRET_INSTEAD}"
        capability = self.compute_capability
        if least is None or capability is None or _version(capability) >= _version(least):
            return None
        return f"needs compute capability {least}, not {capability}"


def _version(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
