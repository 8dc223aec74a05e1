"""Prefix sums of few numbers, as one kernel on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MOST_BY_COMPARISON = 1024


def prefix_sums(x: jax.Array) -> jax.Array:
    """Return the inclusive prefix sums i32`[N]` of i32`[N]`.

    XLA makes several kernels of `cumsum`, which take longer in a decode step than N * N additions.
    """
    if x.size > _MOST_BY_COMPARISON:
        return jnp.cumsum(x, dtype=jnp.int32)
    place = jnp.arange(x.size, dtype=jnp.int32)
    return jnp.sum(jnp.where(place <= place[:, None], x, 0), axis=1, dtype=jnp.int32)
