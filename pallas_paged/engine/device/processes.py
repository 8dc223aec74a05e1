"""One engine over several processes: process 0 schedules, the others make the same device calls.

The calls go over a socket to each process, a few kilobytes at a time: that takes microseconds and
does not wait for a device, as a broadcast by a collective would.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import pickle
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

CONNECT_SECONDS = 60.0  # that processes wait for one another to connect, or to take a message
GREETING_SECONDS = 1.0  # that process 0 waits for the first bytes of a connection
_POLL_SECONDS = 20e-6  # between two looks at whether the devices are ready
_CHECK_SECONDS = 0.01  # between two looks at whether the other processes are there
_KEY_BYTES = 32


class Followers:
    """The other processes, in process 0."""

    def __init__(self, sockets: Sequence[socket.socket]):
        self._sockets = list(sockets)
        self._poll = select.poll()
        self._indices: dict[int, int] = {}  # by file descriptor
        for index, one in enumerate(sockets, 1):
            self._poll.register(one, select.POLLIN)
            self._indices[one.fileno()] = index
        self._waiting = False  # the last message was a release, which ends `follow`
        # Before the end of jax.distributed, which waits for processes that wait for a message.
        atexit.register(self._hang_up)

    def send(self, name: str, args: tuple[Any, ...] = ()) -> None:
        """Let the other processes make a call of the executor.

        Raises:
            RuntimeError: a process has ended, failed, or does not take messages.
        """
        if name != "release" or not self._waiting:
            self.check()
            message = _packed(name, *args)
            for index, one in enumerate(self._sockets, 1):
                try:
                    one.sendall(message)
                except OSError as error:
                    what = f"process {index} has ended or does not answer"
                    raise RuntimeError(what) from error
        self._waiting = name == "release"

    def rejoin(self) -> None:
        """Note that the other processes follow again."""
        self._waiting = False

    def wait(self, arrays: Any) -> None:
        """Wait until arrays are ready, for as long as all processes are there.

        Raises:
            RuntimeError: a process has ended or failed, so that they may never be ready.
        """
        leaves, last = jax.tree.leaves(arrays), time.monotonic()
        while not all(leaf.is_ready() for leaf in leaves):
            if time.monotonic() - last > _CHECK_SECONDS:
                self.check()
                last = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def close(self, error: BaseException | None = None) -> None:
        """Let the other processes end: `follow` returns False, or raises the error."""
        message = _packed("close")
        if error is not None:
            message = _packed("fail", str(error) or type(error).__name__)
        for one in self._sockets:
            with suppress(OSError):  # it has ended
                one.sendall(message)
        self._hang_up()
        atexit.unregister(self._hang_up)

    def check(self) -> None:
        """Raise RuntimeError if a process has ended or failed: others send nothing."""
        for descriptor, _ in self._poll.poll(0):
            index = self._indices[descriptor]
            try:
                reason = self._sockets[index - 1].recv(1 << 16).decode()
            except OSError:
                reason = ""
            raise RuntimeError(f"process {index} has {f'failed: {reason}' if reason else 'ended'}")

    def _hang_up(self) -> None:
        for one in self._sockets:
            one.close()
        self._sockets.clear()


class Leader:
    """Process 0, in the other processes."""

    def __init__(self, connection: socket.socket):
        self._socket, self._file = connection, connection.makefile("rb")
        atexit.register(self.close)

    def follow(self, executor: Any) -> bool:
        """Make the calls of process 0 until it releases the others (True) or closes (False).

        Raises:
            RuntimeError: process 0 has ended or failed.
        """
        while True:
            name, args = self._receive()
            if name in ("release", "close"):
                return name == "release"
            if name == "fail":
                raise RuntimeError(f"process 0 failed: {args[0]}")
            getattr(executor, name)(*args)

    def _receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next call: the name of a method of the executor, and its arguments."""
        try:
            header = self._file.read(8)
            (size,) = struct.unpack("<Q", header)
            return pickle.loads(self._file.read(size))
        except (OSError, EOFError, struct.error, pickle.UnpicklingError) as error:
            raise RuntimeError("process 0 has ended without a close()") from error

    def fail(self, error: BaseException) -> None:
        """Let process 0 fail too, and close the connection."""
        with suppress(OSError):  # it has ended
            self._socket.sendall(f"{type(error).__name__}: {error}".encode()[:4000])
        self.close()

    def close(self) -> None:
        self._file.close()
        self._socket.close()
        atexit.unregister(self.close)


def _packed(name: str, *args: Any) -> bytes:
    """Return a message, which begins with its size: a method of the executor, and its arguments."""
    message = pickle.dumps((name, args), pickle.HIGHEST_PROTOCOL)
    return struct.pack("<Q", len(message)) + message


def connect(engine: str) -> tuple[Followers | None, Leader | None]:
    """Connect process 0, which gets followers, to all others; all of jax.distributed call it.

    Args:
        engine: a description of it, which must be the same in all processes.

    Raises:
        ValueError: a process makes another engine.
        OSError: a process did not connect in time.
    """
    own = hashlib.sha256(engine.encode()).digest()
    own += socket.gethostname().encode()[:255].ljust(256, b"\0")
    all_ = [bytes(x) for x in multihost_utils.process_allgather(np.frombuffer(own, np.uint8))]
    engines, hosts = [x[:-256] for x in all_], [x[-256:] for x in all_]
    if others := [index for index, one in enumerate(engines) if one != engines[0]]:
        raise ValueError(
            f"the processes {others} make another engine than process 0: the config, the sizes of "
            "the model, the shapes of its parameters and the tuning file must be the same in all"
        )
    host = "localhost" if len(set(hosts)) == 1 else hosts[0].rstrip(b"\0").decode()
    if jax.process_index() == 0:
        return _accept(host), None
    message = _broadcast(b"")
    (port,), key = struct.unpack("<H", message[:2]), message[2:]
    connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    connection.sendall(struct.pack("<I", jax.process_index()) + key)
    connection.settimeout(None)
    return None, Leader(connection)


def _accept(host: str) -> Followers:
    """Wait for the connections of the other processes."""
    key = secrets.token_bytes(_KEY_BYTES)
    address = (host if host == "localhost" else "", 0)
    sockets: dict[int, socket.socket] = {}
    with socket.create_server(address, backlog=128) as server:
        _broadcast(struct.pack("<H", server.getsockname()[1]) + key)
        end = time.monotonic() + CONNECT_SECONDS
        while missing := {*range(1, jax.process_count())} - {*sockets}:
            server.settimeout(max(end - time.monotonic(), 0.001))
            try:
                one, _ = server.accept()
            except TimeoutError as error:
                raise TimeoutError(f"the processes {sorted(missing)} do not connect") from error
            if (index := _greeting(one, key)) is None:
                one.close()
            else:
                sockets[index] = one
    return Followers([sockets[index] for index in sorted(sockets)])


def _greeting(connection: socket.socket, key: bytes) -> int | None:
    """Return the process of a new connection, or None for a stranger."""
    connection.settimeout(GREETING_SECONDS)
    try:
        with connection.makefile("rb") as file:
            greeting = file.read(4 + _KEY_BYTES)
    except OSError:
        return None
    if not hmac.compare_digest(greeting[4:], key):
        return None
    connection.settimeout(CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return struct.unpack("<I", greeting[:4])[0]


def _broadcast(message: bytes) -> bytes:
    """Return the message of process 0, of a port and a key."""
    array = np.frombuffer(message.ljust(2 + _KEY_BYTES, b"\0"), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(array), np.uint8))


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C in this block at its end; a second one at once.

    Only Python's own handler of SIGINT is replaced, and only in the main thread, where it runs.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if pending:
            signal.default_int_handler(number, frame)
        pending.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
