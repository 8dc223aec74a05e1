"""Online softmax of the Triton kernels: a block of logits and values joins the running state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.logits import LogitOptions, dot, split_scales, visible
from pallas_paged.kernels.triton.one_byte import Operands

# f32 of R query rows: the largest base-2 logit `[R]`, the sum `[R]`, and the weighted sum of the
# values, `[R, W]` for each tile of them.
State = tuple[jax.Array, jax.Array, list[jax.Array]]


def empty(num_rows: int, width: int, num_tiles: int) -> State:
    """Return the state before any key."""
    return (
        jnp.full((num_rows,), -jnp.inf, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
        [jnp.zeros((num_rows, width), jnp.float32) for _ in range(num_tiles)],
    )


def mask(
    keys: jax.Array,  # i32[1, K] or [K, 1]
    positions: jax.Array,  # i32[R, 1] or [1, R], of the queries
    tokens: jax.Array,  # i32, like positions: places among the newest tokens of the row
    before: jax.Array,  # i32[], keys older than the row's newest tokens
    *,
    row: jax.Array,
    tree_mask_ref: Any,  # i8[B, M, M] or None
    options: LogitOptions,
    causal: bool,
    end: Any = None,
) -> jax.Array:
    """Return which keys each query sees, without those from `end` on, by `logits.visible`."""

    def in_tree():
        newest, size = keys - before, tree_mask_ref.shape[1]
        known = (tokens < size) & (newest >= 0) & (newest < size)
        allowed = plgpu.load(tree_mask_ref.at[row[None, None], tokens, newest], mask=known, other=0)
        return (newest < 0) | (allowed != 0)

    return visible(
        keys,
        positions,
        options,
        end=end,
        last=positions if causal and tree_mask_ref is None else None,
        tree=None if tree_mask_ref is None else in_tree,
    )


def attend(
    state: State,
    s: jax.Array,  # f32[R, K]
    factor: Any,  # float or f32[R]; s * factor are the logits of `exp2`
    v_scales: jax.Array | None,  # f32[K], or [1] for all
    values: Callable[[], list[jax.Array]],  # tiles [K, W]
    *,
    all_see: bool,
    operands: Operands,
) -> State:
    """Return the state after a block; with `all_see` all rows have seen a key, here or before."""
    m_i, l_i, acc = state
    column = factor if isinstance(factor, float) else factor[:, None]
    # A weight is the probability times the scale of its value. f16 has a small range, so there
    # the maximum is taken over the weights: the scales' powers of two go to the exponent.
    significands, inverses = v_scales, None
    if v_scales is not None and operands.in_f16:
        exponents, significands, inverses = split_scales(v_scales)
        s, factor, column = s * column + exponents[None, :], 1.0, 1.0
    m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
    m_safe = m_new if all_see else jnp.where(m_new == -jnp.inf, 0.0, m_new)
    alpha = exp2(m_i - m_safe, operands)
    # The product is rounded, as it is in the maximum. A fused multiply-subtract would keep the
    # rounding error, which overflows an exponent where logits are very large.
    p = exp2(s * column - m_safe[:, None], operands)
    weights = p if significands is None else p * significands[None, :]
    p = p if inverses is None else p * inverses[None, :]
    l_new = l_i * alpha + p.sum(axis=1)
    acc = [
        a * alpha[:, None] + dot(weights.astype(v.dtype), v)
        for a, v in zip(acc, values(), strict=True)
    ]
    return m_new, l_new, acc


def exp2(x: jax.Array, operands: Operands) -> jax.Array:
    """Return `2 ** x`, flushed to 0 where subnormal: keeping those costs four instructions."""
    if operands.interpret:
        return jnp.exp2(x)
    [y] = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return y
