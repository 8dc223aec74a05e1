"""What Ctrl-C does: it ends the process at once, or raises KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import threading


class _Waiter(threading.Thread):
    """Waits for a Ctrl-C, which is blocked in all threads, and ends the process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopping = False

    def run(self) -> None:
        signal.sigwait({signal.SIGINT})
        if not self.stopping:
            os._exit(130)  # all output is flushed as it is printed


_waiter = _Waiter()


def exit_on_ctrl_c() -> None:
    """Let Ctrl-C end the process with status 130, unless its parent has it ignored.

    An exception would wait for a compilation to end, and could hit an import half done.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        _waiter.start()


def raise_on_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again; the main thread must call this."""
    if _waiter.is_alive() and _waiter.ident is not None:
        _waiter.stopping = True
        signal.pthread_kill(_waiter.ident, signal.SIGINT)
        _waiter.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_on_ctrl_c() -> None:
    """Let Ctrl-C end the process at once again, after `raise_on_ctrl_c`; in the main thread.

    An exception could hit functions that run at the exit.
    """
    if _waiter.stopping:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
