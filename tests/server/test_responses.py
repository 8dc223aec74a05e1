"""`/v1/responses` through OpenAI's own client."""

import json

import pytest

openai = pytest.importorskip("openai")

from pallas_paged.engine import CompletionOutput  # noqa: E402
from pallas_paged.server.fields import Fields  # noqa: E402
from pallas_paged.server.responses import parse_response  # noqa: E402
from tests.support.servers import expected_text, make_service, small_engine  # noqa: E402

JSON = {"content-type": "application/json"}
GREEDY = {"model": "small", "temperature": 0}
RENDERED = "[system] Brief.\n[user] Hi\n[assistant] "
CHOICE = {"enum": [{"a": 11}, {"a": 12}, {"a": 21}, {"a": 22}]}
IMAGE = {"type": "input_image"}
QUESTION = {"role": "user", "content": "x"}
TOOL = {"type": "function", "name": "f", "parameters": {"const": {"a": 1}}}


def test_a_response_at_once_and_streamed(api):
    options = dict(input="Hi", instructions="Brief.", max_output_tokens=12, **GREEDY)
    response = api.responses.create(**options)
    assert response.output_text == expected_text(RENDERED, 12)
    assert (response.object, response.status, response.store) == ("response", "incomplete", False)
    assert response.incomplete_details.reason == "max_output_tokens"
    usage = response.usage
    numbers = usage.input_tokens, usage.output_tokens, usage.total_tokens
    assert numbers == (len(RENDERED), 12, len(RENDERED) + 12)
    with api.responses.stream(**options) as stream:
        events = [*stream]
        final = events[-1].response
    assert [one.sequence_number for one in events] == [*range(len(events))]
    kinds = [one.type.removeprefix("response.") for one in events]
    start = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[:4] == start and set(kinds[4:-4]) == {"output_text.delta"}
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == ends and final.status == "incomplete"
    assert final.output[0].content[0].text == response.output_text
    assert final.usage.output_tokens == 12


def test_fields_that_are_shown_may_have_surrogates_without_a_pair(client):
    body = {"input": "Hi", "metadata": {"a": "\ud800\\"}, "max_output_tokens": 1}
    for fields in body, body | {"stream": True}:
        answer = client.post("/v1/responses", content=json.dumps(fields), headers=JSON)
        assert answer.status_code == 200 and r'"metadata":{"a":"\ud800\\"}' in answer.text


def test_a_forced_call_at_once_and_streamed(api):
    pytest.importorskip("llguidance")
    choice = {"type": "function", "name": "f"}
    tool = TOOL | {"parameters": CHOICE}
    options = dict(input="Hi", tools=[tool], tool_choice=choice, **GREEDY)
    response = api.responses.create(**options)
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "f")
    assert json.loads(call.arguments)["a"] in (11, 12, 21, 22)
    assert response.status == call.status == "completed" and call.call_id
    events = [*api.responses.create(**options, stream=True)]
    kinds = [one.type.removeprefix("response.") for one in events]
    deltas = ["function_call_arguments.delta"] * (len(kinds) - 6)
    assert kinds == [
        *("created", "in_progress", "output_item.added", *deltas),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert len(deltas) > 1 and "".join(one.delta for one in events[3:-3]) == call.arguments
    assert events[-3].arguments == call.arguments
    assert events[-1].response.output[0].arguments == call.arguments


def test_a_json_schema_holds_the_text(api):
    pytest.importorskip("llguidance")
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"const": [1]}}}
    response = api.responses.create(input="Hi", text=text, **GREEDY)
    assert response.output_text == "[1]" and response.status == "completed"
    text = {"format": {"type": "json_object"}}
    response = api.responses.create(input="Hi", text=text, max_output_tokens=5, **GREEDY)
    assert response.output_text.startswith("{") and response.text.format.type == "json_object"


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"previous_response_id": "x"}, "not supported", "previous_response_id"),
        ({"conversation": "x"}, "not supported", "conversation"),
        ({"background": True}, "not supported", "background"),
        ({"n": 2}, "unknown field", "n"),
        ({"x": 2}, "unknown field", "x"),
        ({"input": 5}, "must be", "input"),
        ({"input": []}, "not empty", "input"),
        ({"input": [5]}, "must be an object", "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "not supported", "input[0].type"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "must have parts", "input[0].content"),
        ({"input": [{"role": "x", "content": "x"}]}, "role", "input"),
        ({"max_output_tokens": 0.5}, "must be an integer", "max_output_tokens"),
        ({"tools": [TOOL | {"name": ""}]}, "must have 1 to 64", "tools[0].name"),
        ({"tools": [{"type": "web_search"}]}, 'must be "function"', "tools[0].type"),
        ({"text": {"format": {"type": "x"}}}, "must be", "text.format.type"),
    ],
)
def test_a_bad_request_names_its_field(client, fields, words, param):
    response = client.post("/v1/responses", json={"input": "Hi"} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and words in error["message"]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (QUESTION | {"role": "boss"}, ".role='boss' must be one of system, "),
        ({"type": "function_call", "arguments": "{}"}, ".tool_calls[0]={"),
        ({"type": "function_call", "name": "f", "arguments": "{"}, ".tool_calls[0]: arguments='{'"),
        ({"type": "function_call_output", "call_id": 5, "output": ""}, ".tool_call_id=5 must be"),
    ],
)
def test_a_bad_item_is_named_by_its_index(client, item, words):
    """The items of an answer are one message."""
    answer = [{"role": "assistant", "content": x} for x in "ab"]
    items = [*answer, QUESTION, answer[0], item]
    error = client.post("/v1/responses", json={"input": items}).json()["error"]
    assert error["message"].startswith(f"input[4]{words}") and error["param"] == "input"


def parsed(tmp_path, items, **fields):
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    service = make_service(tmp_path, small_engine(tmp_path), **parsers)
    seen = []

    def render(messages, **options):
        seen.append((messages, options["tools"]))
        return "x"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.chat_template, "render", render)
        call = parse_response(Fields({"input": items} | fields), service)
        prompt = call.encode()[0]
    return call.answer, prompt, *seen[0]


def test_items_become_messages_and_tools_those_of_chats(tmp_path):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Q"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "R"},
        {"role": "assistant", "content": "B"},
    ]
    _, _, messages, tools = parsed(tmp_path, items, tools=[TOOL])
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": x, "type": "function", "function": function} for x in ("1", "2")]
    answer = {"role": "assistant", "content": "A", "reasoning_content": "Hm.", "tool_calls": calls}
    first, last = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "B"}
    assert messages == [first, answer, {"role": "tool", "tool_call_id": "1", "content": "R"}, last]
    assert tools == [
        {"type": "function", "function": dict(name="f", parameters=TOOL["parameters"])}
    ]


def test_reasoning_text_and_a_call_are_items(tmp_path):
    answer, prompt, *_ = parsed(tmp_path, "Hi", tools=[TOOL])
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    texts = ["<think>H", "m.</think>Wait", ".", call]
    events = []
    for index, text in enumerate(texts):
        reason = "stop" if index == 3 else None
        output = CompletionOutput(index=0, text=text, finish_reason=reason)
        events += answer.delta(0, prompt, output, is_first=index == 0)
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert [one["type"] for one in done] == ["reasoning", "message", "function_call"]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert done[1]["content"][0]["text"] == "Wait."
    added = [one for one in events if one["type"] == "response.output_item.added"]
    assert [one["output_index"] for one in added] == [0, 1, 2]
    assert [one["item"]["id"] for one in added] == [one["id"] for one in done]


def events_of(tmp_path, texts, reason):
    answer, prompt, *_ = parsed(tmp_path, "Hi", tools=[TOOL])
    events = []
    for index, text in enumerate(texts):
        ends = reason if index == len(texts) - 1 else None
        output = CompletionOutput(index=0, text=text, finish_reason=ends)
        events += answer.delta(0, prompt, output, is_first=index == 0)
    return events, answer.complete([], USAGE)["output"]


USAGE = dict(prompt_tokens=1, completion_tokens=1, total_tokens=2, prompt_tokens_details={})


def test_the_calls_of_one_region_are_items_that_end_in_order(tmp_path):
    calls = [f'{{"name": "f", "arguments": {{"x": {x}}}}}' for x in (1, 2)]
    text = f"Hi <tool_call>{'; '.join(calls)}</tool_call> Bye"
    events, output = events_of(tmp_path, [*text], "stop")
    assert [x["type"] for x in output] == ["message", "function_call", "function_call", "message"]
    assert [one.get("arguments") for one in output] == [None, '{"x": 1}', '{"x": 2}', None]
    assert {one["status"] for one in output} == {"completed"}
    for index, item in enumerate(output):
        own = [one for one in events if one.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1]["item"] == item and own[-1]["type"] == "response.output_item.done"
        deltas = [one["delta"] for one in own if one["type"].endswith("arguments.delta")]
        assert "".join(deltas) == item.get("arguments", "")
        assert {one["item_id"] for one in own if "item_id" in one} == {item["id"]}


def test_a_call_that_is_cut_off_is_an_incomplete_item_and_text(tmp_path):
    text = '<tool_call>{"name": "f", "arguments": {"x"'
    events, output = events_of(tmp_path, [*text], "length")
    kinds = [(one["type"], one["status"]) for one in output]
    assert kinds == [("function_call", "incomplete"), ("message", "completed")]
    assert output[0]["arguments"] == '{"x' and output[1]["content"][0]["text"] == text
    done = [one for one in events if one["type"] == "response.output_item.done"]
    assert [one["output_index"] for one in done] == [1, 0]
    _, at_once = events_of(tmp_path, [text], "length")
    assert [one["type"] for one in at_once] == ["message"]
