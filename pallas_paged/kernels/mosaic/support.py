"""What the Mosaic kernels of all GPUs need. Importing this module does not import Mosaic."""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import numpy as np

from pallas_paged.kernels.call import Call

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


def why_not_memory(call: Call, config: Any, needed: int) -> str | None:
    """Return why a program of a call that needs `needed` bytes of shared memory can't run."""
    limit = call.device.shared_memory
    if needed <= limit:
        return None
    return f"can't run {config}: it needs {needed} bytes of shared memory; a program has {limit}"


def shared_memory_bytes(types: Any, params: Any) -> int:
    """Return the bytes of shared memory that a program with scratch of these types needs.

    The compiler aligns every buffer to 1 KB. It adds barriers of 8 bytes and a buffer for
    reductions across warps.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    leaves = jax.tree.leaves(types)
    barriers = [x for x in leaves if isinstance(x, plgpu.Barrier)]
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in leaves if x not in barriers]
    sizes.append(8 * sum(int(np.prod(x.num_barriers)) for x in barriers))  # int or tuple
    sizes.append(params.reduction_scratch_bytes)
    return sum(-(-size // 1024) * 1024 for size in sizes)
