"""Families of checkpoints: what the `config.json` of each architecture says, and leaves out.

An entry of `FAMILIES` is all that a decoder's configuration needs to know of an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from models.decoder import deepseek_config as deepseek
from models.decoder.experts_config import ExpertsConfig
from models.decoder.rope_scaling import YarnRopeScaling, read_rope
from pallas_paged.checks import INT32_MAX, check_integer

# A damaged config.json must not start hours of work. These are far above published models.
_MAX_LAYERS, _MAX_HEADS, _MAX_SIZE = 1024, 4096, 2**24
LIMITS = {
    "vocab_size": _MAX_SIZE,
    "hidden_size": _MAX_SIZE,
    "intermediate_size": _MAX_SIZE,
    "num_layers": _MAX_LAYERS,
    "num_q_heads": _MAX_HEADS,
    "num_kv_heads": _MAX_HEADS,
    "head_dim": _MAX_HEADS,
    "max_position_embeddings": INT32_MAX,
}
SIZE_KEYS = {  # that a config.json must have, by our names
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
}
Fields = dict[str, Any]  # of a ModelConfig
Keys = Mapping[str, Any]  # of a config.json, with defaults
_SILU = {"silu": "silu", "swish": "silu"}
_GELU = {"gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What all checkpoints of an architecture have in common.

    Attributes:
        defaults: of transformers, for keys that a config.json may leave out, where it is not
            `_DEFAULTS` that has them.
        fields: of the `ModelConfig`.
        activation: the key of the MLP's activation.
        activations: its supported values, and our names of them.
        only: keys with the values that are supported.
        windows: which layers have a sliding window, where "layer_types" does not say it: all, those
            from "max_window_layers" on, all but each "sliding_window_pattern"th, or none. None:
            whatever the file says, all layers see all tokens.
        partial_rotary: whether only a part of each head may be rotated.
        rope_types: other names of rope types.
        biased: whether q, k, v have biases, and o has none, whatever "attention_bias" says.
        read: more fields, from the keys and from the fields before.
    """

    defaults: Keys = field(default_factory=dict)
    fields: Keys = field(default_factory=dict)
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: _SILU)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: Literal["all", "last", "pattern", "none"] | None = None
    partial_rotary: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict)
    biased: bool = False
    read: Callable[[Keys, Fields], Fields] = lambda keys, fields: {}


_DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=None,
    head_dim=None,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=False,
    eos_token_id=None,
    sliding_window=None,
    layer_types=None,
)


def read_fields(config: Keys) -> Fields:
    """Return the fields of the `ModelConfig` of a `config.json`.

    Raises:
        ValueError: as `ModelConfig.from_hugging_face`.
    """
    architectures = config.get("architectures")
    architecture = architectures[0] if architectures and _is_list(architectures) else None
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ValueError(f"{architecture=} is not supported; supported: {ARCHITECTURES}")
    family = FAMILIES[architecture]
    keys = {**_DEFAULTS, **family.defaults, **config}
    _refuse_unsupported(keys, family)
    fields: Fields = {ours: _required(config, key, LIMITS[ours]) for ours, key in SIZE_KEYS.items()}
    fields |= _read_rope(keys, family)
    fields |= dict(
        rms_norm_eps=keys["rms_norm_eps"],
        tie_word_embeddings=bool(keys["tie_word_embeddings"]),
        qkv_bias=family.biased or bool(keys["attention_bias"]),
        o_bias=not family.biased and bool(keys["attention_bias"]),
        activation=family.activations[keys.get(family.activation, "silu")],
        sliding_windows=_read_windows(keys, family, fields["num_layers"]),
        eos_token_ids=read_eos_token_ids(keys["eos_token_id"]),
        **family.fields,
    )
    fields |= family.read(keys, fields)
    hidden_size, num_q_heads = fields["hidden_size"], fields["num_q_heads"]
    head_dim, num_kv_heads = keys["head_dim"], keys["num_key_value_heads"]
    if head_dim is None and "head_dim" not in fields:
        if hidden_size % num_q_heads:
            raise ValueError(
                f"{hidden_size=} must be a multiple of num_attention_heads={num_q_heads}, or"
                " head_dim must be given"
            )
        head_dim = hidden_size // num_q_heads
    num_kv_heads = num_q_heads if num_kv_heads is None else num_kv_heads
    return dict(head_dim=head_dim, num_kv_heads=num_kv_heads) | fields


def read_eos_token_ids(value: Any) -> tuple[int, ...]:
    """Return `eos_token_id` (null, a number or a list) as a tuple."""
    if value is None:
        return ()
    return tuple(value) if _is_list(value) else (value,)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _required(config: Keys, name: str, most: int) -> int:
    if config.get(name) is None:
        raise ValueError(f"config.json has no {name}")
    check_integer(name, config[name], 1, most)
    return config[name]


def _refuse_unsupported(keys: Keys, family: Family) -> None:
    only = {family.activation: tuple(family.activations), "mlp_bias": (False,), **family.only}
    for name, values in only.items():
        value = keys.get(name, values[0])
        if value not in values and value is not None:
            supported = ", ".join(map(repr, values))
            raise ValueError(f"{name}={value!r} is not supported; supported: {supported}")
    quantization = keys.get("quantization_config")
    if quantization and not (_is_of_the_cache_only(quantization) or is_mxfp4(keys)):
        raise ValueError(
            "quantization_config is not supported: the weights must be floats,"
            " only the KV cache may be 8-bit floats"
        )


def _is_of_the_cache_only(quantization: Any) -> bool:
    """Whether a `quantization_config` quantizes the KV cache to float8, and no weights."""
    if not isinstance(quantization, Mapping):
        return False
    scheme = quantization.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping) or quantization.get("config_groups"):
        return False
    is_float8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return is_float8 and not quantization.get("quant_algo")


def is_mxfp4(keys: Keys) -> bool:
    """Whether the experts of a gpt-oss are MXFP4."""
    quantization = keys.get("quantization_config")
    if keys["architectures"][0] != "GptOssForCausalLM" or not isinstance(quantization, Mapping):
        return False
    return quantization.get("quant_method") == "mxfp4"


def _read_rope(keys: Keys, family: Family) -> Fields:
    """Read rotary embeddings; "rope_parameters" may be apart for layers with and without window."""
    max_positions = keys["max_position_embeddings"]
    check_integer("max_position_embeddings", max_positions, 1)
    how: Any = dict(partial=family.partial_rotary, rope_types=family.rope_types)
    window_theta = keys.get("rope_local_base_freq")
    nested = keys.get("rope_parameters") or {}
    has_windows = family.windows == "pattern"
    if has_windows and isinstance(nested, Mapping) and nested.keys() & set(_LAYER_TYPES):
        keys = {**keys, "rope_parameters": nested.get("full_attention")}
        window_rope = nested.get("sliding_attention") or {}
        window_theta, scaling, _ = read_rope({"rope_parameters": window_rope}, max_positions)
        if scaling is not None:
            rope_type = scaling.rope_type
            raise ValueError(f"{rope_type=} of sliding_attention is not supported: 'default' is")
    theta, scaling, factor = read_rope(keys, max_positions, **how)
    if isinstance(scaling, YarnRopeScaling):
        # Files have the length with the scaling or, where a reader added it, without.
        original = scaling.original_max_position_embeddings
        max_positions = max(max_positions, int(scaling.factor * original))
    return dict(
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        window_rope_theta=window_theta,
        partial_rotary_factor=factor,
    )


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _read_windows(keys: Keys, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Windows of the layers: from "layer_types" if it is given, else the family's rule."""
    window, layer_types = keys["sliding_window"], keys["layer_types"]
    if not keys.get("use_sliding_window", True):
        window = None
    if family.windows is None or (layer_types is None and (window is None)):
        return ()
    if layer_types is not None:
        if not _is_list(layer_types) or len(layer_types) != num_layers:
            raise ValueError(f"{layer_types=} must name the attention of {num_layers=}")
        for layer_type in layer_types:
            if layer_type not in _LAYER_TYPES:
                supported = ", ".join(map(repr, _LAYER_TYPES))
                raise ValueError(f"{layer_type=} is not supported; supported: {supported}")
        windowed = [layer_type == "sliding_attention" for layer_type in layer_types]
        if any(windowed) and window is None:
            raise ValueError("layer_types has 'sliding_attention', but no sliding_window is in use")
    elif family.windows == "last":
        check_integer("max_window_layers", keys["max_window_layers"], 0)
        windowed = [layer >= keys["max_window_layers"] for layer in range(num_layers)]
    elif family.windows == "pattern":
        check_integer("sliding_window_pattern", keys["sliding_window_pattern"], 1)
        windowed = [(i + 1) % keys["sliding_window_pattern"] != 0 for i in range(num_layers)]
    else:
        windowed = [family.windows == "all"] * num_layers
    return tuple(window if sliding else None for sliding in windowed) if any(windowed) else ()


def _read_deepseek(architecture: str) -> Callable[[Keys, Fields], Fields]:
    def read(keys: Keys, fields: Fields) -> Fields:
        latent = deepseek.read_latent(keys, architecture, fields["rope_scaling"])
        experts = deepseek.read_experts(keys, architecture, fields["num_layers"])
        heads = dict(head_dim=latent.head_dim, num_kv_heads=fields["num_q_heads"])
        return dict(latent=latent, experts=experts, **heads)

    return read


def _read_qwen3_moe(keys: Keys, fields: Fields) -> Fields:
    step, only = keys["decoder_sparse_step"], keys["mlp_only_layers"] or []
    check_integer("decoder_sparse_step", step, 1)
    if not _is_list(only):
        raise ValueError(f"mlp_only_layers={only!r} must be a list of layers")
    layers = range(fields["num_layers"])
    experts = ExpertsConfig(
        # transformers 5 writes it as num_local_experts.
        n_routed_experts=keys.get("num_experts", keys.get("num_local_experts", 128)),
        num_experts_per_tok=keys["num_experts_per_tok"],
        moe_intermediate_size=keys["moe_intermediate_size"],
        norm_topk_prob=bool(keys["norm_topk_prob"]),
        dense_layers=tuple(i for i in layers if i in only or (i + 1) % step),
    )
    return dict(experts=experts)


def _read_mixtral(keys: Keys, fields: Fields) -> Fields:
    experts = ExpertsConfig(
        n_routed_experts=keys["num_local_experts"],
        num_experts_per_tok=keys["num_experts_per_tok"],
        moe_intermediate_size=fields["intermediate_size"],
    )
    return dict(experts=experts)


_QWEN2: dict[str, Any] = dict(
    max_position_embeddings=32768,
    num_key_value_heads=32,
    sliding_window=4096,
    use_sliding_window=False,
    max_window_layers=28,
)
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        defaults=dict(max_position_embeddings=2048, eos_token_id=2), windows="none"
    ),
    "MistralForCausalLM": Family(
        defaults=dict(
            max_position_embeddings=131072,
            num_key_value_heads=8,
            eos_token_id=2,
            sliding_window=4096,
        ),
        windows="all",
    ),
    "Qwen2ForCausalLM": Family(defaults=_QWEN2, windows="last", biased=True),
    "Qwen3ForCausalLM": Family(
        defaults={**_QWEN2, "head_dim": 128}, fields=dict(qk_norm=True), windows="last"
    ),
    "Qwen3MoeForCausalLM": Family(
        defaults=dict(
            max_position_embeddings=32768,
            num_key_value_heads=4,
            sliding_window=4096,
            use_sliding_window=False,
            decoder_sparse_step=1,
            moe_intermediate_size=768,
            num_experts_per_tok=8,
            norm_topk_prob=False,
            mlp_only_layers=None,
        ),
        fields=dict(qk_norm=True),
        windows="all",
        read=_read_qwen3_moe,
    ),
    "MixtralForCausalLM": Family(
        defaults=dict(
            max_position_embeddings=131072,
            num_key_value_heads=8,
            eos_token_id=2,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            num_experts_per_tok=2,
            num_local_experts=8,
        ),
        fields=dict(stored_as="mixtral"),
        only=dict(attention_bias=(False,)),
        windows="all",
        read=_read_mixtral,
    ),
    deepseek.V2: Family(
        defaults=dict(max_position_embeddings=2048, eos_token_id=2),
        only=deepseek.ONLY[deepseek.V2],
        read=_read_deepseek(deepseek.V2),
    ),
    deepseek.V3: Family(
        defaults=dict(max_position_embeddings=4096, eos_token_id=1),
        only=deepseek.ONLY[deepseek.V3],
        read=_read_deepseek(deepseek.V3),
    ),
}
ARCHITECTURES = tuple(FAMILIES)
