"""Attention over parts of the keys, merged into attention over all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.attention.arguments import check_states
from pallas_paged.checks import as_array, default_promotion
from pallas_paged.kernels import xla


@default_promotion()
def merge_attention_states(outs: ArrayLike, lses: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Merge attention over disjoint sets of keys into attention over their union.

    Args:
        outs: f32, bf16 or f16 `[S, ..., D]`, the outputs of the S states.
        lses: f32`[S, ...]`, their natural-log log-sum-exps; -inf marks a state that saw no key,
            whose `outs` may then hold anything.

    Returns:
        `(out [..., D] in the dtype of outs, lse f32[...])`. Where no state saw a key, `out = 0` and
        `lse = -inf`.

    Raises:
        ValueError: the shapes do not belong together or a dtype is not allowed.
    """
    outs, lses = as_array("outs", outs), as_array("lses", lses)
    check_states(outs, lses)
    return xla.merge_states(jnp.asarray(outs), jnp.asarray(lses))
