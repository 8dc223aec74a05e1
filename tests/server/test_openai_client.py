"""The endpoints through OpenAI's own client."""

from __future__ import annotations

import asyncio

import pytest

openai = pytest.importorskip("openai")

from tests.support.servers import expected_text  # noqa: E402

GREEDY = {"model": "small", "temperature": 0}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
RENDERED = "[system] Be brief.\n[user] Hello\n[assistant] "


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_a_chat_whole_and_streamed(api):
    answer = api.chat.completions.create(messages=MESSAGES, max_tokens=12, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == expected_text(RENDERED, 12)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    numbers = {"prompt_tokens": len(RENDERED), "completion_tokens": 12}
    numbers |= {"total_tokens": len(RENDERED) + 12}
    usage = answer.usage.model_dump()
    assert {name: usage[name] for name in numbers} == numbers

    options = {"stream": True, "stream_options": {"include_usage": True}}
    options |= {"max_completion_tokens": 12, "messages": MESSAGES}
    *chunks, last = list(api.chat.completions.create(**GREEDY, **options))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (
        len(chunks) - 1
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected_text(RENDERED, 12)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks) and last.choices == []
    usage = last.usage.model_dump()
    assert {name: usage[name] for name in numbers} == numbers
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32  # the first answer's prompt
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


def test_echo_repeats_the_prompt_with_its_logprobs(api):
    whole = api.completions.create(prompt="Hi you", echo=True, logprobs=2, max_tokens=4, **GREEDY)
    (choice,) = whole.choices
    assert choice.text == "Hi you" + expected_text("Hi you", 4)
    logprobs = choice.logprobs
    assert logprobs.tokens[:6] == list("Hi you") and len(logprobs.tokens) == 10
    assert logprobs.text_offset[:7] == list(range(7))
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert all(len(top) == 2 for top in logprobs.top_logprobs[1:])
    greedy = zip(logprobs.token_logprobs[6:], logprobs.top_logprobs[6:], strict=True)
    assert all(own == max(top.values()) for own, top in greedy)
    only = api.completions.create(prompt="Hi you", echo=True, logprobs=0, max_tokens=0, **GREEDY)
    assert only.choices[0].text == "Hi you" and only.choices[0].logprobs.top_logprobs is None
    assert only.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        logprobs.token_logprobs[1:6], abs=1e-4
    )


@pytest.mark.parametrize("stream", [False, True])
def test_text_offset_counts_the_characters_that_tokens_begin_in(api, stream):
    options = dict(prompt="é😀!", echo=True, logprobs=0, max_tokens=1, stream=stream, **GREEDY)
    answer = api.completions.create(**options)
    (whole,) = answer if stream else [answer]
    logprobs = whole.choices[0].logprobs
    assert logprobs.tokens[:2] == ["bytes:\\xc3", "bytes:\\xa9"] and logprobs.tokens[6] == "!"
    assert logprobs.text_offset == [0, 0, 1, 1, 1, 1, 2, 3]


def test_logprobs_of_a_chat_streamed_and_whole(api):
    options = dict(messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY)
    whole = api.chat.completions.create(**options).choices[0].logprobs.content
    assert len(whole) == 5
    for entry in whole:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3 and len(entry.bytes) == 1
    streamed = []
    for chunk in api.chat.completions.create(stream=True, **options):
        streamed += chunk.choices[0].logprobs.content
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in whole]
    sampled = bytes(entry.bytes[0] for entry in whole).decode(errors="replace")
    assert sampled == expected_text(RENDERED, 5)


def test_sampling_follows_the_fields(api):
    options = dict(model="small", prompt="Once", max_tokens=16, n=2)
    first, again, other = (api.completions.create(seed=s, **options) for s in (-3, 2**32 - 3, 4))
    texts = [[choice.text for choice in one.choices] for one in (first, again, other)]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]

    text = expected_text("Stop here", 30)
    stop = text[8:10]
    answer = api.completions.create(prompt="Stop here", max_tokens=30, stop=[stop], **GREEDY)
    (choice,) = answer.choices
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"
    assert choice.stop_reason == stop

    options = dict(prompt="More", model="small", max_tokens=4)
    extra = {"logit_bias": {"65": 100}, "min_tokens": 2, "priority": -1, "ignore_eos": True}
    answer = api.completions.create(extra_body=extra | {"return_token_ids": True}, **options)
    assert answer.choices[0].token_ids == [65] * 4
    assert answer.choices[0].prompt_token_ids == list(b"More")
    filters = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0}
    answer = api.completions.create(temperature=2, top_p=0.9, extra_body=filters, **options)
    assert answer.choices[0].text == expected_text("More", 4)
    extra = {"beam_width": 2, "return_token_ids": True}
    beams = api.completions.create(n=2, extra_body=extra, **options).choices
    assert beams[0].token_ids != beams[1].token_ids
    assert len(api.completions.create(best_of=3, seed=1, **options).choices) == 1


def test_the_model_and_errors_have_the_client_s_classes(api):
    (model,) = api.models.list().data
    assert (model.id, model.max_model_len) == ("small", 256)
    assert api.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("large")
    with pytest.raises(openai.NotFoundError) as error:
        api.completions.create(model="large", prompt="x")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature=-1") as error:
        api.completions.create(model="small", prompt="x", temperature=-1)
    assert error.value.param == "temperature"


def test_leaving_a_stream_aborts_the_request(api, server):
    before = server.metrics()['requests_total{outcome="abort"}']
    with api.completions.create(prompt="Long", max_tokens=250, stream=True, **GREEDY) as stream:
        next(iter(stream))
    server.wait_until_idle()
    after = server.metrics()
    assert after['requests_total{outcome="abort"}'] == before + 1


def test_many_clients_of_one_event_loop(server):
    prompts = [f"Client {number}" for number in range(24)]

    async def all_texts():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
            calls = [api.completions.create(prompt=one, max_tokens=8, **GREEDY) for one in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    assert asyncio.run(all_texts()) == [expected_text(prompt, 8) for prompt in prompts]
