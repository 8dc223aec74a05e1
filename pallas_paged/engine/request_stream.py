"""The outputs of a request, on their way from the engine's thread to a consumer elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace

from pallas_paged.engine.outputs import CompletionOutput, FinishReasonName, RequestOutput
from pallas_paged.engine.request import Request

Event = threading.Event | asyncio.Event
Waiter = tuple[asyncio.AbstractEventLoop | None, Event]
_Snapshot = tuple[
    CompletionOutput, int, str, float | None, FinishReasonName | None, int | str | None
]


class RequestStream:
    """The outputs of one request, each what is new since the last one.

    Leaving a loop over it before the end aborts the request, and so does dropping the stream. The
    engine does not wait for a slow consumer, whose next output then has more.

    Attributes:
        request_id: as submitted, or the number that was taken.
    """

    def __init__(self, mailbox: Mailbox, leave: Callable[[], None]):
        self.request_id = mailbox.request_id
        self._mailbox, self._leave = mailbox, leave

    def close(self) -> None:
        """Abort the request if it is not finished; do not wait for it."""
        if not self._mailbox.closed:
            self._leave()

    def __del__(self) -> None:
        self.close()

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield the outputs; wait for them, so not in an event loop.

        Raises:
            EngineDeadError: the engine died before the request was finished.
        """
        try:
            while not self._mailbox.drained:
                event = threading.Event()
                if (output := self._mailbox.take(None, event)) is None:
                    event.wait()
                else:
                    yield output
        finally:
            self.close()

    async def __aiter__(self) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs, in any event loop.

        Raises:
            EngineDeadError: the engine died before the request was finished.
        """
        loop = asyncio.get_running_loop()
        try:
            while not self._mailbox.drained:
                event = asyncio.Event()
                if (output := self._mailbox.take(loop, event)) is None:
                    await event.wait()
                else:
                    yield output
        finally:
            self.close()


class Mailbox:
    """Between the engine's thread, which publishes what a request has, and its consumer.

    Attributes:
        request: the request.
        is_added: whether the engine has it.
        closed: whether nothing more will be published.
        drained: whether the consumer has all of it.
    """

    def __init__(self, request: Request):
        self.request, self.is_added = request, False
        self.closed = self.drained = False
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._waiters: list[Waiter] = []
        # The completions as of the last publication, and how much of each was taken. The engine
        # appends to lists of tokens, so the numbers of tokens are enough to read them later.
        self._published: list[_Snapshot] | None = None
        self._taken: dict[CompletionOutput, tuple[int, int, str | None]] = {}

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def publish(self, request: Request) -> list[Waiter]:
        """Let the consumer take what the request has; return the waiters to be woken."""
        published = [
            (x, len(x.token_ids), x.text, x.cumulative_logprob, x.finish_reason, x.stop_reason)
            for x in request.outputs
        ]
        with self._lock:
            self._published, self.closed = published, request.finished
            waiters, self._waiters = self._waiters, []
        return waiters

    def fail(self, error: BaseException) -> None:
        """Raise an error at the consumer, after what was published."""
        with self._lock:
            self._error, self.closed = error, True
            waiters, self._waiters = self._waiters, []
        for loop, event in waiters:
            set_all(loop, [event])

    def take(self, loop: asyncio.AbstractEventLoop | None, event: Event) -> RequestOutput | None:
        """Return what is new, or None and set the event later, in its loop if it has one."""
        with self._lock:
            if self._published is None:
                if self._error is not None:
                    raise self._error
                if self.closed:  # another consumer has taken the last output
                    event.set()
                self._waiters.append((loop, event))
                return None
            published, self._published = self._published, None
            self.drained = finished = self.closed and self._error is None
            news: list[CompletionOutput] = []
            taken: dict[CompletionOutput, tuple[int, int, str | None]] = {}
            for live, num_tokens, text, cumulative_logprob, finish_reason, stop_reason in published:
                before = self._taken.get(live, (0, 0, None))
                taken[live] = num_tokens, len(text), finish_reason
                if taken[live] != before:
                    new = slice(before[0], num_tokens)
                    delta = CompletionOutput(
                        index=live.index,
                        text=text[before[1] :],
                        token_ids=live.token_ids[new],
                        cumulative_logprob=cumulative_logprob,
                        logprobs=None if live.logprobs is None else live.logprobs[new],
                        finish_reason=finish_reason,
                        stop_reason=stop_reason,
                    )
                    news.append(delta)
            restarted = bool(self._taken.keys() - taken.keys())
            self._taken = taken
        return replace(self.request.output(news, restarted=restarted), finished=finished)


def set_all(loop: asyncio.AbstractEventLoop | None, events: Sequence[Event]) -> bool:
    """Set events, those of an event loop by one call; return False if the loop is closed."""

    def set_each() -> None:
        for event in events:
            event.set()

    if loop is None:
        set_each()
        return True
    try:
        loop.call_soon_threadsafe(set_each)
    except RuntimeError:
        return False
    return True
