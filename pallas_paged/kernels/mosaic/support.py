"""What the Mosaic kernels of all GPUs need. Importing this module does not import Mosaic."""

from __future__ import annotations

import inspect

import jax

V_HEAD_DIMS = ((192, 128),)  # of K and of V of ragged calls, where they differ


def why_not_jax() -> str | None:
    """Return why the kernels can't be built with this JAX, or None."""
    reason = (
        "needs the Mosaic GPU lowering of Pallas as in JAX 0.11, which this JAX "
        f"({jax.__version__}) lacks"
    )
    try:
        from jax.experimental.pallas import mosaic_gpu as plgpu
    except ImportError as e:
        return f"{reason}: {e}"
    try:
        inspect.signature(plgpu.load).bind(None)  # 0.10 has the function, but needs an index
    except TypeError:
        return reason
    return None
