"""`ModelConfig`: spellings and defaults of config.json, what is written back, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from models.decoder import ModelConfig
from models.decoder.rope_scaling import DynamicRopeScaling, Llama3RopeScaling
from tests.support.dense_oracle import CONFIG

SIZES = dict(vocab_size=12, hidden_size=8, intermediate_size=10, num_hidden_layers=1)
HEADS = dict(num_attention_heads=2, num_key_value_heads=2)
LLAMA, MISTRAL, QWEN2 = (
    {"architectures": [f"{x}ForCausalLM"]} for x in ("Llama", "Mistral", "Qwen2")
)
LLAMA |= SIZES | HEADS
QWEN2 |= dict(use_sliding_window=True, sliding_window=32, max_window_layers=1)
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
FACTORS = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
FACTORS |= dict(original_max_position_embeddings=64)
LLAMA3 = {"rope_type": "llama3", **FACTORS}
SCALING = Llama3RopeScaling(**FACTORS)
LINEAR, DYNAMIC, YARN, LONGROPE = (
    {"type": name, "factor": 2.0} for name in ("linear", "dynamic", "yarn", "longrope")
)
FLOAT8_CACHE = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
ROTARY = json.loads((Path(__file__).parents[1] / "goldens" / "rotary.json").read_text())


def factors(short, long):
    return {"short_factor": short, "long_factor": long}


def read(**changes) -> ModelConfig:
    return ModelConfig.from_hugging_face(LLAMA | changes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(rope_theta=5e3, rms_norm_eps=1e-5, tie_word_embeddings=True),
        dict(rope_scaling=SCALING, max_position_embeddings=128, eos_token_ids=(3, 5)),
        dict(qkv_bias=True, o_bias=True),
        *ROTARY,
    ],
    ids=["tied", "scaled", "biased", *ROTARY],
)
def test_written_config_is_read_back(changes):
    if isinstance(changes, str):
        config = read(head_dim=128 if changes.startswith("large") else 16, **ROTARY[changes])
    else:
        config = replace(CONFIG, **changes)
    assert ModelConfig.from_hugging_face(json.loads(json.dumps(config.to_hugging_face()))) == config


def test_decoders_that_llama_cannot_express_are_not_written():
    for changes in ({"qk_norm": True}, {"qkv_bias": True}, {"sliding_windows": (5, None)}):
        with pytest.raises(ValueError, match="cannot be saved as LlamaForCausalLM"):
            replace(CONFIG, **changes).to_hugging_face()


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
    contents = LLAMA | dict(architectures=[architecture], hidden_size=128, num_attention_heads=64)
    del contents["num_key_value_heads"]
    sizes = dict(vocab_size=12, hidden_size=128, intermediate_size=10, num_layers=1, num_q_heads=64)
    sizes |= dict(num_kv_heads=num_kv_heads, head_dim=head_dim, eos_token_ids=eos_token_ids)
    assert ModelConfig.from_hugging_face(contents) == ModelConfig(
        **sizes,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=(4096,) if architecture == "MistralForCausalLM" else (),
    )
    contents |= {"num_key_value_heads": None, "attention_bias": True}
    config = ModelConfig.from_hugging_face(contents)
    assert config.num_kv_heads == 64 and config.qkv_bias
    assert config.o_bias == (architecture != "Qwen2ForCausalLM")  # whose biases are fixed


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, SCALING),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **FACTORS}}, SCALING),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, SCALING),
        ({"rope_theta": 5e5, "rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
        (
            {"rope_theta": 5e5, "max_position_embeddings": 32, "rope_scaling": DYNAMIC | FACTORS},
            DynamicRopeScaling(factor=8.0, original_max_position_embeddings=32),
        ),
        # Added by a user to a file of transformers 5: it wins.
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": LLAMA3}, SCALING),
    ],
)
def test_all_spellings_of_rope_are_read(rope, scaling):
    config = read(**rope)
    assert (config.rope_theta, config.rope_scaling) == (5e5, scaling)


@pytest.mark.parametrize(
    ("max_positions", "original", "expected"),
    [(40960, 32768, 65536), (65536, 32768, 65536), (200000, 32768, 200000), (4096, None, 8192)],
)
def test_yarn_extends_the_context(max_positions, original, expected):
    scaling = YARN | {"original_max_position_embeddings": original}
    config = read(max_position_embeddings=max_positions, rope_scaling=scaling)
    assert config.max_position_embeddings == expected


def test_eos_token_id_may_be_null_a_number_or_a_list():
    for value, expected in ((None, ()), (2, (2,)), ([2, 9], (2, 9))):
        assert read(eos_token_id=value).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
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
        ({"sliding_window": 16}, ()),
        ({"sliding_window": 16, "layer_types": ["full_attention"] * 3}, ()),
    ],
)
def test_sliding_windows_equal_those_of_transformers(changes, windows):
    assert read(num_hidden_layers=3, **changes).sliding_windows == windows


@pytest.mark.parametrize(
    ("quantization", "accepted"),
    [
        ({"config_groups": {}, "kv_cache_scheme": FLOAT8_CACHE}, True),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, False),
        ({"config_groups": {"group_0": {}}, "kv_cache_scheme": FLOAT8_CACHE}, False),
        ({"quant_algo": "FP8", "kv_cache_scheme": FLOAT8_CACHE}, False),
        ({"config_groups": {}, "kv_cache_scheme": FLOAT8_CACHE | {"type": "int"}}, False),
        ({"config_groups": {}, "kv_cache_scheme": FLOAT8_CACHE | {"num_bits": 4}}, False),
        ("fp8", False),
    ],
)
def test_only_the_cache_may_be_quantized(quantization, accepted):
    if accepted:
        assert read(quantization_config=quantization) == read()
    else:
        with pytest.raises(ValueError, match="quantization_config is not supported"):
            read(quantization_config=quantization)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architecture=None is not supported; supported:.*Qwen3For"),
        ({"architectures": [["x"]]}, r"architecture=\['x'\] is not supported"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"hidden_size": 0}, "hidden_size=0 must be an integer in 1..16777216"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be an integer in"),
        ({"hidden_size": 65, "num_attention_heads": 16}, "hidden_size=65 must be a multiple of"),
        ({"num_key_value_heads": 3}, "num_q_heads=2 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"is_causal": False}, "is_causal=False is not supported; supported: True"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a positive number"),
        ({"max_position_embeddings": None}, "max_position_embeddings=None must be an integer in"),
        ({"eos_token_id": 2**40}, "eos_token_id=1099511627776 must be an integer in 0..2147483647"),
        ({"eos_token_id": True}, "eos_token_id=True must be an integer in"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window=0 must be an integer in 1.."),
        (QWEN2 | {"max_window_layers": None}, "max_window_layers=None must be an integer in 0.."),
        ({"layer_types": ["sliding_attention"]}, "but no sliding_window is in use"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 16},
            r"layer_types=\['sliding_attention'\] is not supported: transformers does not read it",
        ),
        ({"layer_types": ["linear_attention"]}, "layer_type='linear_attention' is not supported"),
        ({"layer_types": ["full_attention"] * 2}, "must name the attention of num_layers=1"),
        ({"layer_types": "full_attention"}, "must name the attention of num_layers=1"),
        # Rotary embeddings.
        ({"rope_theta": 0}, "rope_theta=0 must be a positive number"),
        ({"rope_theta": 10**400}, "rope_theta=1000*0 must be a positive number"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, r"rope_theta=1\.0 must be above 1 for YaRN"),
        ({"head_dim": 2, "rope_scaling": DYNAMIC}, "head_dim=2 must be above 2 for a dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {}}}, "must be the parameters of one rotary"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling={'factor': 8.0} has no rope_type"),
        *(
            ({"head_dim": 4, "rope_scaling": scaling}, message)
            for scaling, message in [
                ({"rope_type": "mrope"}, "'mrope' is not supported; supported: default, linear,"),
                ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\] is not supported; supported: def"),
                ({"rope_type": "llama3"}, "rope_type='llama3' needs factor"),
                (LLAMA3 | {"low_freq_factor": 4}, "low_freq_factor=4 must be less than"),
                (LLAMA3 | {"original_max_position_embeddings": "x"}, "='x' must be an integer in"),
                (LINEAR | {"factor": 0}, "factor=0 must be a positive number"),
                (LINEAR | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
                (DYNAMIC | {"factor": "2"}, "factor='2' must be a positive"),
                (YARN | {"factor": True}, "factor=True must be a positive number"),
                (YARN | {"beta_fast": 0.5}, r"beta_fast=0\.5 must be at least"),
                (YARN | {"attention_factor": -1}, "attention_factor=-1 must be a positive"),
                (YARN | {"mscale": "x", "mscale_all_dim": 1}, "mscale='x' must be a number"),
                (LONGROPE, "rope_type='longrope' needs short_factor"),
                (LONGROPE | factors(1, [1]), "short_factor=1 must be a list of numbers"),
                (LONGROPE | factors([1, 1], [1]), "long_factor has 1 numbers, must have 2"),
                (LONGROPE | factors([1, 0], [1, 1]), r"short_factor\[1\]=0 must be a positive"),
            ]
        ),
    ],
)
def test_unsupported_or_damaged_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_windows": (4,)}, "num_windows=1 of the layers must be 0 or num_layers=2"),
        ({"k_scales": (1.0, 1.0)}, r"num_scales=\(2, 0\) of K and V must both be 0 or num_layers"),
        ({"k_scales": (1.0,), "v_scales": (1.0,)}, r"num_scales=\(1, 1\)"),
    ],
)
def test_windows_and_scales_are_of_all_layers_or_none(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)
