"""Families of checkpoints: what the `config.json` of each architecture says, and leaves out.

An entry of `FAMILIES` is all that a decoder's configuration needs to know of an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from models.decoder import deepseek_config as deepseek
from models.decoder.experts_config import ExpertsConfig
from models.decoder.rope_scaling import check_positive
from models.decoder.stored_experts import BLOCK
from pallas_paged.checks import check_integer

Fields = dict[str, Any]  # of a ModelConfig
Keys = Mapping[str, Any]  # of a config.json, with defaults
_SILU = {"silu": "silu", "swish": "silu"}


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
        layers_alike: whether transformers has no "layer_types" here, so that they may say nothing
            else than `windows`.
        partial_rotary: whether only a part of each head may be rotated.
        rope_types: other names of rope types.
        biased: whether q, k, v have biases, and o has none, whatever "attention_bias" says.
        has_text_config: whether the keys of the decoder are in "text_config".
        read: more fields, from the keys and from the fields before.
    """

    defaults: Keys = field(default_factory=dict)
    fields: Keys = field(default_factory=dict)
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: _SILU)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: Literal["all", "last", "pattern", "none"] | None = None
    layers_alike: bool = False
    partial_rotary: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict)
    biased: bool = False
    has_text_config: bool = False
    read: Callable[[Keys, Fields], Fields] = lambda keys, fields: {}


def is_mxfp4(keys: Keys) -> bool:
    """Whether the experts of a gpt-oss are MXFP4."""
    quantization = keys.get("quantization_config")
    if keys["architectures"][0] != "GptOssForCausalLM" or not isinstance(quantization, Mapping):
        return False
    return quantization.get("quant_method") == "mxfp4"


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
    if not isinstance(only, list | tuple):
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


def _read_local_experts(keys: Keys, fields: Fields, **more: Any) -> Fields:
    experts = ExpertsConfig(
        n_routed_experts=keys["num_local_experts"],
        num_experts_per_tok=keys["num_experts_per_tok"],
        moe_intermediate_size=fields["intermediate_size"],
        **more,
    )
    return dict(experts=experts)


def _read_gemma(keys: Keys, fields: Fields) -> Fields:
    scalar = keys["query_pre_attn_scalar"]
    check_positive("query_pre_attn_scalar", scalar)
    return dict(
        embedding_scale=fields["hidden_size"] ** 0.5,
        sm_scale=scalar**-0.5,
        attention_soft_cap=keys["attn_logit_softcapping"],
        logits_soft_cap=keys["final_logit_softcapping"],
    )


def _read_gemma4(keys: Keys, fields: Fields) -> Fields:
    """Read the sizes of layers that see all tokens; those with a window have the usual keys."""
    windows = fields["sliding_windows"] or (None,) * fields["num_layers"]
    windows = (*windows[:-1], None)  # transformers lets the last one see all
    full = _full_sizes_of_gemma4(keys, windows)
    windowed = dict(head_dim=keys["head_dim"], num_kv_heads=keys["num_key_value_heads"])
    if not any(windows):
        windows, windowed = (), {}
    return dict(
        sliding_windows=windows,
        embedding_scale=fields["hidden_size"] ** 0.5,
        logits_soft_cap=keys["final_logit_softcapping"],
        k_eq_v=bool(keys["attention_k_eq_v"]),
        **full,
        **{f"window_{name}": size for name, size in windowed.items() if size != full[name]},
    )


def _full_sizes_of_gemma4(keys: Keys, windows: tuple[int | None, ...]) -> Fields:
    heads = keys["num_key_value_heads"]
    if (per_layer := keys["per_layer_config"]) is None:
        if keys["attention_k_eq_v"] and keys["num_global_key_value_heads"] is not None:
            heads = keys["num_global_key_value_heads"]
        return dict(head_dim=keys["global_head_dim"], num_kv_heads=heads)
    # transformers 5.24 writes the sizes of these layers, one by one.
    usual = dict(head_dim=keys["head_dim"], num_key_value_heads=heads)
    last = str(len(windows) - 1)
    if not isinstance(per_layer, Mapping):
        raise ValueError(f"per_layer_config={per_layer!r} must have sizes of layers")
    for layer, window in enumerate(windows):
        expected = per_layer.get(last, {}) if window is None else {}
        sizes = per_layer.get(str(layer), {})
        if sizes != expected or sizes.keys() - usual.keys():
            raise ValueError(
                f"per_layer_config of layer {layer}, {sizes}, is not supported: layers without a"
                f" window must have the same {tuple(usual)}, others none of their own"
            )
    usual |= per_layer.get(last, {})
    return dict(head_dim=usual["head_dim"], num_kv_heads=usual["num_key_value_heads"])


def _read_olmo3(keys: Keys, fields: Fields) -> Fields:
    """Read that layers with a window have no rotary scaling, which older files don't say."""
    return dict(window_rope_theta=fields["window_rope_theta"] or fields["rope_theta"])


def _read_gpt_oss(keys: Keys, fields: Fields) -> Fields:
    experts = _read_local_experts(keys, fields, bias=True, swiglu_limit=keys["swiglu_limit"])
    if not is_mxfp4(keys):
        return dict(experts, stored_as="gpt_oss")
    for name in ("hidden_size", "intermediate_size"):
        if (size := fields[name]) % BLOCK:
            raise ValueError(f"{name}={size} must be a multiple of {BLOCK}, a block of MXFP4")
    return dict(experts, stored_as="gpt_oss_mxfp4")


_GEMMA2 = Family(
    defaults=dict(
        max_position_embeddings=8192,
        num_key_value_heads=4,
        head_dim=256,
        eos_token_id=1,
        tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
        sliding_window_pattern=2,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    fields=dict(post_norms=True, norm_offset=1.0),
    activation="hidden_activation",
    activations={"gelu_pytorch_tanh": "gelu_tanh"},
    only=dict(use_bidirectional_attention=(False,)),
    windows="pattern",
    read=_read_gemma,
)
_GEMMA3 = replace(
    _GEMMA2,
    defaults=dict(
        _GEMMA2.defaults,
        vocab_size=262208,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    fields=dict(_GEMMA2.fields, qk_norm=True),
    # transformers reads a cap of attention and ignores it.
    only=dict(_GEMMA2.only, attn_logit_softcapping=(None,)),
)
_GEMMA4 = Family(
    defaults=dict(
        vocab_size=262144,
        max_position_embeddings=131072,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=None,
        per_layer_config=None,
        attention_k_eq_v=False,
        eos_token_id=1,
        tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=512,
        sliding_window_pattern=6,
        final_logit_softcapping=None,
        hidden_size_per_layer_input=256,
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
            full_attention=dict(
                rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6
            ),
        ),
    ),
    fields=dict(post_norms=True, qk_norm=True, v_norm=True, layer_scalars=True, sm_scale=1.0),
    activation="hidden_activation",
    activations={"gelu_pytorch_tanh": "gelu_tanh"},
    # What the small models and the mixtures of experts have beside.
    only=dict(
        hidden_size_per_layer_input=(0,),
        num_kv_shared_layers=(0,),
        enable_moe_block=(False,),
        use_bidirectional_attention=(False, "vision"),  # of images only
    ),
    windows="pattern",
    read=_read_gemma4,
)
_OLMO2 = Family(
    defaults=dict(max_position_embeddings=2048, eos_token_id=50279, rms_norm_eps=1e-5),
    fields=dict(pre_norms=False, post_norms=True, qk_norm_over_heads=True),
)
_QWEN2: dict[str, Any] = dict(
    max_position_embeddings=32768,
    num_key_value_heads=32,
    sliding_window=4096,
    use_sliding_window=False,
    max_window_layers=28,
)
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        defaults=dict(max_position_embeddings=2048, eos_token_id=2),
        windows="none",
        layers_alike=True,
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
        layers_alike=True,
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
        layers_alike=True,
        read=_read_local_experts,
    ),
    "Phi3ForCausalLM": Family(  # Phi-4, too
        defaults=dict(
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
            eos_token_id=32000,
            rms_norm_eps=1e-5,
        ),
        fields=dict(stored_as="phi3"),
        only=dict(attention_bias=(False,)),
        windows="all",
        layers_alike=True,
        partial_rotary=True,
        rope_types=dict(su="longrope", yarn="longrope"),
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        defaults=dict(
            _OLMO2.defaults, rope_theta=500000.0, sliding_window=4096, sliding_window_pattern=4
        ),
        windows="pattern",
        read=_read_olmo3,
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(  # its texts; images are not read
        _GEMMA3, fields=dict(_GEMMA3.fields, stored_as="language_model"), has_text_config=True
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(  # its texts, too
        _GEMMA4, fields=dict(_GEMMA4.fields, stored_as="model.language_model"), has_text_config=True
    ),
    "GptOssForCausalLM": Family(
        defaults=dict(
            max_position_embeddings=131072,
            num_key_value_heads=8,
            head_dim=64,
            rms_norm_eps=1e-5,
            attention_bias=True,
            sliding_window=128,
            sliding_window_pattern=2,
            num_local_experts=128,
            num_experts_per_tok=4,
            swiglu_limit=7.0,
            swiglu_alpha=1.702,
            rope_theta=150000.0,
            rope_parameters=dict(
                rope_type="yarn",
                factor=32.0,
                truncate=False,
                original_max_position_embeddings=4096,
            ),
        ),
        fields=dict(sinks=True),
        only=dict(swiglu_alpha=(1.702,)),
        windows="pattern",
        read=_read_gpt_oss,
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
