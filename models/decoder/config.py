"""Sizes and switches of a decoder, read from and written to a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.decoder.deepseek_config import (
    V2,
    V3,
    ExpertsConfig,
    LatentConfig,
    read_experts,
    read_latent,
)
from models.decoder.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
    check_positive,
    read_rope,
    write_rope_scaling,
)
from pallas_paged.checks import INT32_MAX, check_integer

# Defaults of transformers for keys that a config.json may leave out, where architectures differ.
_KEYS = ("max_position_embeddings", "num_key_value_heads", "head_dim", "eos_token_id")
_DEFAULTS = {
    "LlamaForCausalLM": (2048, None, None, 2),
    "MistralForCausalLM": (131072, 8, None, 2),
    "Qwen2ForCausalLM": (32768, 32, None, None),
    "Qwen3ForCausalLM": (32768, 32, 128, None),
    V2: (2048, None, None, 2),
    V3: (4096, None, None, 1),
}
ARCHITECTURES = tuple(_DEFAULTS)
_SIZE_KEYS = {  # that a config.json must have, by our names
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
}
# Vocabularies of published models are multiples of it, for the sake of hardware.
_VOCAB_MULTIPLE = 64
# A damaged config.json must not start hours of work. These are far above published models.
_MAX_LAYERS, _MAX_HEADS, _MAX_SIZE = 1024, 4096, 2**24
_LIMITS = {
    "vocab_size": _MAX_SIZE,
    "hidden_size": _MAX_SIZE,
    "intermediate_size": _MAX_SIZE,
    "num_layers": _MAX_LAYERS,
    "num_q_heads": _MAX_HEADS,
    "num_kv_heads": _MAX_HEADS,
    "head_dim": _MAX_HEADS,
    "max_position_embeddings": INT32_MAX,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder of any supported architecture.

    Hashable and compared by value: it is a static part of the module.

    Attributes:
        sliding_windows: one entry for each layer, None where the layer sees all tokens; empty if
            all layers see all tokens.
        rope_scaling: of the rotary embeddings; None turns each position by its own angle.
        max_position_embeddings: most tokens of a sequence, with the scaling.
        latent: of multi-head latent attention, whose queries, K and V have `num_q_heads` heads;
            None: grouped-query attention.
        experts: of the layers whose MLP is a mixture of experts, with latent attention only; None:
            all are dense.
        k_scales, v_scales: calibrated scale of each layer's K and V in a float8_e4m3fn cache; empty
            if the checkpoint has none.
        eos_token_ids: tokens that end a sequence.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    k_scales: tuple[float, ...] = ()
    v_scales: tuple[float, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, most in _LIMITS.items():
            check_integer(name, getattr(self, name), 1, most)
        for name in ("rms_norm_eps", "rope_theta"):
            check_positive(name, getattr(self, name))
        num_q_heads, num_kv_heads, head_dim = self.num_q_heads, self.num_kv_heads, self.head_dim
        if num_q_heads % num_kv_heads:
            raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
        if self.latent is not None:
            self._check_latent(self.latent)
        elif self.experts is not None:
            raise ValueError("experts must be None without latent attention")
        elif head_dim % 2:
            raise ValueError(f"{head_dim=} must be even: rotary embeddings turn pairs")
        self._check_rope()
        num_layers, num_windows = self.num_layers, len(self.sliding_windows)
        if num_windows not in (0, num_layers):
            raise ValueError(f"{num_windows=} of the layers must be 0 or {num_layers=}")
        for window in self.sliding_windows:
            if window is not None:
                check_integer("sliding_window", window, 1, most=2**63)
        num_scales = len(self.k_scales), len(self.v_scales)
        if num_scales not in ((0, 0), (num_layers, num_layers)):
            raise ValueError(f"{num_scales=} of K and V must both be 0 or {num_layers=}")
        for name in ("k_scales", "v_scales"):
            for layer, scale in enumerate(getattr(self, name)):
                check_positive(f"{name}[{layer}]", scale)
        for token in self.eos_token_ids:
            check_integer("eos_token_id", token, 0)

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    def _check_latent(self, latent: LatentConfig) -> None:
        num_q_heads, num_kv_heads, head_dim = self.num_q_heads, self.num_kv_heads, self.head_dim
        if num_kv_heads != num_q_heads or head_dim != latent.head_dim:
            raise ValueError(
                f"{num_kv_heads=} must be {num_q_heads=}, and {head_dim=} must be "
                f"{latent.head_dim}, with {latent}"
            )
        for name in ("qkv_bias", "o_bias", "qk_norm", "sliding_windows", "v_scales"):
            if value := getattr(self, name):
                raise ValueError(f"{name}={value} is not supported with latent attention")

    def _check_rope(self) -> None:
        scaling, rope_theta, head_dim = self.rope_scaling, self.rope_theta, self.rotary_dim
        if isinstance(scaling, YarnRopeScaling) and rope_theta <= 1:
            raise ValueError(f"{rope_theta=} must be above 1 for YaRN")
        if isinstance(scaling, DynamicRopeScaling) and head_dim == 2:
            raise ValueError(f"{head_dim=} must be above 2 for a dynamic rotary base")
        if isinstance(scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                if (size := len(getattr(scaling, name))) != head_dim // 2:
                    raise ValueError(f"{name} has {size} numbers, must have {head_dim // 2}")

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the contents of a `config.json`.

        Args:
            config: the parsed JSON object, in the spelling of transformers 4 or 5. Keys left out
                take the defaults that transformers has for the architecture.

        Raises:
            ValueError: an architecture or feature is not supported, or a size is missing or out of
                range.
        """
        architectures = config.get("architectures")
        architecture = architectures[0] if architectures and _is_list(architectures) else None
        if architecture not in ARCHITECTURES:
            raise ValueError(f"{architecture=} is not supported; supported: {ARCHITECTURES}")
        _refuse_unsupported(config)

        qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        attention_bias = bool(config.get("attention_bias", False)) and not qwen2
        sizes: dict[str, Any] = {
            ours: _required(config, key, _LIMITS[ours]) for ours, key in _SIZE_KEYS.items()
        }
        hidden_size, num_q_heads = sizes["hidden_size"], sizes["num_q_heads"]
        keys = dict(zip(_KEYS, _DEFAULTS[architecture], strict=True)) | dict(config)
        head_dim, max_positions = keys["head_dim"], keys["max_position_embeddings"]
        check_integer("max_position_embeddings", max_positions, 1)
        rope_theta, rope_scaling = read_rope(config, max_positions)
        latent = experts = None
        if architecture in (V2, V3):
            latent = read_latent(config, architecture, rope_scaling)
            experts = read_experts(config, architecture)
            head_dim, keys["num_key_value_heads"] = latent.head_dim, num_q_heads
        if head_dim is None:
            if hidden_size % num_q_heads:
                raise ValueError(
                    f"{hidden_size=} must be a multiple of num_attention_heads={num_q_heads}, or"
                    " head_dim must be given"
                )
            head_dim = hidden_size // num_q_heads
        if isinstance(rope_scaling, YarnRopeScaling):
            # Files have the length with the scaling or, where a reader added it, without.
            original = rope_scaling.original_max_position_embeddings
            max_positions = max(max_positions, int(rope_scaling.factor * original))
        num_kv_heads = keys["num_key_value_heads"]
        return cls(
            **sizes,
            num_kv_heads=num_q_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias,
            qk_norm=qwen3,
            sliding_windows=(
                _read_sliding_windows(config, architecture, sizes["num_layers"])
                if latent is None
                else ()
            ),
            latent=latent,
            experts=experts,
            eos_token_ids=read_eos_token_ids(keys["eos_token_id"]),
        )

    def with_context(self, max_model_len: int) -> ModelConfig:
        """Return the configuration for sequences of at most this many tokens, where it matters.

        The frequencies of "longrope" in a cache are those of short sequences if all are short.
        Files with "dynamic" or "linear" scaling often have the context without the scaling; it
        grows to `factor` times that where `max_model_len` asks for it. Other configurations stay.
        """
        check_integer("max_model_len", max_model_len, 1)
        scaling, longest = self.rope_scaling, self.max_position_embeddings
        if isinstance(scaling, LongRopeScaling):
            return dataclasses.replace(self, max_position_embeddings=min(max_model_len, longest))
        if isinstance(scaling, DynamicRopeScaling | LinearRopeScaling) and max_model_len > longest:
            longest = max(longest, min(max_model_len, int(scaling.factor * longest)))
            return dataclasses.replace(self, max_position_embeddings=longest)
        return self

    def to_hugging_face(self) -> dict[str, Any]:
        """Write the configuration as the `config.json` of a LlamaForCausalLM.

        Raises:
            ValueError: for a decoder that the Llama architecture cannot express.
        """
        if self.latent is not None:
            raise ValueError("latent attention cannot be saved as LlamaForCausalLM, which has none")
        qkv_bias, o_bias, qk_norm = self.qkv_bias, self.o_bias, self.qk_norm
        if qk_norm or qkv_bias != o_bias:
            raise ValueError(
                f"{qk_norm=}, {qkv_bias=}, {o_bias=} cannot be saved as LlamaForCausalLM,"
                " which has no q/k norm and biases either all or none of its projections"
            )
        if any(self.sliding_windows):
            raise ValueError(
                f"sliding_windows={self.sliding_windows} cannot be saved as LlamaForCausalLM,"
                " whose layers see all tokens"
            )
        scaling = self.rope_scaling
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{key: getattr(self, ours) for ours, key in _SIZE_KEYS.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": write_rope_scaling(scaling),
            "max_position_embeddings": (
                scaling.original_max_position_embeddings
                if isinstance(scaling, DynamicRopeScaling)
                else self.max_position_embeddings
            ),
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": qkv_bias,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": list(self.eos_token_ids) or None,
        }


def read_eos_token_ids(value: Any) -> tuple[int, ...]:
    """Return `eos_token_id` (null, a number or a list) as a tuple."""
    if value is None:
        return ()
    return tuple(value) if _is_list(value) else (value,)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _required(config: Mapping[str, Any], name: str, most: int) -> int:
    if config.get(name) is None:
        raise ValueError(f"config.json has no {name}")
    check_integer(name, config[name], 1, most)
    return config[name]


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    hidden_act = config.get("hidden_act", "silu")
    if hidden_act not in ("silu", "swish"):
        raise ValueError(f"{hidden_act=} is not supported; supported: 'silu'")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias=True is not supported; supported: False")
    quantization = config.get("quantization_config")
    if quantization and not _is_of_the_cache_only(quantization):
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


def _read_sliding_windows(
    config: Mapping[str, Any], architecture: str, num_layers: int
) -> tuple[int | None, ...]:
    """Windows of the layers: from `layer_types` if it is given, else the architecture's rule."""
    qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    default = None if architecture == "LlamaForCausalLM" else 4096
    window = config.get("sliding_window", default)
    if qwen and not config.get("use_sliding_window", False):
        window = None
    layer_types = config.get("layer_types")
    if layer_types is None and (window is None or architecture == "LlamaForCausalLM"):
        return ()
    if layer_types is not None:
        if not _is_list(layer_types) or len(layer_types) != num_layers:
            raise ValueError(f"{layer_types=} must name the attention of {num_layers=}")
        for layer_type in layer_types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise ValueError(
                    f"{layer_type=} is not supported;"
                    " supported: 'full_attention', 'sliding_attention'"
                )
        windowed = [layer_type == "sliding_attention" for layer_type in layer_types]
        if any(windowed) and window is None:
            raise ValueError("layer_types has 'sliding_attention', but no sliding_window is in use")
    elif qwen:
        max_window_layers = config.get("max_window_layers", 28)
        check_integer("max_window_layers", max_window_layers, 0)
        windowed = [layer >= max_window_layers for layer in range(num_layers)]
    else:
        windowed = [True] * num_layers
    return tuple(window if sliding else None for sliding in windowed) if any(windowed) else ()


def is_vocab_sharded(vocab_size: int) -> bool:
    """Return whether devices share the rows of the embeddings, or each has all of them."""
    return vocab_size % _VOCAB_MULTIPLE == 0
