"""Event loops for tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

SECONDS = 120  # after which a test fails


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a new event loop, within a time limit."""
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let a test that is a coroutine run in an event loop."""

    @functools.wraps(test)
    def run_test(**fixtures: Any) -> None:
        run(test(**fixtures))

    return run_test


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    while not condition():
        await asyncio.sleep(0.001)
