"""Sizes and switches of a decoder, read from and written to a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.decoder.config_json import LIMITS, SIZE_KEYS, read_fields
from models.decoder.deepseek_config import LatentConfig
from models.decoder.experts_config import ExpertsConfig
from models.decoder.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
    check_positive,
    write_rope_scaling,
)
from pallas_paged.checks import check_integer

# Vocabularies of published models are multiples of it, for the sake of hardware.
_VOCAB_MULTIPLE = 64
_POSITIVE_OR_NONE = (
    "window_rope_theta",
    "embedding_scale",
    "logits_soft_cap",
    "attention_soft_cap",
    "sm_scale",
)
# Switches of attention by heads.
_NOT_WITH_LATENTS = (
    *("qkv_bias", "o_bias", "qk_norm", "qk_norm_over_heads", "sliding_windows", "v_scales"),
    *("pre_norms", "post_norms", "sm_scale", "attention_soft_cap", "sinks", "window_rope_theta"),
    *("partial_rotary_factor", "stored_as", "window_num_kv_heads", "window_head_dim"),
    *("k_eq_v", "v_norm"),
)
_NOT_IN_LLAMA = (
    *("activation", "pre_norms", "post_norms", "norm_offset", *_POSITIVE_OR_NONE, "sinks"),
    *("qk_norm", "qk_norm_over_heads", "sliding_windows", "partial_rotary_factor", "experts"),
    *("window_num_kv_heads", "window_head_dim", "k_eq_v", "v_norm", "layer_scalars"),
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder of any supported architecture.

    Hashable and compared by value: it is a static part of the module.

    Attributes:
        activation: of the gate of the MLPs: "silu" or "gelu_tanh".
        pre_norms: whether attention and MLP norm what they take.
        post_norms: whether attention and MLP norm what they add.
        norm_offset: what is added to the weights of norms in a file.
        embedding_scale: factor of the embeddings; None: 1.
        logits_soft_cap, attention_soft_cap: c of `c * tanh(x / c)`, of the decoder's logits and of
            those of attention; None: no cap.
        sm_scale: factor of q.k; None: `head_dim ** -0.5`.
        sinks: whether each query head has one more logit, without a value.
        qk_norm: whether each head of q and k is normed.
        qk_norm_over_heads: whether q and k are normed, each over all of its heads together.
        v_norm: whether each head of v is normed, without weights.
        k_eq_v: whether layers without a window have no projection of v: it is k before its norm.
        layer_scalars: whether each layer's output, residual included, is multiplied by a number.
        sliding_windows: one entry for each layer, None where the layer sees all tokens; empty if
            all layers see all tokens.
        rope_scaling: of the rotary embeddings; None turns each position by its own angle.
        window_num_kv_heads, window_head_dim: of layers with a window, where others see all tokens;
            None: those of the others.
        window_rope_theta: rotary base of layers with a window, which then have no scaling; None:
            that of the others.
        partial_rotary_factor: part of each head that is rotated.
        max_position_embeddings: most tokens of a sequence, with the scaling.
        latent: of multi-head latent attention, whose queries, K and V have `num_q_heads` heads;
            None: grouped-query attention.
        experts: of the layers whose MLP is a mixture of experts; None: all are dense.
        stored_as: names and forms of the tensors in a file, one of `stored_tensors.FORMS`.
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
    window_num_kv_heads: int | None = None
    window_head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    window_rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    activation: str = "silu"
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float | None = None
    logits_soft_cap: float | None = None
    attention_soft_cap: float | None = None
    sm_scale: float | None = None
    sinks: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    v_norm: bool = False
    k_eq_v: bool = False
    layer_scalars: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    stored_as: str = "llama"
    k_scales: tuple[float, ...] = ()
    v_scales: tuple[float, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            check_integer(name, getattr(self, name), 1, most)
        for name in ("rms_norm_eps", "rope_theta", *_POSITIVE_OR_NONE):
            if getattr(self, name) is not None or name not in _POSITIVE_OR_NONE:
                check_positive(name, getattr(self, name))
        if self.experts is not None and self.activation != "silu":
            raise ValueError(f"activation={self.activation!r} must be 'silu' with experts")
        if not (self.pre_norms or self.post_norms):
            raise ValueError("pre_norms or post_norms must be True: branches must be normed")
        num_q_heads, num_kv_heads, head_dim = self.num_q_heads, self.num_kv_heads, self.head_dim
        if num_q_heads % num_kv_heads:
            raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
        if self.latent is not None:
            self._check_latent(self.latent)
        elif head_dim % 2:
            raise ValueError(f"{head_dim=} must be even: rotary embeddings turn pairs")
        self._check_rope()
        num_layers, num_windows = self.num_layers, len(self.sliding_windows)
        if num_windows not in (0, num_layers):
            raise ValueError(f"{num_windows=} of the layers must be 0 or {num_layers=}")
        for window in self.sliding_windows:
            if window is not None:
                check_integer("sliding_window", window, 1, most=2**63)
        self._check_window_sizes()
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
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    def _check_latent(self, latent: LatentConfig) -> None:
        num_q_heads, num_kv_heads, head_dim = self.num_q_heads, self.num_kv_heads, self.head_dim
        if num_kv_heads != num_q_heads or head_dim != latent.head_dim:
            raise ValueError(
                f"{num_kv_heads=} must be {num_q_heads=}, and {head_dim=} must be "
                f"{latent.head_dim}, with {latent}"
            )
        for name in _NOT_WITH_LATENTS:
            if (value := getattr(self, name)) != _default(name):
                raise ValueError(f"{name}={value} is not supported with latent attention")

    def _check_window_sizes(self) -> None:
        for name in ("window_num_kv_heads", "window_head_dim"):
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, 1, LIMITS[name.removeprefix("window_")])
                if len({window is None for window in self.sliding_windows}) != 2:
                    raise ValueError(
                        f"{name}={value} must be None: it is for layers with a window, beside"
                        " others that see all tokens"
                    )
        self.of_windows()  # checks its own sizes

    def _check_rope(self) -> None:
        scaling, rope_theta, head_dim = self.rope_scaling, self.rope_theta, self.rotary_dim
        factor = self.partial_rotary_factor
        if head_dim % 2 or not 0 < head_dim <= self.head_dim:
            raise ValueError(
                f"partial_rotary_factor={factor} of a head of {self.head_dim} must be even"
            )
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
        return cls(**read_fields(config))

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

    def of_windows(self) -> ModelConfig:
        """Return the configuration whose heads and rotation are those of layers with a window."""
        changes: dict[str, Any] = {}
        if self.window_rope_theta is not None:
            changes |= dict(rope_theta=self.window_rope_theta, rope_scaling=None)
        for name in ("num_kv_heads", "head_dim"):
            if (value := getattr(self, f"window_{name}")) is not None:
                changes[name] = value
        if self.k_eq_v:
            changes["k_eq_v"] = False
        if not changes:
            return self
        none: dict[str, Any] = dict(
            window_rope_theta=None, window_num_kv_heads=None, window_head_dim=None
        )
        return dataclasses.replace(self, **none, **changes)

    def of_layer(self, layer: int) -> ModelConfig:
        """Return the configuration whose heads and rotation are those of a layer."""
        has_window = bool(self.sliding_windows) and self.sliding_windows[layer] is not None
        return self.of_windows() if has_window else self

    def to_hugging_face(self) -> dict[str, Any]:
        """Write the configuration as the `config.json` of a LlamaForCausalLM.

        Raises:
            ValueError: for a decoder that the Llama architecture cannot express.
        """
        if self.latent is not None:
            raise ValueError("latent attention cannot be saved as LlamaForCausalLM, which has none")
        for name in _NOT_IN_LLAMA:
            if (value := getattr(self, name)) != _default(name):
                raise ValueError(f"{name}={value} cannot be saved as LlamaForCausalLM")
        qkv_bias, o_bias = self.qkv_bias, self.o_bias
        if qkv_bias != o_bias:
            raise ValueError(
                f"{qkv_bias=}, {o_bias=} cannot be saved as LlamaForCausalLM,"
                " which has biases in all or none of its projections"
            )
        scaling = self.rope_scaling
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{key: getattr(self, ours) for ours, key in SIZE_KEYS.items()},
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


def _default(name: str) -> Any:
    return ModelConfig.__dataclass_fields__[name].default


def is_vocab_sharded(vocab_size: int) -> bool:
    """Return whether devices share the rows of the embeddings, or each has all of them."""
    return vocab_size % _VOCAB_MULTIPLE == 0
