"""What `config.json` of DeepSeek V2 and V3 has beside Llama's: latent attention, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.decoder.rope_scaling import RopeScaling, YarnRopeScaling, check_positive, yarn_mscale
from pallas_paged.checks import check_integer

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
_MAX_SIZE = 2**24  # a damaged config.json must not start hours of work
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
# What a file may say, and must then say so.
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    V2: {
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),  # transformers ignores it
    },
    V3: {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
}
_ONLY_OF_BOTH = {"attention_bias": (False,), "moe_layer_freq": (1,)}


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
                check_integer(name, getattr(self, name), 1, _MAX_SIZE)
        check_positive("sm_scale", self.sm_scale)
        if (qk_rope_head_dim := self.qk_rope_head_dim) % 2:
            raise ValueError(f"{qk_rope_head_dim=} must be even: rotary embeddings turn pairs")
        if (v_head_dim := self.v_head_dim) > (head_dim := self.head_dim):
            raise ValueError(f"{v_head_dim=} must be at most {head_dim=}, that of q and k")

    @property
    def head_dim(self) -> int:
        """Elements of a head of q and k."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Elements of a token in the cache: a latent and a rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts.

    Attributes:
        n_routed_experts, num_experts_per_tok: experts, and how many are chosen for a token.
        n_shared_experts: what all tokens go through is as large as this number of experts.
        moe_intermediate_size: features of an expert.
        first_k_dense_replace: layers before the first with experts.
        n_group, topk_group: groups of experts, and how many of them a token may choose from.
        norm_topk_prob: whether the weights of the chosen experts add up to 1 before the scaling.
        routed_scaling_factor: of the weights.
        is_sigmoid: whether scores are sigmoids, and a bias takes part in the choice: V3's rule.
            Otherwise they are a softmax, as V2's.
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    is_sigmoid: bool

    @property
    def shared_size(self) -> int:
        """Features of the shared experts."""
        return self.moe_intermediate_size * self.n_shared_experts

    def __post_init__(self) -> None:
        for name in ("n_routed_experts", "moe_intermediate_size", "n_group", "topk_group"):
            check_integer(name, getattr(self, name), 1, _MAX_SIZE)
        for name in ("n_shared_experts", "first_k_dense_replace"):
            check_integer(name, getattr(self, name), 0, _MAX_SIZE)
        check_positive("routed_scaling_factor", self.routed_scaling_factor)
        n_routed_experts, n_group, topk_group = self.n_routed_experts, self.n_group, self.topk_group
        if n_routed_experts % n_group:
            raise ValueError(f"{n_routed_experts=} must be a multiple of {n_group=}")
        if topk_group > n_group:
            raise ValueError(f"{topk_group=} must be at most {n_group=}")
        in_group = n_routed_experts // n_group
        if self.is_sigmoid and n_group > 1 and in_group < 2:
            raise ValueError(f"{n_group=} of {n_routed_experts=} must have 2 experts each")
        check_integer("num_experts_per_tok", self.num_experts_per_tok, 1, in_group * topk_group)


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
    _check_only(config, _ONLY_OF_BOTH)
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
        check_integer(name, sizes[name], 1, _MAX_SIZE)  # before the scale is made of them
    head_dim = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    interleave = architecture == V2 or config.get("rope_interleave", True)
    scale = head_dim**-0.5 * factor
    return LatentConfig(**sizes, sm_scale=scale, rope_interleave=bool(interleave))


def read_experts(config: Mapping[str, Any], architecture: str) -> ExpertsConfig | None:
    """Read the sizes of a mixture of experts; None where there is none.

    Raises:
        ValueError: a size is out of range, or a feature is not supported.
    """
    sizes = _keys(config, _EXPERTS[architecture])
    if sizes["n_routed_experts"] is None:
        return None
    _check_only(config, _ONLY[architecture])
    if architecture == V2 and config.get("topk_method", "greedy") == "greedy":
        sizes |= {"n_group": 1, "topk_group": 1}
    sizes |= {name: sizes[name] or 0 for name in ("n_shared_experts", "first_k_dense_replace")}
    sizes["norm_topk_prob"] = bool(sizes["norm_topk_prob"])
    return ExpertsConfig(**sizes, is_sigmoid=architecture == V3)


def _keys(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config.get(name, default) for name, default in defaults.items()}


def _check_only(config: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in only.items():
        value = config.get(name)
        if value is not None and value not in values:
            raise ValueError(f"{name}={value!r} is not supported; supported: {values}")
