"""Fixtures of the engine's tests: the model in plain JAX, without a cache."""

from __future__ import annotations

import pytest

from tests.support.engine_calls import MODEL, PROMPTS, weights
from tests.support.oracle import Oracle


@pytest.fixture(scope="module", autouse=True)
def _one_precision(exact_products):
    """All modules share compiled steps, whose precision is part of their key."""


@pytest.fixture(scope="module")
def oracle(exact_products):
    return Oracle(MODEL, weights())


@pytest.fixture(scope="module")
def greedy_tokens(oracle):
    """The next 14 tokens of each of PROMPTS."""
    return [oracle.continue_(prompt, 14) for prompt in PROMPTS]
