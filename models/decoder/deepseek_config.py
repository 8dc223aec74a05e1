"""What `config.json` of DeepSeek V2 and V3 has beside Llama's: latent attention, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.decoder.experts_config import MAX_SIZE, ExpertsConfig
from models.decoder.rope_scaling import RopeScaling, YarnRopeScaling, check_positive, yarn_mscale
from pallas_paged.checks import check_integer

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
# Defaults of transformers for keys that a config.json may leave out.
_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_EXPERTS: dict[str, dict[str, Any]] = {
    V2: {
        "n_routed_experts": 64,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "n_group": None,
        "topk_group": None,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    V3: {
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
_ONLY_OF_BOTH = {"attention_bias": (False,), "moe_layer_freq": (1,)}
# What a file may say, and must then say so.
ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    V2: {
        **_ONLY_OF_BOTH,
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),  # transformers ignores it
    },
    V3: {**_ONLY_OF_BOTH, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
}


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of multi-head latent attention.

    Attributes:
        q_lora_rank: elements between the two projections of q; None: there is one.
        kv_lora_rank: elements of a latent.
        qk_nope_head_dim, qk_rope_head_dim: elements of a head of q and k without and with rotation.
        v_head_dim: elements of a head of v.
        sm_scale: of the logits, with the factor of YaRN.
        rope_interleave: whether a file has rotary elements as pairs (2i, 2i + 1). In a decoder they
            are (i, i + R / 2).
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    sm_scale: float
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        for name in _LATENT:
            if name != "q_lora_rank" or self.q_lora_rank is not None:
                check_integer(name, getattr(self, name), 1, MAX_SIZE)
        check_positive("sm_scale", self.sm_scale)
        if (qk_rope_head_dim := self.qk_rope_head_dim) % 2:
            raise ValueError(f"{qk_rope_head_dim=} must be even: rotary embeddings turn pairs")

    @property
    def head_dim(self) -> int:
        """Elements of a head of q and k."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Elements of a token in the cache: a latent and a rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def read_latent(
    config: Mapping[str, Any], architecture: str, scaling: RopeScaling | None
) -> LatentConfig:
    """Read the sizes of latent attention.

    Args:
        config: the contents of a `config.json`.
        architecture: V2 or V3.
        scaling: of the rotary embeddings, as `read_rope` reads it.

    Raises:
        ValueError: a size is out of range, or a feature is not supported.
    """
    sizes = _keys(config, _LATENT)
    factor = 1.0
    if isinstance(scaling, YarnRopeScaling):
        rope = config.get("rope_scaling") or config["rope_parameters"]
        if mscale := rope.get("mscale_all_dim"):
            factor = yarn_mscale(scaling.factor, mscale) ** 2
    elif scaling is not None:
        rope_type = scaling.rope_type
        raise ValueError(f"{rope_type=} is not supported with {architecture}; supported: 'yarn'")
    for name in ("qk_nope_head_dim", "qk_rope_head_dim"):
        check_integer(name, sizes[name], 1, MAX_SIZE)  # before the scale is made of them
    head_dim = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    interleave = architecture == V2 or config.get("rope_interleave", True)
    scale = head_dim**-0.5 * factor
    return LatentConfig(**sizes, sm_scale=scale, rope_interleave=bool(interleave))


def read_experts(
    config: Mapping[str, Any], architecture: str, num_layers: int
) -> ExpertsConfig | None:
    """Read the sizes of a mixture of experts; None where there is none.

    Raises:
        ValueError: a size is out of range, or a feature is not supported.
    """
    sizes = _keys(config, _EXPERTS[architecture])
    if sizes["n_routed_experts"] is None:
        return None
    if architecture == V2 and config.get("topk_method", "greedy") == "greedy":
        sizes |= {"n_group": 1, "topk_group": 1}
    first_sparse = sizes.pop("first_k_dense_replace") or 0
    check_integer("first_k_dense_replace", first_sparse, 0)
    sizes["dense_layers"] = tuple(range(min(first_sparse, num_layers)))
    sizes["n_shared_experts"] = sizes["n_shared_experts"] or 0
    sizes["norm_topk_prob"] = bool(sizes["norm_topk_prob"])
    return ExpertsConfig(**sizes, is_sigmoid=architecture == V3)


def _keys(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config.get(name, default) for name, default in defaults.items()}
