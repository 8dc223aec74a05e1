"""Every bad input gets an error with the right status, as OpenAI's JSON."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from models.server.body import Fields
from tests.support.servers import expected_text

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "x"}]


def check_error(response, status, *words):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    for word in words:
        assert word in error["message"], error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": None}, ["prompt must be"]),
        ({"prompt": 5}, ["prompt must be a string or an array"]),
        ({"prompt": []}, ["prompt must be"]),
        ({"prompt": [[]]}, ["the prompt is empty"]),
        ({"prompt": ""}, ["the prompt is empty"]),
        ({"prompt": ["x", 5]}, ["prompt must be"]),
        ({"prompt": [1, "x"]}, ["prompt must be"]),
        ({"prompt": [True]}, ["prompt must be"]),
        ({"prompt": [256]}, ["token ids in 0..255", "256"]),
        ({"prompt": [[1, -1]]}, ["token ids in 0..255", "-1"]),
        ({"prompt": [10**400]}, ["token ids in 0..255"]),
        ({"prompt": "\ud800"}, ["valid Unicode"]),
        ({"prompt": "x" * 300}, ["more than the 256 tokens"]),
        ({"max_tokens": 256}, ["more than the 256 tokens"]),
        ({"max_tokens": -1}, ["max_tokens=-1"]),
        ({"max_tokens": 1.5}, ["max_tokens must be an integer"]),
        ({"max_tokens": True}, ["max_tokens must be an integer"]),
        ({"max_tokens": 10**30}, ["max_tokens="]),
        ({"temperature": "hot"}, ["temperature='hot'"]),
        ({"temperature": -1}, ["temperature=-1"]),
        ({"temperature": True}, ["temperature=True"]),
        ({"top_p": 0}, ["top_p=0"]),
        ({"top_k": 2**40}, ["top_k="]),
        ({"min_tokens": 20}, ["min_tokens=20"]),
        ({"n": 0}, ["n=0"]),
        ({"n": 129}, ["n=129 must be at most 128"]),
        ({"best_of": 1, "n": 2}, ["best_of=1"]),
        ({"best_of": 2, "stream": True}, ["best_of can't be streamed"]),
        ({"beam_width": 2, "stream": True}, ["beam_width can't be streamed"]),
        ({"beam_width": 2, "stop": "x"}, ["not possible with beam_width=2"]),
        ({"presence_penalty": 3}, ["presence_penalty=3"]),
        ({"seed": "x"}, ["seed must be an integer"]),
        ({"stop": [""]}, ["stop="]),
        ({"stop": {}}, ["stop must be a string or an array"]),
        ({"stop": ["x"] * 17}, ["stop has 17 texts"]),
        ({"stop": "x" * 1001}, ["stop must have at most 1000 characters"]),
        ({"stop_token_ids": ["x"]}, ["stop_token_ids[0]='x'"]),
        ({"stop_token_ids": [256]}, ["stop_token_ids"]),
        ({"logit_bias": {"x": 1}}, ["token ids as keys"]),
        ({"logit_bias": {"5": 101}}, ["logit_bias[5]=101"]),
        ({"logit_bias": {"256": 1}}, ["logit_bias"]),
        ({"logit_bias": [1]}, ["logit_bias must be an object"]),
        ({"logprobs": 21}, ["logprobs=21"]),
        ({"logprobs": True}, ["logprobs must be an integer"]),
        ({"echo": 1}, ["echo must be a boolean"]),
        ({"suffix": "x"}, ["suffix is not supported"]),
        ({"stream": "yes"}, ["stream must be a boolean"]),
        ({"stream_options": {}}, ["stream_options needs stream=true"]),
        ({"stream": True, "stream_options": {"x": 1}}, ["unknown field stream_options.x"]),
        ({"priority": 2**40}, ["priority="]),
        ({"max_token": 5}, ["unknown field max_token"]),
        ({"\ud800": 5}, ["unknown field \\ud800"]),
        ({"model": 5}, ["model must be a string"]),
        ({"prompt": ["x"] * 600, "n": 2}, ["1200 sequences"]),
        ({"ignore_eos": "no"}, ["ignore_eos='no'"]),
    ],
)
def test_fields_of_completions(client, fields, words):
    check_error(
        client.post(TEXT, content=json.dumps({"prompt": "x"} | fields), headers=JSON), 400, *words
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": None}, ["messages must be a list"]),
        ({"messages": []}, ["messages must be a list"]),
        ({"messages": ["x"]}, ["messages[0]"]),
        ({"messages": [{"role": "bad", "content": "x"}]}, ["messages[0].role"]),
        ({"messages": [{"role": "user"}]}, ["messages[0].content"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            ["messages[0].content[0]", "'text'"],
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, ["UTF-8"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["no tools here"]),
        ({"prompt": "x"}, ["unknown field prompt"]),
        ({"top_logprobs": 2}, ["top_logprobs needs logprobs=true"]),
        ({"logprobs": True, "top_logprobs": 21}, ["top_logprobs=21 must be in 0..20"]),
        ({"tools": "x"}, ["tools must be an array"]),
        ({"tools": [5]}, ["tools="]),
        ({"tool_choice": "required"}, ["tool_choice must be"]),
        ({"response_format": {"type": "json_object"}}, ["response_format is not supported"]),
        ({"functions": []}, ["functions is not supported"]),
        ({"modalities": ["audio"]}, ["modalities is not supported"]),
        ({"max_tokens": 5, "max_completion_tokens": 6}, ["must be equal"]),
        ({"chat_template_kwargs": {"messages": []}}, ["messages can't be a variable"]),
        ({"chat_template_kwargs": 5}, ["chat_template_kwargs must be an object"]),
    ],
)
def test_fields_of_chats(client, fields, words):
    body = json.dumps({"messages": MESSAGES, "max_tokens": 2} | fields)
    error = check_error(client.post(CHAT, content=body, headers=JSON), 400, *words)
    assert error["param"] in ("messages", *fields)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x"} x',
    ],
)
def test_bodies_that_are_not_json_objects(client, body):
    check_error(client.post(TEXT, content=body, headers=JSON), 400, "JSON")


def test_a_prompt_beyond_the_context_has_the_code_of_openai(client):
    for path, fields in ((TEXT, {"prompt": "x" * 256}), (CHAT, {"messages": MESSAGES})):
        answer = client.post(path, json=fields | {"max_tokens": 255})
        assert check_error(answer, 400, "256")["code"] == "context_length_exceeded"
    answer = client.post(TEXT, json={"prompt": "x", "stop_token_ids": [256]})
    assert check_error(answer, 400)["code"] is None


def test_null_is_as_good_as_no_field(client):
    names = ["stop", "n", "seed", "logprobs", "stream", "stream_options", "user", "suffix", "echo"]
    fields = {"prompt": "x", "max_tokens": 4, "temperature": 0} | dict.fromkeys(names)
    answer = client.post(TEXT, json=fields).json()
    assert answer["choices"][0]["text"] == expected_text("x", 4)


def test_errors_outside_the_endpoints_are_counted(client, server):
    before = server.metrics()
    client.get("/v1/nothing")
    client.get(TEXT)
    send_raw(server, b"not HTTP\r\n\r\n")
    after = server.metrics()
    for status in (400, 404, 405):
        name = f'http_errors_total{{status="{status}"}}'
        assert after[name] == before.get(name, 0) + 1


def test_other_paths_methods_and_types(client):
    check_error(client.get("/v1/nothing"), 404, "there is no GET /v1/nothing")
    check_error(client.get(TEXT), 405, "the method must be one of POST")
    check_error(client.delete("/v1/models"), 405)
    check_error(client.post(TEXT, content=b"{}"), 415, "application/json")
    check_error(client.post(TEXT, data={"prompt": "x"}), 415)
    error = check_error(client.post(TEXT, json={"model": "gpt", "prompt": "x"}), 404, "'gpt'")
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_tokens_and_texts(client):
    answer = client.post("/tokenize", json={"prompt": "Hé"}).json()
    assert answer == {"count": 3, "max_model_len": 256, "tokens": list("Hé".encode())}
    answer = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert bytes(answer["tokens"]) == b"[user] x\n[assistant] "
    assert client.post("/detokenize", json={"tokens": [72, 105]}).json() == {"prompt": "Hi"}
    check_error(client.post("/detokenize", json={"tokens": [-1]}), 400, "token ids")
    check_error(client.post("/detokenize", json={}), 400, "tokens")
    check_error(client.post("/tokenize", json={}), 400, "messages")
    check_error(client.post("/tokenize", json={"prompt": 5}), 400, "prompt")


def send_raw(server, data):
    """Send bytes over a socket, and return all that comes back."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # it has left some of the data unread
            while data := connection.recv(65536):
                received += data
        return received


def test_what_is_not_http_gets_an_error(server):
    assert b"400" in send_raw(server, b"\x16\x03\x01 not HTTP\r\n\r\n").split(b"\r\n")[0]
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    assert b"400" in send_raw(server, head + b"content-length: x\r\n\r\n").split(b"\r\n")[0]
    answer = send_raw(server, head + b"a: " + b"x" * 70_000)
    assert (
        answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large") and b'"error"' in answer
    )


def test_many_requests_in_one_connection(server):
    body = json.dumps({"prompt": "x", "max_tokens": 2, "temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    received = b""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request * 5 + last)
        while data := connection.recv(65536):
            received += data
    assert received.count(b"HTTP/1.1 200 OK") == 6 and b'{"status":"ok"}' in received


def test_fields_say_what_they_expect():
    fields = Fields({"a": 1, "b": True, "c": None, "d": 1.5})
    assert fields.take("a", float) == 1 and fields.take("c", str, default="x") == "x"
    assert fields.take("missing", dict) is None
    with pytest.raises(Exception, match="b must be an integer or a string"):
        fields.take("b", int, str)
    with pytest.raises(Exception, match="unknown field d"):
        fields.end()
