"""Signals that end a process at once, where an exception would wait for a compilation."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable


class Signals:
    """Waits for signals in a thread of its own: each ends the process, or calls a function.

    Those that the parent has ignored stay ignored. Make it before other threads start, in the main
    thread, which must call the methods, too.
    """

    def __init__(self, *numbers: signal.Signals):
        """Block these signals, and start to wait."""
        self._stop: Callable[[int], object] | None = None
        self._numbers = {x for x in numbers if signal.getsignal(x) is not signal.SIG_IGN}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def call(self, stop: Callable[[int], object]) -> None:
        """Call this with the next signal, in the thread; the one after it ends the process."""
        self._stop = stop

    def release(self) -> None:
        """Leave the signals to Python's handlers: Ctrl-C raises KeyboardInterrupt again."""
        if self._numbers:
            self.call(sys.exit)  # ends the thread
            assert self._thread.ident is not None
            signal.pthread_kill(self._thread.ident, next(iter(self._numbers)))
            self._thread.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)

    def end_at_once(self) -> None:
        """Let released signals end the process."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL)

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(self._numbers)
            stop, self._stop = self._stop, None
            if stop is None:
                os._exit(128 + number)  # all output is flushed as it is printed
            stop(number)
