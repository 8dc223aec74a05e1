"""Options of a request: samples, best_of, beams, log-probabilities, stops, aborts."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from models.engine import Engine, EngineConfig
from models.generate import generate
from models.request import Completion, Logprobs, Request, SamplingParams
from models.seq import Seq
from models.text_stream import TextStream
from models.tokenizer import Tokenizer, save_byte_tokenizer
from tests.support.beam_oracle import beam_search
from tests.support.dense_oracle import CONFIG, tiny_model
from tests.support.engine_calls import (
    SIZES,
    assert_news_tell_all,
    make_engine,
    reasons_of,
    run,
    serve,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("exact_products")
PROMPTS = [[1, 2, 3], list(range(4, 13)), [18], list(range(20, 28))]
NEW = 12


def sampling(**params) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=NEW, temperature=1.0, seed=5) | params))


@pytest.fixture(scope="module")
def dense_logprobs(oracle):
    """Log-probabilities `f64[V]` of the next token, without a cache."""

    def logprobs(tokens: list[int]) -> np.ndarray:
        padded = np.zeros(CONFIG.max_position_embeddings, np.int32)
        padded[: len(tokens)] = tokens
        logits = np.asarray(oracle._last_logits(padded, len(tokens))[0], np.float64)
        return logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()

    return logprobs


@pytest.fixture(scope="module")
def alone(model):
    """Serves one request in an engine of its own."""
    return lambda prompt, params: tokens_of(serve(make_engine(model), [prompt], params))


FILTERS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 0.3}]


def test_samples_equal_those_of_generate(model, alone):
    """A key depends on the seed, the prompt, the number of the sample and the position."""
    each = [sampling(n=2, seed=2**32 - 1, **params) for params in FILTERS]
    values = {
        name: [getattr(params, name) for params in each]
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    generation = generate(
        model,
        [PROMPTS[1]] * len(each),
        max_new_tokens=NEW,
        num_samples=2,
        seed=2**32 - 1,
        page_size=4,
        implementation="xla",
        **values,
    )
    wanted = [completion.tokens for completion in generation.result().completions]
    assert len(set(map(tuple, wanted))) > len(FILTERS)
    assert [tokens for params in each for tokens in alone(PROMPTS[1], params)] == wanted


def test_samples_do_not_depend_on_other_requests(model, alone, oracle):
    """Greedy and drawn requests, submitted step by step, in a pool with too few pages."""
    each = [SamplingParams(max_tokens=NEW), *(sampling(**params) for params in FILTERS)]
    load = [(prompt, params) for params in each for prompt in PROMPTS]
    wanted = [alone(prompt, params) for prompt, params in load]
    assert wanted[: len(PROMPTS)] == [[oracle.continue_(prompt, NEW)] for prompt in PROMPTS]
    engine = make_engine(model)
    requests = []
    for prompt, params in load:
        requests.append(engine.submit(prompt, params))
        engine.step()
    run(engine)
    assert [tokens_of([request]) for request in requests] == wanted
    assert engine.stats().num_preemptions > 0


def test_requests_without_a_seed_draw_differently(model, alone):
    engine = make_engine(model)
    requests = serve(engine, [PROMPTS[0]] * 3, sampling(seed=None))
    assert len(set(map(tuple, tokens_of(requests)))) == 3
    again = alone(PROMPTS[0], sampling(seed=requests[2].seed))
    assert again == tokens_of(requests[2:])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_samples_of_a_prompt_share_its_pages(model, prompt, prefix_caching):
    engine = make_engine(model, prefix_caching=prefix_caching)
    engine.submit(prompt, sampling(n=4, max_tokens=5))
    most_shared = 0
    while not engine.idle:
        engine.step()
        most_shared = max(most_shared, int(np.sum(np.asarray(engine.table.ref_counts) >= 4)))
    assert most_shared == (len(prompt) - 1) // 4
    assert engine.stats().computed_tokens == len(prompt) - 1 + 4 + 4 * 4


def test_samples_may_end_at_different_times(model, alone):
    params = sampling(n=4, seed=1, stop_tokens=range(6))
    engine = make_engine(model)
    request = engine.submit(PROMPTS[1], params)
    assert_news_tell_all(run(engine), [request])
    lengths = {len(tokens) for tokens in tokens_of([request])}
    assert len(lengths) > 1 and set(reasons_of([request])) == {"stopped", "max_tokens"}
    endless = alone(PROMPTS[1], replace(params, stop_tokens=()))
    for tokens, whole in zip(tokens_of([request]), endless, strict=True):
        assert tokens == whole[: len(tokens)]


@pytest.mark.parametrize("top", [0, 3, 20])
def test_logprobs_equal_the_dense_model(model, dense_logprobs, top):
    """They are of the unfiltered distribution, one for each token."""
    prompt = PROMPTS[1]
    params = [sampling(logprobs=top, top_k=5), SamplingParams(max_tokens=NEW, logprobs=top)]
    engine = make_engine(model)
    others = [engine.submit(other, sampling()) for other in PROMPTS]
    requests = [engine.submit(prompt, one) for one in params]
    run(engine)
    assert all(other.completions[0].logprobs is None for other in others)
    for request in requests:
        (completion,) = request.completions
        assert len(completion.logprobs) == NEW
        total = 0.0
        for index, entry in enumerate(completion.logprobs):
            wanted = dense_logprobs([*prompt, *completion.tokens[:index]])
            assert entry.token == pytest.approx(wanted[completion.tokens[index]], abs=1e-4)
            best = np.argsort(-wanted)[:top]
            assert list(entry.top) == best.tolist()
            np.testing.assert_allclose(list(entry.top.values()), wanted[best], atol=1e-4)
            total += entry.token
        assert completion.cumulative_logprob == pytest.approx(total)


def test_more_logprobs_than_the_vocabulary_has_tokens():
    model = tiny_model(replace(CONFIG, vocab_size=12))
    (request,) = serve(make_engine(model), [[1, 2]], SamplingParams(max_tokens=2, logprobs=20))
    for entry in request.completions[0].logprobs:
        assert sorted(entry.top) == list(range(12))
        assert sum(map(np.exp, entry.top.values())) == pytest.approx(1)


def test_best_of_returns_those_with_the_highest_mean_logprob(model, alone):
    prompt, params = PROMPTS[1], sampling(stop_tokens=[19])
    engine = make_engine(model)
    drawn = engine.submit(prompt, replace(params, n=4, logprobs=0))
    best = engine.submit(prompt, replace(params, n=2, best_of=4))
    news = run(engine)
    means = {
        # The sum includes the log-probability of the stop token.
        tuple(one.tokens): one.cumulative_logprob
        / (len(one.tokens) + (one.finish_reason == "stopped"))
        for one in drawn.completions
    }
    assert len(means) == 4 and len({len(tokens) for tokens in means}) > 1
    wanted = sorted(means, key=means.__getitem__, reverse=True)[:2]
    assert [tuple(tokens) for tokens in tokens_of([best])] == wanted
    assert [completion.index for completion in best.completions] == [0, 1]
    assert all(completion.logprobs is None for completion in best.completions)
    assert_news_tell_all(news, [drawn, best])
    assert len([one for one in news if one.request is best]) == 2  # only at the end


def test_the_stop_token_counts_in_the_mean(model):
    prompt, first = PROMPTS[1], sampling(n=4, logprobs=0)
    (drawn,) = serve(make_engine(model), [prompt], first)
    stop = drawn.completions[0].tokens[0]  # so one completion ends without tokens
    means = {}
    for one in drawn.completions:
        end = one.tokens.index(stop) if stop in one.tokens else NEW
        values = [logprobs.token for logprobs in one.logprobs[: end + 1]]
        means[tuple(one.tokens[:end])] = sum(values) / len(values)
    params = sampling(n=4, best_of=4, stop_tokens=[stop])
    (best,) = serve(make_engine(model), [prompt], params)
    wanted = sorted(means, key=means.__getitem__, reverse=True)
    assert () in wanted and [tuple(tokens) for tokens in tokens_of([best])] == wanted


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("stops", [(), (19, 2, 7, 30, 12)])
@pytest.mark.parametrize("width", [2, 3])
def test_beam_search_equals_brute_force(model, dense_logprobs, width, stops, penalty):
    """Three searches and three sampling requests share rows and pages that suffice for one."""
    prompts = PROMPTS[:3]
    params = SamplingParams(
        max_tokens=6, beam_width=width, n=width, length_penalty=penalty, stop_tokens=stops
    )
    engine = make_engine(model)
    requests = []
    for prompt in prompts:
        requests += [engine.submit(prompt, params), engine.submit(prompt, sampling(n=2))]
    run(engine)
    for prompt, request in zip(prompts, requests[::2], strict=True):
        wanted = beam_search(
            dense_logprobs, prompt, width=width, n=width, length=6, stops=stops, penalty=penalty
        )
        assert tokens_of([request]) == [tokens for tokens, _ in wanted]
        sums = [completion.cumulative_logprob for completion in request.completions]
        np.testing.assert_allclose(sums, [total for _, total in wanted], atol=1e-4)
        assert [completion.index for completion in request.completions] == list(range(width))


def test_a_search_reserves_rows_for_its_beams(model):
    engine = make_engine(model)
    search = engine.submit([1], SamplingParams(max_tokens=12, beam_width=2))
    for _ in range(3):
        engine.submit([2], sampling(max_tokens=1))
    engine.step()
    assert engine.stats().num_running == 3  # the fourth row is for the second beam
    while search.first_token_time is None:
        engine.step()
    assert len(engine._groups[search].live) == 2
    assert not any(seq.num_spare_rows for seq in engine._scheduler.running)
    run(engine)


def test_one_beam_is_greedy(model, oracle):
    requests = serve(make_engine(model), PROMPTS, SamplingParams(max_tokens=NEW, beam_width=1))
    assert tokens_of(requests) == [oracle.continue_(prompt, NEW) for prompt in PROMPTS]


STATES = {"queue": 0, "prefill": 1, "first token": 3, "decode": 7}
ASKED = [{}, {"n": 3}, {"best_of": 3, "n": 2}, {"beam_width": 2, "n": 2, "temperature": 0.0}]


@pytest.mark.parametrize("num_steps", STATES.values(), ids=STATES)
@pytest.mark.parametrize("asked", ASKED, ids=["one", "n", "best_of", "beams"])
def test_an_abort_ends_a_request_with_its_tokens_so_far(model, alone, asked, num_steps):
    params = sampling(**asked)
    engine = make_engine(model)
    other = engine.submit(PROMPTS[0], sampling())
    request = engine.submit(PROMPTS[1] * 2, params)
    news = []
    for _ in range(num_steps):
        news += engine.step()
    engine.abort(request)
    assert request.finished and set(reasons_of([request])) <= {"aborted"}
    lengths = [len(tokens) for tokens in tokens_of([request])]
    engine.abort(request)  # a second abort changes nothing
    news += run(engine)
    assert [len(tokens) for tokens in tokens_of([request])] == lengths
    assert_news_tell_all(news, [other, request])
    engine.abort(request)
    engine.abort(other)
    assert tokens_of([other]) == alone(PROMPTS[0], sampling())
    assert reasons_of([other]) == ["max_tokens"]
    assert engine.stats().num_aborted == 1
    if num_steps == STATES["decode"]:
        assert min(lengths) > 0


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(folder, max_length=64)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def byte_engine(byte_tokenizer):
    model = tiny_model(replace(CONFIG, vocab_size=256))
    return lambda: make_engine(model, byte_tokenizer)


SPEAKING = SamplingParams(max_tokens=30, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def spoken(byte_engine, byte_tokenizer):
    """The byte model's completion of "hello"; many of its bytes are invalid UTF-8."""
    (request,) = serve(byte_engine(), ["hello"], SPEAKING)
    (completion,) = request.completions
    assert request.prompt == list(b"hello")
    assert completion.text == byte_tokenizer.decode(completion.tokens)
    assert len(set(completion.text)) > 10 and "\ufffd" in completion.text
    return completion


def test_text_is_reported_as_soon_as_it_is_certain(byte_engine, spoken):
    engine = byte_engine()
    beams = SamplingParams(max_tokens=20, beam_width=2, n=2)
    load = [SPEAKING, replace(SPEAKING, n=3), replace(SPEAKING, best_of=2), beams]
    requests = [engine.submit("hello", params) for params in load]
    assert_news_tell_all(run(engine), requests)
    assert requests[0].completions[0].text == spoken.text
    for request in requests:
        for completion in request.completions:
            assert completion.text == engine._tokenizer.decode(completion.tokens)


def test_a_stop_text_may_span_tokens(byte_engine, spoken):
    start = len(spoken.text) // 2
    stop = spoken.text[start : start + 3]
    cut = spoken.text.index(stop)
    engine = byte_engine()
    request = engine.submit("hello", replace(SPEAKING, stop=["never said", stop]))
    news = run(engine)
    (completion,) = request.completions
    assert completion.text == spoken.text[:cut] and completion.finish_reason == "stopped"
    assert completion.tokens == spoken.tokens[: len(completion.tokens)]
    assert_news_tell_all(news, [request])


def test_the_beginning_of_a_stop_text_is_reported_at_the_end(byte_engine, spoken):
    params = replace(SPEAKING, stop=[spoken.text[-2:] + "never said"])
    (request,) = serve(byte_engine(), ["hello"], params)
    assert request.completions[0].text == spoken.text
    assert reasons_of([request]) == ["max_tokens"]


def test_a_stop_text_does_not_count_in_the_mean(byte_tokenizer):
    seq = Seq(
        request=Request(number=0, prompt=[1], params=SamplingParams(), seed=0),
        completion=Completion(index=0),
        tokens=[1],
        limit=9,
        stream=TextStream(byte_tokenizer, (), ["b"]),
    )
    assert seq.accept(ord("a"), Logprobs(token=-1.0, top={})) is None
    seq.finish(seq.accept(ord("b"), Logprobs(token=-2.0, top={})))
    assert seq.completion.finish_reason == "stopped" and seq.mean_logprob == -1.5


class _Mute:
    """A tokenizer that encodes, and whose decoding can be made to fail."""

    broken = False

    def encode(self, text: str) -> list[int]:
        return list(map(int, text.split()))

    def decode(self, ids: list[int]) -> str:
        if self.broken:
            raise OSError("lost its tables")
        return " ".join(map(str, ids))


def test_a_failing_tokenizer_ends_only_requests_with_text(model, oracle):
    tokenizer = _Mute()
    engine = Engine(model, None, tokenizer, EngineConfig(**SIZES))
    sampled = engine.submit("1 2 3", SamplingParams(max_tokens=NEW))
    beams = engine.submit("1 2", SamplingParams(max_tokens=NEW, beam_width=2))
    for _ in range(3):
        engine.step()
    tokenizer.broken = True
    run(engine)
    assert reasons_of([sampled, beams]) == ["failed", "failed"]
    assert "lost its tables" in sampled.error and "lost its tables" in beams.error
    assert engine.stats().num_failed == 2
    tokenizer.broken = False
    (after,) = serve(engine, [[1, 2, 3]], SamplingParams(max_tokens=NEW))
    assert after.completions[0].tokens == oracle.continue_([1, 2, 3], NEW)


def test_a_failed_submit_changes_nothing(model):
    tokenizer = _Mute()
    engine = Engine(model, None, tokenizer, EngineConfig(**SIZES))
    tokenizer.broken = True
    with pytest.raises(OSError):
        engine.submit("1 2 3", sampling())
    tokenizer.broken = False
    assert engine.idle and engine.submit([1], sampling(max_tokens=1)).number == 0
    run(engine)


def test_nan_logits_end_the_requests_but_not_the_engine(model):
    nan = jax.tree.map(lambda x: x * np.nan, nnx.state(model))
    broken = Engine(model, nan, None, EngineConfig(**SIZES))
    params = SamplingParams(max_tokens=4)
    load = [params, sampling(n=2), sampling(best_of=2), replace(params, beam_width=2, n=2)]
    requests = [broken.submit(PROMPTS[0], one) for one in load]
    assert_news_tell_all(run(broken), requests)
    assert set(reasons_of(requests)) == {"bad_logits"}
    assert [len(request.completions) for request in requests] == [1, 2, 1, 1]
    assert not any(tokens_of(requests))
