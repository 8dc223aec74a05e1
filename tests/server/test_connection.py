"""Connections: their number, the time and the size of their heads, and what is not HTTP."""

import asyncio
import json

import uvicorn
from uvicorn.server import ServerState

from pallas_paged.server import server as connection
from tests.support.event_loops import in_loop
from tests.support.servers import RunningServer, http_request

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__({"peername": ("1.2.3.4", 5), "sockname": ("127.0.0.1", 80)})
        self.written, self.closed, self.aborted = b"", False, False

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = True

    def pause_reading(self):
        """While requests wait for the one before."""

    def resume_reading(self):
        """When they are served."""

    def is_closing(self):
        return self.closed or self.aborted


class Connections:
    """Connections of one server, in the running loop; `scopes` are those of its requests."""

    def __init__(self, max_connections=9):
        self.errors, self.scopes, self._state = [], [], ServerState()
        self._config = uvicorn.Config(self._answer, interface="asgi3", ws="none", log_config=None)
        self._make = connection.Connections(max_connections, self.errors.append)

    def open(self):
        made = self._make(config=self._config, server_state=self._state, app_state={})
        made.connection_made(transport := Transport())
        return made, transport

    async def _answer(self, scope, receive, send):
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def error_of(transport):
    head, _, body = transport.written.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    length = f"content-length: {len(body)}"
    assert lines[1:] == ["content-type: application/json", length, "connection: close"]
    assert transport.closed
    return lines[0], json.loads(body)["error"]["message"]


@in_loop
async def test_a_connection_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.02)
    connections = Connections(2)
    (first, _), (_, second) = connections.open(), connections.open()
    _, third = connections.open()
    status, message = error_of(third)
    assert status == "HTTP/1.1 503 Service Unavailable" and "2 connections" in message
    assert not second.written and connections.errors == [503]
    first.connection_lost(None)
    connections.open()[0].connection_lost(None)
    assert connections.errors == [503, 503]  # the refused one has not been lost yet
    await asyncio.sleep(0.06)
    assert second.aborted and not third.aborted  # which would cut its answer


@in_loop
async def test_a_head_may_have_64_kib_in_each_request_of_a_connection():
    connections = Connections()
    one, transport = connections.open()
    room = connection.MAX_HEAD_BYTES - len(HEAD) - 7
    largest = HEAD + b"a: " + b"x" * room + b"\r\n\r\n"
    for pieces in ([largest], [largest[:-1], largest[-1:]], [largest[:9], largest[9:]]):
        for piece in pieces:
            assert not transport.written.endswith(b"}")
            one.data_received(piece)
        await settle()
    assert transport.written.count(b"204") == 3 and not connections.errors

    one.data_received(HEAD)
    one.data_received(b"a: " + b"x" * connection.MAX_HEAD_BYTES)
    assert b"431 Request Header Fields Too Large" in transport.written and transport.closed
    larger = HEAD + b"a: " + b"x" * (room + 1) + b"\r\n\r\n"
    many = HEAD + b"a: b\r\n" * 12_000 + b"\r\n"
    for pieces in ([larger], [larger[:-1], larger[-1:]], [many], [larger + largest]):
        fresh, transport = connections.open()
        for piece in pieces:
            fresh.data_received(piece)
        assert "65536 bytes" in error_of(transport)[1]
    assert connections.errors == [431] * 5


@in_loop
async def test_a_body_is_no_part_of_the_head_and_the_next_request_has_a_head_of_its_own():
    connections = Connections()
    one, transport = connections.open()
    size = 3 * connection.MAX_HEAD_BYTES
    body = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size
    for piece in (body, body[:100], body[100:], HEAD + b"\r\n"):
        one.data_received(piece)
        await settle()
    assert transport.written.count(b"204") == 3 and not connections.errors


@in_loop
async def test_a_head_must_arrive_in_time(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    connections = Connections()
    silent, partial, done, second, lost = (connections.open() for _ in range(5))
    partial[0].data_received(HEAD)
    done[0].data_received(HEAD + b"\r\n")  # then it may idle
    second[0].data_received(HEAD + b"\r\n")
    await settle()
    second[0].data_received(HEAD)
    lost[0].connection_lost(None)
    await asyncio.sleep(0.15)
    aborted = [one.aborted for _, one in (silent, partial, done, second, lost)]
    assert aborted == [True, True, False, True, False]
    assert connections.scopes[0]["state"]["cut"] == done[1].abort


@in_loop
async def test_what_is_not_http_gets_a_400():
    connections = Connections()
    for data in (b"\x16\x03\x01 not HTTP\r\n\r\n", HEAD + b"content-length: x\r\n\r\n"):
        one, transport = connections.open()
        one.data_received(data)
        status, message = error_of(transport)
        assert status == "HTTP/1.1 400 Bad Request" and "Invalid HTTP" in message
    assert connections.errors == [400, 400] and not connections.scopes


@in_loop
async def test_other_versions_of_http_get_a_505():
    connections = Connections()
    for version in ("2.0", "0.9"):
        one, transport = connections.open()
        one.data_received(HEAD.replace(b"1.1", version.encode()) + b"\r\n")
        status, message = error_of(transport)
        assert status == "HTTP/1.1 505 HTTP Version Not Supported" and f"HTTP/{version}" in message
    connections.open()[0].data_received(HEAD.replace(b"1.1", b"1.0") + b"\r\n")
    await settle()
    assert connections.errors == [505, 505] and len(connections.scopes) == 1


@in_loop
async def test_an_offer_of_another_protocol_is_served_as_http_and_requests_may_share_a_packet():
    connections = Connections()
    one, transport = connections.open()
    one.data_received(HEAD + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n")
    await settle()
    other, both = connections.open()
    other.data_received((HEAD + b"\r\n") * 2)
    await settle()
    assert (transport.written.count(b" 204 "), both.written.count(b" 204 ")) == (1, 2)
    assert not connections.errors


def test_errors_of_connections_are_counted_and_requests_logged_with_their_address(tmp_path, caplog):
    """Headers of a proxy, which any client can send, change nothing."""
    with RunningServer(tmp_path, max_connections=1, access_log=True) as server:
        assert server.exchange(b"not HTTP\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        headers = {"x-forwarded-for": "9.9.9.9", "x-forwarded-proto": "https"}
        answer = server.client.get("/health", headers=headers)
        assert answer.status_code == 200 and "server" not in answer.headers
        assert server.exchange(http_request("/health")).startswith(b"HTTP/1.1 503 ")
        values = server.metrics()
        assert [values[f'http_errors_total{{status="{one}"}}'] for one in (400, 503)] == [1, 1]
    (line,) = [one.getMessage() for one in caplog.records if one.name == "uvicorn.access"]
    assert line.startswith("127.0.0.1:") and line.endswith('"GET /health HTTP/1.1" 200')
