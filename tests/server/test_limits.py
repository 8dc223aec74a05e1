"""Limits on keys, bodies, queues, connections and time; the end of the server and of its engine."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from models.server import body, connection
from pallas_paged.engine import SamplingParams
from tests.support.servers import RunningServer, expected_text, small_engine, wait_until

TEXT = "/v1/completions"
LONG = {"prompt": "Long", "max_tokens": 250, "temperature": 0}
SHORT = {"prompt": "Short", "max_tokens": 3, "temperature": 0}


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


class Gate:
    """Holds the engine before each step until it is opened."""

    def __init__(self, engine):
        self._step, self._open = engine._step, threading.Event()
        engine._step = self._held_step

    def open(self):
        self._open.set()

    def _held_step(self):
        assert self._open.wait(60)
        self._step()


@contextlib.contextmanager
def held_server(folder, engine=None, **config):
    """A server whose engine waits for `gate.open()`; it is opened at the end."""
    engine = engine or small_engine(folder)
    gate = Gate(engine)
    with RunningServer(folder, engine=engine, **config) as server:
        try:
            yield server, gate
        finally:
            gate.open()


def in_background(call, *args, **options):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args, **options)
    pool.shutdown(wait=False)
    return future


def test_keys(tmp_path):
    with RunningServer(tmp_path, api_keys=("first", "second")) as server:
        for key in ("first", "second"):
            headers = {"authorization": f"Bearer {key}"}
            client = httpx.Client(base_url=server.url, headers=headers, timeout=60)
            assert client.post(TEXT, json=SHORT).status_code == 200
            assert client.get("/metrics").status_code == 200
        for header in ("", "Bearer", "Bearer firs", "Bearer first2", "Basic first", "first", "é"):
            headers = {"authorization": header.encode()}
            for path in ("/v1/models", "/metrics", "/tokenize", "/none"):
                error = error_of(httpx.get(server.url + path, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
            error_of(httpx.post(server.url + TEXT, json=SHORT, headers=headers), 401)
        for path in ("/", "/page.js", "/page.css", "/health"):
            assert httpx.get(server.url + path).status_code == 200


def test_large_bodies(tmp_path):
    with RunningServer(tmp_path, max_body_bytes=1000) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        headers = {"content-type": "application/json"}
        for size in (1001, 3_000_000):
            error = error_of(client.post(TEXT, content=b" " * size, headers=headers), 413)
            assert "1000 bytes" in error["message"]
            pieces = (b" " * 500 for _ in range(size // 500 + 1))
            error_of(client.post(TEXT, content=pieces, headers=headers), 413)
        expecting = headers | {"expect": "100-continue", "connection": "close"}
        error_of(client.post(TEXT, content=b" " * 1001, headers=expecting), 413)
        whole = json.dumps(SHORT).encode().ljust(1000)
        assert client.post(TEXT, content=whole, headers=headers).status_code == 200


def test_slow_bodies_and_heads(tmp_path, monkeypatch):
    monkeypatch.setattr(body, "_BODY_SECONDS", 0.2)
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    typed = head + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with RunningServer(tmp_path) as server:
        for data, expected in ((b"", b""), (head, b""), (typed, b"HTTP/1.1 408 ")):
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=30) as slow:
                slow.sendall(data)
                try:
                    assert slow.recv(13) == expected
                except ConnectionResetError:
                    assert not expected


def test_a_full_queue_refuses_more_until_there_is_room(tmp_path):
    with held_server(tmp_path, max_queue=2) as (server, gate):
        client = httpx.Client(base_url=server.url, timeout=60)
        first = in_background(client.post, TEXT, json=SHORT | {"n": 9})
        wait_until(lambda: server.service.admission.num_seqs == 9)
        response = client.post(TEXT, json=SHORT | {"n": 2})
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) > 0
        error_of(client.post(TEXT, json=SHORT | {"n": 11}), 400)  # never
        second = in_background(client.post, TEXT, json=SHORT)
        wait_until(lambda: server.service.admission.num_seqs == 10)
        error_of(client.post(TEXT, json=SHORT | {"stream": True}), 429)
        gate.open()
        texts = [choice["text"] for choice in first.result(60).json()["choices"]]
        assert texts == [expected_text("Short", 3)] * 9
        assert second.result(60).status_code == 200
        assert client.post(TEXT, json=SHORT | {"n": 10}).status_code == 200


def test_connections_beyond_the_limit_are_refused(tmp_path):
    with RunningServer(tmp_path, max_connections=2) as server:
        clients = [httpx.Client(base_url=server.url) for _ in range(3)]
        for client in clients[:2]:
            assert client.get("/health").status_code == 200
        assert "2 connections" in error_of(clients[2].get("/health"), 503)["message"]
        clients[0].close()
        wait_until(lambda: len(server.server.server_state.connections) == 1)
        assert httpx.get(f"{server.url}/health").status_code == 200


def compile_steps(engine, num_prompts):
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    engine.generate(["Short"] * num_prompts, greedy, progress=False)


def test_requests_that_take_too_long(tmp_path):
    engine = small_engine(tmp_path)
    compile_steps(engine, 2)
    with held_server(tmp_path, engine, request_timeout=0.2) as (server, gate):
        client = httpx.Client(base_url=server.url, timeout=60)
        whole = in_background(client.post, TEXT, json=SHORT)
        stream = in_background(client.post, TEXT, json=SHORT | {"stream": True})
        time.sleep(0.4)
        gate.open()
        for answer in (whole, stream):  # no output was sent, so both have a status
            assert "0.2 s" in error_of(answer.result(60), 504)["message"]
        server.wait_until_idle()
        assert server.metrics()['requests_total{outcome="timeout"}'] == 2


def test_a_stream_that_takes_too_long_ends_with_an_error(tmp_path):
    engine = small_engine(tmp_path)
    compile_steps(engine, 1)
    step = engine._step
    engine._step = lambda: (time.sleep(0.02), step())
    with RunningServer(tmp_path, engine=engine, request_timeout=1.0) as server:
        answer = httpx.post(server.url + TEXT, json=LONG | {"stream": True}, timeout=60)
        *events, error, done = answer.text.strip().split("\n\n")
        assert answer.status_code == 200 and done == "data: [DONE]"
        assert "1 s" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert events


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_abort_their_requests(tmp_path, stream):
    with held_server(tmp_path) as (server, gate):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + TEXT, json=LONG | {"stream": stream, "n": 3}, timeout=0.5)
        gate.open()
        server.wait_until_idle()
        values = server.metrics()
        assert values['requests_total{outcome="abort"}'] == 1
        assert values["generation_tokens_total"] < 3 * 250


def test_a_shutdown_serves_what_it_has_accepted_and_refuses_more(tmp_path):
    with held_server(tmp_path) as (server, gate):
        client = httpx.Client(base_url=server.url, timeout=60)
        accepted = in_background(client.post, TEXT, json=SHORT)
        wait_until(lambda: server.service.admission.num_seqs == 1)
        idle = httpx.Client(base_url=server.url, timeout=60)
        assert idle.get("/health").status_code == 200
        server.stop()
        wait_until(lambda: not server.server.servers[0].is_serving())
        with pytest.raises(httpx.TransportError):
            idle.post(TEXT, json=SHORT)
        gate.open()
        assert accepted.result(60).json()["choices"][0]["text"] == expected_text("Short", 3)


def test_a_shutdown_aborts_what_takes_too_long(tmp_path):
    engine = small_engine(tmp_path)
    step = engine._step
    engine._step = lambda: (time.sleep(0.05), step())
    with RunningServer(tmp_path, engine=engine, drain_timeout=0.2) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        whole = in_background(client.post, TEXT, json=LONG)
        stream = in_background(client.post, TEXT, json=LONG | {"stream": True})
        wait_until(lambda: server.metrics()["num_requests_running"] == 2)
        server.stop()
        assert "shutting down" in error_of(whole.result(60), 503)["message"]
        answer = stream.result(60)
        assert "shutting down" in answer.text


def test_a_model_without_tokenizer_takes_token_ids(tmp_path):
    with RunningServer(tmp_path, has_texts=False) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        body = SHORT | {"prompt": list(b"Short"), "return_token_ids": True}
        (choice,) = client.post(TEXT, json=body).json()["choices"]
        assert bytes(choice["token_ids"]).decode(errors="replace") == expected_text("Short", 3)
        assert choice["text"] == ""
        events = client.post(TEXT, json=body | {"stream": True}).text.split("data: ")[1:-1]
        streamed = [json.loads(event)["choices"][0]["token_ids"] for event in events]
        assert [one for ids in streamed for one in ids] == choice["token_ids"]
        messages = [{"role": "user", "content": "x"}]
        for path, fields, words in (
            (TEXT, SHORT, "tokenizer"),
            (TEXT, body | {"echo": True}, "tokenizer"),
            (TEXT, body | {"stop": "x"}, "stop"),
            (TEXT, body | {"logprobs": 1}, "tokenizer"),
            ("/tokenize", {"prompt": "x"}, "tokenizer"),
            ("/v1/chat/completions", {"messages": messages}, "no chat template"),
        ):
            assert words in error_of(client.post(path, json=fields), 400)["message"]


def test_a_dead_engine_is_reported(tmp_path, caplog):
    engine = small_engine(tmp_path)

    def read(*_):
        raise OSError("the device is lost")

    with RunningServer(tmp_path, engine=engine) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        assert client.get("/health").json() == {"status": "ok"}
        engine.replicas[0].runner.read = read
        for _ in range(2):
            assert error_of(client.post(TEXT, json=SHORT), 500)["code"] == "engine_dead"
        assert client.get("/health").status_code == 503
        assert "pallas_paged:engine_up" in (text := client.get("/metrics").text)
        assert 'engine_up{model_name="small"} 0.0' in text
    (record,) = caplog.records  # the engine logs its death
    assert record.name == "pallas_paged" and "the device is lost" in str(record.exc_info[1])
    caplog.clear()
