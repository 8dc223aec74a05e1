"""Mixtures of experts: a router, its experts, and shared ones beside."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from models.decoder.config import ModelConfig
from models.decoder.experts_config import ExpertsConfig
from models.decoder.modules import MLP, Linear, normal, residual_stddev
from pallas_paged.decoder.between_attentions import Routing
from pallas_paged.experts import fused_experts


class Router(nnx.Module):
    """The weight of each expert for a token."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        assert config.experts is not None
        self.config: ExpertsConfig = config.experts
        num_experts = config.experts.n_routed_experts
        self.weight = nnx.Param(normal(rngs, (num_experts, config.hidden_size), 0.02, dtype))
        self.bias = nnx.Param(jnp.zeros(num_experts, dtype)) if self.config.bias else None
        # It moves which experts are chosen, so it is f32 whatever the dtype of the others is.
        bias = jnp.zeros(num_experts, jnp.float32)
        self.e_score_correction_bias = nnx.Param(bias) if self.config.is_sigmoid else None

    def __call__(self, x: jax.Array, given: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Tokens [T, E] to the experts that are chosen, i32[T, k], and their weights f32[T, k].

        Experts `given`, i32[T, k], are taken in place of those, except where they are below 0. The
        weights are always of this router's scores at the experts, so that it gets gradients.
        """
        config, num_experts = self.config, self.config.n_routed_experts
        # Sums in f32 of exact products: those of 16-bit elements are, and TF32 would choose others.
        logits = jnp.matmul(
            x,
            self.weight[...].T,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        if self.bias is not None:
            logits += self.bias[...].astype(jnp.float32)
        scores = jax.nn.sigmoid(logits) if config.is_sigmoid else jax.nn.softmax(logits)
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = scores + self.e_score_correction_bias[...]
        if config.n_group > 1:
            groups = choice.reshape(len(x), config.n_group, -1)
            # The groups of V3 have the scores of their best two experts, those of V2 of the best.
            best = _ranks(groups) < (2 if config.is_sigmoid else 1)
            chosen = _ranks(jnp.where(best, groups, 0.0).sum(axis=-1)) < config.topk_group
            choice = jnp.where(chosen[..., None], groups, -jnp.inf).reshape(-1, num_experts)
        place = jnp.arange(config.num_experts_per_tok)
        is_place = _ranks(choice)[:, None] == place[:, None]  # [T, k, X]
        experts = jnp.argmax(is_place, axis=-1).astype(jnp.int32)
        if given is not None:
            experts = jnp.where(given < 0, experts, given.astype(jnp.int32))
            is_place = experts[..., None] == jnp.arange(num_experts)
        weights = jnp.where(is_place, scores[:, None], 0.0).sum(axis=-1)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor


class Experts(nnx.Module):
    """SwiGLUs of one size."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        assert config.experts is not None
        hidden_size, size = config.hidden_size, config.experts.moe_intermediate_size
        num_experts = config.experts.n_routed_experts
        self.limit = config.experts.swiglu_limit
        linear = partial(Linear, bias=config.experts.bias, dtype=dtype, rngs=rngs)
        self.gate_up_proj = linear(hidden_size, num_experts, size, 2)
        stddev = residual_stddev(config)
        self.down_proj = linear(size, num_experts, hidden_size, stddev=stddev)

    def __call__(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """Tokens [T, E], their experts i32[T, k] and weights f32[T, k] to the sums [T, E]."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return fused_experts(
            x,
            gate_up.weight[...],
            down.weight[...],
            experts,
            weights,
            gate_up_bias=None if gate_up.bias is None else gate_up.bias[...],
            down_bias=None if down.bias is None else down.bias[...],
            swiglu_limit=self.limit,
        )


class SparseMLP(nnx.Module):
    """Chosen experts for each token, and shared ones for all."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        assert config.experts is not None
        self.gate = Router(config, dtype=dtype, rngs=rngs)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)
        size = config.experts.shared_size
        self.shared_experts = MLP(config, size, dtype=dtype, rngs=rngs) if size else None

    @property
    def routing(self) -> Routing | None:
        """How a kernel may choose experts; None where there is more to this module."""
        config = self.gate.config
        if config.is_sigmoid or config.n_group > 1 or self.shared_experts is not None:
            return None
        return Routing(
            num_experts_per_tok=config.num_experts_per_tok,
            norm_topk_prob=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
            swiglu_limit=config.swiglu_limit,
        )

    @property
    def block_weights(self) -> dict[str, jax.Array | None]:
        """The weights of `BlockWeights` that are of the MLP."""
        router, gate_up, down = self.gate, self.experts.gate_up_proj, self.experts.down_proj
        biases = dict(router_bias=router.bias, gate_up_bias=gate_up.bias, down_bias=down.bias)
        params = dict(router=router.weight, gate_up=gate_up.weight, down=down.weight, **biases)
        return {name: None if param is None else param[...] for name, param in params.items()}

    def __call__(
        self,
        x: jax.Array,
        is_token: jax.Array | None = None,
        given: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens [..., E] to [..., E], and the experts that they were routed to, i32[..., k].

        Where `is_token` [...] is false, no routed expert computes. `given` is as in `Router`.
        """
        tokens = x.reshape(-1, x.shape[-1])
        if given is not None:
            given = given.reshape(len(tokens), -1)
        experts, weights = self.gate(tokens, given)
        routed = experts.reshape(*x.shape[:-1], -1)
        if is_token is not None:
            experts = jnp.where(is_token.reshape(-1, 1), experts, self.gate.weight.shape[0])
        out = self.experts(tokens, experts, weights).reshape(x.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, routed


def _ranks(scores: jax.Array) -> jax.Array:
    """Return i32[..., X]: how many of the X scores f32[..., X] are larger, or equal and before.

    Each is compared with all others, for a CUDA graph holds no sort. The barrier makes both sides
    the same numbers: on a GPU XLA would compute the scores for each side anew, with sums in another
    order, and where a score differs from itself two experts have one rank, and another rank none.
    """
    scores = lax.optimization_barrier(scores)
    own, others = scores[..., :, None], scores[..., None, :]
    # Places of all tokens: with those of one, broadcast, XLA compiles 8192 tokens for minutes.
    shape = jnp.broadcast_shapes(own.shape, others.shape)
    place, other_place = (lax.broadcasted_iota(jnp.int32, shape, own.ndim - i) for i in (2, 1))
    is_behind = (others > own) | ((others == own) & (other_place < place))
    return is_behind.sum(axis=-1)
