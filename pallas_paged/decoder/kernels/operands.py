"""Operands of the kernels between two attentions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_paged.checks import pytree


@pytree
class BlockWeights:
    """Weights from the output projection of a layer to the QKV projection of the next.

    Attributes:
        o: `[E, A]`, the output projection.
        o_bias: `[E]` or None.
        mlp_norm: `[E]`.
        gate_up: `[F, 2, E]`, pairs of rows of gate and up.
        down: `[E, F]`.
        out_norm: `[E]`, the norm of the next layer, or the final one.
        qkv: `[N, E]`, the QKV projection of the next layer, or None after the last.
        qkv_bias: `[N]` or None.
        router: `[X, E]` where the MLP is one of X experts, or None. Then gate_up is `[X, F, 2, E]`
            and down `[X, E, F]`.
        router_bias, gate_up_bias, down_bias: `[X]`, `[X, F, 2]` and `[X, E]` beside a router, or
            None.
    """

    o: jax.Array
    mlp_norm: jax.Array
    gate_up: jax.Array
    down: jax.Array
    out_norm: jax.Array
    qkv: jax.Array | None = None
    o_bias: jax.Array | None = None
    qkv_bias: jax.Array | None = None
    router: jax.Array | None = None
    router_bias: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes, by their names in the functions that choose a config."""
        size, attended_size = self.o.shape
        return dict(
            size=size,
            attended_size=attended_size,
            hidden_size=self.down.shape[-1],
            out_size=0 if self.qkv is None else self.qkv.shape[0],
        )

    @property
    def has_bias(self) -> bool:
        """Whether any product has a bias."""
        return any(value is not None for name, value in vars(self).items() if "bias" in name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How a softmax of the router's logits chooses experts, and their activation.

    Attributes:
        num_experts_per_tok: experts of a token, those with the largest logits; of equal ones the
            first.
        norm_topk_prob: whether their weights add up to 1 before the scaling.
        scaling: of the weights.
        swiglu_limit: of `fused_experts`.
    """

    num_experts_per_tok: int
    norm_topk_prob: bool
    scaling: float
    swiglu_limit: float | None = None


@pytree
class BlockInputs:
    """Arrays or refs to device memory."""

    attended: Any  # `[R, A]`, or `DecodeStates` of one row
    residual: Any  # `[R, E]`
    weights: Any  # `BlockWeights`, of several rows without biases
    mailbox: Any  # i32, a ref: what the programs of the kernel write for one another
    next_mailbox: Any  # of the next call, to be cleared
    peers: Any = None  # `PeerMemory` where devices share the columns of o and down
