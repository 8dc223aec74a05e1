"""Experts of tokens: reported by the engine, and given to a forward pass in their place."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_paged as pp
from models.decoder import Decoder, ModelConfig, dense_attend, engine_model, load_checkpoint
from models.decoder.experts_config import ExpertsConfig
from pallas_paged.engine import Rollouts, SamplingParams
from pallas_paged.engine.device.attend import AttentionKernels, PagedAttend
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.dense_oracle import positions_of
from tests.support.devices import lower_for_cuda, mesh
from tests.support.engine_calls import make_engine
from tests.support.kv_pools import make_pool
from tests.support.marks import needs_mosaic, slow
from tests.support.plain_model import PlainModel

GOLDENS = Path(__file__).parents[1] / "goldens"
PROMPTS = [[5, 9, 2, 40, 7, 7, 31], [3, 8, 1], [5, 9, 2, 40, 7, 7, 31, 11, 4, 22, 6]]
DRAFTS = dict(speculative_config=dict(method="ngram", num_speculative_tokens=2))
pytestmark = pytest.mark.usefixtures("exact_products")


class RecordingAttend:
    """Attention within rows, which keeps what layers record."""

    routed_experts = None

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


@pytest.mark.slow  # compiles on a mesh
def test_two_devices_report_and_take_the_experts_of_a_dense_forward(dense_experts, dense_scores):
    decoder, _ = load_checkpoint(GOLDENS / "qwen3_moe", mesh=mesh(2), dtype=jnp.float32)
    engine = engine_of(decoder, tensor_parallel_size=2)
    assert_dense(engine.generate(PROMPTS, asks(), progress=False), dense_experts)
    given = experts_of(decoder.config)
    wanted = list(map(dense_scores, SCORED, COMPLETIONS, given))
    assert_scores(engine.score(SCORED, COMPLETIONS, given), wanted)


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


@pytest.fixture(scope="module")
def dense_scores(decoder):
    """Returns the log-probabilities of completions by a forward pass that gets their experts."""

    graphdef, params = nnx.split(decoder)

    @jax.jit
    def logprobs_of(tokens, experts):
        model = nnx.merge(graphdef, params)
        positions = positions_of(tokens)
        hidden, _ = model(tokens, positions, dense_attend(), routed_experts=experts)
        return jax.nn.log_softmax(model.logits(hidden))

    def of(prompt, completion, experts):
        tokens = [*prompt, *completion]
        padded, given = np.zeros((1, 32), np.int32), np.full((1, 32, *experts.shape[1:]), -1)
        padded[0, : len(tokens)], given[0, : len(experts)] = tokens, experts
        logprobs = np.asarray(logprobs_of(padded, given))[0]
        return [logprobs[len(prompt) - 1 + i, token] for i, token in enumerate(completion)]

    return of


SCORED = [*PROMPTS, [8, 6], [7]]
COMPLETIONS = [[*range(12)], [], [9] * 7, [5, 2], [3, 1, 4]]  # some in two chunks, two in one step


def experts_of(config, seed=0):
    """Other experts than the router's for most tokens, and the router's own for some."""
    rng = np.random.default_rng(seed)
    num_layers = config.num_layers - len(config.experts.dense_layers)
    experts, k = config.experts.n_routed_experts, config.experts.num_experts_per_tok
    of_rows = []
    for prompt, completion in zip(SCORED, COMPLETIONS, strict=True):
        scores = rng.random((len(prompt) + len(completion) - 1, num_layers, experts))
        of_rows.append(np.argsort(scores, axis=-1)[..., :k])
        of_rows[-1][::5] = -1
    return of_rows


def assert_scores(found, wanted):
    for row, scores in zip(found, wanted, strict=True):
        np.testing.assert_allclose(row[: len(scores)], scores, atol=1e-4)
        assert not row[len(scores) :].any()


@pytest.mark.cpu_budget(9)  # compiles the steps that score, with given experts and without
def test_scores_with_given_experts_are_those_of_a_dense_forward(decoder, dense_scores):
    """Beside tokens with the router's experts; the prefix cache has K and V of these only."""
    engine = engine_of(decoder)
    own = engine.score(SCORED, COMPLETIONS)
    given = experts_of(decoder.config)
    wanted = list(map(dense_scores, SCORED, COMPLETIONS, given))
    assert not np.allclose(own[0, :12], wanted[0], atol=1e-2)
    others = [engine.submit(prompt, asks()) for prompt in PROMPTS]
    engine.step()
    assert_scores(engine.score(SCORED, COMPLETIONS, given), wanted)
    while not engine.idle:
        engine.step()
    plain = engine_of(decoder).generate(PROMPTS, asks(), progress=False)
    for request, output in zip(others, plain, strict=True):
        assert request.outputs[0].token_ids == output.outputs[0].token_ids
    np.testing.assert_allclose(engine.score(SCORED, COMPLETIONS), own, atol=1e-4)
    engine.reset_prefix_cache()
    assert_scores(engine.score(SCORED, COMPLETIONS, given), wanted)
    np.testing.assert_allclose(engine.score(SCORED, COMPLETIONS), own, atol=1e-4)


def test_scores_with_reported_experts_are_those_without(decoder):
    """As outputs have them, or rollouts, with padding behind; or with the least number for none."""
    engine = engine_of(decoder)
    outputs = engine.generate(PROMPTS, asks(temperature=1.0, seed=1), progress=False)
    rollouts = Rollouts.from_outputs(outputs)
    completions = [one.outputs[0] for one in outputs]
    tokens = [one.token_ids for one in completions]
    reported = [one.routed_experts for one in completions]
    firsts = rollouts.prompt_token_ids.shape[1] - rollouts.prompt_lens
    padded = [rows[first:] for rows, first in zip(rollouts.routed_experts, firsts, strict=True)]
    none = [np.full(one.shape, np.iinfo(np.int64).min) for one in reported]
    own = engine.score(PROMPTS, tokens)
    for given in (reported, padded, none):
        np.testing.assert_allclose(engine.score(PROMPTS, tokens, given), own, atol=1e-4)
    with pytest.raises(ValueError, match=r"sequence 0: .* behind its first 15 rows"):
        engine.score(PROMPTS, tokens, rollouts.routed_experts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given[:2], "5 prompts must have as many routed_experts, not 2"),
        (lambda given: 5, "routed_experts=5 must be a list"),
        (lambda given: [*given[:4], None], "sequence 4: routed_experts object"),
        (lambda given: [*given[:4], given[4] * 1.0], "sequence 4: routed_experts float64"),
        (lambda given: [given[0][1:], *given[1:]], r"for at least the 18 tokens before the last"),
        (lambda given: [one[:, 1:] for one in given], r"must be integers \[tokens, "),
        (lambda given: [one + 2**15 for one in given], "must be at most 32767, not 32"),
    ],
)
def test_given_experts_that_do_not_fit_are_refused(decoder, change, message):
    engine = engine_of(decoder)
    with pytest.raises(ValueError, match=message):
        engine.score(SCORED, COMPLETIONS, change(experts_of(decoder.config)))
    assert engine.idle


def test_models_that_take_no_experts_are_not_scored_with_them():
    given = [np.zeros((2, 1, 1), np.int16)]
    with pytest.raises(ValueError, match="must be None: the model reports no experts"):
        make_engine().score([[1, 2]], [[3]], given)
    with pytest.raises(ValueError, match=r"the model must use attend\.routed_experts"):
        make_engine(ReportingModel(vocab_size=40, max_model_len=64)).score([[1, 2]], [[3]], given)


class ReportingModel(PlainModel):
    """Reports an expert, and does not take one."""

    def __call__(self, params, tokens, positions, attend, cache):
        attend.record(jnp.zeros((tokens.size, 1), jnp.int32))
        return super().__call__(params, tokens, positions, attend, cache)


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


QWEN = dict(hidden_size=2048, num_q_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True)
OF_QWEN = dict(n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=256)
BIASES = dict(qkv_bias=True, o_bias=True, sinks=True)
GPT_OSS = dict(hidden_size=2880, num_q_heads=64, num_kv_heads=8, head_dim=64, **BIASES)
OF_GPT_OSS = dict(n_routed_experts=32, num_experts_per_tok=4, moe_intermediate_size=2880)
OF_GPT_OSS |= dict(bias=True, swiglu_limit=7.0)


def lowered_loop(num_rows: int, model: dict, experts: dict) -> str:
    """A loop of decode steps of a bf16 model of two layers, as text, without its weights."""
    config = ModelConfig(
        vocab_size=256,
        intermediate_size=256,
        num_layers=2,
        experts=ExpertsConfig(**experts),
        **model,
    )
    heads = dict(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)

    def make():
        decoder = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        pool = make_pool(
            num_layers=2, dtype=jnp.bfloat16, num_pages=4 * num_rows, page_size=16, **heads
        )
        table = pp.create_page_table(
            num_pages=4 * num_rows, page_size=16, max_seqs=num_rows, pages_per_seq=4
        )
        return nnx.split(decoder), pool.layers, table

    (graphdef, params), layers, table = nnx.eval_shape(make)

    def step(params, layers, table, rows):
        kernels = AttentionKernels()

        def one_step(_, carry):
            layers, _ = carry
            slots = pp.slot_mapping(table, rows, rows)
            num_kv_heads = [config.num_kv_heads]
            attend = PagedAttend(
                table, slots, rows, None, num_kv_heads=num_kv_heads, kernels=kernels
            )
            hidden, layers = nnx.merge(graphdef, params)(rows, rows, attend, layers)
            return layers, hidden

        hidden = jnp.zeros((num_rows, config.hidden_size), jnp.bfloat16)
        return jax.lax.fori_loop(0, 2, one_step, (layers, hidden))

    rows = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    return lower_for_cuda(step, params, layers, table, rows).as_text()


@needs_mosaic
@pytest.mark.parametrize(
    ("num_rows", "model", "experts", "is_one"),
    [
        (1, QWEN, OF_QWEN, True),
        (2, QWEN, OF_QWEN, False),
        (1, QWEN, OF_QWEN | dict(n_shared_experts=1), False),
        (1, GPT_OSS, OF_GPT_OSS, True),
    ],
    ids=["one row", "two rows", "shared experts", "gpt-oss"],
)
def test_a_layer_is_one_kernel_beside_attention_for_one_row(num_rows, model, experts, is_one):
    text = lowered_loop(num_rows, model, experts)
    # Layers of one structure are lowered once; the last has no product of q, k and v.
    assert text.count("between_attentions_mosaic") == (2 if is_one else 0)
    assert ("grouped_product" in text) != is_one
