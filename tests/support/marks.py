"""Marks of tests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def slow(parameters: Iterable) -> list:
    """Parameters of a test for runs with the slow tests only; tuples are of several arguments."""
    each = (x if isinstance(x, tuple) else (x,) for x in parameters)
    return [pytest.param(*x, marks=pytest.mark.slow) for x in each]
