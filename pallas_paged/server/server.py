"""The server around the app: its socket, its connections, its process, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import prometheus_client
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pallas_paged.checks import check_integer
from pallas_paged.engine import AsyncEngine, Tokenizer
from pallas_paged.server.app import app_of
from pallas_paged.server.chat_template import ChatTemplate
from pallas_paged.server.fields import APIError
from pallas_paged.server.service import Service

HEAD_SECONDS = 10.0  # in which the head of a request must arrive
MAX_HEAD_BYTES = 64 << 10  # the blank line included
CLOSE_SECONDS = 2.0  # in which aborted requests can still send an error
_KEEP_ALIVE_SECONDS = 60  # more than proxies keep idle connections
# Seconds after which a thread of Python must let another one go on, where 0.005 is the default. The
# threads of the engine and of the connections need one another's results sooner.
_SWITCH_SECONDS = 0.0005


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound, so that a port in use is an error before anything is loaded.

    Raises:
        OSError: the address can't be used.
        ValueError: the host is no text, or the port is out of range.
    """
    if not isinstance(host, str):
        raise ValueError(f"{host=} must be a text")
    check_integer("port", port, 0, 65535)
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


class Connections:
    """Makes the connections of a server, for `uvicorn.Config(http=...)`.

    Attributes:
        open: those that are not closed yet, refused ones too.
    """

    def __init__(self, max_connections: int, count_error: Callable[[int], object]):
        """Accept at most `max_connections` at a time.

        Args:
            max_connections: the limit.
            count_error: called with the status of each error that does not come from the app.
        """
        self.open: set[_Connection] = set()
        self.max_connections, self.count_error = max_connections, count_error

    def __call__(self, **of_uvicorn: Any) -> _Connection:
        return _Connection(self, of_uvicorn)


class _Connection(asyncio.Protocol):
    """A connection whose heads arrive in time and in full, and that requests can cut.

    A parser of its own finds the heads; uvicorn's connection does the rest. The state of a
    request's scope has `cut`, which ends the connection at once.
    """

    def __init__(self, connections: Connections, of_uvicorn: dict[str, Any]):
        self._all, self._of_uvicorn = connections, of_uvicorn
        self._inner: Any = asyncio.Protocol()  # until it is accepted; does nothing
        self._parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # of an old httptools; uvicorn sets it too
            self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head, self._head_bytes = True, 0
        self._error: APIError | None = None  # of what has been read

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._all.open.add(self)
        if len(self._all.open) > (most := self._all.max_connections):
            self._refuse(APIError(503, f"the server has {most} connections already"))
            return
        state = {**self._of_uvicorn["app_state"], "cut": transport.abort}
        self._inner = HttpToolsProtocol(**self._of_uvicorn | {"app_state": state})
        self._inner.connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._all.open.discard(self)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        # Only what a head may still have; the parser does not say how much of a read is the head.
        size = MAX_HEAD_BYTES - self._head_bytes if self._in_head else len(data)
        self._head_bytes += min(size, len(data))
        try:
            self._parser.feed_data(data[:size])
            if self._in_head and self._head_bytes >= MAX_HEAD_BYTES:
                self._error = APIError(431, f"the head has more than {MAX_HEAD_BYTES} bytes")
            else:
                self._parser.feed_data(data[size:])
        except httptools.HttpParserUpgrade:
            pass  # to a protocol that uvicorn does not have here either
        except httptools.HttpParserError:
            self._error = APIError(400, "Invalid HTTP request received.")
        if self._error is not None:
            self._refuse(self._error)
        else:
            self._inner.data_received(data)

    def on_message_begin(self) -> None:
        """Of the parser: a request begins."""
        if self._head_timer is None:  # a later one of the connection
            self._await_head()

    def on_headers_complete(self) -> None:
        """Of the parser: a head has ended."""
        self._in_head = False
        self._end_head()
        if (version := self._parser.get_http_version()) not in ("1.0", "1.1"):
            self._error = APIError(505, f"HTTP/{version} must be HTTP/1.0 or HTTP/1.1")

    def on_message_complete(self) -> None:
        """Of the parser: a request has ended, and the next one may begin."""
        self._in_head, self._head_bytes = True, 0

    def _await_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: APIError) -> None:
        """Answer outside the app, and close."""
        self._end_head()
        self._all.count_error(error.status)
        body = json.dumps(error.body).encode()
        phrase = http.HTTPStatus(error.status).phrase
        head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Serves a service over a socket until `stop`."""

    def __init__(self, service: Service, *, access_log: bool = False, ready: str = ""):
        """Make the app of a service; `ready` is printed when it accepts requests."""
        config = service.config
        self._connections = Connections(config.max_connections, service.metrics.answered)
        protocol: Any = self._connections  # makes protocols, as the class that uvicorn expects
        super().__init__(
            uvicorn.Config(
                app_of(service),
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                log_level=logging.INFO if access_log else logging.WARNING,
                access_log=access_log,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )
        self._service, self._ready = service, ready
        self._stopping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept requests, and say so."""
        await super().startup(sockets)
        if self._ready:
            print(self._ready, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run`."""
        yield

    def stop(self) -> None:
        """Accept no more connections and requests, and serve those that are there; in the loop."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())

    def stop_or_exit(self, number: int) -> None:
        """Stop at the first signal, and end the process at once at a second one."""
        if self._stopping is not None:
            os._exit(128 + number)
        print("shutting down ... (again: at once)", file=sys.stderr, flush=True)
        self.stop()

    async def _stop(self) -> None:
        service = self._service
        service.is_draining = self.should_exit = True
        await asyncio.sleep(service.config.drain_timeout)
        await service.engine.shutdown(drain=False)  # its requests get an error
        await asyncio.sleep(CLOSE_SECONDS)
        for connection in [*self._connections.open]:
            connection.transport.abort()


def serve(
    engine: AsyncEngine,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | str | Callable[..., str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    access_log: bool = False,
    **options: Any,
) -> None:
    """Serve an engine over HTTP until Ctrl-C or SIGTERM; return when the last request has ended.

    A line on the standard output says when requests are accepted, and where. A second signal ends
    the process at once.

    Args:
        engine, tokenizer, chat_template: as in `create_app`.
        host: address to listen at; the default is for this machine only.
        port: 0 takes any free one.
        access_log: whether uvicorn logs a line for each request.
        options: the keywords of `create_app`.

    Raises:
        ValueError: an argument is not of its type or out of its range.
        OSError: the address can't be used.
    """
    service = Service(engine, tokenizer, chat_template, **options)
    run(service, listen(host, port), access_log=access_log)


def run(
    service: Service,
    bound: socket.socket,
    *,
    access_log: bool = False,
    on_signal: Callable[[Callable[[int], object]], object] | None = None,
) -> None:
    """Serve until a signal, and return when the last request has ended.

    Args:
        service: what to serve; its engine is started and shut down.
        bound: the socket.
        access_log: as in `serve`.
        on_signal: takes the function to call with the first signal, in any thread. None: signals
            get handlers of the event loop, if this is the main thread.
    """
    server = Server(service, access_log=access_log, ready=ready_line(service, bound))
    prepare_process()

    async def serve_until_stopped() -> None:
        loop = asyncio.get_running_loop()
        if on_signal is not None:
            on_signal(lambda n: loop.call_soon_threadsafe(server.stop_or_exit, n))
        elif threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as with `command &`
                    loop.add_signal_handler(number, server.stop_or_exit, number)
        await server.serve(sockets=[bound])

    with asyncio.Runner() as runner:
        runner.run(serve_until_stopped())


def prepare_process() -> None:
    """Set what the threads of a server need of their process."""
    prometheus_client.disable_created_metrics()  # a second line for each counter
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # the collector need not look at modules and traces again
    with contextlib.suppress(ImportError, OSError, ValueError):  # a system without this limit
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def ready_line(service: Service, bound: socket.socket) -> str:
    """Return what `run` prints when requests are accepted."""
    host, port = bound.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    engine = service.engine.engine
    config, stats = engine.config, engine.stats()
    name = service.config.served_model_name
    return (
        f"{address} serves {name}: {service.max_model_len} tokens of context,"
        f" {config.max_num_seqs} sequences at a time, {stats.num_pages} pages of"
        f" {config.page_size} tokens ({stats.pool_bytes / 2**20:,.0f} MiB)"
    )
