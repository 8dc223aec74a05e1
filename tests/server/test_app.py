"""The endpoints as an ASGI app: keys, health, the page, errors; no running engine."""

import hmac
import time
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from pallas_paged.engine import EngineDeadError
from pallas_paged.server import app
from pallas_paged.server.fields import APIError
from pallas_paged.server.service import Admission
from tests.support.servers import make_service, metric_values, small_engine

PATHS = ("/v1/models", "/metrics", "/pool", "/tokenize", "/none")


@pytest.fixture(scope="module")
def folder_and_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("app")
    return folder, small_engine(folder)


@pytest.fixture
def make(folder_and_engine):
    def make(**options):
        folder, engine = folder_and_engine
        engine = engine if options.get("has_texts", True) else small_engine(None)
        service = make_service(folder, engine, **options)
        return service, TestClient(app.app_of(service), raise_server_exceptions=False)

    return make


def test_a_request_needs_one_of_the_keys(make):
    _, client = make(api_keys=("first", "second"))
    for header in ("Bearer first", "Bearer second", "bearer  first ", "BEARER second"):
        assert client.get("/v1/models", headers={"authorization": header}).status_code == 200
    bad = ("", "Bearer", "Bearer firs", "Bearer first2", "Basic first", "first", "Bearer first x")
    for header in (*bad, "é"):
        for path in PATHS:
            answer = client.get(path, headers={"authorization": header.encode()})
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
    answer = client.get("/metrics", headers={"authorization": "Bearer first"})
    assert answer.headers["content-type"].startswith("text/plain; version=")
    refused = metric_values(answer.content)['http_errors_total{status="401"}']
    assert refused == len((*bad, "é")) * len(PATHS)
    for path in ("/", "/api.js", "/page.js", "/pool.js", "/page.css", "/health"):
        assert client.get(path).status_code == 200


def test_keys_are_compared_in_constant_time(make, monkeypatch):
    """Each key by `hmac.compare_digest`, in digests of one length, whether or not one matches."""
    calls, answers = [], []

    def compare(a, b):
        calls.append((a, b))
        return answers.pop(0)

    keys = ("first", "second", "third")
    _, client = make(api_keys=keys)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    # The result is that of these comparisons alone.
    for given, matches in (("first", [0, 0, 0]), ("other", [1, 0, 0]), ("other", [0, 0, 1])):
        answers[:], calls[:] = map(bool, matches), []
        answer = client.get("/v1/models", headers={"authorization": f"Bearer {given}"})
        assert answer.status_code == (200 if any(matches) else 401)
        assert len(calls) == len(keys) and len({a for a, _ in calls}) == 1
        assert len({b for _, b in calls}) == len(keys)
        assert {len(one) for call in calls for one in call} == {32}


def test_a_request_needs_one_of_the_hosts(make):
    _, client = make(allowed_hosts=("Example.org", "[::1]"))
    for host, status in (
        ("example.org", 200),
        ("EXAMPLE.org:8000", 200),
        ("[::1]:80", 200),
        ("[::1]", 200),
        ("example.org.evil", 400),
        ("evil:example.org", 400),
        ("[::1", 400),
        ("", 400),
    ):
        answer = client.get("/health", headers={"host": host})
        assert answer.status_code == status, host
        if status == 400:
            assert "no host of this server" in answer.json()["error"]["message"]
    refused = metric_values(client.get("/metrics", headers={"host": "[::1]"}).content)
    assert refused['http_errors_total{status="400"}'] == 4


def test_the_health_of_a_server(make):
    service, client = make()
    assert client.get("/health").json() == {"status": "ok"}
    service.is_draining = True
    answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "shutting down"})
    answer = client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503 and answer.headers["connection"] == "close"
    service.metrics.error = EngineDeadError("dead", OSError())
    assert (answer := client.get("/health")).json() == {"status": "dead"}
    assert answer.status_code == 503


def test_the_model_is_described(make):
    _, client = make(served_model_name="a/b")
    (model,) = client.get("/v1/models").json()["data"]
    assert client.get("/v1/models").json()["object"] == "list"
    assert client.get("/v1/models/a/b").json() == model
    assert abs(model.pop("created") - time.time()) < 60
    expected = {"id": "a/b", "object": "model", "owned_by": "pallas_paged", "max_model_len": 256}
    assert model == expected | {"has_chat_template": True, "has_tokenizer": True}
    (model,) = make(has_texts=False)[1].get("/v1/models").json()["data"]
    assert model["has_chat_template"] is model["has_tokenizer"] is False


def test_files_of_the_page(make):
    _, client = make()
    kinds = {"index.html": "text/html", "page.css": "text/css"}
    kinds |= dict.fromkeys(("api.js", "page.js", "pool.js"), "text/javascript")
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    for name, kind in kinds.items():
        answer = client.get("/" if name == "index.html" else f"/{name}")
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert answer.headers["content-security-policy"] == policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.content == Path(app.__file__).with_name("page").joinpath(name).read_bytes()


def test_a_bug_is_an_error_that_is_counted_and_names_no_details(make, monkeypatch):
    service, client = make()

    def fail(*_, **options):
        raise KeyError("a secret")

    monkeypatch.setattr(service, "encode_text", fail)
    answer = client.post("/tokenize", json={"prompt": "x"})
    assert answer.status_code == 500
    error = {"message": "internal error: KeyError", "type": "server_error", "param": None}
    assert answer.json() == {"error": error | {"code": "server_error"}}
    values = metric_values(client.get("/metrics").content)
    assert values['http_errors_total{status="500"}'] == 1


def test_bodies_have_a_limit(make):
    _, client = make(max_body_bytes=14)
    for path, body, size, status in (
        ("/tokenize", '{"prompt":"x"}', 14, 200),
        ("/tokenize", '{"prompt":"x"}', 15, 413),
        ("/detokenize", '{"tokens":[]}', 14, 200),
        ("/detokenize", '{"tokens":[]}', 15, 413),
        ("/v1/completions", "", 15, 413),
    ):
        headers = {"content-type": "application/json"}
        answer = client.post(path, content=body.ljust(size), headers=headers)
        assert answer.status_code == status and ("14 bytes" in answer.text) == (status == 413)


def test_bodies_together_have_a_limit(make):
    _, client = make(max_total_body_bytes=20)
    for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"):
        answer = client.post(path, json={"prompt": "x" * 20})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_a_model_without_tokenizer_or_template(make):
    _, client = make(has_texts=False)
    messages = {"messages": [{"role": "user", "content": "x"}]}
    for path, fields, words in (
        ("/v1/completions", {"prompt": "x"}, "tokenizer"),
        ("/v1/completions", {"prompt": [1], "echo": True}, "tokenizer"),
        ("/v1/completions", {"prompt": [1], "stop": "x"}, "stop"),
        ("/v1/completions", {"prompt": [1], "logprobs": 1}, "tokenizer"),
        ("/tokenize", {"prompt": "x"}, "tokenizer"),
        ("/detokenize", {"tokens": [1]}, "tokenizer"),
        ("/v1/chat/completions", messages, "no chat template"),
        ("/tokenize", messages, "no chat template"),
    ):
        answer = client.post(path, json=fields)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_the_queue_has_room_for_what_runs_and_waits(make, folder_and_engine, monkeypatch):
    _, engine = folder_and_engine
    monkeypatch.setattr(engine, "config", replace(engine.config, data_parallel_size=2))
    queue = make(max_queue=3)[0].admission
    with queue.admit(2 * 8 + 3), pytest.raises(APIError, match="queue is full"):
        queue.admit(1).__enter__()
    admission = Admission(5)
    with admission.admit(2), admission.admit(3):
        assert (admission.num_seqs, admission.num_requests) == (5, 2)
        with pytest.raises(APIError, match="queue is full: 5 sequences") as raised:
            admission.admit(1).__enter__()
        assert (raised.value.status, raised.value.headers) == (429, {"retry-after": "1"})
    with pytest.raises(APIError, match="6 sequences is more than the 5") as raised:
        admission.admit(6).__enter__()
    assert raised.value.status == 400
    with pytest.raises(KeyError), admission.admit(5):
        raise KeyError
    assert (admission.num_seqs, admission.num_requests) == (0, 0)
