"""Fixtures: the implementations of attention that can run on this machine."""

from __future__ import annotations

import jax
import pytest

IMPLEMENTATIONS = ["xla", "triton_interpret"]
if jax.default_backend() == "gpu":
    IMPLEMENTATIONS.append("triton")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    """Every implementation that runs here; "triton" wherever there is a GPU."""
    return request.param


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module():
    """JAX keeps what it compiled, in more memory mappings than Linux allows a process."""
    yield
    jax.clear_caches()
