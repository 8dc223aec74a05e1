"""Fields of a request: what they become, and which are refused; without a running server."""

import asyncio
import threading
import time

import pytest
import tokenizers
from starlette.requests import Request
from starlette.testclient import TestClient
from tokenizers.processors import TemplateProcessing

from pallas_paged.engine import PoolingParams, SamplingParams
from pallas_paged.server import fields as body
from pallas_paged.server.app import app_of, parse_embedding
from pallas_paged.server.call import field_of
from pallas_paged.server.completions import parse_chat, parse_completion, take_conversation
from pallas_paged.server.fields import APIError, Bodies, Fields, read_fields
from pallas_paged.server.service import ServerConfig
from tests.support.servers import make_service

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    defaults = {"temperature": 0.5, "stop": "D", "stop_token_ids": [7], "top_k": 3}
    folder = tmp_path_factory.mktemp("fields")
    return make_service(
        folder, defaults=defaults, chat_defaults={"stop": ["A", "B"]}, allow_priority=True
    )


def error_of(call, *args, **options):
    with pytest.raises(APIError) as raised:
        call(*args, **options)
    error = raised.value.body["error"]
    return raised.value.status, error["message"], error["param"]


def test_fields_say_what_they_expect():
    fields = Fields({"a": 1, "b": True, "c": None, "d": 1.5, "e": 0, "f": False}, path="in.")
    assert fields.take("a", float) == 1 and fields.take("c", str, default="x") == "x"
    assert fields.take("missing", dict) is None and fields.take("e", int, default=5) == 0
    assert fields.take("f", bool, default=True) is False
    message = "in.b must be an integer or a string"
    assert error_of(fields.take, "b", int, str) == (400, message, "in.b")
    assert error_of(fields.end) == (400, "unknown field in.d", "in.d")
    assert fields.take("d") == 1.5 and fields.end() is None
    kinds = {bool: "a boolean", float: "a number", list: "an array", dict: "an object"}
    for kind, name in kinds.items():
        assert error_of(Fields({"x": "y"}).take, "x", kind)[1] == f"x must be {name}"
    assert error_of(Fields({"k" * 200: 1}).end)[1:] == ("unknown field " + "k" * 100, "k" * 100)
    fields = Fields({"x": "other", "y": "", "z": None}, path="in.")
    assert error_of(fields.refuse, "x", "") == (400, "in.x is not supported", "in.x")
    assert fields.refuse("y", "a", "") is None and fields.refuse("z") is None
    assert fields.end() is None


def read(
    pieces, *, headers=(), content_type=b"application/json", max_bytes=10, wait=0.0, bodies=None
):
    """Read a body that comes in pieces, and take those from the list that are read."""

    async def receive():
        await asyncio.sleep(wait)
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    headers = [(b"content-type", content_type), *headers]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    bodies = bodies or Bodies(1 << 20)
    fields = asyncio.run(read_fields(request, max_bytes, bodies))
    fields.take("a")
    fields.end()


def test_bodies_must_be_small_timely_json(monkeypatch):
    for kind in (b"application/json", b" Application/JSON ;charset=utf-8"):
        read([b'{"a"', b": 123}"], content_type=kind)  # as many bytes as allowed
    for kind in (b"", b"text/plain", b"application/json5"):
        assert error_of(read, [], content_type=kind)[0] == 415
    too_large = 413, "the body has more than 10 bytes", None
    assert error_of(read, [b'{"a":  123', b"}"]) == too_large
    monkeypatch.setattr(body, "MAX_DISCARDED_BYTES", 5)
    # Up to this many more bytes are read before the answer, which the client else does not see.
    for pieces, num_left in (([7, 8, 0], 0), ([7, 9, 1], 1)):
        pieces = [b" " * size for size in pieces]
        assert error_of(read, pieces) == too_large
        assert len(pieces) == num_left
    for length, extra in ((b"16", []), (b"11", [(b"expect", b"100-continue")])):
        headers = [(b"content-length", length), *extra]
        assert error_of(read, [], headers=headers) == too_large
    for length in (b"15", b"x"):
        length = [(b"content-length", length)]
        assert error_of(read, [b" " * 11], headers=length) == too_large
    read([b"{}"], headers=[(b"content-length", b"10"), (b"expect", b"100-continue")])
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)
    with pytest.raises(APIError, match="the body did not arrive in 0 s") as raised:
        read([b"{", b"}"], wait=0.04)
    assert (raised.value.status, raised.value.headers) == (408, {"connection": "close"})


def test_bodies_together_are_limited():
    bodies = Bodies(12)
    bodies.add(3)  # of another request
    read([b'{"a"', b": 12}"], bodies=bodies)
    with pytest.raises(APIError, match="bodies of all requests have more than 12 bytes") as raised:
        read([b'{"a"', b": 123}"], bodies=bodies)
    headers = {"retry-after": "1", "connection": "close"}
    assert (raised.value.status, raised.value.headers) == (503, headers)
    assert error_of(read, [b" " * 5, b" " * 6, b""], bodies=bodies)[0] == 413
    assert bodies.num_bytes == 3


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "x"} x'),
        *(b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": ' + b"9" * 5000 + b"}"),
        b"[" * 100_000,
        *('{"prompt": "x"}'.encode(encoding) for encoding in ("utf-16", "utf-16-be", "utf-32-le")),
    ],
)
def test_bodies_that_are_not_json_objects(text):
    status, message, param = error_of(read, [text], max_bytes=200_000)
    assert (status, param) == (400, None) and "JSON" in message


def parsed(parse, service, **fields):
    fields = Fields({"messages": MESSAGES} | fields if parse is parse_chat else fields)
    return parse(fields, service)


def test_fields_become_parameters(service):
    def completion(**fields):
        return parsed(parse_completion, service, prompt="x", **fields).params

    def chat(**fields):
        return parsed(parse_chat, service, **fields).params

    base = dict(temperature=0.5, top_k=3, stop="D", stop_token_ids=[7], max_tokens=16)
    assert completion() == SamplingParams(**base)
    names = ("stop", "n", "seed", "logprobs", "stream", "stream_options", "user", "suffix", "echo")
    assert completion(**dict.fromkeys(names)) == SamplingParams(**base)  # of null
    names = dict(n=2, best_of=3, length_penalty=2.0, min_tokens=1, temperature=0.0, top_k=5)
    names |= dict(top_p=0.5, min_p=0.25, presence_penalty=1.0, frequency_penalty=-1.0, seed=5)
    names |= dict(repetition_penalty=1.5, ignore_eos=True, max_tokens=4, logprobs=2)
    assert completion(**names) == SamplingParams(**base | names)
    assert completion(seed=-3).seed == 2**32 - 3
    assert completion(seed=2**32 + 1).seed == 1
    assert completion(logit_bias={"5": 1}).logit_bias == ((5, 1),)
    assert completion(echo=True, logprobs=3).prompt_logprobs == 3
    assert completion(echo=True).prompt_logprobs is None
    both = base | {"stop": ["D", "E"], "stop_token_ids": [7, 8]}
    assert completion(stop="E", stop_token_ids=[8]) == SamplingParams(**both)
    assert chat() == SamplingParams(stop=["A", "B"])
    assert chat(beam_width=2) == SamplingParams(beam_width=2)
    assert completion(beam_width=2) == SamplingParams(
        beam_width=2, stop_token_ids=[7], max_tokens=16
    )
    beams = "stop=('C',) is not possible with beam_width=2"
    for stopped in (completion, chat):
        assert error_of(stopped, beam_width=2, stop="C") == (400, beams, "stop")
    assert chat(stop=["C"], temperature=0.25).stop == ("A", "B", "C")
    assert chat(max_tokens=5).max_tokens == chat(max_completion_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=0).max_tokens == 0
    assert (chat().logprobs, chat(logprobs=True).logprobs) == (None, 0)
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).logprobs is None
    # The largest that are allowed.
    assert completion(n=128).n == completion(best_of=128).best_of == 128
    assert len(completion(stop=["x" * 1000] * 16).stop) == 17


def test_fields_become_calls(service):
    call = parsed(parse_completion, service, prompt=["ab", [1, 2, 3], "c"])
    assert (call.num_prompts, call.num_characters, call.priority) == (3, 6, 0)
    assert [prompt.token_ids for prompt in call.encode()] == [[97, 98], [1, 2, 3], [99]]
    assert [prompt.text for prompt in call.encode()] == ["", "", ""]
    assert abs(time.perf_counter() - call.arrival) < 10
    call = parsed(parse_completion, service, prompt=["ab", [65, 66]], echo=True, suffix="")
    assert [prompt.text for prompt in call.encode()] == ["ab", "AB"]
    assert parsed(parse_completion, service, prompt=[5, 6]).num_prompts == 1
    largest = parsed(parse_completion, service, prompt="x", priority=-(2**31) + 1, stream=True)
    assert largest.priority == -(2**31) + 1 and largest.stream and not largest.include_usage
    options = {"include_usage": True, "include_obfuscation": False}
    ignored = dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier"), 1)
    ignored |= dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), "x")
    chat = dict(parallel_tool_calls=True, modalities=["text"], response_format={"type": "text"})
    call = parsed(parse_chat, service, stream=True, stream_options=options, **ignored, **chat)
    assert call.stream and call.include_usage and call.num_prompts == 1
    assert call.num_characters > len(str(MESSAGES))
    assert bytes(call.encode()[0].token_ids) == b"[user] x\n[assistant] "
    text = parsed(parse_completion, service, prompt="x")
    for head, kind, prefix in (
        (call.answer.head, "chat.completion", "chatcmpl-"),
        (text.answer.head, "text_completion", "cmpl-"),
    ):
        assert head.pop("id").startswith(prefix) and abs(head.pop("created") - time.time()) < 60
        assert head == {"object": kind, "model": "small", "system_fingerprint": None}
    one, other = (parsed(parse_completion, service, prompt="x").answer.head for _ in range(2))
    assert one["id"] != other["id"] and len(one["id"]) == len("cmpl-") + 32


def test_fields_that_the_template_renders(service):
    def rendered(**fields):
        conversation = take_conversation(Fields({"messages": MESSAGES} | fields), service)
        assert conversation.num_characters > sum(len(str(one)) for one in fields.values())
        return bytes(conversation.encode(service)).decode()

    end = "[user] x\n[assistant] "
    tools = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    assert rendered(**tools).endswith(end) and '"add"' in rendered(**tools)
    assert rendered(**tools, tool_choice="auto") == rendered(**tools)
    assert rendered(**tools, tool_choice="none") == end
    assert rendered(documents=[{"title": "T"}]).startswith('[documents] [{"title": "T"}]')
    assert rendered(add_generation_prompt=False) == "[user] x\n"
    assert rendered(reasoning_effort="low") == "[effort] low\n" + end
    both = {"reasoning_effort": "high", "style": "old"}
    expected = "[style] old\n[effort] high\n" + end
    assert rendered(reasoning_effort="low", chat_template_kwargs=both) == expected


def test_texts_have_special_tokens_but_rendered_ones_have_not(tmp_path):
    """`tokenizer.json` may add some to each text, which a template writes itself."""
    make_service(tmp_path)
    path = tmp_path / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.post_processor = TemplateProcessing(single="! $A", special_tokens=[("!", 33)])
    inner.save(str(path))
    made = make_service(tmp_path)
    assert bytes(made.encode_text("x")) == b"!x"
    assert bytes(made.encode_text("x", add_special_tokens=False)) == b"x"
    assert bytes(parsed(parse_completion, made, prompt="x").encode()[0].token_ids) == b"!x"
    assert bytes(parsed(parse_chat, made).encode()[0].token_ids) == b"[user] x\n[assistant] "
    client = TestClient(app_of(made))
    for more, tokens in (({}, b"!x"), ({"add_special_tokens": False}, b"x")):
        answer = client.post("/tokenize", json={"prompt": "x"} | more)
        assert bytes(answer.json()["tokens"]) == tokens


def test_long_texts_are_encoded_in_a_thread(service):
    here = threading.get_ident()
    for length, is_inline in ((4000, True), (4001, False)):
        assert (asyncio.run(service.encode(threading.get_ident, length)) == here) == is_inline


def test_errors_name_their_field():
    for name in ("top_k", "stop", "max_tokens", "logprobs", "logit_bias", "seed", "best_of"):
        assert field_of(f"{name}=5 must be less") == name
    for message in ("prompt=5", "the seed", ""):
        assert field_of(message) is None
    error = APIError(400, "x" * 1001, param="\ud800").body["error"]
    assert error["message"] == "x" * 1000 + " ..." and error["param"] == "\\ud800"
    assert APIError(400, "x" * 1000).body["error"]["message"] == "x" * 1000
    kinds = {400: ("invalid_request_error", None), 401: ("authentication_error", "invalid_api_key")}
    kinds |= {429: ("rate_limit_error", "rate_limit_exceeded"), 500: ("server_error",) * 2}
    kinds |= {404: ("invalid_request_error", "not_found"), 504: ("server_error", "timeout")}
    kinds |= {503: ("server_error", "service_unavailable"), 418: ("invalid_request_error", None)}
    kinds |= {408: ("invalid_request_error", "request_timeout")}
    kinds |= {413: ("invalid_request_error", "request_too_large")}
    for status, kind in kinds.items():
        error = APIError(status, "m").body["error"]
        assert (error["type"], error["code"], error["param"]) == (*kind, None)
    assert APIError(404, "m", code="own").body["error"]["code"] == "own"


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_config_says_what_vectors_are_made_of(service, monkeypatch, pooling):
    monkeypatch.setattr(service, "config", ServerConfig(allow_priority=True, pooling=pooling))
    call = parse_embedding(Fields({"input": ["x", "y"], "priority": -3}), service)
    assert call.pooling == PoolingParams(pooling=pooling)
    assert (call.priority, call.num_prompts, call.stream) == (-3, 2, False)


def test_limits_of_a_server_have_bounds():
    config = ServerConfig(served_model_name="x")
    limits = dict(max_body_bytes=8 << 20, max_queue=1024, max_connections=4096, api_keys=())
    limits |= dict(request_timeout=600, drain_timeout=30, max_total_body_bytes=256 << 20)
    limits |= dict(allowed_hosts=(), allow_priority=False)
    assert {name: getattr(config, name) for name in limits} == limits
    least = dict(max_body_bytes=1, max_queue=0, max_connections=1, max_total_body_bytes=1)
    least |= dict(request_timeout=0.0, drain_timeout=0.0)
    ServerConfig(served_model_name="x", **least)
    for name, value in least.items():
        for bad in (value - 1, None, "5"):
            with pytest.raises(ValueError, match=name):
                ServerConfig(served_model_name="x", **{name: bad})
    for name in ("api_keys", "allowed_hosts"):
        # Each character of a text would be a key.
        for bad in ("secret", ("",), ("a", "é"), (b"x",), ["x"]):
            with pytest.raises(
                ValueError, match=f"^{name} must be a tuple of ASCII texts"
            ) as raised:
                ServerConfig(**{name: bad})
            assert "secret" not in str(raised.value)
    with pytest.raises(ValueError, match=r"'b:80', which must be without a port"):
        ServerConfig(allowed_hosts=("a", "[::1]", "b:80"))
    for bad in ({"served_model_name": ""}, {"served_model_name": 5}, {"allow_priority": 1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ServerConfig(**bad)
    with pytest.raises(ValueError, match="pooling='cls' must be one of last, mean"):
        ServerConfig(pooling="cls")
    for name in ("tool_call_parser", "reasoning_parser"):
        assert getattr(config, name) == "auto"
        for bad in ("pythonic", None, ["mistral"]):
            with pytest.raises(ValueError, match=f"^{name}=.* must be one of auto, none, "):
                ServerConfig(**{name: bad})
