"""Marks of tests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support import without_triton

needs_triton = pytest.mark.skipif(
    without_triton.is_hidden(), reason="of the Triton kernels, which this run hides"
)


def slow(parameters: Iterable) -> list:
    """Parameters of a test for runs with the slow tests only; tuples are of several arguments."""
    each = (x if isinstance(x, tuple) else (x,) for x in parameters)
    return [pytest.param(*x, marks=pytest.mark.slow) for x in each]
