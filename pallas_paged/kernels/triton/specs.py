"""Block specs of the Triton kernels, whose programs index their refs themselves."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl


def whole(tree: Any) -> Any:
    """Specs that give every program all of every array, or shape, of a pytree."""
    return jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape)), tree)


def scale_spec(x: jax.Array | None) -> pl.BlockSpec | None:
    """Spec of scales `[Hkv, P * S]`, a program gets its KV head's, or of the one of all, `[1]`."""
    return kv_head(x, 0) if x is None or x.ndim == 2 else whole(x)


def kv_head(x: Any, axis: int) -> pl.BlockSpec | None:
    """Spec that gives a program all of an array but, of `axis`, its own KV head only.

    The first axis of the grid must be the KV heads. None for None.
    """
    if x is None:
        return None
    block = tuple(None if i == axis else n for i, n in enumerate(x.shape))
    return pl.BlockSpec(
        block, lambda h, *_: tuple(h if i == axis else 0 for i in range(len(block)))
    )
