"""State of an online softmax in the Mosaic kernels, in base 2: its start, merge and end."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_paged.kernels.logits import LN_2, LOG2_E
from pallas_paged.kernels.mosaic import ops

State = tuple[jax.Array, jax.Array, jax.Array]  # m f32[R], l f32[R], acc f32[R, D]


def empty_state(num_rows: int, num_columns: int) -> State:
    """Return the state of rows that have seen no key, in the layouts of `wgmma`."""
    return (
        ops.full((num_rows,), -jnp.inf, ops.WGMMA_ROW),
        ops.full((num_rows,), 0.0, ops.WGMMA_ROW),
        ops.full((num_rows, num_columns), 0.0, ops.WGMMA),
    )


def scale(acc: jax.Array, factor: jax.Array) -> jax.Array:
    """Return `acc` times a factor for each row, or of the only row."""
    return acc * (ops.bcast(factor, acc) if factor.ndim else factor)


def merge_partial(state: State, lse: jax.Array, out: jax.Array, *, interpret: bool) -> State:
    """Return a state that has merged a partial state, normalised and with `lse` in base 2."""
    m_i, l_i, acc = state
    m_new = jnp.maximum(m_i, lse)
    m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # rows that have seen no key yet
    less = ops.difference(lse, m_safe, ops.WGMMA_ROW, interpret=interpret)
    alpha, w = jnp.exp2(m_i - m_safe), jnp.exp2(less)
    return m_new, l_i * alpha + w, scale(acc, alpha) + scale(out, w)


def finish(state: State, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return `(out f32[R, D], lse f32[R])` of a state, lse in base e.

    Sinks f32`[R]` join the denominator of rows that have seen a key.
    """
    empty = state[1] == 0.0
    m_i, l_i, acc = state if sinks is None else _join_sinks(state, sinks, empty)
    l_safe = jnp.where(empty, 1.0, l_i)
    lse = jnp.where(empty, -jnp.inf, m_i * LN_2 + jnp.log(l_safe))
    return scale(acc, 1.0 / l_safe), lse


def _join_sinks(state: State, sinks: jax.Array, empty: jax.Array) -> State:
    m_i, l_i, acc = state
    sinks = sinks * LOG2_E
    m_new = jnp.where(empty, 0.0, jnp.maximum(m_i, sinks))
    alpha = jnp.exp2(m_i - m_new)
    # Not exp2(sinks - m_new) where that is 1: the compiler fuses the product with the difference,
    # which then is the rounding of the product, not 0, and large for a large sink.
    weights = jnp.where(sinks > m_i, 1.0, jnp.exp2(sinks - m_new))
    l_i = jnp.where(empty, 0.0, l_i * alpha + weights)
    return m_new, l_i, scale(acc, alpha)
