"""A Llama-family decoder in Flax NNX whose attention, and with it the cache, is passed in.

Modules and parameters carry Hugging Face's names, and weights its [out, in] layout, so that a
checkpoint needs no transposing; only q/k/v and gate/up are fused, for fewer kernels per step. The
first axis of a fused weight is that of KV heads, or of pairs of gate and up, so that devices can
share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import pallas_paged as pp
from models.decoder.config import ModelConfig, is_vocab_sharded
from models.decoder.rotary import Rotation, rotation
from pallas_paged.decoder.between_attentions import BlockWeights, Residual, between_attentions
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.decoder.unmerged_attention import UnmergedAttention

# Cache of one layer: its pages, or K and V [B, max_len, Hkv, D] of a contiguous cache.
LayerCache = pp.LayerKV | tuple[jax.Array, jax.Array]
Dropout = Callable[[jax.Array], jax.Array]


class Attend(Protocol):
    """Attention of one layer: what its queries see of its keys, old and new."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache | None,
        *,
        sliding_window: int | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """q [..., Hq, D] and k, v [..., Hkv, D] to out, like q, and the cache with k and v in it.

        A query at position p sees the keys j with p - sliding_window < j <= p; None: all j <= p.
        """


@runtime_checkable
class FusedAttend(Attend, Protocol):
    """An `Attend` that also norms and rotates q and k, and splits them from v: the engine's."""

    def fused(
        self,
        qkv: jax.Array,
        cache: LayerCache | None,
        *,
        rotation: Rotation,
        q_norm: jax.Array | None,
        k_norm: jax.Array | None,
        eps: float,
        sliding_window: int | None,
        unmerged: bool,
    ) -> tuple[jax.Array | UnmergedAttention, LayerCache | None]:
        """As the call with what `split_qkv` returns: qkv [..., Hkv, Hq / Hkv + 2, D].

        If unmerged, out may be what `between_attentions` merges.
        """


@runtime_checkable
class ParallelAttend(Attend, Protocol):
    """An `Attend` that knows the devices of a mesh and adds up over them: the engine's."""

    def embed(self, token_ids: jax.Array, table: jax.Array) -> jax.Array:
        """table[token_ids], where each device has a part of the rows."""

    def row_linear_norm(
        self, x: jax.Array, weight: jax.Array, residual: jax.Array, norm: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """residual + x @ weight.T, whose columns are sharded; and its RMS norm."""


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
        self.weight = nnx.Param(_normal(rngs, (*out_shape, in_size), stddev, dtype))
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
        self.weight = nnx.Param(_normal(rngs, (vocab_size, hidden_size), 0.02, dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.weight[...][tokens]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in f32."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(size, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention around an `Attend`, between two products."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.sliding_window = config.sliding_windows[layer] if config.sliding_windows else None
        q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
        hidden_size, stddev = config.hidden_size, _residual_stddev(config)
        # Each KV head has its query heads, its K and its V.
        shape = (kv_heads, q_heads // kv_heads + 2, config.head_dim)
        self.qkv_proj = Linear(hidden_size, *shape, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        weight = self.qkv_proj.weight
        # Drawn as all of q, then k, then v: a seed means the same model however they are fused.
        rows = weight[...].reshape(-1, config.head_dim, hidden_size)
        weight[...] = _fuse_qkv(*jnp.split(rows, (q_heads, q_heads + kv_heads)))
        self.o_proj = Linear(
            q_heads * config.head_dim,
            hidden_size,
            bias=config.o_bias,
            stddev=stddev,
            dtype=dtype,
            rngs=rngs,
        )

        def head_norm() -> RMSNorm | None:
            norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype)
            return norm if config.qk_norm else None

        self.q_norm, self.k_norm = head_norm(), head_norm()

    def __call__(
        self, qkv: jax.Array, rotation: Rotation, attend: Attend, cache: LayerCache | None
    ) -> tuple[jax.Array | UnmergedAttention, LayerCache | None]:
        """Attend with the product of `qkv_proj`; that of `o_proj` comes after."""
        window = self.sliding_window
        how: dict[str, Any] = {"rotation": rotation, "eps": self.config.rms_norm_eps}
        for name in ("q_norm", "k_norm"):
            norm = getattr(self, name)
            how[name] = None if norm is None else norm.weight[...]
        qkv = qkv.reshape(*qkv.shape[:-1], *self.qkv_proj.weight.shape[:-1])
        if isinstance(attend, FusedAttend):
            out, cache = attend.fused(qkv, cache, **how, sliding_window=window, unmerged=True)
            if isinstance(out, UnmergedAttention):
                return out, cache
        else:
            out, cache = attend(*pp.split_qkv(qkv, **how), cache, sliding_window=window)
        return out.reshape(*out.shape[:-2], -1), cache


class MLP(nnx.Module):
    """The weights of SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden_size, size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden_size, size, 2, dtype=dtype, rngs=rngs)
        weight = self.gate_up_proj.weight  # drawn as all of gate, then up
        weight[...] = weight[...].reshape(2, size, hidden_size).swapaxes(0, 1)
        self.down_proj = Linear(
            size, hidden_size, stddev=_residual_stddev(config), dtype=dtype, rngs=rngs
        )


class DecoderLayer(nnx.Module):
    """Attention and MLP, each normed before and added after."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def qkv(self, x: jax.Array) -> jax.Array:
        """Norm the residual [..., E] and multiply, for the attention of the first layer."""
        proj = self.self_attn.qkv_proj
        out = self.input_layernorm(x) @ proj.matrix.T
        return out if proj.vector is None else out + proj.vector

    def __call__(
        self,
        qkv: jax.Array,
        residual: Residual,
        rotation: Rotation,
        attend: Attend,
        cache: LayerCache | None,
        dropout: Dropout,
        out_norm: RMSNorm,
        qkv_proj: Linear | None,
    ) -> tuple[jax.Array, Residual, LayerCache | None]:
        """Run from the qkv of this layer to that of the next, or to the final norm."""
        attn, mlp = self.self_attn, self.mlp
        attended, cache = attn(qkv, rotation, attend, cache)
        weights = BlockWeights(
            o=attn.o_proj.matrix,
            o_bias=attn.o_proj.vector,
            mlp_norm=self.post_attention_layernorm.weight[...],
            gate_up=mlp.gate_up_proj.weight[...],
            down=mlp.down_proj.matrix,
            out_norm=out_norm.weight[...],
            qkv=None if qkv_proj is None else qkv_proj.matrix,
            qkv_bias=None if qkv_proj is None else qkv_proj.vector,
        )
        residual, out = between_attentions(
            attended,
            residual,
            weights,
            eps=out_norm.eps,
            dropout=None if dropout is identity else dropout,
            row_linear_norm=attend.row_linear_norm if isinstance(attend, ParallelAttend) else None,
        )
        return out, residual, cache


class Decoder(nnx.Module):
    """Token ids in, hidden states and then logits out."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(vocab_size, hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(hidden_size, vocab_size, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: Sequence[LayerCache] | None = None,
        *,
        dropout: Dropout = identity,
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None]:
        """Run all layers and the final norm.

        Args:
            tokens: i32[...], [B, T] for training, [T] packed for prompts, [B] for a decode step.
            positions: i32[...], the place of each token in its own sequence.
            attend: the attention of every layer, `dense_attend`, or the engine's.
            cache: what `attend` reads and writes, one entry per layer, or None.
            dropout: applied to the embeddings and to each residual branch (training only).

        Returns:
            hidden [..., E], and the cache as `attend` left it (None for None).

        Raises:
            ValueError: if shapes or the number of caches do not fit.
        """
        if tokens.shape != positions.shape:
            raise ValueError(f"{tokens.shape=} must equal {positions.shape=}")
        num_layers = self.config.num_layers
        if cache is not None and len(cache) != num_layers:
            raise ValueError(f"{len(cache)=} must equal {num_layers=}")
        angles = rotation(positions, self.config, whole_rows=cache is None)

        def run(
            structure: nnx.GraphDef,
            weights: nnx.State,
            qkv: jax.Array,
            residual: Residual,
            layer_cache: LayerCache | None,
        ) -> tuple[jax.Array, Residual, LayerCache | None]:
            layer, *after = nnx.merge(structure, weights)
            return layer(qkv, residual, angles, attend, layer_cache, dropout, *after)

        if dropout is identity:
            # Layers of one structure are then traced and lowered once: a step of 28 layers in 0.3
            # instead of 1.2 seconds. Dropout draws anew in each layer, so it must be traced anew.
            run = jax.jit(run, static_argnums=0)
        embed: Callable[[jax.Array], jax.Array] = self.embed_tokens
        if isinstance(attend, ParallelAttend) and is_vocab_sharded(self.config.vocab_size):
            embed = partial(attend.embed, table=self.embed_tokens.weight[...])
        residual = Residual(x=dropout(embed(tokens)))  # [..., E]
        out = self.layers[0].qkv(residual.x)
        after: list[tuple[RMSNorm, Linear | None]] = [
            (layer.input_layernorm, layer.self_attn.qkv_proj) for layer in self.layers[1:]
        ]
        after.append((self.norm, None))
        new_caches: list[LayerCache] = []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache[index]
            parts = nnx.split((layer, *after[index]))
            out, residual, new_cache = run(*parts, out, residual, layer_cache)
            if new_cache is not None:
                new_caches.append(new_cache)
        return out, None if cache is None else tuple(new_caches)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the next token: hidden [..., E] to f32[..., V]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return jnp.matmul(hidden, head.weight[...].T, preferred_element_type=jnp.float32)


def dense_attend() -> Attend:
    """Causal attention within each row of [B, T], for training; a cache passes through."""

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache | None,
        *,
        sliding_window: int | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        window = None
        if sliding_window is not None:  # no more than there are keys, for JAX adds it to positions
            window = (min(sliding_window, q.shape[1]) - 1, 0)
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            local_window_size=window,
            implementation="cudnn" if _cudnn_takes(q) else None,
        )
        return out, cache

    return attend


def _cudnn_takes(q: jax.Array) -> bool:
    half = q.dtype in (jnp.float16, jnp.bfloat16)
    head_dim = q.shape[-1]
    return jax.default_backend() == "gpu" and half and head_dim % 8 == 0 and head_dim <= 128


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float, dtype: DTypeLike) -> jax.Array:
    return (jax.random.normal(rngs.params(), shape) * stddev).astype(dtype)


def _fuse_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Join projections: q [Hq, ...], k and v [Hkv, ...] to [Hkv, Hq / Hkv + 2, ...]."""
    groups = q.reshape(k.shape[0], -1, *q.shape[1:])
    return jnp.concatenate([groups, k[:, None], v[:, None]], axis=1)


def _residual_stddev(config: ModelConfig) -> float:
    # GPT-2: keeps the variance of the residual stream independent of depth at the start.
    return 0.02 / math.sqrt(2 * config.num_layers)
