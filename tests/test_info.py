"""`python -m pallas_paged.info`."""

import importlib.util
import subprocess
import sys

import jax
import pytest

from pallas_paged import info
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.families import FAMILIES

H100 = Device(platform="gpu", kind="NVIDIA H100", num_sms=132, compute_capability="9.0")
A100 = Device(platform="gpu", kind="NVIDIA A100", num_sms=108, compute_capability="8.0")


def report(monkeypatch, device, *, jax_lacks=None, missing=()):
    """The lines for a device, with a JAX that lacks something for a family and without packages."""
    find_spec = importlib.util.find_spec
    hidden = lambda name: None if name in missing else find_spec(name)  # noqa: E731
    monkeypatch.setattr(info.Device, "here", lambda: device)
    monkeypatch.setattr(info.importlib.util, "find_spec", hidden)
    for family in FAMILIES.values():
        reason = "needs another JAX" if family.name == jax_lacks else None
        monkeypatch.setattr(type(family), "why_not_jax", lambda _, reason=reason: reason)
    return list(info.lines())


def test_report_has_versions_devices_and_families(monkeypatch):
    lines = report(monkeypatch, H100)
    assert lines[0].startswith("pallas_paged ") and f"jax {jax.__version__}, " in lines[0]
    assert lines[1].startswith(f"device {jax.local_devices()[0].id}: ")
    families = [f"{name}: runs" for name in (*FAMILIES, "xla")]
    assert lines[1 + jax.local_device_count() :] == families


@pytest.mark.parametrize(
    ("device", "options", "line"),
    [
        (A100, {}, "mosaic_sm90: needs a Hopper GPU"),
        (H100, dict(jax_lacks="mosaic_sm80"), "mosaic_sm80: needs another JAX"),
        (H100, dict(jax_lacks="mosaic_sm90"), "The fastest kernels for this GPU lack something: "),
        (H100, dict(missing=["uvicorn"]), "server: uvicorn not found: pip install "),
    ],
)
def test_report_has_the_reason_of_what_can_not_run(device, options, line, monkeypatch):
    assert any(one.startswith(line) for one in report(monkeypatch, device, **options))


def test_without_a_plugin_the_report_names_the_extra(monkeypatch):
    cpu = Device(platform="cpu", kind="cpu", num_sms=4, compute_capability=None)
    assert "pallas-paged[cuda13]" in report(monkeypatch, cpu, missing=["jax_plugins"])[-1]


def test_command_prints_the_report():
    command = [sys.executable, "-m", "pallas_paged.info"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.startswith("pallas_paged ") and "\nxla: runs\n" in out
