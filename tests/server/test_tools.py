"""Calls of tools and reasoning in chats, through OpenAI's own client."""

import copy
import json
import types

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance", reason="needs the extra [structured]")

from pallas_paged.engine import CompletionOutput, StructuredOutputsParams  # noqa: E402
from pallas_paged.engine.requests.grammar import (  # noqa: E402
    GrammarCompiler,
    empty_masks,
    fill_masks,
)
from pallas_paged.server.answer_format import find_formats  # noqa: E402
from pallas_paged.server.answer_parser import AnswerParser  # noqa: E402
from pallas_paged.server.chat_template import checked_messages  # noqa: E402
from pallas_paged.server.completions import parse_chat  # noqa: E402
from pallas_paged.server.fields import Fields  # noqa: E402
from pallas_paged.server.tools import take_tools  # noqa: E402
from tests.support.servers import make_service, small_engine  # noqa: E402

GREEDY = {"model": "small", "temperature": 0}
MESSAGES = [
    {"role": "user", "content": "Hi"}
]  # with the tools it must fit in a context of 256 bytes
SCHEMA = {"const": {"a": 1}}
F = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
G = {"type": "function", "function": {"name": "g", "parameters": {"const": {}}}}
CHOICE = {"enum": [{"a": 11}, {"a": 12}, {"a": 21}, {"a": 22}]}
CHOOSING = {"type": "function", "function": {"name": "f", "parameters": CHOICE}}
NAMED = {"type": "function", "function": {"name": "f"}}
BYTES = types.SimpleNamespace(token_bytes=lambda x: bytes([x]), is_special=lambda _: False)
BYTES.decode, BYTES.encode = str, lambda text: [*text.encode()]
PARSERS = [("hermes", "qwen3"), ("llama3_json", "none"), ("mistral", "mistral")]
PARSERS.append(("openai", "openai_gptoss"))


def test_a_forced_call_at_once_and_streamed(api):
    options = dict(messages=MESSAGES, tools=[CHOOSING], tool_choice=NAMED)
    (choice,) = api.chat.completions.create(**options, **GREEDY).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.function.name == "f" and len(call.id) == 9
    assert json.loads(call.function.arguments)["a"] in (11, 12, 21, 22)
    chunks = [*api.chat.completions.create(**options, **GREEDY, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    pieces = [one.choices[0].delta.tool_calls for one in chunks]
    first, *others = [piece for (piece,) in filter(None, pieces)]
    assert (first.index, first.type, len(first.id)) == (0, "function", 9)
    assert (first.function.name, first.function.arguments) == ("f", "")
    assert {(x.index, x.id, x.type, x.function.name) for x in others} == {(0, None, None, None)}
    assert len(others) > 1  # what the schema leaves open comes piece by piece
    assert "".join(one.function.arguments for one in others) == call.function.arguments
    with api.chat.completions.stream(**options, **GREEDY) as stream:
        (last,) = [one for one in stream if one.type == "tool_calls.function.arguments.done"]
    assert (last.name, last.arguments) == ("f", call.function.arguments)


def test_required_calls_of_one_of_the_tools(api):
    options = dict(messages=MESSAGES, tools=[G, F], tool_choice="required")
    options |= {"parallel_tool_calls": False, "temperature": 1.0, "n": 4}
    answer = api.chat.completions.create(model="small", seed=3, **options)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        expected = {"f": {"a": 1}, "g": {}}[call.function.name]
        assert json.loads(call.function.arguments) == expected


def test_a_call_that_is_cut_off_is_content(api):
    options = dict(messages=MESSAGES, tools=[F], tool_choice="required", max_tokens=30)
    (choice,) = api.chat.completions.create(**options, **GREEDY).choices
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content.startswith('<tool_call>\n{"name": "f"')


def matches(structure, text):
    """Whether a text and its end are allowed by a grammar, for a tokenizer of bytes."""
    state = GrammarCompiler(BYTES, 256, (0,)).compile(structure).start((0,))
    try:
        for byte in text.encode():
            state.accept(byte)
    except ValueError:
        return False
    masks = empty_masks(1, 256)
    fill_masks([(0, state)], masks)
    return state.is_complete or bool(masks[0, 0] & 1)


def test_no_other_spelling_of_a_name_escapes_its_pattern():
    schema = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    tools = take_tools(Fields({"tools": [tool], "tool_choice": "required"}))
    forced, (calls, _) = tools.structure(None, None, is_thinking=False), find_formats("", "hermes")
    for arguments, is_right in (('{"x":1}', True), ('{"y":""}', True), (r'{"\u0078":""}', False)):
        assert matches(StructuredOutputsParams(json=schema), arguments) == is_right
        assert matches(forced, call_of(calls, arguments)) == is_right


def call_of(calls, arguments, name="f"):
    begin, end, _ = calls.call
    return begin.replace("NAME", name) + arguments + end


@pytest.mark.parametrize(
    ("parsers", "is_thinking"), [*((one, False) for one in PARSERS), (("hermes", "qwen3"), True)]
)
def test_the_grammar_of_forced_calls_and_the_parser_agree(parsers, is_thinking):
    calls, reasoning = find_formats("", *parsers)
    tools = take_tools(Fields({"tools": [F], "tool_choice": "required"}))
    structure = tools.structure(calls, reasoning, is_thinking=is_thinking)
    good = call_of(calls, '{"a":1}')
    thought = ""
    if parsers[0] == "openai":
        thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    elif reasoning is not None:
        thought = ("" if is_thinking else reasoning.open) + "Hm." + reasoning.close[0]
    assert matches(structure, thought + good)
    assert matches(structure, good) != is_thinking
    assert not matches(structure, thought + call_of(calls, '{"a":3}'))
    assert not matches(structure, thought + "Hello")
    parts = AnswerParser(calls, reasoning, is_thinking=is_thinking).push(
        thought + good, is_last=True
    )
    assert [one.name for one in parts.calls] == ["f"]
    assert parts.reasoning == ("Hm." if thought else "")
    if calls.call[2] is not None:
        assert matches(structure, thought + good + calls.call[2] + good)


@pytest.mark.parametrize("parsers", PARSERS)
def test_strict_tools_hold_the_arguments_of_free_answers(parsers):
    calls, reasoning = find_formats("", *parsers)
    strict = {"type": "function", "function": F["function"] | {"strict": True}}
    loose = {"type": "function", "function": {"name": "h", "parameters": {"not": {}}}}
    tools = take_tools(Fields({"tools": [G, strict, loose]}))
    structure = tools.structure(calls, reasoning, is_thinking=False)
    assert matches(structure, "Well: " + call_of(calls, '{"a": [1, {}]}', "h"))
    assert not matches(structure, "Well: " + call_of(calls, "[]", "h"))
    assert matches(structure, "Hello {x}\n<think> you")
    assert matches(structure, "Well: " + call_of(calls, '{"a":1}'))
    assert not matches(structure, "Well: " + call_of(calls, '{"a":3}'))
    assert not matches(structure, call_of(calls, "{}", "other"))
    free = take_tools(Fields({"tools": [G, F]}))
    assert free.structure(calls, reasoning, is_thinking=False) is None


def answers(tmp_path, texts, parsers, **fields):
    """Return the deltas and the complete message of an answer whose text comes in these pieces."""
    names = dict(zip(("tool_call_parser", "reasoning_parser"), parsers, strict=True))
    service = make_service(tmp_path, small_engine(tmp_path), **names)
    body = {"messages": MESSAGES} | fields

    def parsed():
        call = parse_chat(Fields(copy.deepcopy(body)), service)
        return call.answer, call.encode()[0]

    def output(text, reason):
        return CompletionOutput(index=0, text=text, token_ids=[], finish_reason=reason)

    answer, prompt = parsed()
    complete = answer.choice(0, prompt, output("".join(texts), "stop"))
    answer, prompt = parsed()
    reasons = [None] * (len(texts) - 1) + ["stop"]
    deltas = [
        answer.delta(0, prompt, output(text, reason), is_first=i == 0)
        for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))
    ]
    return complete, deltas


def test_reasoning_content_and_parallel_calls(tmp_path):
    calls = [f'<tool_call>{{"name": "g", "arguments": {{"x": {x}}}}}</tool_call>' for x in (1, 2)]
    texts = ["<think>H", "m.</thi", "nk>\nHi", " ", calls[0][:9], calls[0][9:] + calls[1]]
    complete, deltas = answers(tmp_path, texts, ("hermes", "qwen3"), tools=[G])
    message = complete["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi", "Hm.")
    functions = [{"name": "g", "arguments": f'{{"x": {x}}}'} for x in (1, 2)]
    assert [one["function"] for one in message["tool_calls"]] == functions
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    assert complete["finish_reason"] == deltas[-1]["finish_reason"] == "tool_calls"
    new = [one["delta"] for one in deltas if one is not None]
    assert new[0] == {"role": "assistant", "content": "", "reasoning_content": "H"}
    assert new[1:3] == [{"reasoning_content": "m."}, {"content": "Hi"}]
    (last,) = [one for one in new if "tool_calls" in one]
    arguments = [{"arguments": one.pop("arguments")} for one in functions]
    pieces = [x | {"arguments": ""} for x in functions], arguments
    assert [(x["index"], x["function"]) for x in last["tool_calls"]] == [
        (number, piece) for number in (0, 1) for piece in (pieces[0][number], pieces[1][number])
    ]
    options = {"tools": [G], "parallel_tool_calls": False}
    complete, _ = answers(tmp_path, texts, ("hermes", "qwen3"), **options)
    assert len(complete["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("parsers", PARSERS)
def test_an_answer_of_a_format_is_content_in_spite_of_reasoning(tmp_path, parsers, monkeypatch):
    monkeypatch.setattr("tests.support.servers.CHAT_TEMPLATE", "{{ tools }}<think>\n")
    texts = ['{"name": "g", ', '"parameters": {}}']
    options = {"tools": [G], "response_format": {"type": "json_object"}}
    complete, deltas = answers(tmp_path, texts, parsers, **options)
    assert complete["message"]["content"] == "".join(texts)
    assert [one["delta"]["content"] for one in deltas] == texts


def test_a_prompt_that_opens_the_reasoning_begins_within_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.servers.CHAT_TEMPLATE", "{{ tools }}<think>\n")
    complete, _ = answers(tmp_path, ["Hm.\n</think>\n", "\nHi"], ("hermes", "qwen3"))
    message = complete["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi", "Hm.")


def test_an_answer_of_reasoning_alone_can_be_sent_back(tmp_path):
    complete, _ = answers(tmp_path, ["<think>Hm."], ("hermes", "qwen3"))
    message = complete["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "Hm.")
    assert checked_messages([message])


def test_calls_stay_content_without_tools_or_a_parser(tmp_path):
    text = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    for parsers, fields in (
        (("hermes", "qwen3"), {}),
        (("hermes", "qwen3"), {"tools": [G], "tool_choice": "none"}),
        (("none", "none"), {"tools": [G]}),
    ):
        complete, _ = answers(tmp_path, [text], parsers, **fields)
        assert complete["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert complete["finish_reason"] == "stop"
