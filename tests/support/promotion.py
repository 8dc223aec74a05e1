"""JAX's strictest rules for promotion, which programs that use the library may set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@contextlib.contextmanager
def strict_promotion() -> Iterator[None]:
    """Refuse to promote ranks and dtypes."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def assert_is_strict() -> None:
    """Both rules are in force here, or a test of them could not fail."""
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones(3) + jnp.ones((2, 3))
    with pytest.raises(ValueError, match="promotion"):
        jnp.ones(3) + np.ones(3, np.int32)
