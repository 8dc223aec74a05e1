"""The softmax of the Triton kernels over keys that come block by block, and the values under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.logits import dot
from pallas_paged.kernels.one_byte import split_scales

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
    v_scales: jax.Array | None,  # f32[K]
    values: Callable[[], list[jax.Array]],  # tiles [K, W]
    *,
    all_see: bool,
    interpret: bool,
) -> State:
    """The state with a block of keys more.

    Args:
      all_see: every row sees one of the keys seen so far.
      interpret: without PTX.
    """
    m_i, l_i, acc = state
    down = significands = None
    if v_scales is not None:
        # A weight is the probability times the scale of its value. Scales may be of any size but
        # f16 is not, so the maximum is that of the weights: their powers of two go to the exponent.
        exponents, significands, down = split_scales(v_scales)
        s, factor = s * _column(factor) + exponents[None, :], 1.0
    m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
    m_safe = m_new if all_see else jnp.where(m_new == -jnp.inf, 0.0, m_new)
    alpha = _exp2(m_i, 1.0, m_safe, interpret=interpret)
    p = _exp2(s, _column(factor), m_safe[:, None], interpret=interpret)
    weights = p
    if significands is not None and down is not None:
        p, weights = p * down[None, :], p * significands[None, :]
    l_new = l_i * alpha + p.sum(axis=1)
    acc = [
        a * alpha[:, None] + dot(weights.astype(v.dtype), v)
        for a, v in zip(acc, values(), strict=True)
    ]
    return m_new, l_new, acc


def _column(factor: Any) -> Any:
    return factor if isinstance(factor, float) else factor[:, None]


def _exp2(x: jax.Array, factor: Any, m: jax.Array, *, interpret: bool) -> jax.Array:
    """`2 ** (x * factor - m)`, where what is less than the smallest normal f32 may be 0."""
    if interpret:
        return jnp.exp2(x * factor - m)
    # Of the same in jnp Triton makes six instructions and not two: a product, a difference, and
    # four for the sake of subnormal results.
    [y] = plgpu.elementwise_inline_asm(
        _EXP2,
        args=[x, *(jnp.broadcast_to(jnp.float32(a), x.shape) for a in (factor, m))],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return y


_EXP2 = """{
.reg .f32 y;
neg.f32 y, $3;
fma.rn.f32 y, $1, $2, y;
ex2.approx.ftz.f32 $0, y;
}"""
