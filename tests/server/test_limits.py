"""A full queue, slow and absent clients, late requests; the end of the server and of its engine."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pallas_paged.engine import SamplingParams
from pallas_paged.server import generation
from pallas_paged.server import server as server_module
from tests.support.servers import (
    RunningServer,
    expected_text,
    http_request,
    small_engine,
    wait_until,
)

TEXT = "/v1/completions"
LONG = {"prompt": "Long", "max_tokens": 250, "temperature": 0}
SHORT = {"prompt": "Short", "max_tokens": 3, "temperature": 0}


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


def slowed(engine, wait):
    """Let an engine, whose steps are compiled, call a function before each call of the device."""
    greedy = SamplingParams(max_tokens=2, temperature=0.0)
    engine.generate(["x"], greedy, progress=False)
    runner = engine.replicas[0].runner
    dispatch = runner.dispatch
    runner.dispatch = lambda scheduled: (wait(), dispatch(scheduled))[1]
    return engine


@contextlib.contextmanager
def held_server(folder, **config):
    gate = threading.Event()
    engine = slowed(small_engine(folder), lambda: gate.wait(60))
    with RunningServer(folder, engine, **config) as running:
        try:
            yield running, gate
        finally:
            gate.set()


def in_background(call, *args, **options):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args, **options)
    pool.shutdown(wait=False)
    return future


def test_a_full_queue_refuses_more_until_there_is_room(tmp_path):
    with held_server(tmp_path, max_queue=2) as (running, gate):
        client, admission = running.client, running.service.admission
        first = in_background(client.post, TEXT, json=SHORT | {"n": 9})
        wait_until(lambda: admission.num_seqs == 9)
        response = client.post(TEXT, json=SHORT | {"n": 2})
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"
        assert response.headers["retry-after"] == "1"
        second = in_background(client.post, TEXT, json=SHORT)
        wait_until(lambda: admission.num_seqs == 10)
        error_of(client.post(TEXT, json=SHORT | {"stream": True}), 429)
        gate.set()
        texts = [choice["text"] for choice in first.result(60).json()["choices"]]
        assert texts == [expected_text("Short", 3)] * 9
        assert second.result(60).status_code == 200
        assert client.post(TEXT, json=SHORT | {"n": 10}).status_code == 200
        assert (admission.num_seqs, admission.num_requests) == (0, 0)


def test_requests_that_take_too_long(tmp_path):
    """Before its first event a stream has a status of its own, later an event with the error."""
    calls, gate = [], threading.Event()

    def wait():
        calls.append(0)
        assert len(calls) != 3 or gate.wait(60)

    engine = slowed(small_engine(tmp_path), wait)
    with RunningServer(tmp_path, engine, request_timeout=0.6) as running:
        client = running.client
        started = in_background(client.post, TEXT, json=LONG | {"stream": True})
        wait_until(lambda: len(calls) == 3)  # which reads the first
        waiting = in_background(client.post, TEXT, json=SHORT | {"stream": True})
        complete = in_background(client.post, TEXT, json=SHORT)
        wait_until(lambda: running.service.admission.num_requests == 3)
        time.sleep(0.7)
        gate.set()
        for answer in (waiting, complete):
            assert "0.6 s" in error_of(answer.result(60), 504)["message"]
        first, *_, error, done = started.result(60).text.strip().split("\n\n")
        assert '"text"' in first and done == "data: [DONE]"
        assert "0.6 s" in json.loads(error.removeprefix("data: "))["error"]["message"]
        running.wait_until_idle()
        values = running.metrics()
        assert values['request_success_total{finished_reason="timeout"}'] == 3
        assert values['http_errors_total{status="504"}'] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_abort_their_requests(tmp_path, stream):
    with held_server(tmp_path) as (running, gate):
        with pytest.raises(httpx.ReadTimeout):
            body = LONG | {"stream": stream, "n": 3}
            running.client.post(TEXT, json=body, timeout=0.3)
        gate.set()
        running.wait_until_idle()
        values = running.metrics()
        assert values['request_success_total{finished_reason="abort"}'] == 1
        assert values["generation_tokens_total"] < 3 * 250
        assert not [name for name in values if "http_errors" in name]


def test_a_client_that_leaves_in_its_body_is_no_error(server):
    head, before = http_request("/tokenize", {"prompt": "x"})[:-5], server.metrics()
    with server.connection(head):
        wait_until(lambda: server.server.server_state.tasks)
    wait_until(lambda: not server.server.server_state.tasks)
    errors = {k: v for k, v in server.metrics().items() if "http_errors" in k}
    assert errors == {k: v for k, v in before.items() if "http_errors" in k}


def test_a_client_that_never_reads_is_disconnected_when_its_time_is_up(tmp_path, monkeypatch):
    """Its answer has filled all buffers by then."""
    monkeypatch.setattr(generation, "GRACE_SECONDS", 0.2)
    fields = {"prompt": "x", "max_tokens": 240, "n": 8, "logprobs": 20, "stream": True}
    engine = slowed(small_engine(tmp_path), lambda: None)
    with RunningServer(tmp_path, engine, request_timeout=3.0) as running, socket.socket() as client:
        for one, option in ((client, socket.SO_RCVBUF), (running.bound, socket.SO_SNDBUF)):
            one.setsockopt(socket.SOL_SOCKET, option, 4096)
        client.connect(running.bound.getsockname())
        start = time.monotonic()
        client.sendall(http_request(TEXT, fields))
        wait_until(lambda: running.service.admission.num_seqs == 8)
        wait_until(lambda: not running.server.server_state.connections)
        assert time.monotonic() - start > 3.1  # it had time to read an error
        running.wait_until_idle()
        # The connection ends before the answer does.
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                data += piece
        assert b"logprobs" in data and b"[DONE]" not in data


def test_a_shutdown_serves_what_it_has_accepted_and_refuses_more(tmp_path):
    with held_server(tmp_path) as (running, gate):
        accepted = in_background(running.client.post, TEXT, json=SHORT)
        wait_until(lambda: running.service.admission.num_seqs == 1)
        request = http_request(TEXT, SHORT, "connection: close")
        with running.connection(request[:-5]) as late, running.connection(b"") as idle:
            wait_until(lambda: len(running.server.server_state.tasks) == 2)
            for _ in range(2):  # the second one changes nothing
                running.stop()
            wait_until(lambda: not running.server.servers[0].is_serving())
            assert idle.recv(1) == b""
            late.sendall(request[-5:])
            assert late.recv(65536).startswith(b"HTTP/1.1 503 ")
        gate.set()
        assert accepted.result(60).json()["choices"][0]["text"] == expected_text("Short", 3)


def test_a_shutdown_aborts_what_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "CLOSE_SECONDS", 0.5)
    engine = slowed(small_engine(tmp_path), lambda: time.sleep(0.05))
    with RunningServer(tmp_path, engine, drain_timeout=0.2) as running:
        complete = in_background(running.client.post, TEXT, json=LONG)
        stream = in_background(running.client.post, TEXT, json=LONG | {"stream": True})
        unfinished = http_request("/tokenize", {"prompt": "x"})[:-5]
        with running.connection(unfinished) as never_ends:
            wait_until(lambda: running.metrics()["num_requests_running"] == 2)
            running.stop()
            assert "shutting down" in error_of(complete.result(60), 503)["message"]
            assert "shutting down" in stream.result(60).text
            with contextlib.suppress(ConnectionResetError):
                assert never_ends.recv(1) == b""


def test_a_dead_engine_is_reported(tmp_path, caplog):
    engine = small_engine(tmp_path)

    def read(*_):
        raise OSError("the device is lost")

    with RunningServer(tmp_path, engine) as running:
        engine.replicas[0].runner.read = read
        for _ in range(2):
            error = error_of(running.client.post(TEXT, json=SHORT), 500)
            assert error["code"] == "engine_dead"
        assert running.client.get("/health").json() == {"status": "dead"}
        values = running.metrics()
        assert (values["engine_up"], values['request_success_total{finished_reason="error"}']) == (
            0,
            1,
        )
    (record,) = caplog.records  # the engine logs its death
    assert record.name == "pallas_paged" and "the device is lost" in str(record.exc_info[1])
    caplog.clear()
