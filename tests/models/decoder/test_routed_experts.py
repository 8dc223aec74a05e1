"""Experts of tokens: reported by the engine, and given to a forward pass in their place."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import dense_attend, engine_model, load_checkpoint
from pallas_paged.engine import Rollouts, SamplingParams
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.dense_oracle import positions_of
from tests.support.devices import mesh
from tests.support.engine_calls import make_engine
from tests.support.marks import slow

GOLDENS = Path(__file__).parents[1] / "goldens"
PROMPTS = [[5, 9, 2, 40, 7, 7, 31], [3, 8, 1], [5, 9, 2, 40, 7, 7, 31, 11, 4, 22, 6]]
DRAFTS = dict(speculative_config=dict(method="ngram", num_speculative_tokens=2))
pytestmark = pytest.mark.usefixtures("exact_products")


class RecordingAttend:
    """Attention within rows, which keeps what layers record."""

    def __init__(self):
        self.recorded, self._attend = [], dense_attend()

    def __call__(self, *args, **options):
        return self._attend(*args, **options)

    def record(self, experts):
        self.recorded.append(experts)


@pytest.fixture(scope="module")
def decoder():
    return load_checkpoint(GOLDENS / "qwen3_moe", dtype=jnp.float32)[0]


@pytest.fixture(scope="module")
def dense_experts(decoder):
    """Returns the experts [tokens, layers, k] that a forward pass without a cache chooses."""

    graphdef, params = nnx.split(decoder)

    @jax.jit
    def experts_of(tokens):
        attend = RecordingAttend()
        nnx.merge(graphdef, params)(tokens, positions_of(tokens), attend)
        return jnp.stack(attend.recorded, axis=-2)

    def of(token_ids):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(token_ids)] = token_ids
        return np.asarray(experts_of(padded))[0, : len(token_ids)]

    return of


def engine_of(decoder, **sizes):
    """All requests have one mode, so that the engines share two programs."""
    modes = [SamplingMode(draws=True, routed_experts=True)]
    return make_engine(*engine_model(decoder), modes=modes, **sizes)


def asks(**params):
    values = dict(max_tokens=9, temperature=0.0, ignore_eos=True, return_routed_experts=True)
    return SamplingParams(**values | params)


def assert_dense(outputs, dense_experts):
    for output in outputs:
        for one in output.outputs:
            tokens = [*output.prompt_token_ids, *one.token_ids]
            assert one.routed_experts.dtype == np.int16
            np.testing.assert_array_equal(one.routed_experts, dense_experts(tokens[:-1]))


@pytest.mark.cpu_budget(9)  # compiles the steps that later tests share
@pytest.mark.parametrize("sizes", [{}, *slow([DRAFTS, dict(num_scheduler_steps=1)])], ids=str)
def test_completion_has_the_experts_of_a_dense_forward(decoder, dense_experts, sizes):
    """Of prompts in chunks, in calls of several steps, and after preemption."""
    engine = engine_of(decoder, **sizes)
    outputs = engine.generate(PROMPTS + PROMPTS[:1], asks(max_tokens=20), progress=False)
    assert_dense(outputs, dense_experts)
    assert engine.stats().num_preemptions


def test_cached_prompts_and_forks_have_the_experts_of_a_dense_forward(decoder, dense_experts):
    engine = engine_of(decoder)
    plain = asks(return_routed_experts=False)
    (first,) = engine.generate(PROMPTS[2:], plain, progress=False)
    assert first.outputs[0].routed_experts is None
    forks = asks(n=3, temperature=1.0, seed=1)
    outputs = engine.generate(PROMPTS[2:] * 2, [forks, plain], progress=False)
    assert outputs[0].num_cached_tokens == 0 and outputs[1].num_cached_tokens > 0
    assert_dense(outputs[:1], dense_experts)
    assert outputs[1].outputs[0].routed_experts is None
    assert outputs[1].outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.cpu_budget(9)  # compiles on a mesh
def test_two_devices_report_the_experts_of_a_dense_forward(dense_experts):
    decoder, _ = load_checkpoint(GOLDENS / "qwen3_moe", mesh=mesh(2), dtype=jnp.float32)
    engine = engine_of(decoder, tensor_parallel_size=2)
    assert_dense(engine.generate(PROMPTS, asks(), progress=False), dense_experts)


def test_stopped_and_empty_completions_have_the_experts_of_their_tokens(decoder, dense_experts):
    engine = engine_of(decoder)
    (free,) = engine.generate(PROMPTS[:1], asks(), progress=False)
    stop = asks(stop_token_ids=[free.outputs[0].token_ids[2]])
    outputs = engine.generate(PROMPTS[:1] * 2, [stop, asks(max_tokens=0)], progress=False)
    assert [len(one.outputs[0].routed_experts) for one in outputs][1] == len(PROMPTS[0]) - 1
    assert len(outputs[0].outputs[0].token_ids) <= 3
    assert_dense(outputs, dense_experts)


def test_dense_forward_with_the_experts_of_rollouts_is_its_own(decoder):
    engine = engine_of(decoder)
    rollouts = Rollouts.from_outputs(engine.generate(PROMPTS, asks(), progress=False))
    tokens = np.concatenate([rollouts.prompt_token_ids, rollouts.token_ids], axis=1)[:, :-1]
    experts = rollouts.routed_experts
    assert experts.shape[:2] == tokens.shape
    lens = rollouts.prompt_lens + rollouts.lens - 1
    first = rollouts.prompt_token_ids.shape[1] - rollouts.prompt_lens
    graphdef, params = nnx.split(decoder)

    @jax.jit
    def hidden_of(tokens, experts=None):
        model = nnx.merge(graphdef, params)
        return model(tokens, positions_of(tokens), dense_attend(), routed_experts=experts)[0]

    for row, (start, length) in enumerate(zip(first, lens, strict=True)):
        place = slice(start, start + length)
        assert (experts[row, place] >= 0).all()
        assert (np.delete(experts[row], range(start, start + length), axis=0) == -1).all()
        one, given = np.zeros_like(tokens[:1]), np.full_like(experts[:1], -1)
        one[0, :length], given[0, :length] = tokens[row, place], experts[row, place]
        found, own = hidden_of(one, given), hidden_of(one)
        np.testing.assert_allclose(found[:, :length], own[:, :length], rtol=1e-5, atol=1e-5)


def test_given_experts_have_the_weights_of_the_router(decoder):
    layer = next(layer.mlp for layer in decoder.layers if hasattr(layer.mlp, "experts"))
    router, config = layer.gate, layer.gate.config
    num_experts, k = config.n_routed_experts, config.num_experts_per_tok
    x = jax.random.normal(jax.random.key(0), (5, decoder.config.hidden_size))
    given = np.stack([(np.arange(k) + row) % num_experts for row in range(5)]).astype(np.int16)
    given[4] = -1
    route = jax.jit(lambda *args: router(*args))
    (experts, weights), (chosen, own) = route(x, given), route(x)
    np.testing.assert_array_equal(experts[:4], given[:4])
    np.testing.assert_array_equal(experts[4], chosen[4])
    scores = np.asarray(jax.nn.softmax(x @ router.weight[...].T))
    wanted = np.take_along_axis(scores[:4], given[:4].astype(int), axis=1)
    if config.norm_topk_prob:
        wanted /= wanted.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights[:4], wanted * config.routed_scaling_factor, rtol=1e-5)
    np.testing.assert_array_equal(weights[4], own[4])
