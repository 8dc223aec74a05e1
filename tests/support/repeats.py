"""A call of a kernel many times on the device, in one program: do its bits repeat?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def other_bits(a: Any, b: Any) -> jax.Array:
    """Return whether two trees of arrays differ in a bit."""

    def differ(x: jax.Array, y: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
            x, y = (lax.bitcast_convert_type(z, word) for z in (x, y))
        return (x != y).any()

    return jnp.stack(jax.tree.leaves(jax.tree.map(differ, a, b))).any()


def repeat(function: Callable[..., Any], arrays: Any, runs: int) -> tuple[Any, int]:
    """Run `function(*arrays)` once, then `runs` times in a loop.

    Returns:
        The first results, and how many of the runs in the loop gave other bits.
    """
    first = jax.jit(function)(*arrays)

    @jax.jit
    def count(arrays: Any, first: Any) -> jax.Array:
        def body(i: jax.Array, found: jax.Array) -> jax.Array:
            # XLA may not take the call out of the loop: its arrays depend on the steps before.
            given, _, found = lax.optimization_barrier((arrays, i, found))
            return found + other_bits(first, function(*given))

        return lax.fori_loop(0, runs, body, jnp.int32(0))

    return first, int(count(jax.tree.map(jnp.asarray, arrays), first))


def largest_error(actual: Any, expected: Any) -> float:
    """Return the largest error beside the largest value of a result, over the results."""
    errors = []
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf")
        a, b = (x[np.isfinite(b)] for x in (a, b))
        errors.append(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-9))
    return float(max(errors))
