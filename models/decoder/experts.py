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
from models.decoder.modules import MLP, Linear, gated, normal, residual_stddev

# Tokens at a time: features of all experts are in memory for each of them.
_BLOCK = 256


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

    def __call__(self, x: jax.Array) -> jax.Array:
        """Tokens [T, E] to f32[T, X]: 0 for experts that are not chosen."""
        config, num_experts = self.config, self.config.n_routed_experts
        logits = jnp.matmul(
            x.astype(jnp.float32),
            self.weight[...].astype(jnp.float32).T,
            precision=lax.Precision.HIGHEST,  # TF32 would choose others
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
            best = _is_chosen(groups, 2 if config.is_sigmoid else 1)
            chosen = _is_chosen(jnp.where(best, groups, 0.0).sum(axis=-1), config.topk_group)
            choice = jnp.where(chosen[..., None], groups, -jnp.inf).reshape(-1, num_experts)
        weights = jnp.where(_is_chosen(choice, config.num_experts_per_tok), scores, 0.0)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return weights * config.routed_scaling_factor


class Experts(nnx.Module):
    """Gated MLPs of one size, whose weights are two matrices."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        assert config.experts is not None
        hidden_size, size = config.hidden_size, config.experts.moe_intermediate_size
        num_experts = config.experts.n_routed_experts
        self.activation = config.activation
        self.limit, self.alpha = config.experts.swiglu_limit, config.experts.swiglu_alpha
        linear = partial(Linear, bias=config.experts.bias, dtype=dtype, rngs=rngs)
        self.gate_up_proj = linear(hidden_size, num_experts, size, 2)
        stddev = residual_stddev(config)
        self.down_proj = linear(size, hidden_size, num_experts, stddev=stddev)

    def __call__(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """Tokens [T, E] and their weights f32[T, X] to the weighted sums [T, E].

        All experts compute all tokens, as one MLP whose features are 0 where an expert has no
        weight.
        """
        down = self.down_proj.weight[...].reshape(x.shape[-1], -1)
        gate_up_bias, down_bias = self.gate_up_proj.vector, self.down_proj.bias

        def run(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, weights = block
            gate_up = x @ self.gate_up_proj.matrix.T
            if gate_up_bias is not None:
                gate_up = gate_up + gate_up_bias
            features = self._gated(gate_up).reshape(*weights.shape, -1)
            # Selected, because an infinite feature times 0 is NaN.
            chosen, weights = weights[..., None] != 0, weights.astype(x.dtype)
            features = jnp.where(chosen, features * weights[..., None], 0)
            out = features.reshape(len(x), -1) @ down.T
            return out if down_bias is None else out + weights @ down_bias[...].T

        num_tokens = len(x)
        if num_tokens <= _BLOCK:
            return run((x, weights))
        padding = -num_tokens % _BLOCK
        blocks = tuple(
            jnp.pad(y, ((0, padding), (0, 0))).reshape(-1, _BLOCK, y.shape[-1])
            for y in (x, weights)
        )
        return lax.map(run, blocks).reshape(-1, x.shape[-1])[:num_tokens]

    def _gated(self, gate_up: jax.Array) -> jax.Array:
        """Pairs of gate and up [T, X * F * 2] to features [T, X * F]."""
        if self.limit is None:
            return gated(gate_up, self.activation)
        pairs = gate_up.reshape(len(gate_up), -1, 2)
        gate = jnp.minimum(pairs[..., 0], self.limit)
        up = jnp.clip(pairs[..., 1], -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class SparseMLP(nnx.Module):
    """Chosen experts for each token, and shared ones for all."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        assert config.experts is not None
        self.gate = Router(config, dtype=dtype, rngs=rngs)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)
        size = config.experts.shared_size
        self.shared_experts = MLP(config, size, dtype=dtype, rngs=rngs) if size else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Tokens [..., E] to [..., E]."""
        tokens = x.reshape(-1, x.shape[-1])
        out = self.experts(tokens, self.gate(tokens)).reshape(x.shape)
        return out if self.shared_experts is None else out + self.shared_experts(x)


def _is_chosen(scores: jax.Array, count: int) -> jax.Array:
    """Return bool[..., X]: which `count` of the X scores f32[..., X] are the largest.

    Of equal ones the first are. Each is compared with all others, for a CUDA graph holds no sort.
    """
    place = jnp.arange(scores.shape[-1])
    own, others = scores[..., :, None], scores[..., None, :]
    is_behind = (others > own) | ((others == own) & (place < place[:, None]))
    return is_behind.sum(axis=-1) < count
