"""Fixtures of the engine's tests: the model without a cache, and an engine in a thread."""

import faulthandler

import pytest

from pallas_paged.engine import AsyncEngine
from tests.support.async_calls import Gate
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    NumberTokenizer,
    assert_every_page_is_free,
    make_engine,
    weights,
)
from tests.support.event_loops import SECONDS, run
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


@pytest.fixture
def watchdog():
    """End the process with the stacks of all threads if a test hangs."""
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def inner(watchdog):
    """The engine within an `AsyncEngine`; no page is left in the end."""
    inner = make_engine(tokenizer=NumberTokenizer())
    yield inner
    inner.wake_up()
    assert_every_page_is_free(inner)


@pytest.fixture
def engine(inner):
    engine = AsyncEngine(inner)
    engine.start()
    yield engine
    run(engine.shutdown())


@pytest.fixture
def gate(inner):
    gate = Gate(inner)
    yield gate
    gate.let()
