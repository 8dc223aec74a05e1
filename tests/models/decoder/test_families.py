"""Families of checkpoints: what their configs mean, what is refused, forms of their tensors."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models.decoder import CheckpointError, ModelConfig, engine_model, load_checkpoint
from models.decoder.families import ARCHITECTURES
from models.decoder.stored_experts import from_mxfp4
from models.decoder.tensor_file import tensors_in
from tests.support.attention_oracle import relative_error
from tests.support.checkpoints import edit, weights_without_gradient
from tests.support.dense_oracle import CONFIG, logits_of

pytestmark = pytest.mark.usefixtures("exact_products")
GOLDENS = Path(__file__).parents[1] / "goldens"
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2)
SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = dict(rope_type="linear", factor=2.0)
NO_WINDOWS = dict(layer_types=None, sliding_window=None)


def read(architecture, **keys):
    contents = {"architectures": [f"{architecture}ForCausalLM"], **SIZES, **keys}
    return ModelConfig.from_hugging_face(contents)


def test_qwen3_moe_has_experts_in_the_layers_that_its_keys_name():
    config = read("Qwen3Moe", num_experts=16, decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.experts.dense_layers == (0, 2, 3) and config.experts.n_routed_experts == 16
    assert not config.experts.norm_topk_prob and config.qk_norm and not config.sliding_windows
    # transformers 5 has another name of the experts.
    config = read("Qwen3Moe", num_local_experts=32, norm_topk_prob=True)
    assert config.experts.n_routed_experts == 32 and config.experts.dense_layers == ()
    assert config.experts.norm_topk_prob
    config = read("Qwen3Moe", use_sliding_window=True, sliding_window=8)
    assert config.sliding_windows == (8,) * 4


def test_phi_rotates_a_part_of_each_head_and_has_names_of_its_own_for_longrope():
    factors = dict(short_factor=[1.0] * 3, long_factor=[2.0] * 3)
    for rope_type in ("su", "yarn", "longrope"):
        rope = dict(type=rope_type, **factors)
        config = read("Phi3", partial_rotary_factor=0.75, rope_scaling=rope)
        assert config.rope_scaling.rope_type == "longrope" and config.rotary_dim == 6
        assert config.rope_scaling.original_max_position_embeddings == 4096
    nested = dict(rope_type="default", rope_theta=5e3, partial_rotary_factor=0.5)
    config = read("Phi3", rope_parameters=nested)
    assert (config.rotary_dim, config.rope_theta) == (4, 5e3)


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("Gemma2", {}, (4096, None, 4096, None)),
        ("Gemma3", dict(sliding_window=8, sliding_window_pattern=3), (8, 8, None, 8)),
        ("Gemma3", dict(sliding_window=8), (8,) * 4),
        ("Olmo3", dict(sliding_window=8), (8, 8, 8, None)),
        ("Olmo3", dict(layer_types=[FULL, SLIDING, FULL, FULL]), (None, 4096, None, None)),
        ("GptOss", {}, (128, None, 128, None)),
        ("Mixtral", {}, ()),
        ("Mixtral", dict(sliding_window=8), (8,) * 4),
        ("Phi3", dict(sliding_window=2047, use_sliding_window=False), (2047,) * 4),
        ("Olmo2", dict(sliding_window=8), ()),
    ],
)
def test_windows_are_those_of_the_family(architecture, keys, windows):
    assert read(architecture, **keys).sliding_windows == windows


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (
            dict(rope_theta=2e6, rope_local_base_freq=2e4),
            {SLIDING: dict(rope_theta=2e4), FULL: dict(rope_theta=2e6)},
        ),
        (
            dict(rope_scaling=dict(rope_type="linear", factor=8.0)),
            {SLIDING: dict(rope_theta=1e4), FULL: dict(rope_type="linear", factor=8.0)},
        ),
    ],
)
def test_gemma_3_has_other_rotation_in_layers_with_a_window(older, newer):
    if "rope_theta" not in newer[FULL]:
        newer[FULL]["rope_theta"] = 1e6
    config = read("Gemma3", **older)
    assert config == read("Gemma3", rope_parameters=newer)
    windowed = config.of_windows()
    assert windowed.rope_theta == newer[SLIDING]["rope_theta"] and windowed.rope_scaling is None


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("gemma3", "language_model.model."),
        ("gemma4", "model.language_model."),
        ("gemma4_untied", "model.language_model."),
    ],
)
def test_texts_of_gemma_with_a_vision_tower_run(tmp_path, name, prefix):
    golden = GOLDENS / name
    contents = json.loads((golden / "config.json").read_text())
    tied = contents["tie_word_embeddings"]
    # transformers writes both of these twice, and takes the outer ones.
    text_config = contents | dict(architectures=None, eos_token_id=7, tie_word_embeddings=not tied)
    architecture = name.removesuffix("_untied").capitalize() + "ForConditionalGeneration"
    outer = dict(architectures=[architecture], eos_token_id=[1, 5], tie_word_embeddings=tied)
    (tmp_path / "config.json").write_text(json.dumps(outer | dict(text_config=text_config)))
    tensors = load_file(golden / "model.safetensors")
    tensors = {re.sub(r"^model\.", prefix, key): x for key, x in tensors.items()}
    tensors["vision_tower.head.probe"] = np.zeros(1, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (model, config), (expected, alone) = load_checkpoint(tmp_path), load_checkpoint(golden)
    stored_as = prefix.removesuffix(".model.").removesuffix(".")
    assert config == replace(alone, stored_as=stored_as, eos_token_ids=(1, 5))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(expected))
    with pytest.raises(ValueError, match="text_config=None must have the sizes"):
        ModelConfig.from_hugging_face(outer)


def test_gemma_3_with_a_vision_tower_has_the_sizes_that_its_file_leaves_out():
    # The published 4B names only these sizes.
    sizes = dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34)
    outer = dict(architectures=["Gemma3ForConditionalGeneration"], text_config=sizes)
    config = ModelConfig.from_hugging_face(outer)
    assert (config.vocab_size, config.num_q_heads, config.num_kv_heads) == (262208, 8, 4)
    assert config.sliding_windows.count(None) == 5


def test_gemma_4_has_other_heads_where_layers_see_all_tokens():
    types = [SLIDING, FULL, SLIDING, FULL]
    keys = dict(head_dim=16, layer_types=types, sliding_window=8, hidden_size_per_layer_input=0)
    config = read("Gemma4", global_head_dim=32, num_global_key_value_heads=1, **keys)
    assert (config.head_dim, config.num_kv_heads) == (32, 2) and not config.k_eq_v
    shared = dict(num_global_key_value_heads=1, attention_k_eq_v=True)
    config = read("Gemma4", global_head_dim=32, **shared, **keys)
    assert (config.head_dim, config.num_kv_heads, config.k_eq_v) == (32, 1, True)
    windowed = config.of_layer(0)
    assert (windowed.head_dim, windowed.num_kv_heads, windowed.k_eq_v) == (16, 2, False)
    assert config.rope_scaling.rope_type == "proportional" and windowed.rope_scaling is None
    assert read("Gemma4", **keys | dict(layer_types=[FULL] * 4)).sliding_windows == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden_size_per_layer_input=256), "hidden_size_per_layer_input=256"),
        (dict(num_kv_shared_layers=2), "num_kv_shared_layers=2"),
        (dict(enable_moe_block=True), "enable_moe_block=True"),
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention='all'"),
        (dict(per_layer_config={"1": dict(head_dim=32)}), "per_layer_config of layer 1"),
        (NO_WINDOWS | dict(per_layer_config={"2": dict(head_dim=32)}), "of layer 2"),
    ],
)
def test_what_other_sizes_of_gemma_4_have_is_refused_by_its_name(change, message):
    keys = dict(layer_types=[FULL] * 4, hidden_size_per_layer_input=0) | change
    with pytest.raises(ValueError, match=message):
        read("Gemma4", **keys)


def test_olmo_3_scales_the_rotation_of_full_layers_only():
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    config = read("Olmo3", rope_theta=1e5, rope_scaling=yarn)
    assert config.rope_scaling.factor == 4.0 and config.rope_theta == 1e5
    assert config.of_windows().rope_scaling is None and config.of_windows().rope_theta == 1e5


def test_gpt_oss_has_the_published_yarn_where_a_file_has_none():
    config = read("GptOss")
    assert config.rope_scaling.attention_factor == pytest.approx(1.34657, abs=1e-5)
    assert not config.rope_scaling.truncate and config.rope_theta == 150000
    assert config.max_position_embeddings == 131072 and config.o_bias and config.sinks
    assert config.experts.swiglu_limit == 7.0 and config.experts.n_routed_experts == 128
    assert read("GptOss", rope_parameters=None) == config


def test_gemma_scales_as_published():
    config = read("Gemma2", hidden_size=3584, num_attention_heads=16, query_pre_attn_scalar=224)
    assert config.sm_scale == 224**-0.5 and config.tie_word_embeddings
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    # transformers rounds the scale of embeddings to their dtype.
    assert jnp.asarray(config.embedding_scale, jnp.bfloat16) == 59.75
    assert read("Gemma3").attention_soft_cap is read("Gemma3").logits_soft_cap is None


MXFP4 = dict(quantization_config=dict(quant_method="mxfp4"))


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("Qwen3Moe", dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
        ("Qwen3Moe", dict(num_experts=0), "n_routed_experts=0 must be an integer"),
        ("Qwen3Moe", dict(num_experts=4), "num_experts_per_tok=8 must be"),
        ("Qwen3Moe", dict(decoder_sparse_step=0), "decoder_sparse_step=0 must be an integer"),
        ("Qwen3Moe", dict(mlp_only_layers=1), "mlp_only_layers=1 must be a list"),
        ("Qwen3Moe", MXFP4, "quantization_config is not supported"),
        ("Mixtral", dict(num_local_experts=None), "n_routed_experts=None must be an integer"),
        ("Mixtral", dict(attention_bias=True), "attention_bias=True is not supported"),
        ("Mixtral", dict(layer_types=[FULL] * 4, sliding_window=8), "layer_types=.* does not"),
        ("Phi3", dict(layer_types=[FULL] * 4, sliding_window=8), "layer_types=.* does not"),
        ("Phi3", dict(partial_rotary_factor=0.4), "partial_rotary_factor=0.4 of a head of 8"),
        ("Phi3", dict(partial_rotary_factor=2), "partial_rotary_factor=2 of a head of 8"),
        ("Phi3", dict(partial_rotary_factor=-1), "partial_rotary_factor=-1 must be a positive"),
        ("Olmo2", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
        ("Olmo2", dict(hidden_act="relu"), "hidden_act='relu' is not supported"),
        ("Gemma2", dict(hidden_activation="gelu"), "hidden_activation='gelu' is not supported"),
        ("Gemma2", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar=0 must be a positive"),
        ("Gemma2", dict(final_logit_softcapping=-1.0), "logits_soft_cap=-1.0 must be a positive"),
        ("Gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not supp"),
        ("Gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is"),
        ("Gemma3", dict(sliding_window_pattern=0), "sliding_window_pattern=0 must be an integer"),
        ("Gemma3", dict(rope_parameters={SLIDING: LINEAR}), "rope_type='linear' of sliding_att"),
        ("GptOss", dict(layer_types=["chunked_attention"] * 4), "layer_type='chunked_attention'"),
        ("GptOss", dict(sliding_window="x"), "sliding_window='x' must be an integer"),
        ("GptOss", dict(swiglu_limit=0), "swiglu_limit=0 must be a positive"),
        ("GptOss", dict(quantization_config=dict(quant_method="fp8")), "quantization_config is"),
        ("GptOss", MXFP4, "intermediate_size=48 must be a multiple of 32, a block of MXFP4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(architecture, keys, message):
    with pytest.raises(ValueError, match=message):
        read(architecture, **keys)


def test_a_null_activation_is_that_of_the_family():
    assert read("Gemma2", hidden_activation=None).activation == "gelu_tanh"
    assert read("Olmo2", hidden_act=None).activation == "silu"


def test_branches_must_be_normed_before_or_after():
    with pytest.raises(ValueError, match="pre_norms or post_norms must be True"):
        replace(CONFIG, pre_norms=False)


def test_pages_are_freed_of_layers_with_a_window_only():
    """Where some layers see all tokens, they are a group of their own, whose pages are kept."""
    specs = {
        x: engine_model(load_checkpoint(GOLDENS / x)[0])[0].kv_cache_spec
        for x in ("gpt_oss", "mixtral")
    }
    assert specs["gpt_oss"].sliding_windows == (9, None)
    assert specs["gpt_oss"].sliding_window is None
    groups = specs["gpt_oss"].groups
    assert [(one.layers, one.sliding_window) for one in groups] == [((1,), None), ((0,), 9)]
    assert specs["mixtral"].sliding_window == 11


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_norms_whose_files_lack_1_are_f32_whatever_the_dtype(name):
    model, _ = load_checkpoint(GOLDENS / name, dtype=jnp.bfloat16)
    stored = load_file(GOLDENS / name / "model.safetensors")
    norm = model.layers[1].pre_feedforward_layernorm.weight[...]
    expected = 1 + stored["model.layers.1.pre_feedforward_layernorm.weight"]
    assert norm.dtype == jnp.float32
    np.testing.assert_array_equal(norm, expected)
    assert model.layers[1].mlp.down_proj.weight[...].dtype == jnp.bfloat16
    with np.load(GOLDENS / name / "golden.npz") as golden:
        tokens = golden["input_ids"].astype(np.int32)
        graphdef, params = nnx.split(model)
        assert relative_error(logits_of(params, tokens, graphdef), golden["logits"]) < 0.1


@pytest.mark.cpu_budget(6)
@pytest.mark.parametrize(
    ("name", "without"), [("gpt_oss", set()), ("deepseek_v3", {"e_score_correction_bias"})]
)
def test_gradients_reach_every_weight_but_the_bias_of_a_choice(name, without):
    """Sinks, biases, a router, clamped gates; latents, groups of experts."""
    assert weights_without_gradient(load_checkpoint(GOLDENS / name)[0]) == without


def test_mxfp4_is_decoded_as_ml_dtypes_decodes_its_halves():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 2, 16)).astype(np.uint8)
    scales = np.uint8([[127, 0], [130, 250], [120, 128]])
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(3, 2, 32)
    numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected = numbers * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    np.testing.assert_array_equal(from_mxfp4(blocks, scales), expected.reshape(3, 64))


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
BLOCKS = f"{GATE_UP}_blocks"
W2 = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"
Q_NORM = "model.layers.0.self_attn.q_norm.weight"
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
ATTN = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {W2: None}, rf"missing tensor {W2}, expected shape \(32, 24\)"),
        ("mixtral", {W2.replace(".2.", ".4."): np.zeros((32, 24))}, r"unexpected .*experts\.4\.w2"),
        ("phi3", {QKV: np.zeros((96, 64))}, rf"{QKV}: expected shape \(128, 64\)"),
        ("olmo2", {Q_NORM: np.zeros(8)}, rf"{Q_NORM}: expected shape \(32,\), found=\(8,\)"),
        ("gpt_oss", {f"{GATE_UP}_bias": None}, rf"missing tensor {GATE_UP}_bias, .* \(4, 64\)"),
        ("gpt_oss", {GATE_UP: np.zeros((4, 64, 32))}, rf"{GATE_UP}: expected shape \(4, 32, 64\)"),
        ("gpt_oss_mxfp4", {f"{GATE_UP}_scales": None}, rf"missing tensor {GATE_UP}_scales"),
        ("gpt_oss_mxfp4", {BLOCKS: np.zeros((4, 64, 1, 8), "u1")}, rf"{BLOCKS}: expected shape"),
        (
            "gpt_oss_mxfp4",
            {BLOCKS: np.zeros((4, 64, 1, 16), "f4")},
            rf"{BLOCKS}: .*'U8'.* found='F32'",
        ),
        ("deepseek_v3", {GATE: None}, rf"missing tensor {GATE}, expected shape \(8, 32\)"),
        ("deepseek_v3", {GATE: np.zeros((32, 8))}, rf"{GATE}: expected shape \(8, 32\), found="),
        ("deepseek_v3", {GATE.replace("3", "16"): np.zeros(1)}, "unexpected .*experts.16.gate"),
        ("deepseek_v3", {BIAS: None}, f"missing tensor {BIAS}"),
        ("deepseek_v3", {f"{ATTN}.kv_b_proj.weight": np.zeros(1)}, r"kv_b_proj.* \(88, 16\)"),
        ("deepseek_v3", {f"{ATTN}.q_proj.weight": np.zeros(1)}, "unexpected tensor .*q_proj"),
    ],
)
def test_damaged_and_partial_checkpoints_are_refused_by_tensor(tmp_path, name, changes, message):
    edit(shutil.copytree(GOLDENS / name, tmp_path, dirs_exist_ok=True), changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss_mxfp4"])
def test_a_file_that_was_cut_short_is_refused_by_the_tensor_that_it_ends_in(tmp_path, name):
    path = shutil.copytree(GOLDENS / name, tmp_path, dirs_exist_ok=True) / "model.safetensors"
    stored = tensors_in(path)
    tensor = next(x for x in stored.values() if x.name.endswith(("experts.2.w1.weight", "_blocks")))
    path.write_bytes(path.read_bytes()[: tensor.offset + 1])
    with pytest.raises(CheckpointError, match=f"ends before tensor {re.escape(tensor.name)} does"):
        load_checkpoint(tmp_path)


def test_each_supported_architecture_has_a_golden_or_is_alike_to_one_that_has():
    folders = (path.parent for path in GOLDENS.glob("*/config.json"))
    found = {json.loads((x / "config.json").read_text())["architectures"][0] for x in folders}
    # With tests of their own.
    others = {"MistralForCausalLM"} | {f"Gemma{i}ForConditionalGeneration" for i in (3, 4)}
    assert {*ARCHITECTURES} - found == others
