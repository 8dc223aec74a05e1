"""The outputs of a request, on their way from the engine's thread to a consumer elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace

from pallas_paged.engine.outputs import RequestOutput
from pallas_paged.engine.requests.request import Request

Event = threading.Event | asyncio.Event
Waiter = tuple[asyncio.AbstractEventLoop | None, Event]


class OutputCollector:
    """Takes outputs from the engine's thread, and merges those that a consumer has not taken yet.

    Attributes:
        request: the request.
        closed: whether nothing more will come.
        drained: whether the consumer has taken the last output.
        takes_whole: whether the consumer wants one output, with all of the request.
    """

    def __init__(self, request: Request):
        self.request = request
        self.closed = self.drained = self.takes_whole = False
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._has_taken = False
        self._waiters: list[Waiter] = []

    def put(self, output: RequestOutput | None, error: BaseException | None = None) -> list[Waiter]:
        """Add an output, or an error to raise after the outputs; return the waiters to wake."""
        with self._lock:
            if self.takes_whole and output is not None:
                if not output.finished:
                    return []
                self._output = self.request.output()
            elif output is not None:
                output = self._output.add(output) if self._output is not None else output
                if output.restarted and not self._has_taken:  # nothing is void
                    output = replace(output, restarted=False)
                self._output = output
            self._error, self.closed = error, output is None or output.finished
            waiters, self._waiters = self._waiters, []
        return waiters

    def take(self, waiter: Waiter) -> RequestOutput | None:
        """Return what is new, or None: the event of the waiter will be set, in its loop."""
        with self._lock:
            output = None if self.takes_whole and not self.closed else self._output
            if output is not None:
                self._output = None
                self._has_taken, self.drained = True, output.finished
            elif self._error is not None:
                raise self._error
            elif self.closed:  # another consumer has taken the last output
                waiter[1].set()
            else:
                self._waiters.append(waiter)
        return output


class RequestStream:
    """The outputs of one request, each what is new since the last one.

    Leaving a loop over it before the end aborts the request, and so does dropping the stream. The
    engine does not wait for a slow consumer, whose next output then has more.

    Attributes:
        request: the request, whose fields change as the engine steps.
        request_id: as submitted, or the number that was taken.
    """

    def __init__(self, collector: OutputCollector, abort: Callable[[], object]):
        self.request, self.request_id = collector.request, collector.request.request_id
        self._collector, self._abort = collector, abort

    def close(self) -> None:
        """Abort the request if it is not finished; do not wait for it."""
        if not self._collector.closed:
            self._abort()

    def __del__(self) -> None:
        self.close()

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield the outputs; wait for them, so not in an event loop.

        Raises:
            EngineDeadError: the engine died before the request was finished.
        """
        try:
            while not self._collector.drained:
                event = threading.Event()
                if (output := self._collector.take((None, event))) is None:
                    event.wait()
                else:
                    yield output
        finally:
            self.close()

    async def whole(self) -> RequestOutput:
        """Wait for the end and return the whole request, in any event loop; wakes up only once.

        To be called before anything else of the stream is read; errors as in `__iter__`.
        """
        self._collector.takes_whole = True
        outputs = [output async for output in self]
        return outputs[-1]

    async def __aiter__(self) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs, in any event loop; errors as in `__iter__`."""
        loop = asyncio.get_running_loop()
        try:
            while not self._collector.drained:
                event = asyncio.Event()
                if (output := self._collector.take((loop, event))) is None:
                    await event.wait()
                else:
                    yield output
        finally:
            self.close()
