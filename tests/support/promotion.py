"""JAX's strict promotion rules, which a program that uses the library may set."""

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
    """Check that both rules apply, so that a test of them can fail."""
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones(3) + jnp.ones((2, 3))
    with pytest.raises(ValueError, match="promotion"):
        jnp.ones(3) + np.ones(3, np.int32)
