"""Devices: those that tests without a GPU compile for, and what the device of this machine runs."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from pallas_paged.kernels.device import Device
from pallas_paged.kernels.families import FAMILIES

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
H200_MESH = AbstractMesh((1,), ("x",), abstract_device=H200)

CPU = Device(platform="cpu", kind="cpu", num_sms=4, compute_capability=None)
HOPPER = Device(platform="gpu", kind="a Hopper GPU", num_sms=132, compute_capability="9.0")
A100 = Device(platform="gpu", kind="NVIDIA A100", num_sms=108, compute_capability="8.0")


@functools.cache
def implementations_here() -> list[str]:
    """The implementations of attention that tests run on this machine.

    The interpreted Mosaic kernels are left out: they are too slow for most tests. A function,
    because asking for the backend starts it, and conftest.py must set XLA's flags before.
    """
    device, found = Device.here(), ["xla"]
    for name, family in FAMILIES.items():
        if family.why_not_jax() is None and family.why_not_device(device) is None:
            found.append(name)
        elif name == "triton" and family.why_not_jax() is None:
            found.append("triton_interpret")
    return found


def latent_implementations_here() -> list[str]:
    """Those of `implementations_here` that have multi-head latent attention."""
    return [
        name
        for name in implementations_here()
        if name == "xla" or (name in FAMILIES and FAMILIES[name].reads_latents)
    ]


def mesh(num_devices: int) -> Mesh:
    """A mesh of one axis, "tensor"; skips the test where there are fewer devices."""
    devices = jax.devices()
    if len(devices) < num_devices:
        pytest.skip(f"needs {num_devices} devices, and {len(devices)} are here")
    return Mesh(np.array(devices[:num_devices]), ("tensor",), axis_types=(AxisType.Auto,))


def lower_for_cuda(function, *shapes, **jit_options) -> jax.stages.Lowered:
    """Lowers a function for an H200, on any machine."""
    with jax.sharding.use_abstract_mesh(H200_MESH):
        traced = jax.jit(function, **jit_options).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",))
