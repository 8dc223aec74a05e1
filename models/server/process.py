"""The socket and the signals of the server's process; imports nothing that starts threads."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, so that a port in use is an error before the loading.

    Raises:
        OSError: the address can't be used.
        ValueError: the port is out of range.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"{port=} must be in 0..65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    return bound


class Signals:
    """Ends the process at SIGINT or SIGTERM: at once, or while it serves after a shutdown.

    A second signal ends it at once. A SIGINT that the parent has ignored stays ignored. Make it
    before other threads start, in the main thread.
    """

    def __init__(self) -> None:
        """Block the signals, and start a thread that waits for them."""
        self._stop: Callable[[], object] | None = None
        signals = {signal.SIGTERM}
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signals.add(signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        threading.Thread(target=self._wait, args=(signals,), daemon=True).start()

    def call(self, stop: Callable[[], object]) -> None:
        """Call this function at the first signal, from another thread."""
        self._stop = stop

    def _wait(self, signals: set[signal.Signals]) -> None:
        while True:
            number = signal.sigwait(signals)
            if (stop := self._stop) is None:
                os._exit(128 + number)
            self._stop = None
            print("shutting down ... (again: at once)", file=sys.stderr, flush=True)
            stop()
