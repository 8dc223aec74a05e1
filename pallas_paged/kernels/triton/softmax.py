"""The softmax of the Triton kernels over keys that come block by block, and the values under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.logits import dot
from pallas_paged.kernels.triton.one_byte import Operands, split_scales

# f32 over R query rows: of the exponents the largest `[R]`, the sum `[R]`, and for each tile of
# values the weighted sum `[R, W]`.
State = tuple[jax.Array, jax.Array, list[jax.Array]]


def empty(num_rows: int, width: int, num_tiles: int) -> State:
    """The state of no keys."""
    return (
        jnp.full((num_rows,), -jnp.inf, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
        [jnp.zeros((num_rows, width), jnp.float32) for _ in range(num_tiles)],
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
    """The state with a block of keys more.

    Args:
      all_see: every row sees one of the keys seen so far.
      operands: what the values are, and whether there is PTX.
    """
    m_i, l_i, acc = state
    column = factor if isinstance(factor, float) else factor[:, None]
    # A weight is the probability times the scale of its value. f16 has little range, so there the
    # maximum is that of the weights: the scales' powers of two go to the exponent.
    significands, inverses = v_scales, None
    if v_scales is not None and operands.in_f16:
        exponents, significands, inverses = split_scales(v_scales)
        s, factor, column = s * column + exponents[None, :], 1.0, 1.0
    m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
    m_safe = m_new if all_see else jnp.where(m_new == -jnp.inf, 0.0, m_new)
    alpha = _exp2(m_i - m_safe, operands)
    # The product is rounded, as in the maximum: fused with the difference it would leave what is
    # rounded off, which is more than an exponent holds where logits are very large.
    p = _exp2(s * column - m_safe[:, None], operands)
    weights = p if significands is None else p * significands[None, :]
    p = p if inverses is None else p * inverses[None, :]
    l_new = l_i * alpha + p.sum(axis=1)
    acc = [
        a * alpha[:, None] + dot(weights.astype(v.dtype), v)
        for a, v in zip(acc, values(), strict=True)
    ]
    return m_new, l_new, acc


def _exp2(x: jax.Array, operands: Operands) -> jax.Array:
    """`2 ** x`, or 0 where that is subnormal, for whose sake Triton takes four instructions."""
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
