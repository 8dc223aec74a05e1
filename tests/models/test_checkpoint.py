"""Checkpoint folders: round trips, spellings of config.json, and folders that are wrong."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from models.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from models.config import ModelConfig
from models.decoder import Decoder
from models.rope_scaling import Llama3RopeScaling
from tests.support.dense_oracle import dense_logits

GOLDENS = Path(__file__).parent / "goldens"
SHAKESPEARE = Path(__file__).parents[2] / "models" / "checkpoints" / "shakespeare"
CONFIG = ModelConfig(
    vocab_size=12,
    hidden_size=8,
    intermediate_size=10,
    num_layers=1,
    num_q_heads=3,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    rope_scaling=Llama3RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    max_position_embeddings=128,
    tie_word_embeddings=True,
    eos_token_ids=(3, 5),
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 32,
    "max_window_layers": 1,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LAYER = "model.layers.0."


def save_random(folder, config=CONFIG, dtype=jnp.float32):
    model = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))
    save_checkpoint(folder, model, config)
    return model


def assert_same_weights(model, other):
    graphdef, params = nnx.split(model)
    other_graphdef, other_params = nnx.split(other)
    assert graphdef == other_graphdef
    for value, other_value in zip(
        jax.tree.leaves(params), jax.tree.leaves(other_params), strict=True
    ):
        assert value.dtype == other_value.dtype
        np.testing.assert_array_equal(value, other_value)


@pytest.mark.parametrize(
    ("dtype", "tied", "bias"),
    [(jnp.float32, True, True), (jnp.bfloat16, False, True), (jnp.float16, True, False)],
)
def test_round_trip_keeps_every_bit(tmp_path, dtype, tied, bias):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, qkv_bias=bias, o_bias=bias)
    model = save_random(tmp_path, config, dtype)
    loaded, loaded_config = load_checkpoint(tmp_path)
    assert loaded_config == loaded.config == config
    assert_same_weights(model, loaded)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_saved_files_have_the_mode_of_the_umask(tmp_path, mode):
    umask = os.umask(0o666 & ~mode)
    try:
        save_random(tmp_path)
        save_random(tmp_path)  # over existing files
    finally:
        os.umask(umask)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode, name


def test_saved_folder_has_the_names_and_shapes_of_llama(tmp_path):
    model = save_random(tmp_path, dtype=jnp.bfloat16)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: value.shape for name, value in tensors.items()} == {
        "model.embed_tokens.weight": (12, 8),
        "model.norm.weight": (8,),
        LAYER + "input_layernorm.weight": (8,),
        LAYER + "post_attention_layernorm.weight": (8,),
        LAYER + "self_attn.q_proj.weight": (12, 8),
        LAYER + "self_attn.k_proj.weight": (4, 8),
        LAYER + "self_attn.v_proj.weight": (4, 8),
        LAYER + "self_attn.o_proj.weight": (8, 12),
        LAYER + "mlp.gate_proj.weight": (10, 8),
        LAYER + "mlp.up_proj.weight": (10, 8),
        LAYER + "mlp.down_proj.weight": (8, 10),
    }
    assert {value.dtype for value in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    q, k, v = (tensors[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv")
    (qkv,) = model.layers[0].self_attn.qkv_proj.weight[...]  # [3 + 2, 4, 8] of the one KV head
    np.testing.assert_array_equal(qkv, [*q.reshape(3, 4, 8), k, v])
    gate, up = (tensors[f"{LAYER}mlp.{x}_proj.weight"] for x in ("gate", "up"))
    gate_up = model.layers[0].mlp.gate_up_proj.weight[...]
    np.testing.assert_array_equal(gate_up, np.stack([gate, up], axis=1))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["eos_token_id"] == [3, 5]


def test_shards_equal_one_file(tmp_path):
    sharded, config = load_checkpoint(GOLDENS / "llama")
    save_checkpoint(tmp_path, sharded, config)
    single, _ = load_checkpoint(tmp_path)
    assert_same_weights(sharded, single)


def test_dtype_defaults_to_that_of_the_embeddings(tmp_path):
    save_random(tmp_path, dtype=jnp.bfloat16)
    edit(tmp_path, {"model.norm.weight": np.full(8, 1.5, np.float32)})
    model, _ = load_checkpoint(tmp_path)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(model.norm.weight[...], np.full(8, 1.5))
    model, _ = load_checkpoint(tmp_path, dtype=jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}


def test_generation_config_decides_where_text_ends(tmp_path):
    save_random(tmp_path)
    for token in (7, 0):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {token}}}')
        assert load_checkpoint(tmp_path)[1].eos_token_ids == (token,)
    (tmp_path / "generation_config.json").unlink()
    assert load_checkpoint(tmp_path)[1].eos_token_ids == (3, 5)


def edit(folder, changes):
    """Replace tensors of model.safetensors; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


def test_harmless_extras_are_ignored(tmp_path):
    model = save_random(tmp_path)
    tied = np.asarray(model.embed_tokens.weight[...])
    inv_freq = np.ones(2, np.float32)
    edit(tmp_path, {"lm_head.weight": tied, LAYER + "self_attn.rotary_emb.inv_freq": inv_freq})
    assert_same_weights(model, load_checkpoint(tmp_path)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {LAYER + "self_attn.v_proj.weight": None},
            r"missing tensor model\.layers\.0\.self_attn\.v_proj\.weight, expected shape \(4, 8\)",
        ),
        (
            {LAYER + "mlp.up_proj.weight": np.zeros((8, 10), np.float32)},
            r"tensor model\.layers\.0\.mlp\.up_proj\.weight: expected shape \(10, 8\),"
            r" found=\(8, 10\)",
        ),
        (
            {LAYER + "self_attn.q_norm.weight": np.zeros(4, np.float32)},
            r"unexpected tensor model\.layers\.0\.self_attn\.q_norm\.weight of shape \(4,\)",
        ),
        ({"model.norm.weight": np.zeros(8, np.int8)}, r"tensor model\.norm\.weight: expected one"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tmp_path, changes, message):
    save_random(tmp_path)
    edit(tmp_path, changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_an_untied_model_without_a_head_is_refused(tmp_path):
    save_random(tmp_path, dataclasses.replace(CONFIG, tie_word_embeddings=False))
    edit(tmp_path, {"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"missing tensor lm_head\.weight.*\(12, 8\)"):
        load_checkpoint(tmp_path)


def test_wrong_files_are_refused_by_name(tmp_path):
    def load_after(name, text):
        folder = tmp_path / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(GOLDENS / "llama", folder)
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)
        load_checkpoint(folder)

    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError) as refused:
        load_after("config.json", None)
    assert str(refused.value).count("config.json") == 1
    for name, text, message in (
        ("config.json", None, r"config\.json: no such file"),
        ("config.json", "{", r"config\.json: not JSON"),
        ("config.json", "[" * 100_000, r"config\.json: not JSON"),
        ("config.json", "[]", r"config\.json: expected a JSON object"),
        ("config.json", '{"architectures": ["GPT2LMHeadModel"]}', "'GPT2LMHeadModel' is not"),
        ("generation_config.json", "{", r"generation_config\.json: not JSON"),
        ("model.safetensors.index.json", None, r"neither model\.safetensors nor model\.saf"),
        ("generation_config.json", '{"eos_token_id": "x"}', r"n_config\.json: eos_token_id='x' "),
        ("model.safetensors.index.json", "{}", r"index\.json: expected .*weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "expected weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": []}}', "expected weight_map"),
        ("model-00002-of-00002.safetensors", None, r"00002\.safetensors: missing, though"),
        ("model-00001-of-00002.safetensors", "short", r"00001-of-00002\.safetensors: "),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_after(name, text)


def test_more_layers_than_the_folder_has_are_refused_before_tracing(tmp_path, monkeypatch):
    save_random(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(nnx, "eval_shape", None)
    with pytest.raises(CheckpointError, match=r"missing tensor model\.layers\.1023\."):
        load_checkpoint(tmp_path)


def test_llama_cannot_express_every_decoder(tmp_path):
    for changes in ({"qk_norm": True}, {"qkv_bias": True}, {"sliding_windows": (5,)}):
        config = dataclasses.replace(CONFIG, **changes)
        with pytest.raises(ValueError, match="cannot be saved as LlamaForCausalLM"):
            save_random(tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_config_round_trip():
    assert ModelConfig.from_hugging_face(CONFIG.to_hugging_face()) == CONFIG
    biased = dataclasses.replace(CONFIG, qkv_bias=True, o_bias=True, eos_token_ids=())
    assert ModelConfig.from_hugging_face(biased.to_hugging_face()) == biased


@pytest.mark.parametrize(
    ("architecture", "max_positions", "num_kv_heads", "head_dim", "eos_token_ids"),
    [
        ("LlamaForCausalLM", 2048, 64, 2, (2,)),
        ("MistralForCausalLM", 131072, 8, 2, (2,)),
        ("Qwen2ForCausalLM", 32768, 32, 2, ()),
        ("Qwen3ForCausalLM", 32768, 32, 128, ()),
    ],
)
def test_missing_keys_take_the_defaults_of_transformers(
    architecture, max_positions, num_kv_heads, head_dim, eos_token_ids
):
    contents = LLAMA | {"architectures": [architecture], "hidden_size": 128}
    contents["num_attention_heads"] = 64
    del contents["num_key_value_heads"]
    config = ModelConfig.from_hugging_face(contents)
    assert config.max_position_embeddings == max_positions
    assert (config.num_kv_heads, config.head_dim) == (num_kv_heads, head_dim)
    assert config.eos_token_ids == eos_token_ids
    assert (config.rope_theta, config.tie_word_embeddings, config.o_bias) == (10000.0, False, False)
    assert config.qkv_bias == (architecture == "Qwen2ForCausalLM")
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")
    assert config.rms_norm_eps == 1e-6
    more = {"num_key_value_heads": None, "attention_bias": True}
    config = ModelConfig.from_hugging_face(contents | more)
    assert config.num_kv_heads == 64 and config.qkv_bias
    assert config.o_bias == (architecture != "Qwen2ForCausalLM")  # whose biases are fixed


def test_both_spellings_of_rope_agree():
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_type"}
    old = {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    oldest = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    expected = Llama3RopeScaling(**scaling)
    for rope in (old, oldest, new):
        config = ModelConfig.from_hugging_face(LLAMA | rope)
        assert (config.rope_theta, config.rope_scaling) == (5e5, expected)
    for rope in (
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ):
        config = ModelConfig.from_hugging_face(LLAMA | rope)
        assert (config.rope_theta, config.rope_scaling) == (5e5, None)


@pytest.mark.parametrize(("value", "expected"), [(None, ()), (2, (2,)), ([2, 9], (2, 9))])
def test_eos_token_id_may_be_null_a_number_or_a_list(value, expected):
    assert ModelConfig.from_hugging_face(LLAMA | {"eos_token_id": value}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architecture=None is not supported; supported:.*Qwen3For"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"hidden_size": 0}, "hidden_size=0 must be an integer in 1..16777216"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be an integer in"),
        ({"vocab_size": 2**62}, "vocab_size=4611686018427387904 must be an integer in 1..16777216"),
        ({"hidden_size": 65, "num_attention_heads": 16}, "hidden_size=65 must be a multiple of"),
        ({"num_key_value_heads": 3}, "num_q_heads=2 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type='llama3' needs factor"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling={'factor': 8.0} has no rope_type"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "rope_type='llama3' needs factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor=4 must be less than"),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": "x"}},
            "original_max_position_embeddings='x' must be an integer in 1..",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "must be the parameters of one rotary"),
        ({"rope_scaling": "x"}, "rope_scaling='x' must be the parameters of one rotary"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_theta": 0}, "rope_theta=0 must be a positive number"),
        ({"rope_theta": -1e4}, "rope_theta=-10000.0 must be a positive number"),
        ({"rope_theta": 10**400}, "rope_theta=1000*0 must be a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be a positive number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' must be a positive number"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a positive number"),
        ({"max_position_embeddings": None}, "max_position_embeddings=None must be an integer in"),
        ({"eos_token_id": 2**40}, "eos_token_id=1099511627776 must be an integer in 0..2147483647"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id='x' must be an integer in"),
        ({"eos_token_id": True}, "eos_token_id=True must be an integer in"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id={'a': 1} must be an integer in"),
        ({"architectures": 5}, "architecture=None is not supported"),
        ({"architectures": [["x"]]}, r"architecture=\['x'\] is not supported"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window=0 must be an integer in 1.."),
        (MISTRAL | {"sliding_window": "x"}, "sliding_window='x' must be an integer in 1.."),
        (QWEN2 | {"max_window_layers": None}, "max_window_layers=None must be an integer in 0.."),
        ({"layer_types": ["sliding_attention"]}, "but no sliding_window is in use"),
        (
            QWEN2 | {"use_sliding_window": False, "layer_types": ["sliding_attention"]},
            "but no sliding_window is in use",
        ),
        ({"layer_types": ["linear_attention"]}, "layer_type='linear_attention' is not supported"),
        ({"layer_types": ["full_attention"] * 2}, "must name the attention of num_layers=1"),
        ({"layer_types": "full_attention"}, "must name the attention of num_layers=1"),
    ],
)
def test_unsupported_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hugging_face(LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (MISTRAL, (4096,) * 3),
        (MISTRAL | {"sliding_window": 7}, (7,) * 3),
        (MISTRAL | {"sliding_window": None}, ()),
        (MISTRAL | {"sliding_window": 7, "layer_types": ALTERNATING}, (7, None, 7)),
        (QWEN2, (None, 32, 32)),
        (QWEN2 | {"max_window_layers": 0}, (32, 32, 32)),
        (QWEN2 | {"max_window_layers": 3}, ()),
        (QWEN2 | {"use_sliding_window": False, "max_window_layers": None}, ()),
        (QWEN2 | {"sliding_window": None}, ()),
        (QWEN2 | {"layer_types": ALTERNATING}, (32, None, 32)),
        (QWEN2 | {"layer_types": ["full_attention"] * 3}, ()),
        (QWEN2 | {"architectures": ["Qwen3ForCausalLM"]}, (None, 32, 32)),
        ({"layer_types": ALTERNATING, "sliding_window": 16}, (16, None, 16)),
        ({"sliding_window": 16}, ()),
    ],
)
def test_sliding_windows_equal_those_of_transformers(changes, windows):
    config = ModelConfig.from_hugging_face(LLAMA | {"num_hidden_layers": 3} | changes)
    assert config.sliding_windows == windows


def test_a_config_needs_one_window_per_layer():
    with pytest.raises(ValueError, match="num_windows=2 of the layers must be 0 or num_layers=1"):
        dataclasses.replace(CONFIG, sliding_windows=(4, None))


@pytest.fixture(scope="module")
def shakespeare_logits():
    """Our logits over the golden's text and its greedy continuation, and the golden file."""
    with np.load(GOLDENS / "shakespeare" / "golden.npz") as file:
        golden = dict(file)
    tokens = np.concatenate([golden["input_ids"], golden["greedy_tokens"]], 1).astype(np.int32)
    model, _ = load_checkpoint(SHAKESPEARE, dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        return tokens, dense_logits(model, tokens), golden


def test_shakespeare_equals_its_golden(shakespeare_logits):
    _, logits, golden = shakespeare_logits
    expected = golden["logits"]
    known = expected.shape[1]
    error = np.linalg.norm(logits[:, :known] - expected) / np.linalg.norm(expected)
    assert error <= 1e-5
    np.testing.assert_array_equal(logits[:, known - 1 : -1].argmax(-1), golden["greedy_tokens"])


def test_shakespeare_runs_in_transformers_with_the_same_greedy_tokens(shakespeare_logits):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokens, logits, golden = shakespeare_logits
    model = transformers.AutoModelForCausalLM.from_pretrained(SHAKESPEARE, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    known = golden["input_ids"].shape[1]
    theirs = model.generate(
        torch.tensor(golden["input_ids"]),
        do_sample=False,
        max_new_tokens=tokens.shape[1] - known,
    )
    np.testing.assert_array_equal(theirs[:, known:], logits[:, known - 1 : -1].argmax(-1))
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHAKESPEARE)
    assert tokenizer("ROMEO: é").input_ids == list("ROMEO: é".encode())
