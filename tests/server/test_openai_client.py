"""The endpoints through OpenAI's own client."""

from __future__ import annotations

import asyncio

import pytest

openai = pytest.importorskip("openai")

from tests.support.servers import MODEL, expected_text  # noqa: E402

GREEDY = {"model": "small", "temperature": 0}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
RENDERED = "[system] Be brief.\n[user] Hello\n[assistant] "


@pytest.fixture
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_a_chat_answers_with_the_greedy_tokens_of_the_rendered_messages(api):
    answer = api.chat.completions.create(messages=MESSAGES, max_tokens=12, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == expected_text(RENDERED, 12)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(RENDERED), 12)
    assert usage.total_tokens == len(RENDERED) + 12


def test_a_streamed_chat_has_the_same_text_and_ends_with_its_usage(api):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = api.chat.completions.create(
        messages=MESSAGES, max_completion_tokens=12, **GREEDY, **options
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected_text(RENDERED, 12)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens == len(RENDERED)
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_of_several_prompts_and_samples(api):
    prompts = ["One two", "Three"]
    answer = api.completions.create(prompt=prompts, n=2, max_tokens=6, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts == [expected_text(prompt, 6) for prompt in prompts for _ in range(2)]
    assert answer.usage.completion_tokens == 24
    ids = [list(prompt.encode()) for prompt in prompts]
    again = api.completions.create(prompt=ids, max_tokens=6, **GREEDY)
    assert [choice.text for choice in again.choices] == texts[::2]
    one = api.completions.create(prompt=ids[1], max_tokens=6, **GREEDY)
    assert one.choices[0].text == texts[2]


def test_streamed_completions_of_several_prompts_and_samples(api):
    prompts = ["One two", "Three"]
    stream = api.completions.create(prompt=prompts, n=2, max_tokens=6, stream=True, **GREEDY)
    texts = [""] * 4
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [expected_text(prompt, 6) for prompt in prompts for _ in range(2)]


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


def test_equal_seeds_sample_equal_texts(api):
    options = dict(model="small", prompt="Once", max_tokens=16, n=2)
    first = api.completions.create(seed=-3, **options)
    again = api.completions.create(seed=-3, **options)
    other = api.completions.create(seed=4, **options)
    texts = [[choice.text for choice in one.choices] for one in (first, again, other)]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]


def test_a_stop_text_ends_the_answer(api):
    text = expected_text("Stop here", 30)
    stop = text[8:10]
    answer = api.completions.create(prompt="Stop here", max_tokens=30, stop=[stop], **GREEDY)
    (choice,) = answer.choices
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"
    assert choice.stop_reason == stop


def test_fields_beyond_openai_s_api(api):
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
    best = api.completions.create(best_of=3, seed=1, **options)
    assert len(best.choices) == 1


def test_tools_and_variables_reach_the_template(api):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    options = dict(messages=MESSAGES, max_tokens=2, **GREEDY)
    with_tools = api.chat.completions.create(tools=[tool], user="u", **options)
    plain = api.chat.completions.create(tools=[tool], tool_choice="none", **options)
    extra = {"chat_template_kwargs": {"style": "old"}}
    styled = api.chat.completions.create(extra_body=extra, **options)
    lengths = [one.usage.prompt_tokens - len(RENDERED) for one in (with_tools, plain, styled)]
    assert lengths[0] > 50 and lengths[1:] == [0, len("[style] old\n")]


def test_the_model_is_listed(api):
    (model,) = api.models.list().data
    assert model.id == "small" and model.max_model_len == MODEL.max_model_len
    assert api.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("large")


def test_errors_have_the_client_s_classes(api):
    with pytest.raises(openai.NotFoundError) as error:
        api.completions.create(model="large", prompt="x")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature=-1") as error:
        api.completions.create(model="small", prompt="x", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="no tools here"):
        api.chat.completions.create(
            model="small", messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}]
        )


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
