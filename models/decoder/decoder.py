"""A decoder in Flax NNX whose attention, and with it the cache, is passed in.

Modules and parameters carry Hugging Face's names, and weights its [out, in] layout, so that a
checkpoint needs no transposing; only q/k/v and gate/up are fused, for fewer kernels per step. The
first axis of a fused weight is that of KV heads, or of pairs of gate and up, so that devices can
share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.decoder.attend import Attend, LayerCache, ParallelAttend, RoutedAttend
from models.decoder.attention import Attention
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
    norm_of,
)
from models.decoder.rotary import Rotation, rotation
from pallas_paged.decoder.between_attentions import BlockWeights, Residual, between_attentions
from pallas_paged.decoder.unmerged_attention import UnmergedAttention


class DecoderLayer(nnx.Module):
    """Attention and MLP, each normed before or after, or both, and added."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.has_post_norms = config.post_norms
        norm = partial(norm_of, config, config.hidden_size, dtype=dtype)
        self.input_layernorm = norm() if config.pre_norms else None
        attention = Attention if config.latent is None else LatentAttention
        self.self_attn = attention(config, layer, dtype=dtype, rngs=rngs)
        # Hugging Face's name of the norm before the MLP, or, with post norms, of that of attention.
        self.post_attention_layernorm = norm()
        both = config.pre_norms and config.post_norms
        self.pre_feedforward_layernorm = norm() if both else None
        self.post_feedforward_layernorm = norm() if config.post_norms else None
        self.layer_scalar = nnx.Param(jnp.ones(1, dtype)) if config.layer_scalars else None
        self.mlp: MLP | SparseMLP
        if config.experts is None or layer in config.experts.dense_layers:
            self.mlp = MLP(config, config.intermediate_size, dtype=dtype, rngs=rngs)
        else:
            self.mlp = SparseMLP(config, dtype=dtype, rngs=rngs)

    @property
    def qkv_proj(self) -> Linear | None:
        """What the layer before multiplies by; None where attention takes what is normed."""
        return None if isinstance(self.self_attn, LatentAttention) else self.self_attn.qkv_proj

    def qkv(self, x: jax.Array) -> jax.Array:
        """Norm the residual [..., E] and multiply, for the attention of the first layer."""
        return _product(_normed(x, self.input_layernorm), self.qkv_proj)

    def __call__(
        self,
        qkv: jax.Array,
        residual: Residual,
        rotation: Rotation,
        attend: Attend,
        cache: LayerCache | None,
        dropout: Dropout,
        routed: jax.Array | None,
        out_norm: RMSNorm | None,
        qkv_proj: Linear | None,
    ) -> tuple[jax.Array, Residual, LayerCache | None, jax.Array | None]:
        """Run from the qkv of this layer to that of the next, or to the final norm.

        `routed` are experts i32[..., k] to be used, as in `Router`; those used are returned.
        """
        mlp = self.mlp
        attended, cache = self.self_attn(qkv, rotation, attend, cache)
        is_scaled = self.has_post_norms or self.layer_scalar is not None
        if is_scaled or (isinstance(mlp, MLP) and mlp.activation != "silu"):
            if isinstance(attended, UnmergedAttention):
                attended = attended.merged()
            x, out, routed = self._separately(
                attended, residual.x, attend, dropout, routed, out_norm
            )
            return _product(out, qkv_proj), replace(residual, x=x), cache, routed
        assert out_norm is not None
        how: dict[str, Any] = {}
        if isinstance(mlp, SparseMLP):
            how["mlp"] = partial(mlp, is_token=getattr(attend, "is_token", None), given=routed)
            how["routing"] = mlp.routing if routed is None else None
        residual, out, routed = between_attentions(
            attended,
            residual,
            self._weights(out_norm, qkv_proj),
            eps=out_norm.eps,
            dropout=None if dropout is identity else dropout,
            peers=attend.peers if isinstance(attend, ParallelAttend) else None,
            **how,
        )
        return out, residual, cache, routed

    def _weights(self, out_norm: RMSNorm, qkv_proj: Linear | None) -> BlockWeights:
        o_proj, mlp = self.self_attn.o_proj, self.mlp
        of_mlp: dict[str, Any]
        if isinstance(mlp, SparseMLP):
            of_mlp = mlp.block_weights
        else:
            of_mlp = dict(gate_up=mlp.gate_up_proj.weight[...], down=mlp.down_proj.weight[...])
        return BlockWeights(
            o=o_proj.matrix,
            o_bias=o_proj.vector,
            mlp_norm=self.post_attention_layernorm.weight[...],
            out_norm=out_norm.weight[...],
            qkv=None if qkv_proj is None else qkv_proj.matrix,
            qkv_bias=None if qkv_proj is None else qkv_proj.vector,
            **of_mlp,
        )

    def _separately(
        self,
        attended: jax.Array,
        x: jax.Array,
        attend: Attend,
        dropout: Dropout,
        routed: jax.Array | None,
        out_norm: RMSNorm | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Do what `between_attentions` does, up to its last norm, for layers that it can't do."""
        after_attention: RMSNorm | None = None
        mlp_norm: RMSNorm | None = self.post_attention_layernorm
        if self.has_post_norms:
            after_attention, mlp_norm = mlp_norm, self.pre_feedforward_layernorm
        x, normed = _add(
            attended, self.self_attn.o_proj, x, after_attention, mlp_norm, attend, dropout
        )
        after_mlp = self.post_feedforward_layernorm
        next_norm = out_norm if self.layer_scalar is None else None
        if isinstance(self.mlp, MLP):
            features = self.mlp.features(normed)
            down_proj = self.mlp.down_proj
            x, out = _add(features, down_proj, x, after_mlp, next_norm, attend, dropout)
            routed = None
        else:
            out, routed = self.mlp(normed, getattr(attend, "is_token", None), routed)
            x = x + dropout(_normed(out, after_mlp))
            out = _normed(x, next_norm)
        if self.layer_scalar is not None:
            x = x * self.layer_scalar[...]
            out = _normed(x, out_norm)
        return x, out, routed


class Decoder(nnx.Module):
    """Token ids in, hidden states and then logits out."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(vocab_size, hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = norm_of(config, hidden_size, dtype=dtype)
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
        routed_experts: jax.Array | None = None,
        embedded: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None]:
        """Run all layers and the final norm.

        Args:
            tokens: i32[...], [B, T] for training, [T] packed for prompts, [B] for a decode step.
            positions: i32[...], the place of each token in its own sequence.
            attend: the attention of every layer, `dense_attend`, or the engine's.
            cache: what `attend` reads and writes, one entry per layer, or None.
            dropout: applied to the embeddings and to each residual branch (training only).
            routed_experts: i32[..., layers with experts, k], experts to use in place of the
                router's choice, such as those of `Rollouts`; below 0: the router's own. Their
                weights are this router's. None: those of `attend`, or the router's own.
            embedded: [..., E], what the first layer takes of the tokens; None: their embeddings.

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
        if routed_experts is None and isinstance(attend, RoutedAttend):
            routed_experts = attend.routed_experts
        angles = rotation(positions, self.config, whole_rows=cache is None)
        window_angles, of_windows = angles, self.config.of_windows()
        if of_windows != self.config:
            window_angles = rotation(positions, of_windows)

        def run(
            structure: nnx.GraphDef,
            weights: nnx.State,
            qkv: jax.Array,
            residual: Residual,
            layer_cache: LayerCache | None,
            routed: jax.Array | None,
        ) -> tuple[jax.Array, Residual, LayerCache | None, jax.Array | None]:
            layer, *after = nnx.merge(structure, weights)
            has_window = self.config.latent is None and layer.self_attn.sliding_window is not None
            turned = window_angles if has_window else angles
            return layer(qkv, residual, turned, attend, layer_cache, dropout, routed, *after)

        if dropout is identity:
            # Layers of one structure are then traced and lowered once: a step of 28 layers in 0.3
            # instead of 1.2 seconds. Dropout draws anew in each layer, so it must be traced anew.
            run = jax.jit(run, static_argnums=0)
        x = self.embed(tokens, attend) if embedded is None else embedded
        residual = Residual(x=dropout(x))
        out = self.layers[0].qkv(residual.x)
        after: list[tuple[RMSNorm | None, Linear | None]] = [
            (layer.input_layernorm, layer.qkv_proj) for layer in self.layers[1:]
        ]
        after.append((self.norm, None))
        new_caches: list[LayerCache] = []
        num_routed = 0  # layers with experts so far
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache[index]
            parts = nnx.split((layer, *after[index]))
            given = None
            if isinstance(layer.mlp, SparseMLP):
                given = None if routed_experts is None else routed_experts[..., num_routed, :]
                num_routed += 1
            out, residual, new_cache, routed = run(*parts, out, residual, layer_cache, given)
            if routed is not None and isinstance(attend, RoutedAttend):
                attend.record(routed)
            if new_cache is not None:
                new_caches.append(new_cache)
        return out, None if cache is None else tuple(new_caches)

    def embed(self, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Embeddings [..., E] of tokens i32[...], scaled where the decoder does that."""
        if isinstance(attend, ParallelAttend) and is_vocab_sharded(self.config.vocab_size):
            x = attend.embed(tokens, self.embed_tokens.weight[...])
        else:
            x = self.embed_tokens(tokens)
        if self.config.embedding_scale is not None:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the next token: hidden [..., E] to f32[..., V]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        logits = jnp.matmul(hidden, head.weight[...].T, preferred_element_type=jnp.float32)
        cap = self.config.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _add(
    x: jax.Array,
    proj: Linear,
    residual: jax.Array,
    post_norm: RMSNorm | None,
    out_norm: RMSNorm | None,
    attend: Attend,
    dropout: Dropout,
) -> tuple[jax.Array, jax.Array]:
    """Add a branch, the product of x with a row-parallel weight; return that and its norm."""
    if isinstance(attend, ParallelAttend) and dropout is identity:
        if post_norm is None and proj.bias is None and out_norm is not None:
            norm, eps = out_norm.weight[...], out_norm.eps
            return attend.row_linear_norm(x, proj.matrix, residual, norm, eps)
        x = attend.row_linear(x, proj.matrix)
    else:
        x = x @ proj.matrix.T
    if proj.vector is not None:
        x = x + proj.vector
    residual = residual + dropout(_normed(x, post_norm))
    return residual, _normed(residual, out_norm)


def _normed(x: jax.Array, norm: RMSNorm | None) -> jax.Array:
    return x if norm is None else norm(x)


def _product(x: jax.Array, proj: Linear | None) -> jax.Array:
    if proj is None:
        return x
    x = x @ proj.matrix.T
    return x if proj.vector is None else x + proj.vector
