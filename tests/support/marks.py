"""Marks of tests."""

from collections.abc import Iterable

import jax
import pytest

from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support import without_triton


def _gpu_memory() -> int:
    if jax.default_backend() != "gpu":
        return 0
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)


needs_triton = pytest.mark.skipif(without_triton.is_hidden(), reason="this run hides Triton")
needs_mosaic = pytest.mark.skipif(
    mosaic_support.why_not_jax() is not None, reason="the Mosaic GPU kernels need JAX 0.11"
)
needs_large_gpu = pytest.mark.skipif(_gpu_memory() < 24 << 30, reason="needs 24 GiB of a GPU: -n0")


def slow(parameters: Iterable) -> list:
    """Parameters of a test for runs with the slow tests only; tuples are of several arguments."""
    each = (x if isinstance(x, tuple) else (x,) for x in parameters)
    return [pytest.param(*x, marks=pytest.mark.slow) for x in each]


def slow_if_interpreted(names: Iterable[str]) -> list:
    """Implementations; interpreted kernels run with the slow tests only."""
    return [slow([name])[0] if name.endswith("_interpret") else name for name in names]


def by_implementation(
    quick: Iterable[tuple], names: Iterable[str], others: Iterable[tuple] = ()
) -> list:
    """Rows of parameters with each implementation behind them; `others` are slow.

    An interpreted kernel runs the first quick row, and the others with the slow tests only.
    """
    quick, others, found = [*quick], [*others], []
    for name in names:
        count = 1 if name.endswith("_interpret") else len(quick)
        found += [(*row, name) for row in quick[:count]]
        found += slow((*row, name) for row in (*quick[count:], *others))
    return found
