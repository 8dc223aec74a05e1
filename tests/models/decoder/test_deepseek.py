"""DeepSeek V2 and V3: what their configs mean, routing against NumPy, experts, checkpoints."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from models.decoder import (
    CheckpointError,
    ModelConfig,
    engine_model,
    load_checkpoint,
    save_checkpoint,
)
from models.decoder.experts import Router
from models.decoder.experts_config import ExpertsConfig
from tests.support.attention_oracle import relative_error
from tests.support.checkpoints import edit
from tests.support.dense_oracle import dense_logits

pytestmark = pytest.mark.usefixtures("exact_products")
GOLDENS = Path(__file__).parents[1] / "goldens"
V2, V3 = GOLDENS / "deepseek_v2", GOLDENS / "deepseek_v3"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
YARN = dict(type="yarn", factor=40, original_max_position_embeddings=4096)
LITE = dict(  # the published config.json, without what no decoder reads
    architectures=["DeepseekV2ForCausalLM"],
    attention_bias=False,
    bos_token_id=100000,
    eos_token_id=100001,
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=10944,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rope_scaling=YARN | dict(beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707),
    rope_theta=10000,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    topk_group=1,
    topk_method="greedy",
    v_head_dim=128,
    vocab_size=102400,
)
LARGE = LITE | dict(
    architectures=["DeepseekV3ForCausalLM"],
    q_lora_rank=1536,
    n_routed_experts=256,
    n_group=8,
    topk_group=4,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_published_configs_are_read():
    lite = ModelConfig.from_hugging_face(LITE)
    assert (lite.num_q_heads, lite.num_kv_heads, lite.head_dim, lite.rotary_dim) == (
        16,
        16,
        192,
        64,
    )
    assert lite.max_position_embeddings == 163840 and lite.eos_token_ids == (100001,)
    assert lite.rope_scaling.attention_factor == 1 and not lite.sliding_windows
    # 0.1 * mscale_all_dim * ln(40) + 1, twice.
    assert lite.latent.sm_scale == pytest.approx(192**-0.5 * 1.58962, rel=1e-5)
    experts = lite.experts
    assert (experts.n_routed_experts, experts.shared_size) == (64, 2816)
    assert not experts.is_sigmoid and experts.n_group == experts.topk_group == 1
    large = ModelConfig.from_hugging_face(LARGE)
    assert large.latent.sm_scale == pytest.approx(192**-0.5 * 1.87385, rel=1e-5)
    assert large.latent.q_lora_rank == 1536 and large.latent.cached_dim == 576
    assert large.experts.is_sigmoid and large.experts.norm_topk_prob
    dense = ModelConfig.from_hugging_face(LITE | dict(n_routed_experts=None, rope_scaling=None))
    assert dense.experts is None and dense.latent.sm_scale == 192**-0.5


def test_what_a_config_leaves_out_has_the_defaults_of_transformers():
    names = ("architectures", "vocab_size", "hidden_size", "intermediate_size")
    names += ("num_hidden_layers", "num_attention_heads", "num_experts_per_tok")
    v2, v3 = (ModelConfig.from_hugging_face({k: x[k] for k in names}) for x in (LITE, LARGE))
    assert (v2.latent.q_lora_rank, v2.latent.kv_lora_rank, v2.latent.v_head_dim) == (1536, 512, 128)
    assert (v2.experts.n_routed_experts, v2.experts.moe_intermediate_size) == (64, 1407)
    assert (v3.experts.n_group, v3.experts.topk_group) == (8, 4)
    assert v3.experts.dense_layers == (0, 1, 2)
    assert v3.experts.routed_scaling_factor == 2.5
    assert (v2.max_position_embeddings, v3.max_position_embeddings) == (2048, 4096)
    assert (v2.eos_token_ids, v3.eos_token_ids) == ((2,), (1,))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LITE, dict(attention_bias=True), "attention_bias=True is not supported"),
        (LITE, dict(moe_layer_freq=2), "moe_layer_freq=2 is not supported"),
        (LITE, dict(norm_topk_prob=True), "norm_topk_prob=True is not supported"),
        (LITE, dict(scoring_func="sigmoid"), "scoring_func='sigmoid' is not supported"),
        (LITE, dict(topk_method="noaux_tc"), "topk_method='noaux_tc' is not supported"),
        (LARGE, dict(scoring_func="softmax"), "scoring_func='softmax' is not supported"),
        (LARGE, dict(quantization_config={"quant_method": "fp8"}), "quantization_config is not"),
        (LITE, dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_type='linear' is not"),
        (LITE, dict(kv_lora_rank=0), "kv_lora_rank=0 must be an integer"),
        (LITE, dict(q_lora_rank="x"), "q_lora_rank='x' must be an integer"),
        (LITE, dict(qk_rope_head_dim=63), "qk_rope_head_dim=63 must be even"),
        (LITE, dict(v_head_dim=0), "v_head_dim=0 must be an integer"),
        (LARGE, dict(n_group=7), "n_routed_experts=256 must be a multiple of n_group=7"),
        (LARGE, dict(topk_group=9), "topk_group=9 must be at most n_group=8"),
        (LARGE, dict(n_group=256), "n_group=256 of n_routed_experts=256 must have 2 experts"),
        (LARGE, dict(num_experts_per_tok=129), "num_experts_per_tok=129 must be"),
        (LARGE, dict(n_routed_experts=True), "n_routed_experts=True must be an integer"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hugging_face(config | changes)


def test_switches_of_other_attention_are_refused():
    config = ModelConfig.from_hugging_face(config_of(V2))
    with pytest.raises(ValueError, match="qk_norm=True is not supported with latent attention"):
        replace(config, qk_norm=True)
    with pytest.raises(ValueError, match=r"head_dim=16 must be 20"):
        replace(config, head_dim=16)


def expected_weights(config, x, weight, bias):
    """Weights `f64[T, X]` of experts, token by token."""
    logits = np.float64(x) @ np.float64(weight).T
    if config.is_sigmoid:
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found, size = np.zeros_like(scores), scores.shape[1] // config.n_group
    for row, own in zip(found, scores, strict=True):
        choice = own + (0 if bias is None else np.float64(bias))
        groups = np.sort(choice.reshape(config.n_group, size))[:, ::-1]
        best = np.argsort(-groups[:, : 2 if config.is_sigmoid else 1].sum(axis=1))
        allowed = [e for g in best[: config.topk_group] for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: config.num_experts_per_tok]
        row[chosen] = own[chosen] / (own[chosen].sum() if config.norm_topk_prob else 1)
    return found * config.routed_scaling_factor


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("architecture", ["v2", "v3"])
def test_experts_are_chosen_and_weighed_as_numpy_does(architecture, groups):
    config = ModelConfig.from_hugging_face(config_of(V3))
    n_group, topk_group = groups
    changes = dict(n_group=n_group, topk_group=topk_group)
    if architecture == "v2":
        changes |= dict(is_sigmoid=False, norm_topk_prob=False, routed_scaling_factor=16.0)
    config = replace(config, experts=replace(config.experts, **changes))
    router = Router(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, config.hidden_size), np.float32)
    router.weight[...] = jnp.asarray(rng.standard_normal(router.weight.shape, np.float32) / 4)
    bias = None
    if config.experts.is_sigmoid:
        bias = rng.standard_normal(16, np.float32)  # far more than the scores: it only chooses
        router.e_score_correction_bias[...] = jnp.asarray(bias)
    experts, weights = jax.jit(lambda: router(x))()
    found = np.zeros((30, 16))
    np.put_along_axis(found, np.asarray(experts), np.asarray(weights), axis=1)
    expected = expected_weights(config.experts, x, router.weight[...], bias)
    assert ((expected > 0).sum(axis=1) == config.experts.num_experts_per_tok).all()
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    text = jax.jit(lambda x: router(x)).lower(x).as_text()
    assert not re.findall("sort|top_k|while", text)  # what a CUDA graph can't hold


@pytest.mark.parametrize("num_tokens", [1, 16, 64])
def test_each_token_has_its_best_experts_at_the_sizes_of_a_published_model(num_tokens):
    experts = ExpertsConfig(n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=8)
    config = replace(ModelConfig.from_hugging_face(config_of(V2)), hidden_size=2048)
    router = Router(replace(config, experts=experts), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((num_tokens, 2048)), jnp.bfloat16)
    found, _ = jax.jit(lambda x: router(x))(x)
    logits = np.asarray(x, np.float64) @ np.asarray(router.weight[...], np.float64).T
    np.testing.assert_array_equal(found, np.argsort(-logits, axis=1)[:, :8])


def test_of_equal_scores_the_first_experts_are_chosen():
    config = ModelConfig.from_hugging_face(config_of(V2))
    router = Router(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    experts, weights = jax.jit(lambda x: router(x))(np.zeros((1, config.hidden_size), np.float32))
    np.testing.assert_array_equal(experts[0], [0, 1, 2])
    np.testing.assert_allclose(weights[0], [0.125] * 3)


def test_bf16_keeps_the_bias_of_the_choice_in_f32():
    model, _ = load_checkpoint(V3, dtype=jnp.bfloat16)
    gate = model.layers[1].mlp.gate
    np.testing.assert_array_equal(
        gate.e_score_correction_bias[...], load_file(V3 / "model.safetensors")[BIAS]
    )
    assert gate.weight[...].dtype == jnp.bfloat16
    with np.load(V3 / "golden.npz") as golden:
        logits = dense_logits(model, golden["input_ids"].astype(np.int32))
        assert 1e-4 < relative_error(logits, golden["logits"]) < 0.3  # a choice may be another one


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(V3, tmp_path, dirs_exist_ok=True)


def test_rotary_rows_may_be_in_halves(folder):
    """The order of `rope_interleave=False`, of the same model."""
    halves = {}
    for name, value in load_file(folder / "model.safetensors").items():
        rows = value.reshape(4, 20, -1) if "q_b_proj" in name else value[None]
        if "q_b_proj" in name or "kv_a_proj" in name:
            pairs = rows[:, -8:]
            rows = np.concatenate([rows[:, :-8], pairs[:, ::2], pairs[:, 1::2]], axis=1)
            halves[name] = rows.reshape(value.shape)
    edit(folder, halves, rope_interleave=False)
    (model, config), (other, _) = load_checkpoint(folder), load_checkpoint(V3)
    assert not config.latent.rope_interleave
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))


def test_heads_of_v_may_be_larger_than_those_of_q_and_k(folder):
    """The same model, which adds up two halves of each V."""
    wider = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if "kv_b_proj" in name:
            k, v = np.split(value.reshape(4, 22, -1), [12], axis=1)
            wider[name] = np.concatenate([k, v, v, 0 * v], axis=1).reshape(4 * 42, -1)
        elif "self_attn.o_proj" in name:
            half = value.reshape(-1, 4, 10) / 2
            wider[name] = np.concatenate([half, half, half], axis=2).reshape(len(value), -1)
    edit(folder, wider, v_head_dim=30)
    model, config = load_checkpoint(folder)
    assert config.head_dim == 20
    with np.load(V3 / "golden.npz") as golden:
        logits = dense_logits(model, golden["input_ids"].astype(np.int32))
        assert relative_error(logits, golden["logits"]) <= 1e-5


def test_layers_that_predict_further_tokens_are_ignored(folder):
    further = {"model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)}
    edit(folder, further, num_nextn_predict_layers=1)
    load_checkpoint(folder)
    edit(folder, {"model.layers.4.x": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.4\.x"):
        load_checkpoint(folder)


def test_it_is_not_saved_as_llama(tmp_path):
    model, config = load_checkpoint(V2)
    with pytest.raises(ValueError, match="latent attention cannot be saved as LlamaForCausalLM"):
        save_checkpoint(tmp_path / "nowhere", model, config)
    assert not (tmp_path / "nowhere").exists()


def test_equal_checkpoints_share_compiled_steps():
    (model, _), (other, _) = (engine_model(load_checkpoint(V3)[0]) for _ in range(2))
    assert model is other and model.cache_key
