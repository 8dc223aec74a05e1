"""The server around the app: connections, and a shutdown that serves what it has accepted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from models.server.app import create_app
from models.server.connection import connection_class
from models.server.process import Signals
from models.server.service import Service

_KEEP_ALIVE_SECONDS = 60  # more than proxies keep idle connections
CLOSE_SECONDS = 2.0  # in which aborted requests can still send an error


class Server(uvicorn.Server):
    """Serves a service over a socket until `stop`."""

    def __init__(self, service: Service, *, access_log: bool = False):
        """Make the app of a service."""
        config = service.config
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=connection_class(config.max_connections, service.metrics.answered),
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
        self._service = service
        self._stopping: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Signals`."""
        yield

    def stop(self) -> None:
        """Accept no more connections and requests, and serve those that are there; in the loop."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        service = self._service
        service.is_draining = self.should_exit = True
        await asyncio.sleep(service.config.drain_timeout)
        await service.engine.shutdown(drain=False)  # its requests get an error
        await asyncio.sleep(CLOSE_SECONDS)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


def serve(service: Service, bound: socket.socket, signals: Signals, ready: str, **options: bool):
    """Serve until a signal, and return when the last request has ended.

    Args:
        service: what to serve; its engine is started and shut down.
        bound: the socket.
        signals: of the process.
        ready: line to print when requests are accepted.
        options: of `Server`.
    """
    server = Server(service, **options)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        signals.call(lambda: loop.call_soon_threadsafe(server.stop))
        announcement = loop.create_task(_announce(server, ready))
        await server.serve(sockets=[bound])
        announcement.cancel()

    with asyncio.Runner() as runner:
        runner.run(run())


async def _announce(server: uvicorn.Server, ready: str) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    print(ready, flush=True)
