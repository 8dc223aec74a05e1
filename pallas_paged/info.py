"""`python -m pallas_paged.info`: which kernels run here, and what to install for the others."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator

import jax
import jaxlib

import pallas_paged
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.families import FAMILIES

_SERVER = ("uvicorn", "starlette", "httptools", "prometheus_client")


def lines() -> Iterator[str]:
    """Give versions, devices, and families of kernels with the reason of each that can't run."""
    versions = dict(pallas_paged=pallas_paged.__version__, jax=jax.__version__)
    versions |= dict(jaxlib=jaxlib.__version__, Python=platform.python_version())
    yield ", ".join(f"{name} {version}" for name, version in versions.items())
    for device in jax.local_devices():
        yield f"device {device.id}: {device.platform} {device.device_kind}{_properties(device)}"
    here = Device.here()
    for name, family in FAMILIES.items():
        reason = family.why_not_device(here) or family.why_not_jax()
        yield f"{name}: {reason or 'runs'}"
    yield "xla: runs"
    yield from _advice(here)


def _properties(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    found = [f"compute capability {capability}"] if capability else []
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        found.append(f"{limit / 2**30:.1f} GiB for JAX")
    return "".join(f", {one}" for one in found)


def _advice(here: Device) -> Iterator[str]:
    if here.platform == "cpu" and importlib.util.find_spec("jax_plugins") is None:
        yield 'With an NVIDIA GPU: pip install "pallas-paged[cuda13]"; cuda12 for an older driver'
    elif here.is_hopper and (reason := FAMILIES["mosaic_sm90"].why_not_jax()):
        yield f"The fastest kernels for this GPU lack something: mosaic_sm90 {reason}"
    if missing := [name for name in _SERVER if importlib.util.find_spec(name) is None]:
        yield f'server: {", ".join(missing)} not found: pip install "pallas-paged[server]"'


if __name__ == "__main__":
    for line in lines():
        print(line)
