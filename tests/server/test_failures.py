"""What docs/server.md says of failures: clocks that jump, tokenizers that fail or block."""

from __future__ import annotations

import random
import threading
import time

import httpx
import pytest

from pallas_paged.engine import SamplingParams
from pallas_paged.server import generation
from tests.support.servers import RunningServer, expected_text, small_engine, wait_until

TEXT = "/v1/completions"
SHORT = {"prompt": "Short", "max_tokens": 6, "temperature": 0}


def test_a_clock_that_jumps_changes_nothing_but_the_date_of_answers(tmp_path, monkeypatch):
    """By a century forth and back at each look; times and limits are of a monotonic clock."""
    now, jumps = time.time, random.Random(0)  # a cycle could be in step with the looks of a request
    monkeypatch.setattr(time, "time", lambda: now() + jumps.choice((0.0, 3e9, -1e9)))
    with RunningServer(tmp_path, request_timeout=60.0) as server:
        answers = [server.client.post(TEXT, json=SHORT) for _ in range(20)]
        streamed = server.client.post(TEXT, json=SHORT | {"stream": True}).text
        values = server.metrics()
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [expected_text("Short", 6)] * 20 and streamed.endswith("data: [DONE]\n\n")
    assert len({answer.json()["created"] // 10**8 for answer in answers}) > 1
    for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
        assert values[f"{name}_seconds_count"] == 21 and 0 < values[f"{name}_seconds_sum"] < 60


def test_a_tokenizer_that_fails_is_an_error_of_its_request_only(tmp_path, caplog):
    engine = small_engine(tmp_path)
    decode, encode = engine.tokenizer.decode, engine.tokenizer.encode

    def fail(*_, **__):
        raise OSError("the tables are lost")

    with RunningServer(tmp_path, engine) as server:
        engine.tokenizer.decode = fail
        answer = server.client.post(TEXT, json=SHORT)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the model failed: OSError: the tables are lost"
        engine.tokenizer.decode, engine.tokenizer.encode = decode, fail
        answer = server.client.post(TEXT, json=SHORT)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error: OSError"
        assert answer.headers["connection"] == "close"  # or the next request might be lost
        engine.tokenizer.encode = encode
        assert server.client.post(TEXT, json=SHORT).status_code == 200
    assert "the tables are lost" in caplog.text  # of the second, with its traceback
    caplog.clear()


def test_a_tokenizer_that_blocks_holds_up_requests_but_not_their_limits(tmp_path, monkeypatch):
    """It blocks the thread of the engine; the server answers, and cuts what takes too long."""
    monkeypatch.setattr(generation, "GRACE_SECONDS", 0.2)
    engine, gate, blocked = small_engine(tmp_path), threading.Event(), threading.Event()
    engine.generate(["Short"], SamplingParams(max_tokens=6))  # compiles the steps
    decode = engine.tokenizer.decode

    def wait(token_ids):
        blocked.set()
        assert gate.wait(60)
        return decode(token_ids)

    with RunningServer(tmp_path, engine, request_timeout=2.0) as server:
        engine.tokenizer.decode = wait
        with pytest.raises(httpx.TransportError):
            server.client.post(TEXT, json=SHORT)
        assert blocked.wait(60) and server.client.get("/health").json() == {"status": "ok"}
        gate.set()
        engine.tokenizer.decode = decode
        server.wait_until_idle()
        answer = server.client.post(TEXT, json=SHORT)
        assert answer.json()["choices"][0]["text"] == expected_text("Short", 6)


def test_a_client_that_reads_slowly_holds_up_its_own_stream_only(tmp_path):
    """A byte at a time: others are served meanwhile, and it gets all of its stream."""
    with RunningServer(tmp_path) as server:
        fields = SHORT | {"stream": True, "max_tokens": 60, "logprobs": 5}
        with server.client.stream("POST", TEXT, json=fields) as slow:
            pieces = slow.iter_raw(1)
            begin = b"".join(next(pieces) for _ in range(20))
            answer = server.client.post(TEXT, json=SHORT)
            assert answer.json()["choices"][0]["text"] == expected_text("Short", 6)
            wait_until(lambda: server.metrics()["num_requests_running"] == 0)
            text = begin + b"".join(pieces)
    assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n")
