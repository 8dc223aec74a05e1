"""A model of latent attention in the engine: its pool, its tokens, its steps."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import KVCacheSpec
from pallas_paged.engine.device.attend import AttentionKernels
from pallas_paged.engine.device.placement import Placement
from pallas_paged.engine.device.pool import create_pool, page_bytes, pages_that_fit, pool_bytes
from pallas_paged.engine.device.program import make_step
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.attention_oracle import relative_error
from tests.support.devices import lower_for_cuda, mesh
from tests.support.draft_calls import NGRAM
from tests.support.engine_calls import (
    MANY_PAGES,
    MODES,
    PROMPTS,
    assert_copies_no_pool,
    assert_every_page_is_free,
    greedy,
    make_engine,
    serve,
    tokens_of,
)
from tests.support.latent_model import LatentModel, expected_logits, greedy_tokens
from tests.support.marks import needs_triton, slow
from tests.support.oracle import log_softmax

pytestmark = pytest.mark.usefixtures("exact_products")
MODEL = LatentModel()
PARAMS = MODEL.init(0)
SPEC = MODEL.kv_cache_spec
GREEDY = MODES[:1]


def engine_of(model=MODEL, **sizes):
    return make_engine(model, PARAMS, **dict(modes=GREEDY) | sizes)


@pytest.fixture(scope="module")
def expected():
    """The greedy tokens of each prompt."""
    return [greedy_tokens(PARAMS, prompt, 14) for prompt in PROMPTS]


@pytest.mark.slow
def test_tokens_with_drafts_equal_numpy(expected):
    engine = engine_of(num_pages=32, speculative_config=NGRAM)
    assert tokens_of(serve(engine, PROMPTS, greedy())) == expected
    assert engine.stats().spec_decode_num_drafts > 0


@pytest.mark.cpu_budget(8)  # compiles a step with chunks and one without
def test_tokens_equal_numpy_in_chunks_with_a_cached_prefix_after_preemption_and_in_forks(expected):
    engine = engine_of(num_pages=13, watermark=0.0)
    assert tokens_of(serve(engine, PROMPTS, greedy())) == expected
    longer = [*PROMPTS[4], *expected[4][:3]]
    requests = serve(engine, [PROMPTS[4], longer], greedy())
    assert [request.num_cached_tokens for request in requests] == [16, 20]
    again, tail = tokens_of(requests)
    assert again == expected[4] and tail[:11] == expected[4][3:]
    assert tokens_of(serve(engine, PROMPTS[1:2], greedy(n=3))) == [expected[1]] * 3
    assert engine.stats().num_preemptions > 0
    assert_every_page_is_free(engine)


@pytest.mark.parametrize(("kv_cache_dtype", "most"), slow([("int8", 0.02), ("fp8", 0.03)]))
def test_quantized_latents_stay_near_exact_ones(kv_cache_dtype, most):
    engine = engine_of(kv_cache_dtype=kv_cache_dtype, modes=[SamplingMode(prompt_logprobs=0)])
    prompt = PROMPTS[4]
    (request,) = serve(engine, [prompt], greedy(max_tokens=1, prompt_logprobs=0))
    entries = zip(request.prompt_logprobs[1:], prompt[1:], strict=True)
    found = np.array([entry[token].logprob for entry, token in entries])
    exact = log_softmax(expected_logits(PARAMS, prompt)[:-1])
    error = relative_error(found, exact[np.arange(len(found)), prompt[1:]])
    assert most / 10 < error < most


@pytest.mark.parametrize(
    ("dtype", "scales", "token_bytes"),
    [
        *[("float32", None, 24 * 4), ("bfloat16", None, 24 * 2), ("int8", None, 24 + 4)],
        *[("float8_e4m3fn", None, 24 + 4), ("float8_e4m3fn", (0.5, 0.25), 24)],
    ],
)
def test_a_token_is_one_latent_in_the_pool(dtype, scales, token_bytes):
    spec = replace(SPEC, k_scales=scales)
    pool = create_pool(spec, num_pages=3, page_size=4, dtype=dtype)
    for index, layer in enumerate(pool.layers):
        assert layer.k_pages.shape == (3, 4, 1, 24)
        assert layer.v_pages is None and layer.v_scales is None
        if scales:
            assert layer.k_scales == np.float32(scales[index])
    page = 2 * 4 * token_bytes  # in all layers
    assert page_bytes(spec, page_size=4, dtype=dtype) == page
    assert pool_bytes(pool) == 3 * page + (2 * 4 if scales else 0)


def test_latents_are_replicated_where_heads_would_be_copied():
    assert SPEC.on_devices(4) == SPEC
    heads = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32")
    assert heads.on_devices(4).num_kv_heads == 4


def test_as_many_pages_of_latents_fit_two_devices_as_one():
    def fitting(num_devices):
        there = Placement.on(mesh(num_devices).devices)
        sizes = dict(page_size=4, dtype="float32", memory_fraction=0.01, placements=[there])
        return pages_that_fit(SPEC, **sizes)

    assert fitting(2) == fitting(1) > 1


def test_a_step_copies_no_pool_of_latents():
    assert_copies_no_pool(engine_of(num_pages=MANY_PAGES))


@needs_triton
def test_a_decode_step_for_cuda_writes_latents_by_the_kernel_and_fits_a_graph():
    engine = engine_of(modes=None, num_pages=8, num_scheduler_steps=1, implementation=None)
    runner = engine.replicas[0].runner
    batch = runner.empty_batch((4, 0), SamplingMode(draws=True))
    weights, state = runner.executor.weights, runner.executor.state
    shapes = jax.eval_shape(lambda: (weights.leaves, state, batch))
    # Without its compile options, which only the outermost function may have.
    step = make_step(MODEL, weights.structure, AttentionKernels()).__wrapped__
    text = lower_for_cuda(step, *shapes).as_text()
    assert "rotate_and_write_latents" in text
    assert "}) : (tensor<32x1x24xf32>, " not in text  # as a scatter into the pages would end
    assert not re.findall(r"stablehlo\.(?:sort|while|case|if)\b|chlo.top_k|callback", text)


def test_a_model_of_heads_and_a_pool_of_latents_do_not_fit():
    class Wrong(LatentModel):
        def __call__(self, params, tokens, positions, attend, cache):
            k = jnp.zeros((len(tokens), 1, 24))
            return attend(k, k, k, cache[0]), cache

    with pytest.raises(ValueError, match="v must be None with v_head_dim=16"):
        serve(make_engine(Wrong(), PARAMS, modes=GREEDY), PROMPTS[:1], greedy())
