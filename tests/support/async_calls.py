"""Clients of `AsyncEngine`, and a gate that holds its thread."""

import threading
from collections.abc import AsyncIterable, Sequence
from typing import Any

from pallas_paged.engine import Engine, RequestOutput
from tests.support.engine_calls import make_engine, serve, tokens_of


class Gate:
    """Holds the engine's thread before each step, until `let` allows some."""

    def __init__(self, engine: Engine):
        self._step, self._passes = engine.replicas.step, threading.Semaphore(0)
        self.held = threading.Event()  # the thread is at the gate
        engine.replicas.step = self._held_step

    def _held_step(self) -> Any:
        if not self._passes.acquire(blocking=False):
            self.held.set()
            self._passes.acquire()
            self.held.clear()
        return self._step()

    def let(self, num_steps: int = 10**4) -> None:
        if num_steps:
            self._passes.release(num_steps)


def alone(prompt: Any, params: Any) -> list[list[int]]:
    """The tokens of all completions of a request that has the engine for itself."""
    return tokens_of(serve(make_engine(), [prompt], params, check=False))


def merged(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for output in outputs:
        found = {} if output.restarted else found
        for one in output.outputs:
            found.setdefault(one.index, []).extend(one.token_ids)
    assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
    return [found[index] for index in sorted(found)]


async def collect(outputs: AsyncIterable[RequestOutput]) -> list[list[int]]:
    return merged([one async for one in outputs])
