"""Modules that all layers of a decoder are made of: products, embeddings, norms, MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.decoder.config import ModelConfig
from pallas_paged.decoder.rms_norm import rms_norm

Dropout = Callable[[jax.Array], jax.Array]
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def identity(x: jax.Array) -> jax.Array:
    """No dropout."""
    return x


class Linear(nnx.Module):
    """The weight and the bias of x @ weight.T (+ bias), which may have several output axes."""

    def __init__(
        self,
        in_size: int,
        *out_shape: int,
        bias: bool = False,
        stddev: float = 0.02,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.weight = nnx.Param(normal(rngs, (*out_shape, in_size), stddev, dtype))
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype)) if bias else None

    @property
    def matrix(self) -> jax.Array:
        """The weight with one output axis: of several, XLA would transpose, hence copy, it."""
        weight = self.weight[...]
        return weight.reshape(-1, weight.shape[-1])

    @property
    def vector(self) -> jax.Array | None:
        """The bias with one axis."""
        return None if self.bias is None else self.bias[...].reshape(-1)


class Embedding(nnx.Module):
    """A table of vocab_size vectors."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, (vocab_size, hidden_size), 0.02, dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.weight[...][tokens]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in f32."""

    def __init__(self, *shape: int, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(shape, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


def norm_of(config: ModelConfig, *shape: int, dtype: DTypeLike) -> RMSNorm:
    """A norm with weights of this shape, and the decoder's epsilon."""
    # Where files have what is added to 1, the sum in bf16 would lose bits.
    dtype = jnp.float32 if config.norm_offset else dtype
    return RMSNorm(*shape, eps=config.rms_norm_eps, dtype=dtype)


class MLP(nnx.Module):
    """A gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden_size = config.hidden_size
        self.activation = config.activation
        self.gate_up_proj = Linear(hidden_size, size, 2, dtype=dtype, rngs=rngs)
        weight = self.gate_up_proj.weight  # drawn as all of gate, then up
        weight[...] = weight[...].reshape(2, size, hidden_size).swapaxes(0, 1)
        self.down_proj = Linear(
            size, hidden_size, stddev=residual_stddev(config), dtype=dtype, rngs=rngs
        )

    def features(self, x: jax.Array) -> jax.Array:
        """What `down_proj` multiplies."""
        return gated(x @ self.gate_up_proj.matrix.T, self.activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.features(x) @ self.down_proj.matrix.T


def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """Pairs of gate and up [..., 2 * F] to activation(gate) * up [..., F]."""
    pairs = gate_up.reshape(*gate_up.shape[:-1], -1, 2)
    return _ACTIVATIONS[activation](pairs[..., 0]) * pairs[..., 1]


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float, dtype: DTypeLike) -> jax.Array:
    return (jax.random.normal(rngs.params(), shape) * stddev).astype(dtype)


def residual_stddev(config: ModelConfig) -> float:
    # GPT-2: keeps the variance of the residual stream independent of depth at the start.
    return 0.02 / math.sqrt(2 * config.num_layers)
