"""The endpoints through OpenAI's own client."""

import base64
import functools

import numpy as np
import pytest

openai = pytest.importorskip("openai")

from tests.support.oracle import hidden_states_of  # noqa: E402
from tests.support.servers import MODEL, expected_text, small_params  # noqa: E402

GREEDY = {"model": "small", "temperature": 0}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
RENDERED = "[system] Be brief.\n[user] Hello\n[assistant] "


@pytest.mark.smoke
@pytest.mark.cpu_budget(5)  # the client builds its models in the first call
def test_a_chat_at_once_and_streamed(api):
    options = dict(messages=MESSAGES, **GREEDY)
    answer = api.chat.completions.create(**options, max_tokens=12)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == expected_text(RENDERED, 12)
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = api.chat.completions.create(**options, max_completion_tokens=12)
    choices = [chunk.choices[0] for chunk in chunks]
    assert [one.delta.role for one in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert "".join(one.delta.content or "" for one in choices) == choice.message.content
    assert [one.finish_reason for one in choices] == [None] * (len(choices) - 1) + ["length"]
    for usage in (answer.usage, last.usage):
        numbers = usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
        assert numbers == (len(RENDERED), 12, len(RENDERED) + 12)
    assert last.usage.prompt_tokens_details.cached_tokens == 32  # the first answer's prompt
    assert {(one.id, one.object) for one in [*chunks, last]} == {(last.id, "chat.completion.chunk")}


def test_completions_of_several_prompts_and_samples(api):
    prompts = ["One two", "Three"]
    answer = api.completions.create(prompt=prompts, n=2, max_tokens=6, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts == [expected_text(prompt, 6) for prompt in prompts for _ in range(2)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 24)
    streamed = [""] * 4
    for chunk in api.completions.create(prompt=prompts, n=2, max_tokens=6, stream=True, **GREEDY):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    ids = [list(prompt.encode()) for prompt in prompts]
    again = api.completions.create(prompt=ids, max_tokens=6, **GREEDY)
    assert [choice.text for choice in again.choices] == texts[::2]
    one = api.completions.create(prompt=ids[1], max_tokens=6, **GREEDY)
    assert one.choices[0].text == texts[2]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_with_its_logprobs(api, stream):
    prompt = "é😀!"  # of 2, 4 and 1 tokens
    options = dict(prompt=prompt, echo=True, logprobs=2, max_tokens=4, stream=stream, **GREEDY)
    answer = api.completions.create(**options)
    choices = [one.choices[0] for one in (answer if stream else [answer])]
    text = "".join(choice.text for choice in choices)
    assert text == prompt + expected_text(prompt, 4) and choices[-1].finish_reason == "length"
    logprobs = [choice.logprobs for choice in choices]
    assert [len(one.tokens) for one in logprobs] == [11] or stream
    names = ("tokens", "token_logprobs", "text_offset")
    tokens, own, offsets = ([x for one in logprobs for x in getattr(one, name)] for name in names)
    assert tokens[:2] == ["bytes:\\xc3", "bytes:\\xa9"] and tokens[6] == "!"
    assert offsets[:8] == [0, 0, 1, 1, 1, 1, 2, 3] and len(offsets) == len(own) == 11
    top = [x for one in logprobs for x in one.top_logprobs]
    assert own[0] is None and top[0] is None and all(len(one) == 2 for one in top[1:])
    assert own[7:] == [max(one.values()) for one in top[7:]]
    scored = api.completions.create(**options | {"max_tokens": 0, "logprobs": 0, "stream": False})
    assert scored.choices[0].text == prompt and scored.choices[0].logprobs.top_logprobs is None
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(own[1:7], abs=1e-4)


def test_a_chat_has_the_logprobs_of_its_tokens_and_ends_at_a_stop_text(api):
    text = expected_text(RENDERED, 12)
    options = dict(messages=MESSAGES, stop=[text[8:10]], logprobs=True, top_logprobs=3, **GREEDY)
    complete = api.chat.completions.create(**options).choices[0]
    assert complete.message.content == text[: text.index(text[8:10])]
    assert (complete.finish_reason, complete.stop_reason) == ("stop", text[8:10])
    entries = complete.logprobs.content
    sampled = bytes(entry.bytes[0] for entry in entries).decode(errors="replace")
    assert sampled == text[: len(sampled)] and len(sampled) >= len(complete.message.content)
    for entry in entries:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3
    chunks = api.chat.completions.create(stream=True, **options)
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]


def test_ranked_and_sampled_completions(api):
    options = dict(model="small", prompt="Once", max_tokens=8, n=2)
    first, again, other = (api.completions.create(seed=s, **options) for s in (-3, 2**32 - 3, 4))
    texts = [[choice.text for choice in one.choices] for one in (first, again, other)]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]
    for extra in {"beam_width": 2}, {"best_of": 3}:
        choices = api.completions.create(extra_body=extra, **options).choices
        assert [choice.index for choice in choices] == [0, 1]


def vectors_of(texts, size=None):
    """What the server says of texts: last hidden states, computed without a cache."""
    hidden_states = hidden_states_of(MODEL, small_params())
    rows = np.array([hidden_states([*text.encode()])[-1] for text in texts])[:, :size]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_embeddings_of_texts_and_token_ids(api):
    """The client asks for base64 by itself."""
    texts = ["One two", "Three", "x" * 100]  # the last takes two steps
    wanted = vectors_of(texts)
    create = functools.partial(api.embeddings.create, model="small")
    for given, extra in ((texts, {}), ([[*text.encode()] for text in texts], {"user": "me"})):
        for options in {}, {"encoding_format": "float"}, {"encoding_format": "base64"}:
            answer = create(input=given, **options, **extra)
            found = [one.embedding for one in answer.data]
            if "base64" in options.values():
                found = [np.frombuffer(base64.b64decode(one), "<f4") for one in found]
            np.testing.assert_allclose(found, wanted, atol=1e-5)
            kinds = answer.object, answer.model, answer.data[1].object
            assert kinds == ("list", "small", "embedding")
            assert [one.index for one in answer.data] == [0, 1, 2]
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (112, 112)
    for one in texts[1], [*texts[1].encode()]:
        (found,) = create(input=one, dimensions=16).data
        np.testing.assert_allclose([found.embedding], vectors_of(texts[1:2], 16), atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions=65 is more than the 64"):
        create(input="x", dimensions=65)
