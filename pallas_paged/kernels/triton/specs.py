"""Block specs of the Triton kernels, whose programs index their refs themselves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def full_specs(tree: Any) -> Any:
    """Return specs that give each program every array, or shape, of a pytree in full."""
    return jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape)), tree)


def kv_head(tree: Any, axis: int) -> Any:
    """Return specs that give a program its KV head along `axis`, and all of the other axes.

    `tree` is a pytree of arrays or shapes. The first axis of the grid must be the KV heads.
    """

    def spec(x: Any) -> pl.BlockSpec:
        block = tuple(None if i == axis else n for i, n in enumerate(x.shape))
        return pl.BlockSpec(
            block, lambda h, *_: tuple(h if i == axis else 0 for i in range(len(block)))
        )

    return jax.tree.map(spec, tree)


def loop_params(config: Any) -> plgpu.CompilerParams:
    """Return the parameters of a kernel with a config of warps and stages."""
    return plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)


def by_kv_head(x: jax.Array | None, num_kv_heads: int) -> jax.Array | None:
    """Return values of query heads `[Hq]` as `[Hkv, G]`; None of None."""
    return None if x is None else x.reshape(num_kv_heads, -1)


def as_int8(mask: jax.Array | None) -> jax.Array | None:
    """Return a mask as i8, since a kernel loads no bool; None of None."""
    return None if mask is None else mask.astype(jnp.int8)


def load_masked(ref: Any, row: jax.Array, places: jax.Array, other: float) -> jax.Array:
    """Return these elements of a row of a ref `[rows, N]`; `other` where there is none."""
    return plgpu.load(ref.at[row, places], mask=places < ref.shape[1], other=other)
