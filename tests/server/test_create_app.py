"""`create_app` and `serve`: what they take of a program, and what they refuse."""

import asyncio
import os
import re
import signal
import socket

import pytest
import tokenizers
from starlette.testclient import TestClient

from models.text import save_byte_tokenizer
from pallas_paged.engine import AsyncEngine
from pallas_paged.server import ChatTemplate, HFTokenizer, ServerConfig, create_app, serve
from pallas_paged.server.server import Server
from pallas_paged.server.service import Service
from pallas_paged.server.tokenizer import text_tokenizer
from tests.support.event_loops import in_loop
from tests.support.servers import expected_text, small_engine
from tests.support.word_tokenizers import sentencepiece

USER = [{"role": "user", "content": "Hi"}]


class Bytes:
    """The least that a tokenizer has."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


class WithSpecials(Bytes):
    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + super().encode(text)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return small_engine(tmp_path_factory.mktemp("engine"))


def test_a_plain_tokenizer_and_a_function_as_template_serve_texts_and_chats(engine):
    given = {}

    def template(messages, **options):
        given.update(options)
        return messages[0]["content"] + "!"

    app = create_app(AsyncEngine(engine), Bytes(), template)
    greedy = {"max_tokens": 3, "temperature": 0}
    with TestClient(app) as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["has_chat_template"]) == ("model", True)
        request = greedy | {"prompt": "Hi!", "logprobs": 1}
        (text,) = client.post("/v1/completions", json=request).json()["choices"]
        assert text["text"] == expected_text("Hi!", 3) and len(text["logprobs"]["tokens"]) == 3
        request = greedy | {"messages": USER, "chat_template_kwargs": {"style": 1}}
        (chat,) = client.post("/v1/chat/completions", json=request).json()["choices"]
        assert chat["message"]["content"] == text["text"]
    assert given == {"tools": None, "documents": None, "add_generation_prompt": True, "style": 1}


def test_errors_of_a_function_as_template_are_the_clients(engine):
    for template, words in (
        (lambda messages, **_: messages[1], "the chat template fails: IndexError"),
        (lambda messages: "", "the chat template fails: TypeError"),
        (lambda messages, **_: [1], "the chat template fails: [1] must be a text"),
    ):
        client = TestClient(create_app(AsyncEngine(engine), None, template))
        answer = client.post("/tokenize", json={"messages": USER})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_tokenizers_get_the_methods_that_they_lack(tmp_path):
    plain = text_tokenizer(Bytes())
    assert plain.encode("é", add_special_tokens=False) == plain.encode("é") == [195, 169]
    assert plain.token_bytes(65) == b"A" and not plain.is_special(65)
    special = text_tokenizer(WithSpecials())
    assert special.encode("A") == [0, 65]
    assert special.encode("A", add_special_tokens=False) == [65]

    inner = sentencepiece("<s>", "</s>")
    inner.enable_truncation(1)
    fast = type("Fast", (), {"backend_tokenizer": inner})()  # as those of transformers
    for one in (text_tokenizer(inner), text_tokenizer(fast), HFTokenizer(fast)):
        tokens = one.encode("ab <s>b")
        assert len(tokens) > 1 and one.decode(tokens).split() == ["ab", "b"]
        assert [*map(one.is_special, tokens)].count(True) == 1
    assert inner.truncation is not None  # a copy was changed
    save_byte_tokenizer(tmp_path, max_length=8)
    read = HFTokenizer(tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    assert text_tokenizer(read) is read
    with pytest.raises(ValueError, match=r"^tokenizer=.* must be a tokenizers\.Tokenizer"):
        HFTokenizer(Bytes())


@in_loop
async def test_a_second_signal_ends_the_process_at_once(engine, monkeypatch, capsys):
    statuses, server = [], Server(Service(AsyncEngine(engine)))
    monkeypatch.setattr(os, "_exit", statuses.append)
    server.stop_or_exit(signal.SIGINT)
    assert not statuses and capsys.readouterr().err == "shutting down ... (again: at once)\n"
    server.stop_or_exit(signal.SIGTERM)
    assert statuses == [143]
    await asyncio.sleep(0)
    assert server.should_exit


def test_bad_arguments_are_refused(engine):
    made = AsyncEngine(engine)
    without = AsyncEngine(small_engine(None))
    for given, options, words in (
        ((engine,), {}, "must be an AsyncEngine"),
        ((made, object()), {}, "tokenizer="),
        ((made, None, 5), {}, "template=5 must be Jinja text or a function"),
        ((made, None, "{% if %}"), {}, "the chat template is not valid"),
        ((made,), {"config": {}}, "config={} must be a ServerConfig"),
        ((made,), {"sampling_defaults": {"top_p": 2}}, "sampling_defaults={'top_p': 2}: top_p=2"),
        ((made,), {"chat_defaults": {"x": 2}}, "chat_defaults={'x': 2}: "),
        ((without, Bytes()), {}, "the engine must have the tokenizer too"),
        ((without, None, "x"), {}, "a chat_template needs a tokenizer"),
    ):
        for function in (create_app, serve):
            with pytest.raises(ValueError, match=re.escape(words)):
                function(*given, **options)
    for address in ({"port": "80"}, {"port": 70000}, {"host": 5}):
        with pytest.raises(ValueError, match=f"^{next(iter(address))}="):
            serve(made, **address)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        serve(made, port=taken.getsockname()[1])
    assert ChatTemplate("{{ bos_token }}", special_tokens={"bos_token": "B"}).render(USER) == "B"
    assert ServerConfig().served_model_name == "model"
