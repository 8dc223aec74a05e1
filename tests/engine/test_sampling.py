"""Parameters of a request, end to end: samples, logits processors, log-probabilities, ends."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from pallas_paged.engine import CompletionOutput, SamplingParams
from tests.support.beam_oracle import beam_search
from tests.support.engine_calls import (
    PROMPTS,
    NumberTokenizer,
    assert_deltas_add_up,
    assert_logprobs,
    greedy,
    make_engine,
    reasons_of,
    run,
    sampling,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)

pytestmark = pytest.mark.usefixtures("exact_products")
NEW = 12
# Of each only the most probable token is left.
NARROW = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}, {"temperature": 1e-4}]


def alone(prompt, params, **sizes) -> list[list[int]]:
    return tokens_of(serve(make_engine(**sizes), [prompt], params))


@pytest.mark.cpu_budget(8)  # compiles programs that later tests share
def test_requests_that_leave_one_token_to_draw_equal_greedy_ones(greedy_tokens):
    engine = make_engine()
    each = [greedy(max_tokens=NEW), *(sampling(**one) for one in NARROW)]
    others, requests, wanted = [], [], []
    for prompt, tokens in zip(PROMPTS[:4], greedy_tokens, strict=False):
        others.append(engine.submit(prompt, sampling()))
        requests += submit(engine, [prompt] * len(each), each)
        wanted += [tokens[:NEW]] * len(each)
        step(engine)
    run(engine)
    assert tokens_of(requests) == wanted
    assert not any(tokens in wanted for tokens in tokens_of(others))


def test_requests_without_a_seed_draw_differently_and_report_it():
    requests = serve(make_engine(), [PROMPTS[0]] * 3, sampling(seed=None))
    requests += serve(make_engine(), [PROMPTS[0]] * 3, sampling(seed=None))
    assert len(set(map(tuple, tokens_of(requests)))) == 6
    again = alone(PROMPTS[0], sampling(seed=requests[2].output().seed))
    assert again == tokens_of(requests[2:3])
    assert sampling(seed=7).seed == make_engine().submit([1], sampling(seed=7)).output().seed == 7


@pytest.mark.parametrize("caching", [False, True])
def test_a_request_may_have_more_samples_than_slots(caching):
    """Sample i of n draws the same whatever n is."""
    engine = make_engine(enable_prefix_caching=caching)
    request = engine.submit(PROMPTS[1], sampling(n=11))
    assert_deltas_add_up(run(engine), [request])
    tokens = tokens_of([request])
    assert len(set(map(tuple, tokens))) == 11
    assert tokens[:2] == alone(PROMPTS[1], sampling(n=2))


@pytest.mark.parametrize("top", [0, 20])
def test_logprobs_equal_the_dense_model(oracle, top):
    """They are of the raw logits, one entry for each token."""
    prompt = PROMPTS[1]
    params = [sampling(logprobs=top, top_k=5, logit_bias={3: 5}), greedy(logprobs=top)]
    engine = make_engine()
    others = [engine.submit(other, sampling()) for other in PROMPTS]
    requests = [engine.submit(prompt, one) for one in params]
    run(engine)
    for (output,) in (other.outputs for other in others):
        assert output.logprobs is None and output.cumulative_logprob is None
    for request in requests:
        (output,) = request.outputs
        wanted = oracle.logprobs([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        assert len(output.logprobs) == len(output.token_ids)
        for entry, each, token in zip(output.logprobs, wanted, output.token_ids, strict=True):
            assert_logprobs(entry, each, token, top)
        total = sum(wanted[range(len(wanted)), output.token_ids])
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)


PROCESSORS = [
    dict(presence_penalty=1.5),
    dict(frequency_penalty=0.9),
    dict(frequency_penalty=-1.0, presence_penalty=-0.5),
    dict(repetition_penalty=1.7),
    dict(repetition_penalty=0.6, frequency_penalty=1.0),
    dict(logit_bias={3: 4.0, 36: -100, 1: 1.5}),
    dict(min_tokens=5, stop_token_ids=range(20)),
    dict(min_tokens=3, logit_bias={36: 3}, presence_penalty=2, repetition_penalty=1.2),
    dict(stop_token_ids=range(20)),
]


def processed_tokens(oracle, prompt, params: SamplingParams) -> list[int]:
    """Greedy tokens by a loop over the logits of the dense model."""
    stops = params.stop_token_ids
    out: list[int] = []
    while len(out) < params.max_tokens and not (out and out[-1] in stops):
        logits = oracle.logits([*prompt, *out])[-1]
        for token, bias in dict(params.logit_bias or ()).items():
            logits[token] += bias
        if len(out) < params.min_tokens:
            logits[list(stops)] = -np.inf
        for token in {*prompt, *out}:
            scale = params.repetition_penalty
            logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
        for token in set(out):
            logits[token] -= params.frequency_penalty * out.count(token) + params.presence_penalty
        out.append(int(np.argmax(logits)))
    return out


def test_processed_logits_equal_a_loop_over_the_dense_model(oracle):
    """With all of them in one batch; forks, and those preempted, count their tokens again."""
    load = [(PROMPTS[i % 4], greedy(n=2, **params)) for i, params in enumerate(PROCESSORS)]
    engine = make_engine()
    found = tokens_of(serve(engine, *zip(*load, strict=True)))
    assert found[::2] == found[1::2] == [processed_tokens(oracle, *one) for one in load]
    assert len(set(map(tuple, found))) > 6 and engine.stats().num_preemptions > 0


def test_best_of_returns_those_with_the_highest_mean_logprob():
    prompt, params = PROMPTS[1], sampling(stop_token_ids=[19, 36, 2])
    engine = make_engine()
    drawn = engine.submit(prompt, replace(params, n=6, logprobs=0))
    best = engine.submit(prompt, replace(params, n=2, best_of=6))
    deltas = run(engine)
    means = {tuple(x.token_ids): x.cumulative_logprob / len(x.token_ids) for x in drawn.outputs}
    assert len(means) == 6 and len({len(tokens) for tokens in means}) > 1
    wanted = sorted(means, key=means.__getitem__, reverse=True)[:2]
    assert [tuple(tokens) for tokens in tokens_of([best])] == wanted
    assert [output.index for output in best.outputs] == [0, 1]
    assert all(output.logprobs is None for output in best.outputs)
    assert_deltas_add_up(deltas, [drawn, best])
    (last,) = [one for one in deltas if one.request_id == best.request_id]  # only at the end
    assert last.finished


STOPS = (19, 2, 7, 30, 12)


@pytest.mark.parametrize(("width", "stops", "penalty"), [(2, (), 0.0), (3, STOPS, 1.0)])
def test_beam_search_equals_brute_force(oracle, width, stops, penalty):
    """Three searches and three sampling requests share slots and pages that suffice for one."""
    params = SamplingParams(max_tokens=6, beam_width=width, n=width, stop_token_ids=stops)
    params = replace(params, length_penalty=penalty)
    options = dict(width=width, n=width, length=6, stops=stops, penalty=penalty)
    load = [x for prompt in PROMPTS[:3] for x in ((prompt, params), (prompt, sampling(n=2)))]
    requests = serve(make_engine(), *zip(*load, strict=True))
    for prompt, request in zip(PROMPTS, requests[::2], strict=False):
        wanted = beam_search(lambda tokens: oracle.logprobs(tokens)[-1], prompt, **options)
        assert tokens_of([request]) == [tokens for tokens, _ in wanted]
        sums = [output.cumulative_logprob for output in request.outputs]
        np.testing.assert_allclose(sums, [total for _, total in wanted], atol=1e-4)
        assert [output.index for output in request.outputs] == list(range(width))


@pytest.mark.parametrize("kind", [{}, {"n": 3}, {"best_of": 3, "n": 2}, {"beam_width": 2}], ids=str)
def test_an_abort_ends_a_request_with_its_tokens_so_far(kind):
    engine = make_engine(num_steps=1)
    request = engine.submit(PROMPTS[1] * 2, sampling(**kind))
    times = [(step(engine), request.first_token_time)[1] for _ in range(7)]
    assert len({*times} - {None}) == 1  # that of the first token stays
    engine.abort(request.request_id)
    tokens = [tokens[:] for tokens in tokens_of([request])]
    assert request.finished and set(reasons_of([request])) == {"abort"} and all(tokens)
    engine.abort(request)  # a second abort changes nothing
    run(engine)
    assert tokens_of([request]) == tokens and engine.stats().num_aborted == 1


class CharacterTokenizer:
    """A token is a letter, or a byte of a longer character of UTF-8."""

    BYTES = "abcdefghijklmnopqrstuvwxyz ,.!-é€🎭".encode()

    def encode(self, text: str) -> list[int]:
        return [self.BYTES.index(byte) for byte in text.encode()]

    def decode(self, token_ids) -> str:
        return bytes(self.BYTES[token_id] for token_id in token_ids).decode(errors="replace")


TOKENIZER = CharacterTokenizer()
SPEAKING = SamplingParams(max_tokens=30, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def spoken() -> CompletionOutput:
    """The model's completion of "hello"; some of its bytes are invalid UTF-8."""
    (request,) = serve(make_engine(tokenizer=TOKENIZER), ["hello"], SPEAKING)
    (output,) = request.outputs
    assert request.prompt == "hello" and request.prompt_token_ids == [7, 4, 11, 11, 14]
    assert output.text == TOKENIZER.decode(output.token_ids)
    assert len(set(output.text)) > 10 and "\ufffd" in output.text
    return output


def test_text_is_reported_as_soon_as_it_is_certain(spoken):
    engine = make_engine(tokenizer=TOKENIZER)
    beams = SamplingParams(max_tokens=20, beam_width=2, n=2)
    load = [SPEAKING, replace(SPEAKING, n=3), replace(SPEAKING, best_of=2), beams]
    load.append(replace(beams, stop_token_ids=range(20)))
    requests = [engine.submit("hello", params) for params in load]
    silent = engine.submit("hello", replace(SPEAKING, detokenize=False))
    assert_deltas_add_up(run(engine), [*requests, silent])
    assert requests[0].outputs[0].text == spoken.text
    assert silent.outputs[0].text == "" and tokens_of([silent]) == [spoken.token_ids]
    for request in requests:
        for output in request.outputs:
            end = -1 if output.finish_reason == "stop" else None  # a stop token has no text
            assert output.text == TOKENIZER.decode(output.token_ids[:end])
    assert "stop" in reasons_of(requests[-1:])


@pytest.mark.parametrize("num_steps", [1, 8])
def test_a_text_ends_before_its_stop_text_or_stop_token(spoken, num_steps):
    text, tokens = spoken.text, spoken.token_ids
    letters = [TOKENIZER.decode([token_id]) for token_id in tokens]
    at = next(i for i in range(9, 20) if letters.count(letters[i]) == 1 and letters[i].isascii())
    letter, word = letters[at], text[15:18]
    load = [  # parameters, the text, and why it ends
        (dict(stop=["never said", word]), text[: text.index(word)], word),
        (dict(stop=letter, min_tokens=at), text[: text.index(letter)], letter),
        (dict(stop=letter, min_tokens=at + 1), text, None),
        (dict(stop=text[-2:] + "never said"), text, None),  # reported at the end
        (dict(stop_token_ids=[tokens[at]]), TOKENIZER.decode(tokens[:at]), tokens[at]),
    ]
    engine = make_engine(tokenizer=TOKENIZER, num_steps=num_steps)
    requests = submit(engine, ["hello"] * 5, [replace(SPEAKING, **params) for params, *_ in load])
    assert_deltas_add_up(run(engine), requests)
    for (params, wanted, reason), request in zip(load, requests, strict=True):
        (output,) = request.outputs
        assert (output.text, output.stop_reason) == (wanted, reason), params
        assert output.finish_reason == ("length" if reason is None else "stop"), params
        assert output.token_ids == tokens[: len(output.token_ids)], params


def test_a_failing_tokenizer_ends_only_requests_with_text(greedy_tokens):
    tokenizer = NumberTokenizer()
    engine = make_engine(tokenizer=tokenizer, num_steps=1)
    sampled = engine.submit("1 2 3", greedy())
    beams = engine.submit("1 2", greedy(beam_width=2))
    silent = engine.submit([1, 2, 3], greedy(detokenize=False))
    step(engine, 3)
    tokenizer.broken = True
    run(engine)
    assert reasons_of([sampled, beams]) == ["error", "error"]
    assert "the tables are lost" in sampled.error and "the tables are lost" in beams.error
    assert tokens_of([silent]) == greedy_tokens[:1]
    assert engine.stats().num_failed == 2
    late = engine.submit("1 2 3", greedy())  # whose first token needs the tokenizer
    run(engine)
    assert reasons_of([late]) == ["error"] and len(late.outputs[0].token_ids) == 1
    tokenizer.broken = False
    assert tokens_of(serve(engine, [[1, 2, 3]], greedy())) == greedy_tokens[:1]


def test_token_0_counts_as_a_generated_token():
    engine = make_engine()
    requests = serve(engine, PROMPTS[:1], greedy(max_tokens=3, logit_bias={0: 100}))
    assert tokens_of(requests) == [[0, 0, 0]] and engine.stats().generated_tokens == 3


def test_nan_logits_end_requests_but_not_the_engine(greedy_tokens):
    engine = make_engine(params=jax.tree.map(lambda x: x * np.nan, weights()))
    load = [greedy(), sampling(n=2), sampling(best_of=2), greedy(beam_width=2, n=2)]
    requests = [engine.submit(PROMPTS[0], one) for one in load]
    assert_deltas_add_up(run(engine), requests)
    assert set(reasons_of(requests)) == {"error"}
    assert all("NaN or infinite" in request.error for request in requests)
    assert [len(request.outputs) for request in requests] == [1, 2, 1, 1]
    assert not any(tokens_of(requests)) and engine.stats().generated_tokens == 0
    engine.update_params(weights())
    assert tokens_of(serve(engine, PROMPTS[:1], greedy())) == greedy_tokens[:1]


def test_nan_logits_amid_a_beam_search_end_it_as_it_stands(greedy_tokens):
    engine = make_engine()
    request = engine.submit(PROMPTS[0], greedy(beam_width=3, n=3))
    for _ in range(6):
        engine.step()
    engine.update_params(jax.tree.map(lambda x: x * np.nan, weights()))
    run(engine)
    assert reasons_of([request]) == ["error"] * 3 and "NaN or infinite" in request.error
    assert all(tokens_of([request]))
    engine.update_params(weights())
    assert tokens_of(serve(engine, PROMPTS[:1], greedy())) == greedy_tokens[:1]
