"""Answers in a form that the request asks for, through OpenAI's own client."""

import asyncio
import json
import threading

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance", reason="needs the extra [structured]")

GREEDY = {"model": "small", "temperature": 0}
MESSAGES = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 20]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_chat_with_a_json_schema(api):
    schema = {"name": "person", "strict": True, "schema": SCHEMA}
    options = {"messages": MESSAGES, "max_tokens": 60} | GREEDY
    options |= {"response_format": {"type": "json_schema", "json_schema": schema}}
    answer = api.chat.completions.create(**options)
    (choice,) = answer.choices
    value = json.loads(choice.message.content)
    assert choice.finish_reason == "stop" and [*value] == ["name", "age"]
    assert len(value["name"]) <= 4 and value["age"] in (1, 20)
    chunks = [*api.chat.completions.create(**options, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content


def test_a_chat_with_any_json_object(api):
    answer = api.chat.completions.create(
        messages=MESSAGES, max_tokens=20, response_format={"type": "json_object"}, **GREEDY
    )
    assert answer.choices[0].message.content.startswith("{")


def test_structured_outputs_of_a_completion(api):
    for fields, texts in (
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "[ab]{2}"}, ("aa", "ab", "ba", "bb")),
        ({"grammar": 'start: "x" "y"'}, ("xy",)),
        ({"json": {"const": None}}, ("null",)),
    ):
        extra = {"structured_outputs": fields}
        answer = api.completions.create(prompt="One", max_tokens=8, extra_body=extra, **GREEDY)
        assert answer.choices[0].text in texts and answer.choices[0].finish_reason == "stop"


def test_a_bad_schema_gets_the_compilers_text(api):
    schema = {"name": "x", "schema": {"type": "strin"}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: strin") as error:
        api.chat.completions.create(
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": schema},
            **GREEDY,
        )
    assert error.value.body["param"] == "structured_outputs"


def test_a_grammar_is_compiled_outside_the_event_loop(server, monkeypatch):
    engine, threads = server.service.engine, []
    compile_grammar = engine.compile_grammar

    def compile_here(structure):
        threads.append(threading.get_ident())
        compile_grammar(structure)

    async def loops_thread():
        await asyncio.sleep(0)
        return threading.get_ident()

    monkeypatch.setattr(engine, "compile_grammar", compile_here)
    body = {"prompt": "x", "structured_outputs": {"choice": ["p", "q"]}}
    assert server.client.post("/v1/completions", json=body).json()["choices"][0]["text"] in "pq"
    assert len(threads) == 1 and threads[0] != server.call(loops_thread())
