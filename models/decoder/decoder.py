"""A decoder in Flax NNX whose attention, and with it the cache, is passed in.

Modules and parameters carry Hugging Face's names, and weights its [out, in] layout, so that a
checkpoint needs no transposing; only q/k/v and gate/up are fused, for fewer kernels per step. The
first axis of a fused weight is that of KV heads, or of pairs of gate and up, so that devices can
share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import pallas_paged as pp
from models.decoder.attend import Attend, FusedAttend, LayerCache, ParallelAttend
from models.decoder.config import ModelConfig, is_vocab_sharded
from models.decoder.experts import SparseMLP
from models.decoder.latent_attention import LatentAttention
from models.decoder.modules import (
    MLP,
    Dropout,
    Embedding,
    Linear,
    RMSNorm,
    identity,
    residual_stddev,
)
from models.decoder.rotary import Rotation, rotation
from pallas_paged.decoder.between_attentions import BlockWeights, Residual, between_attentions
from pallas_paged.decoder.unmerged_attention import UnmergedAttention


class Attention(nnx.Module):
    """Grouped-query attention around an `Attend`, between two products."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.sliding_window = config.sliding_windows[layer] if config.sliding_windows else None
        q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
        hidden_size, stddev = config.hidden_size, residual_stddev(config)
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


class DecoderLayer(nnx.Module):
    """Attention and MLP, each normed before and added after."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        attention = Attention if config.latent is None else LatentAttention
        self.self_attn = attention(config, layer, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp: MLP | SparseMLP
        if config.experts is None or layer < config.experts.first_k_dense_replace:
            self.mlp = MLP(config, config.intermediate_size, dtype=dtype, rngs=rngs)
        else:
            self.mlp = SparseMLP(config, dtype=dtype, rngs=rngs)

    @property
    def qkv_proj(self) -> Linear | None:
        """What the layer before multiplies by; None where attention takes what is normed."""
        return None if isinstance(self.self_attn, LatentAttention) else self.self_attn.qkv_proj

    def qkv(self, x: jax.Array) -> jax.Array:
        """Norm the residual [..., E] and multiply, for the attention of the first layer."""
        out, proj = self.input_layernorm(x), self.qkv_proj
        if proj is None:
            return out
        out = out @ proj.matrix.T
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
        if isinstance(mlp, SparseMLP):
            assert qkv_proj is None and not isinstance(attended, UnmergedAttention)
            x, normed = self._after_attention(attended, residual.x, attend, dropout)
            x = x + dropout(mlp(normed))
            return out_norm(x), replace(residual, x=x), cache
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

    def _after_attention(
        self, attended: jax.Array, x: jax.Array, attend: Attend, dropout: Dropout
    ) -> tuple[jax.Array, jax.Array]:
        """Add the product of `o_proj` to the residual, and return its norm, too."""
        weight, norm = self.self_attn.o_proj.matrix, self.post_attention_layernorm
        if isinstance(attend, ParallelAttend) and dropout is identity:
            return attend.row_linear_norm(attended, weight, x, norm.weight[...], norm.eps)
        x = x + dropout(attended @ weight.T)
        return x, norm(x)


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
            (layer.input_layernorm, layer.qkv_proj) for layer in self.layers[1:]
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


def _fuse_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Join projections: q [Hq, ...], k and v [Hkv, ...] to [Hkv, Hq / Hkv + 2, ...]."""
    groups = q.reshape(k.shape[0], -1, *q.shape[1:])
    return jnp.concatenate([groups, k[:, None], v[:, None]], axis=1)
