"""Prompts as vectors, against the hidden states of the model without a cache."""

import asyncio
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import AsyncEngine, PoolingParams
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    NumberTokenizer,
    assert_every_page_is_free,
    greedy,
    make_engine,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)
from tests.support.event_loops import run
from tests.support.oracle import hidden_states_of
from tests.support.plain_model import PlainModel

MODES = (SamplingMode(pooling=True),)


@pytest.fixture(scope="module")
def hidden(exact_products):
    return [*map(hidden_states_of(MODEL, weights()), PROMPTS)]


@pytest.fixture
def vectors(hidden):
    def vectors(pooling, normalize):
        rows = np.array([x[-1] if pooling == "last" else x.mean(axis=0) for x in hidden])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True) if normalize else rows

    return vectors


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_the_model_without_a_cache(pooling, normalize, vectors):
    """The longest prompt takes two steps; the second time the prefix cache has its first pages."""
    engine, options = make_engine(modes=MODES), dict(pooling=pooling, normalize=normalize)
    for _ in range(2):
        found = engine.embed(PROMPTS, **options)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, vectors(**options), atol=1e-5)
    assert (engine.stats().prefix_cache_hits > 0) == (pooling == "last")
    assert_every_page_is_free(engine)


def test_prompts_become_vectors_beside_completions(vectors, greedy_tokens):
    """Of one request at a time the output has the vector, at the end; preemption repeats chunks."""
    engine = make_engine(modes=MODES, tokenizer=NumberTokenizer())
    texts = submit(engine, PROMPTS[:3], greedy())
    step(engine)
    prompt = " ".join(map(str, PROMPTS[4]))
    requests = [engine.submit(prompt, PoolingParams(pooling="mean", normalize=False))]
    requests += [engine.submit(prompt, PoolingParams()) for _ in range(2)]
    outputs = []
    while not engine.idle:
        outputs += step(engine)
    assert tokens_of(texts) == greedy_tokens[:3]
    found = {one.request_id: one for one in outputs if one.finished}
    mean, *last = (found[request.request_id].embedding for request in requests)
    np.testing.assert_allclose(mean, vectors("mean", False)[4], atol=1e-5)
    for one in last:
        np.testing.assert_allclose(one, vectors("last", True)[4], atol=1e-5)
    for one in outputs:
        has_vector = one.finished and one.request_id in {x.request_id for x in requests}
        assert (one.embedding is not None) == has_vector
    assert [request.outputs[0].finish_reason for request in requests] == ["length"] * 3


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 15, 16, 17, 18])
def test_a_prompt_may_end_anywhere_in_a_page_or_a_chunk(num_tokens, hidden):
    """Also where one token is left, which of a completion would be a decode step."""
    engine = make_engine(modes=MODES)
    prompt = PROMPTS[4][:num_tokens]
    requests = submit(engine, [PROMPTS[3]], greedy(max_tokens=3))
    for pooling, wanted in (("last", hidden[4][num_tokens - 1]), ("mean", None)):
        wanted = hidden[4][:num_tokens].mean(axis=0) if wanted is None else wanted
        found = engine.embed([prompt, prompt], pooling=pooling, normalize=False)
        np.testing.assert_allclose(found, [wanted] * 2, atol=1e-5)
    assert requests[0].finished


def test_new_weights_begin_a_vector_anew(hidden):
    engine, new = make_engine(modes=MODES), weights(seed=2)
    request = engine.submit(PROMPTS[4], PoolingParams(pooling="mean", normalize=False))
    step(engine)  # of the first 16 tokens
    engine.update_params(new, restart_running=True)
    (*_, output) = engine.stream(request)
    wanted = hidden_states_of(MODEL, new)(PROMPTS[4]).mean(axis=0)
    np.testing.assert_allclose(output.embedding, wanted, atol=1e-5)


class Broken(PlainModel):
    """Its hidden states are infinite at token 39, and its logits finite."""

    def __call__(self, params, tokens, positions, attend, cache):
        hidden, cache = super().__call__(params, tokens, positions, attend, cache)
        return jnp.where(tokens[:, None] == 39, jnp.inf, hidden), cache

    def logits(self, params, hidden):
        return jnp.nan_to_num(super().logits(params, hidden))


@pytest.mark.cpu_budget(5)  # compiles a model of its own
def test_bad_hidden_states_are_an_error_of_their_prompt_only(vectors):
    engine = make_engine(Broken(**vars(MODEL)), weights(), modes=MODES)
    bad = engine.submit([1, 39, 3], PoolingParams(pooling="mean"))
    good = submit(engine, PROMPTS[:2], [PoolingParams(pooling="mean")] * 2)
    while not engine.idle:
        step(engine)
    np.testing.assert_allclose([x.embedding for x in good], vectors("mean", True)[:2], atol=1e-5)
    assert bad.embedding is None and bad.outputs[0].finish_reason == "error"
    with pytest.raises(RuntimeError, match=r"prompt 1 has no embedding.* NaN or infinite"):
        engine.embed([[1], [39]])
    assert engine.embed([[39, 1]]).shape == (1, 64)  # not of the last token
    assert_every_page_is_free(engine)


def test_what_is_no_prompt_or_pooling_is_refused():
    engine = make_engine(modes=MODES)
    for options, message in (
        (dict(pooling="cls"), "pooling='cls' must be one of last, mean"),
        (dict(normalize=1), "normalize=1 must be True or False"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.embed(PROMPTS, **options)
    for prompts, message in (
        ([[1], []], "prompt 1: the prompt is empty"),
        ([[40]], "prompt 0: token id of the prompt"),
        (["1 2"], "needs a tokenizer"),
        ([[1] * 65], "a prompt of 65 tokens"),
        ("1 2", "prompts='1 2' must be a list"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.embed(prompts)
    assert engine.idle and engine.embed([]).shape == (0, 0)
    engine.sleep()
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.embed([[1]])


@pytest.mark.cpu_budget(5)  # compiles two steps for those behind it
def test_warmup_with_pooling_compiles_the_steps_of_vectors(compilations):
    engine = make_engine(modes=None)
    engine.warmup([PoolingParams()])
    num_steps = engine.stats().compilations
    del compilations[:]
    engine.embed(PROMPTS)
    assert not compilations and engine.stats().compilations == num_steps == 2


def test_vectors_of_a_16_bit_model_are_sums_in_f32(exact_products):
    model = replace(MODEL, dtype="bfloat16")
    engine = make_engine(model, modes=MODES)
    rows = hidden_states_of(model, weights(model))(PROMPTS[4])
    found = engine.embed([PROMPTS[4]], pooling="mean", normalize=False)
    np.testing.assert_allclose(found[0], rows.mean(axis=0), atol=0.05)
    assert (found != found.astype(jnp.bfloat16)).any()


async def _async_vectors(inner):
    async with AsyncEngine(inner) as engine:
        found = await engine.embed(PROMPTS, pooling="mean")
        stream = engine.submit(PROMPTS[4], PoolingParams())
        complete = await stream.complete()
        running = asyncio.create_task(engine.embed(PROMPTS * 10))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(ValueError, match="prompt 1"):
            await engine.embed([[1], [40]])
    return found, complete.embedding


def test_an_engine_in_a_thread_embeds(vectors, watchdog):
    inner = make_engine(modes=MODES)
    mean, last = run(_async_vectors(inner))
    np.testing.assert_allclose(mean, vectors("mean", True), atol=1e-5)
    np.testing.assert_allclose(last, vectors("last", True)[4], atol=1e-5)
    assert_every_page_is_free(inner)


@pytest.mark.slow  # compiles on a mesh, where other requests of an engine run by default
def test_vectors_of_several_devices_and_replicas_are_the_same(vectors):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    sizes = dict(tensor_parallel_size=2, data_parallel_size=2)
    engine = make_engine(modes=MODES, **sizes)
    for pooling in ("last", "mean"):
        found = engine.embed(PROMPTS, pooling=pooling)
        np.testing.assert_allclose(found, vectors(pooling, True), atol=1e-5)
    assert {len(serve(engine, PROMPTS, greedy(max_tokens=1)))} == {len(PROMPTS)}
