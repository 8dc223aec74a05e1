"""Requests served with the drafts of a smaller model have the tokens that they have without."""

import asyncio
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import AsyncEngine, EngineConfig
from pallas_paged.engine.device.pool import page_bytes
from tests.support.draft_calls import (
    ALL,
    GREEDY,
    MODES,
    SIZES,
    accepted_and_drafted,
    assert_ends_at_stop_texts,
    assert_equal_results,
    interrupted,
    mixed,
    plain,
)
from tests.support.engine_calls import (
    MANY_PAGES,
    MODEL,
    PROMPTS,
    assert_copies_no_pool,
    assert_every_page_is_free,
    drafts_of,
    greedy,
    make_engine,
    run,
    serve,
    step,
    submit,
    tokens_of,
    weights,
)
from tests.support.marks import needs_triton, slow
from tests.support.mixed_model import MixedModel
from tests.support.plain_model import greedy_tokens

K = 2
# Most tests draft with the model itself, by the same weights or others: they share three programs.
DRAFT = replace(MODEL, max_model_len=48)
SMALL = replace(MODEL, num_layers=1, num_kv_heads=4, head_dim=8)
WEIGHTS = weights()
own_programs = pytest.mark.cpu_budget(14)


def config_of(draft, num_drafts=K):
    return dict(method="draft_model", model=draft, num_speculative_tokens=num_drafts)


def drafting(draft_params=WEIGHTS, draft=DRAFT, *, num_drafts=K, modes=MODES, **options):
    """An engine that verifies drafts whenever it can, or as `num_drafts` says for each call."""
    options = SIZES | dict(speculative_config=config_of(draft)) | options
    engine = make_engine(draft_params=draft_params, modes=modes, num_steps=4, **options)
    drafts_of(engine, num_drafts)
    return engine


def noisy(scale):
    """Weights that think alike often; those of NaN never do."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + scale * rng.standard_normal(x.shape, np.float32), WEIGHTS)


def assert_all_drafts_are_right(engine, least=1):
    accepted, drafted = accepted_and_drafted(engine)
    assert accepted == drafted >= least


@own_programs
@pytest.mark.parametrize(
    ("draft", "params", "share", "modes", "filters"),
    [
        (DRAFT, WEIGHTS, (1.0, 1.0), MODES, {}),
        (DRAFT, noisy(0.05), (0.1, 0.9), MODES, {}),
        (DRAFT, noisy(np.nan), (0.0, 0.1), MODES, {}),
        *slow([(SMALL, weights(SMALL), (0.0, 0.3), MODES, {})]),
        *slow([(DRAFT, noisy(0.05), (0.1, 0.9), ALL, dict(top_k=5, top_p=0.9))]),
    ],
)
def test_tokens_and_logprobs_equal_those_without_drafts(draft, params, share, modes, filters):
    """Greedy and sampled; the pool is too small for all at once, so some are preempted."""
    prompts, each = [[1, 2, 3, 4, 5] * 3, [7, 8] * 5, [9] * 22, *PROMPTS[:2]], mixed(**filters)
    engine = drafting(params, draft, modes=modes)
    requests = serve(engine, prompts, each)
    assert_equal_results(requests, serve(plain(), prompts, each))
    accepted, drafted = accepted_and_drafted(engine)
    assert share[0] <= accepted / drafted <= share[1] and drafted > 30
    assert engine.stats().num_preemptions > 0
    assert_every_page_is_free(engine)


def test_pages_of_the_prefix_cache_and_of_forks_have_what_the_draft_model_stored():
    engine = drafting()
    prompt = [9, *range(10, 31)]
    serve(engine, [prompt], greedy(max_tokens=1))
    requests = serve(engine, [prompt], greedy(max_tokens=20, n=3))
    assert tokens_of(requests) == [greedy_tokens(MODEL, WEIGHTS, prompt, 20)] * 3
    assert engine.stats().prefix_cache_hits == 20
    assert_all_drafts_are_right(engine, least=24)


def test_calls_without_drafts_store_what_the_draft_model_needs_later():
    calls = iter([0, K, 0, 0, K] * 100)
    engine = drafting(num_drafts=lambda: next(calls))
    first, second = submit(engine, PROMPTS[:2], greedy(max_tokens=40))
    step(engine, 3)
    third = engine.submit(PROMPTS[2], greedy(max_tokens=30))  # a chunk beside rows that decode
    run(engine)
    wanted = serve(plain(), PROMPTS[:3], [greedy(max_tokens=size) for size in (40, 40, 30)])
    assert tokens_of([first, second, third]) == tokens_of(wanted)
    assert_all_drafts_are_right(engine, least=15)


def test_a_stop_text_ends_a_request_within_accepted_drafts():
    assert_ends_at_stop_texts(PROMPTS[:3], drafting, 6)


def test_requests_go_on_after_aborts_and_new_weights_and_without_a_pool():
    """The new weights of both models, and then those of the model alone."""
    prompts, new = PROMPTS[:4], weights(seed=2)
    wanted, _ = interrupted(plain(), prompts)
    found, (accepted, drafted) = interrupted(drafting(), prompts, draft_params=new)
    assert found == wanted and accepted == drafted > 10
    found, (accepted, drafted) = interrupted(drafting(), prompts)
    assert found == wanted and accepted < drafted / 2


def test_an_async_engine_takes_new_weights_of_the_draft_model():
    async def update_and_serve():
        async with AsyncEngine(engine) as server:
            await server.update_params(new, draft_params=new)
            return [await server.submit(prompt, greedy()).complete() for prompt in PROMPTS]

    engine, new = drafting(), weights(seed=2)
    assert tokens_of(asyncio.run(update_and_serve())) == [
        greedy_tokens(MODEL, new, prompt, 14) for prompt in PROMPTS
    ]
    assert_all_drafts_are_right(engine, least=18)


def test_rows_beyond_the_draft_models_context_go_on_without_drafts():
    """From its 48 tokens to the model's 64."""
    engine = drafting()
    requests = serve(engine, PROMPTS[4:], greedy(max_tokens=None))
    assert tokens_of(requests) == [greedy_tokens(MODEL, WEIGHTS, PROMPTS[4], 46)]
    assert_all_drafts_are_right(engine, least=18)
    assert engine.stats().spec_decode_num_accepted_tokens < 30


@own_programs
@pytest.mark.parametrize("num_full_layers", slow([0, 1]))
def test_layers_with_a_window_draft_for_layers_with_a_window(num_full_layers):
    """Some of the model's layers, which have a pool of their own, or all; all of the draft's."""
    model = replace(MODEL, max_model_len=128, sliding_window=6)
    draft = replace(model, num_layers=1)
    if num_full_layers:
        model = MixedModel(**vars(model), num_full_layers=num_full_layers)
    engine = drafting(weights(draft), draft, model=model, modes=GREEDY, num_pages=64)
    requests = serve(engine, PROMPTS[:3], [greedy(max_tokens=50, n=n) for n in (1, 1, 2)])
    wanted = [greedy_tokens(model, weights(model), prompt, 50) for prompt in PROMPTS[:3]]
    assert tokens_of(requests) == [*wanted, wanted[-1]]
    assert engine.stats().spec_decode_num_drafts > 10
    assert_every_page_is_free(engine)


@needs_triton
@pytest.mark.slow  # interpreted
def test_kernels_draft_and_verify_as_the_plain_path_does():
    engine = drafting(modes=GREEDY, implementation="triton", interpret=True)
    requests = serve(engine, PROMPTS[:2], greedy(max_tokens=16), check=False)
    assert tokens_of(requests) == tokens_of(serve(plain(), PROMPTS[:2], greedy(max_tokens=16)))
    assert_all_drafts_are_right(engine, least=5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 0), (4, 0, K), (4, 16)])
def test_a_step_copies_the_pool_of_neither_model(shape):
    engine = drafting(weights(SMALL), SMALL, modes=GREEDY, num_pages=MANY_PAGES)
    assert_copies_no_pool(engine, shape)


# What is refused, and what the sizes count.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(config_of(None)), "method='draft_model' must have a 'model'"),
        (dict(config_of(MODEL), method="ngram"), "model=.* is of the methods 'draft_model'"),
        (dict(config_of(MODEL), prompt_lookup_max=3), "=3 is of method='ngram'"),
        (config_of("a folder"), "model='a folder' must have vocab_size"),
        (config_of(MODEL, 0), "num_speculative_tokens=0 must be"),
    ],
)
def test_a_config_without_a_usable_draft_model_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculative_config=given)


def test_a_draft_model_that_can_not_draft_for_the_model_is_refused():
    wide = replace(MODEL, sliding_window=9)
    for draft, model, message in [
        (replace(MODEL, vocab_size=41), MODEL, "vocab_size=41 must be the model's, 40"),
        (wide, replace(MODEL, sliding_window=8), "sliding_window=9 must be at most the model's, 8"),
        (MODEL, wide, "sliding_window=None must be at most the model's, 9"),
    ]:
        with pytest.raises(ValueError, match=message):
            drafting(weights(draft), draft, model=model)


def test_weights_that_are_not_of_the_draft_model_are_refused():
    with pytest.raises(ValueError, match="draft_params must be the weights of a 'model'"):
        drafting(None)
    with pytest.raises(ValueError, match="draft_params must be None without a 'model'"):
        make_engine(draft_params=WEIGHTS)
    with pytest.raises(ValueError, match="draft_params must be None without a draft model"):
        make_engine().update_params(WEIGHTS, draft_params=WEIGHTS)
    engine = drafting()
    with pytest.raises(ValueError, match=r"draft_params\['head'\] is float16"):
        engine.update_params(WEIGHTS, draft_params=WEIGHTS | dict(head=jnp.zeros(3, jnp.float16)))


def test_the_pool_has_pages_of_both_models():
    own, other = (page_bytes(x.kv_cache_spec, page_size=4, dtype="int8") for x in (MODEL, SMALL))
    sizes = dict(page_size=4, max_num_seqs=1024, kv_cache_dtype="int8", max_model_len=64)
    config = EngineConfig(**sizes, max_num_batched_tokens=2048)
    drafts = replace(config, speculative_config=config_of(SMALL))
    big = replace(MODEL, max_model_len=2**24)
    for one, size in ((config, own), (drafts, own + other)):
        one = replace(one, max_model_len=None)
        num_pages, *_ = one.sizes(big)
        assert num_pages == 2**30 // size or jax.default_backend() != "cpu"
