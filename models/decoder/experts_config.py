"""Sizes and rules of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from models.decoder.rope_scaling import check_positive
from pallas_paged.checks import check_integer

MAX_SIZE = 2**24  # a damaged config.json must not start hours of work


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts.

    Attributes:
        n_routed_experts, num_experts_per_tok: experts, and how many are chosen for a token.
        moe_intermediate_size: features of an expert.
        n_shared_experts: what all tokens go through is as large as this number of experts.
        dense_layers: indices of the layers that have one MLP and no experts.
        n_group, topk_group: groups of experts, and how many of them a token may choose from.
        norm_topk_prob: whether the weights of the chosen experts add up to 1 before the scaling.
        routed_scaling_factor: of the weights.
        is_sigmoid: whether scores are sigmoids, and a bias takes part in the choice: DeepSeek V3's
            rule. Otherwise they are a softmax.
        bias: whether the router and the products of experts have biases.
        swiglu_limit: of gpt-oss, whose experts clamp gate and up, see `fused_experts`; None: they
            are SwiGLUs.
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 0
    dense_layers: tuple[int, ...] = ()
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    is_sigmoid: bool = False
    bias: bool = False
    swiglu_limit: float | None = None

    @property
    def shared_size(self) -> int:
        """Features of the shared experts."""
        return self.moe_intermediate_size * self.n_shared_experts

    def __post_init__(self) -> None:
        for name in ("n_routed_experts", "moe_intermediate_size", "n_group", "topk_group"):
            check_integer(name, getattr(self, name), 1, MAX_SIZE)
        check_integer("n_shared_experts", self.n_shared_experts, 0, MAX_SIZE)
        check_positive("routed_scaling_factor", self.routed_scaling_factor)
        if self.swiglu_limit is not None:
            check_positive("swiglu_limit", self.swiglu_limit)
        n_routed_experts, n_group, topk_group = self.n_routed_experts, self.n_group, self.topk_group
        if n_routed_experts % n_group:
            raise ValueError(f"{n_routed_experts=} must be a multiple of {n_group=}")
        if topk_group > n_group:
            raise ValueError(f"{topk_group=} must be at most {n_group=}")
        in_group = n_routed_experts // n_group
        if self.is_sigmoid and n_group > 1 and in_group < 2:
            raise ValueError(f"{n_group=} of {n_routed_experts=} must have 2 experts each")
        check_integer("num_experts_per_tok", self.num_experts_per_tok, 1, in_group * topk_group)
