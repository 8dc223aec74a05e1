"""What a decoder looks like, read from and written to a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1: low frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a Llama-family decoder, whatever its architecture is called.

    Hashable and compared by value: it is a static part of the module.
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
    rope_scaling: Llama3RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        )
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        num_q_heads, num_kv_heads, head_dim = self.num_q_heads, self.num_kv_heads, self.head_dim
        if num_q_heads % num_kv_heads:
            raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
        if head_dim % 2:
            raise ValueError(f"{head_dim=} must be even: rotary embeddings turn pairs")

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the contents of a `config.json`.

        Args:
            config: the parsed JSON object, in the spelling of transformers 4 or 5.

        Returns:
            The configuration. Keys left out take the defaults of their architecture.

        Raises:
            ValueError: an architecture or feature that the decoder does not have, or a
                missing or impossible size.
        """
        architecture = next(iter(config.get("architectures") or ()), None)
        if architecture not in ARCHITECTURES:
            raise ValueError(f"{architecture=} is not supported; supported: {ARCHITECTURES}")
        _refuse_unsupported(config, architecture)

        qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        attention_bias = bool(config.get("attention_bias", False)) and not qwen2
        hidden_size, num_q_heads = _required(config, "hidden_size", "num_attention_heads")
        vocab_size, intermediate_size, num_layers = _required(
            config, "vocab_size", "intermediate_size", "num_hidden_layers"
        )
        head_dim = config.get("head_dim") or (128 if qwen3 else hidden_size // num_q_heads)
        max_positions = config.get("max_position_embeddings", 2048)
        rope_theta, rope_scaling = _read_rope(config, max_positions)
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_q_heads,
            head_dim=head_dim,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias,
            qk_norm=qwen3,
            eos_token_ids=read_eos_token_ids(config.get("eos_token_id")),
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """Write the configuration as the `config.json` of a LlamaForCausalLM.

        Raises:
            ValueError: for a decoder that the Llama architecture cannot express.
        """
        qkv_bias, o_bias, qk_norm = self.qkv_bias, self.o_bias, self.qk_norm
        if qk_norm or qkv_bias != o_bias:
            raise ValueError(
                f"{qk_norm=}, {qkv_bias=}, {o_bias=} cannot be saved as LlamaForCausalLM,"
                " which has no q/k norm and biases either all or none of its projections"
            )
        scaling = self.rope_scaling
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling and {"rope_type": "llama3", **vars(scaling)},
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": qkv_bias,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": list(self.eos_token_ids) or None,
        }


def read_eos_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Bring the spellings of `eos_token_id` (null, a number, a list) to a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _required(config: Mapping[str, Any], *names: str) -> list[int]:
    for name in names:
        if config.get(name) is None:
            raise ValueError(f"config.json has no {name}")
        if not isinstance(config[name], int) or config[name] < 1:
            raise ValueError(f"{name}={config[name]!r} must be a positive integer")
    return [config[name] for name in names]


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    hidden_act = config.get("hidden_act", "silu")
    if hidden_act not in ("silu", "swish"):
        raise ValueError(f"{hidden_act=} is not supported; supported: 'silu'")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias=True is not supported; supported: False")
    if config.get("quantization_config"):
        raise ValueError("quantization_config is not supported: the weights must be floats")
    sliding_window = _sliding_window(config, architecture)
    if sliding_window:
        raise ValueError(f"{architecture} with {sliding_window=} is not supported; supported: None")


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    """The window that at least one layer uses, or None."""
    if "layer_types" in config and config["layer_types"] is not None:
        windowed = "sliding_attention" in config["layer_types"]
    elif architecture == "MistralForCausalLM":
        windowed = True
    else:
        first_windowed_layer = config.get("max_window_layers", 28)
        windowed = config.get("use_sliding_window", False) and (
            first_windowed_layer < config.get("num_hidden_layers", 0)
        )
    return config.get("sliding_window", 4096) if windowed else None


def _read_rope(
    config: Mapping[str, Any], max_positions: int
) -> tuple[float, Llama3RopeScaling | None]:
    """Rotary base and scaling: `rope_parameters` of transformers 5, else the older two keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    rotary_factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if rotary_factor != 1.0:
        raise ValueError(f"partial_rotary_factor={rotary_factor} is not supported; supported: 1.0")
    if rope_type == "default":
        return float(rope_theta), None
    if rope_type != "llama3":
        raise ValueError(f"{rope_type=} is not supported; supported: 'default', 'llama3'")
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if name not in rope:
            raise ValueError(f"{rope_type=} needs {name}")
    scaling = Llama3RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope.get(
            "original_max_position_embeddings", max_positions
        ),
    )
    return float(rope_theta), scaling
