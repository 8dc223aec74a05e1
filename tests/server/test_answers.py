"""The JSON of answers, at once and as events, and of log-probabilities."""

import json
import math
from types import SimpleNamespace

import pytest

from pallas_paged.engine import CompletionOutput, Logprob
from pallas_paged.server.call import Prompt, TextOffsets, chat_logprobs, completion_logprobs
from pallas_paged.server.completions import parse_chat, parse_completion
from pallas_paged.server.fields import Fields
from tests.support.servers import RunningServer, make_service, small_engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# 10 tokens, so that no page of them is ever cached.
MESSAGES = {"messages": [{"role": "user", "content": "é"}], "add_generation_prompt": False}
# Every token is "A".
BIASED = {"max_tokens": 1, "temperature": 0, "logit_bias": {"65": 100}, "return_token_ids": True}


def without_id(answer):
    assert answer.pop("id") and answer.pop("created")
    return answer


def usage(num_prompt, num_new):
    numbers = {"prompt_tokens": num_prompt, "completion_tokens": num_new}
    numbers |= {"total_tokens": num_prompt + num_new}
    return numbers | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_a_chat_and_a_text_at_once(client):
    answer = client.post(CHAT, json=MESSAGES | BIASED | {"stop_token_ids": [65]}).json()
    message = {"role": "assistant", "content": "", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    choice |= {"stop_reason": 65, "token_ids": [65]}
    head = {"object": "chat.completion", "model": "small", "system_fingerprint": None}
    assert without_id(answer) == head | {"choices": [choice], "usage": usage(10, 1)}
    answer = client.post(TEXT, json=BIASED | {"prompt": "é", "echo": True, "max_tokens": 2})
    assert answer.headers["content-type"] == "application/json"
    assert "éAA".encode() in answer.content
    ids = {"token_ids": [65, 65], "prompt_token_ids": list("é".encode())}
    choice = {"index": 0, "text": "éAA", "logprobs": None, "finish_reason": "length"}
    head = {"object": "text_completion", "model": "small", "system_fingerprint": None}
    expected = head | {"choices": [choice | {"stop_reason": None} | ids], "usage": usage(2, 2)}
    assert without_id(answer.json()) == expected


def test_a_model_without_tokenizer_continues_token_ids(tmp_path):
    with RunningServer(tmp_path, small_engine(None), has_texts=False) as server:
        answer = server.client.post(TEXT, json=BIASED | {"prompt": [120], "max_tokens": 2})
        (choice,) = answer.json()["choices"]
        assert (choice["token_ids"], choice["text"]) == ([65, 65], "")


@pytest.mark.parametrize("include_usage", [False, True])
def test_streamed_answers(client, include_usage):
    options = BIASED | {"stream": True, "stream_options": {"include_usage": include_usage}}
    choice = {"index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    choice["token_ids"] = [65]
    ids = {"prompt_token_ids": [120]}
    delta = {"role": "assistant", "content": "A"}
    for path, fields, part, kind, num_prompt in (
        (TEXT, {"prompt": "x"}, {"text": "A"} | ids, "text_completion", 1),
        (CHAT, MESSAGES, {"delta": delta}, "chat.completion.chunk", 10),
    ):
        answer = client.post(path, json=options | fields)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        events = [without_id(json.loads(one.removeprefix("data: "))) for one in events]
        head = {"object": kind, "model": "small", "system_fingerprint": None}
        first = head | {"choices": [choice | part]} | ({"usage": None} if include_usage else {})
        last = head | {"choices": [], "usage": usage(num_prompt, 1)}
        assert events == [first, last][: 1 + include_usage]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    return make_service(tmp_path_factory.mktemp("answers"))


def test_outputs_without_news_are_no_events(service):
    prompt = Prompt(token_ids=[1], text="p")
    nothing = CompletionOutput(index=0)
    news = [CompletionOutput(index=0, text="t"), CompletionOutput(index=0, finish_reason="stop")]

    def chat(**fields):
        return parse_chat(Fields(MESSAGES | fields), service).answer

    def text(**fields):
        return parse_completion(Fields({"prompt": "p"} | fields), service).answer

    for make in (chat, text):
        assert make().delta(0, prompt, nothing, is_first=False) is None
        assert make(return_token_ids=True).delta(0, prompt, nothing, is_first=False)
        for one in news:
            delta = make().delta(3, prompt, one, is_first=False)
            assert delta["index"] == 3 and delta["finish_reason"] == one.finish_reason
    first = chat().delta(0, prompt, nothing, is_first=True)["delta"]
    assert first == {"role": "assistant", "content": ""}
    assert chat().delta(0, prompt, news[0], is_first=False)["delta"] == {"content": "t"}
    assert chat().delta(0, prompt, news[1], is_first=False)["delta"] == {}
    assert text().delta(0, prompt, nothing, is_first=True) is None
    echo = text(echo=True, return_token_ids=True)
    assert echo.delta(0, prompt, nothing, is_first=True)["text"] == "p"
    later = echo.delta(0, prompt, news[0], is_first=False)
    assert later["text"] == "t" and "prompt_token_ids" not in later
    plain = text().delta(0, prompt, news[0], is_first=True)
    assert not {"token_ids", "prompt_token_ids"} & plain.keys()
    # The possible beginning of a stop text has log-probabilities, but no text yet.
    held = CompletionOutput(index=0, token_ids=[65], logprobs=[{65: Logprob(-1.0, 1)}])
    assert chat(logprobs=True).delta(0, prompt, held, is_first=False)["logprobs"]["content"]
    both = text(logprobs=0)
    logprobs = [both.delta(i, prompt, held, is_first=False)["logprobs"] for i in (0, 1, 0)]
    assert [one["text_offset"] for one in logprobs] == [[0], [0], [1]]
    assert logprobs[0]["tokens"] == ["A"]


# Token 0 is special; 1 and 2 are the halves of "é".
BYTES = [b"<s>", b"\xc3", b"\xa9", b"x"]
TOKENIZER = SimpleNamespace(token_bytes=BYTES.__getitem__, is_special=lambda one: one == 0)
ENTRIES = [
    {3: Logprob(-2.0, 3), 1: Logprob(-0.5, 1), 0: Logprob(-1.0, 2)},
    {2: Logprob(-math.inf, 4), 3: Logprob(0.0, 1)},
]


def test_log_probabilities_of_a_chat():
    def token(text, logprob, *data):
        return {"token": text, "logprob": logprob, "bytes": [*data]}

    best = token("bytes:\\xc3", -0.5, 0xC3), token("<s>", -1.0, *b"<s>")
    own = token("x", -2.0, *b"x"), token("bytes:\\xa9", -9999.0, 0xA9)
    top = token("x", 0.0, *b"x"), token("bytes:\\xa9", -9999.0, 0xA9)
    for num_top in (0, 1, 2):
        found = chat_logprobs([3, 2], ENTRIES, num_top, TOKENIZER.token_bytes)
        tops = [[*best][:num_top], [*top][:num_top]]
        content = [a | {"top_logprobs": b} for a, b in zip(own, tops, strict=True)]
        assert found == {"content": content, "refusal": None}


def test_log_probabilities_of_a_text():
    offsets = TextOffsets()
    first = completion_logprobs([0, 3, 2], [None, *ENTRIES], 2, TOKENIZER, offsets)
    assert first == {
        "tokens": ["<s>", "x", "bytes:\\xa9"],
        "token_logprobs": [None, -2.0, -9999.0],
        "top_logprobs": [
            None,
            {"bytes:\\xc3": -0.5, "<s>": -1.0},
            {"x": 0.0, "bytes:\\xa9": -9999.0},
        ],
        "text_offset": [0, 0, 1],
    }
    entries = [{one: Logprob(-1.0, 1)} for one in (1, 2, 3)]
    later = completion_logprobs([1, 2, 3], entries, 0, TOKENIZER, offsets)
    assert later["text_offset"] == [2, 2, 3] and later["top_logprobs"] is None


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [
        ("", [b"\xf0\x9f", b"x", b"\xf0", b"\xf0", b"\x9f\x98\x80y", b"z"], [0, 1, 2, 3, 3, 5]),
        ("Hi <s>x", [b"<s>", b" Hi", b" ", b"<s>", b" x", b"<s>", b" y"], [0, 0, 2, 3, 6, 7, 7]),
        (" Hi", [b" Hi", b" "], [0, 3]),
        (" Hi", [b" ", b" Hi", b" "], [0, 1, 3]),
    ],
)
def test_offsets_are_those_of_the_text(prompt, tokens, offsets):
    """Also behind a part of a character, special tokens, and a space that the text lacks."""
    made = TextOffsets(prompt)
    assert [made.add(one, is_special=one == b"<s>") for one in tokens] == offsets
