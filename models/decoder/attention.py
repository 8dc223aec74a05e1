"""Grouped-query attention of a decoder, around an `Attend`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import pallas_paged as pp
from models.decoder.attend import Attend, FusedAttend, LayerCache
from models.decoder.config import ModelConfig
from models.decoder.modules import Linear, RMSNorm, norm_of, residual_stddev
from models.decoder.rotary import Rotation
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.decoder.unmerged_attention import UnmergedAttention


class Attention(nnx.Module):
    """Grouped-query attention around an `Attend`, between two products."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.sliding_window = config.sliding_windows[layer] if config.sliding_windows else None
        self.config = config = config.of_layer(layer)
        # F32 whatever the dtype of the others is, as kernels take them: a step converts nothing.
        sinks = jnp.zeros(config.num_q_heads, jnp.float32)
        self.sinks = nnx.Param(sinks) if config.sinks else None
        q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
        hidden_size, stddev = config.hidden_size, residual_stddev(config)
        # Each KV head has its query heads, its K and its V, unless V is K.
        shape = (kv_heads, q_heads // kv_heads + (1 if config.k_eq_v else 2), config.head_dim)
        self.qkv_proj = Linear(hidden_size, *shape, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        weight = self.qkv_proj.weight
        # Drawn as all of q, then k, then v: a seed means the same model however they are fused.
        rows = weight[...].reshape(-1, config.head_dim, hidden_size)
        q, *kv = jnp.split(rows, tuple(range(q_heads, rows.shape[0], kv_heads)))
        groups = q.reshape(kv_heads, -1, *q.shape[1:])
        weight[...] = jnp.concatenate([groups, *(part[:, None] for part in kv)], axis=1)
        self.o_proj = Linear(
            q_heads * config.head_dim,
            hidden_size,
            bias=config.o_bias,
            stddev=stddev,
            dtype=dtype,
            rngs=rngs,
        )

        def head_norm(num_heads: int) -> RMSNorm | None:
            if config.qk_norm_over_heads:
                return norm_of(
                    config, kv_heads, num_heads // kv_heads, config.head_dim, dtype=dtype
                )
            return norm_of(config, config.head_dim, dtype=dtype) if config.qk_norm else None

        self.q_norm, self.k_norm = head_norm(q_heads), head_norm(kv_heads)

    def __call__(
        self, qkv: jax.Array, rotation: Rotation, attend: Attend, cache: LayerCache | None
    ) -> tuple[jax.Array | UnmergedAttention, LayerCache | None]:
        """Attend with the product of `qkv_proj`; that of `o_proj` comes after."""
        config = self.config
        options: dict[str, Any] = {
            "sm_scale": config.sm_scale,
            "soft_cap": config.attention_soft_cap,
            "sinks": None if self.sinks is None else self.sinks[...].astype(jnp.float32),
        }
        options = {name: value for name, value in options.items() if value is not None}
        options["sliding_window"] = self.sliding_window
        how: dict[str, Any] = {"rotation": rotation, "eps": config.rms_norm_eps}
        qkv = qkv.reshape(*qkv.shape[:-1], *self.qkv_proj.weight.shape[:-1])
        if config.k_eq_v:
            qkv = jnp.concatenate([qkv, qkv[..., -1:, :]], axis=-2)
        if config.v_norm:
            v = rms_norm(qkv[..., -1:, :], jnp.ones(config.head_dim), config.rms_norm_eps)
            qkv = jnp.concatenate([qkv[..., :-1, :], v], axis=-2)
        if config.qk_norm_over_heads:
            assert self.q_norm is not None and self.k_norm is not None
            qkv = _norm_over_heads(qkv, self.q_norm, self.k_norm)
        else:
            for name in ("q_norm", "k_norm"):
                norm = getattr(self, name)
                how[name] = None if norm is None else norm.weight[...]
        if isinstance(attend, FusedAttend):
            out, cache = attend.fused(qkv, cache, **how, **options, unmerged=True)
            if isinstance(out, UnmergedAttention):
                return out, cache
        else:
            out, cache = attend(*pp.split_qkv(qkv, **how), cache, **options)
        return out.reshape(*out.shape[:-2], -1), cache


def _norm_over_heads(qkv: jax.Array, q_norm: RMSNorm, k_norm: RMSNorm) -> jax.Array:
    """Norm all query heads of qkv [..., Hkv, G + 2, D] together, and all keys.

    Weights are [Hkv, G, D] and [Hkv, 1, D].
    """
    parts = qkv[..., :-2, :], qkv[..., -2:-1, :]
    normed = []
    for x, norm in zip(parts, (q_norm, k_norm), strict=True):
        x32 = x.astype(jnp.float32)
        squares = jnp.mean(x32 * x32, axis=(-3, -2, -1), keepdims=True)
        x32 = x32 * jax.lax.rsqrt(squares + norm.eps) * norm.weight[...].astype(jnp.float32)
        normed.append(x32.astype(x.dtype))
    return jnp.concatenate([*normed, qkv[..., -1:, :]], axis=-2)
