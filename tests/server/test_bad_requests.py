"""Every bad input gets an error with the right status, as OpenAI's JSON."""

import json

import pytest

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "x"}]
# Fields, words of the message, and its parameter.
OF_TEXTS = [
    ({"prompt": None}, "prompt must be", "prompt"),
    ({"prompt": 5}, "prompt must be a string or an array", "prompt"),
    ({"prompt": []}, "prompt must be", "prompt"),
    ({"prompt": [[]]}, "the prompt is empty", None),
    ({"prompt": ["x", 5]}, "prompt must be", "prompt"),
    ({"prompt": [256]}, "prompt must have token ids in 0..255, not 256", "prompt"),
    ({"prompt": [[1, True]]}, "token ids in 0..255, not True", "prompt"),
    ({"prompt": [10**400]}, "token ids in 0..255, not 1", "prompt"),
    ({"prompt": "\ud800"}, "valid Unicode", None),
    ({"prompt": "x" * 300}, "more than the 256 tokens", None),
    ({"prompt": [*range(1000)]}, "a prompt of 1000 tokens is more than the 256 tokens", None),
    ({"max_tokens": 256}, "more than the 256 tokens", None),
    ({"max_tokens": -1}, "max_tokens=-1", "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens must be an integer", "max_tokens"),
    ({"n": 129}, "n=129 must be at most 128", "n"),
    ({"best_of": 129}, "best_of=129 must be at most 128", "best_of"),
    ({"best_of": 2, "stream": True}, "best_of can't be streamed", "best_of"),
    ({"beam_width": 2, "stream": True}, "beam_width can't be streamed", "beam_width"),
    ({"beam_width": 2, "stop": "x"}, "not possible with beam_width=2", "stop"),
    ({"seed": "x"}, "seed must be an integer", "seed"),
    ({"stop": {}}, "stop must be a string or an array", "stop"),
    ({"stop": ["x"] * 17}, "stop has 17 texts, must have at most 16", "stop"),
    ({"stop": "x" * 1001}, "stop must have at most 1000 characters", "stop"),
    ({"stop": ["x", "x" * 1001]}, "stop must have at most 1000 characters", "stop"),
    ({"stop_token_ids": [256]}, "stop_token_ids", None),
    ({"logit_bias": {"x": 1}}, "token ids as keys", "logit_bias"),
    ({"logit_bias": {"256": 1}}, "logit_bias", None),
    ({"logit_bias": [1]}, "logit_bias must be an object", "logit_bias"),
    ({"structured_outputs": {}}, "structured_outputs has nothing", "structured_outputs"),
    ({"structured_outputs": {"choice": "x"}}, "must be an array", "structured_outputs.choice"),
    ({"structured_outputs": {"regexp": "x"}}, "unknown field", "structured_outputs.regexp"),
    ({"logprobs": True}, "logprobs must be an integer", "logprobs"),
    ({"echo": 1}, "echo must be a boolean", "echo"),
    ({"suffix": "x"}, "suffix is not supported", "suffix"),
    ({"return_token_ids": 1}, "return_token_ids must be a boolean", "return_token_ids"),
    ({"stream": "yes"}, "stream must be a boolean", "stream"),
    ({"stream_options": {}}, "stream_options needs stream=true", "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "unknown field stream", "stream_options.x"),
    ({"priority": -1}, "priority=-1 is not allowed by this server", "priority"),
    ({"priority": 2**31}, "must be in -2147483647..2147483647", "priority"),
    ({"priority": -(2**31)}, "must be in -2147483647..2147483647", "priority"),
    ({"max_token": 5}, "unknown field max_token", "max_token"),
    (
        {"return_routed_experts": True},
        "unknown field return_routed_experts",
        "return_routed_experts",
    ),
    ({"\ud800": 5}, "unknown field \\ud800", "\\ud800"),
    ({"model": 5}, "model must be a string", "model"),
    ({"prompt": ["x"] * 600, "n": 2}, "1200 sequences is more than the 1032", None),
]


def tool(name="f", **fields):
    return {"type": "function", "function": {"name": name} | fields}


TOOL = tool()
JSON_OBJECT = {"response_format": {"type": "json_object"}}
OF_CHATS = [
    ({"messages": None}, "messages must be a list", "messages"),
    ({"messages": []}, "messages must be a list", "messages"),
    ({"messages": [{"role": "bad", "content": "x"}]}, "messages[0].role", "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "UTF-8", "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "no tools here", "messages"),
    ({"prompt": "x"}, "unknown field prompt", "prompt"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs=true", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 must be in 0..20", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs=-1", "top_logprobs"),
    ({"tools": "x"}, "tools must be an array", "tools"),
    ({"tools": [5]}, "tools[0]=5 must be an object", "tools[0]"),
    ({"tools": [{"type": "x"}]}, "tools[0].type='x' must be \"function\"", "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "that of another tool", "tools[1].function.name"),
    ({"tools": [tool(name="a b")]}, "must have 1 to 64 letters", "tools[0].function.name"),
    ({"tools": [tool(parameters=5)]}, "must be an object", "tools[0].function.parameters"),
    ({"tools": [tool(x=5)]}, "unknown field", "tools[0].function.x"),
    ({"tools": [TOOL], "tool_choice": "f"}, "tool_choice='f' must be", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": tool(name="g")}, "tool_choice={", "tool_choice"),
    (JSON_OBJECT | {"tools": [TOOL], "tool_choice": "required"}, "response_format", "tool_choice"),
    ({"tools": [tool(parameters={"type": "strin"})], "tool_choice": "required"}, "strin", "tools"),
    ({"documents": [5]}, "documents=", "documents"),
    ({"tool_choice": "required"}, 'tool_choice="required" needs tools', "tool_choice"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": 5}]}, "be a text", "messages"),
    ({"response_format": "json"}, "response_format must be an object", "response_format"),
    ({"response_format": {"type": "json"}}, "response_format.type must be", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "must have a schema", "response_format"),
    ({"response_format": {"type": "text", "schema": {}}}, "unknown", "response_format.schema"),
    (JSON_OBJECT | {"structured_outputs": {"regex": "x"}}, "given both", "structured_outputs"),
    (JSON_OBJECT | {"min_tokens": 2}, "min_tokens=2 is not possible with", "min_tokens"),
    ({"modalities": ["audio"]}, "modalities is not supported", "modalities"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "must be equal", "max_completion_tokens"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs must be", "chat_template_kwargs"),
    ({"parallel_tool_calls": 5}, "parallel_tool_calls must be", "parallel_tool_calls"),
]
OF_EMBEDDINGS = [
    ({"input": None}, "input must be a text, token ids, or a list of those", "input"),
    ({"input": []}, "input must be", "input"),
    ({"input": 5}, "input must be a string or an array", "input"),
    ({"input": ["x", 5]}, "input must be", "input"),
    ({"input": ["x", ""]}, "the prompt is empty", None),
    ({"input": [[1], [256]]}, "input must have token ids in 0..255, not 256", "input"),
    ({"input": ["x", "x" * 300]}, "a prompt of 300 tokens", None),
    ({"input": ["x"] * 1100}, "1100 sequences is more than the 1032", None),
    ({"encoding_format": "int8"}, "encoding_format='int8' must be one of", "encoding_format"),
    ({"dimensions": 0}, "dimensions=0 must be at least 1", "dimensions"),
    ({"dimensions": 65}, "dimensions=65 is more than the 64 of the model", "dimensions"),
    ({"dimensions": "2"}, "dimensions must be an integer", "dimensions"),
    ({"priority": 1}, "priority=1 is not allowed by this server", "priority"),
    ({"max_tokens": 1}, "unknown field max_tokens", "max_tokens"),
]
UNSUPPORTED = ("functions", "function_call", "audio", "prediction", "web_search_options")
OF_CHATS += [({name: ["x"]}, f"{name} is not supported", name) for name in UNSUPPORTED]


def check_error(response, status, *words):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    for word in words:
        assert word in error["message"], error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "valid", "rows"),
    [
        (TEXT, {"prompt": "x", "max_tokens": 2}, OF_TEXTS),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2}, OF_CHATS),
        (VECTORS, {"input": "x"}, OF_EMBEDDINGS),
    ],
)
def test_bad_fields(client, path, valid, rows):
    for fields, words, param in rows:
        body = json.dumps(valid | fields)
        answer = client.post(path, content=body, headers=JSON)
        assert (check_error(answer, 400, words)["param"]) == param, fields


def test_other_paths_methods_models_and_types(client, server):
    before = server.metrics()
    check_error(client.get("/v1/nothing"), 404, "there is no GET /v1/nothing")
    check_error(client.get("/health/"), 404, "there is no GET /health/")  # and no redirect
    answer = client.get(TEXT)
    check_error(answer, 405, f"GET {TEXT}: the method must be one of POST")
    assert answer.headers["allow"] == "POST"
    check_error(client.post(TEXT, content=b"{}"), 415, "application/json")
    check_error(client.post(TEXT, content=b"{", headers=JSON), 400, "the body is not JSON")
    for path, fields in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        error = check_error(client.post(path, json=fields | {"model": "gpt"}), 404, "'gpt'")
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    check_error(client.get("/v1/models/small/other"), 404, "'small/other'")
    after = server.metrics()
    for status, count in ((404, 5), (405, 1), (415, 1), (400, 1)):
        name = f'http_errors_total{{status="{status}"}}'
        assert after[name] == before.get(name, 0) + count


def test_tokens_and_texts(client):
    def tokens(**fields):
        return client.post("/tokenize", json=fields)

    answer = tokens(prompt="Hé", model="small", add_special_tokens=False).json()
    assert answer == {"count": 3, "max_model_len": 256, "tokens": list("Hé".encode())}
    assert tokens(prompt="x" * 5000).json()["count"] == 5000
    assert bytes(tokens(messages=MESSAGES).json()["tokens"]) == b"[user] x\n[assistant] "
    for fields, words in (
        ({}, "messages"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "messages": MESSAGES}, "unknown field messages"),
        ({"messages": MESSAGES, "x": 1}, "unknown field x"),
    ):
        check_error(tokens(**fields), 400, words)
    check_error(tokens(prompt="x", model="gpt"), 404)

    def text(**fields):
        return client.post("/detokenize", json=fields)

    assert text(tokens=[72, 105]).json() == {"prompt": "Hi"} and text(tokens=[]).status_code == 200
    check_error(text(tokens=[-1]), 400, "tokens must have token ids")
    assert check_error(text(), 400, "tokens must be a list of token ids")["param"] == "tokens"
    check_error(text(tokens=[], x=1), 400, "unknown field x")
    check_error(text(tokens=[], model="gpt"), 404)
