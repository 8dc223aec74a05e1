"""An HTTP connection with limits that uvicorn's own does not have."""

from __future__ import annotations

import asyncio
import http
import json
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from models.server.errors import APIError

HEAD_SECONDS = 10.0  # in which the head of a request must arrive
MAX_HEAD_BYTES = 64 << 10


def connection_class(
    max_connections: int, count_error: Callable[[int], object]
) -> type[HttpToolsProtocol]:
    """Return the class of the connections of a server with a limit on their number.

    Args:
        max_connections: the limit.
        count_error: called with the status of each error that does not come from the app.
    """

    class Connection(HttpToolsProtocol):
        """A connection whose heads arrive in time and in full, and that requests can cut.

        Attributes:
            scope: of a request; its state has `cut`, which ends the connection at once.
        """

        _head_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                error = APIError(503, f"the server has {max_connections} connections already")
                self._refuse(error)
                return
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._head_timer is not None:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(APIError(431, f"the head has more than {MAX_HEAD_BYTES} bytes"))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["state"]["cut"] = self.transport.abort
            if self._head_timer is None:  # a later request of the connection
                self._await_head()

        def on_headers_complete(self) -> None:
            self._end_head()
            super().on_headers_complete()

        def send_400_response(self, msg: str) -> None:
            self._end_head()
            self._refuse(APIError(400, msg))

        def _await_head(self) -> None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

        def _end_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _refuse(self, error: APIError) -> None:
            """Answer outside the app, and close."""
            self._end_head()
            count_error(error.status)
            body = json.dumps(error.body).encode()
            phrase = http.HTTPStatus(error.status).phrase
            head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    return Connection
