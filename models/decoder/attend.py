"""Attention of a decoder, as its layers call it: the engine's, or within rows without a cache."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

import pallas_paged as pp
from models.decoder.rotary import Rotation
from pallas_paged.decoder.peers import Peers
from pallas_paged.decoder.unmerged_attention import UnmergedAttention

# Cache of one layer: its pages, or K and V [B, max_len, Hkv, D] of a contiguous cache.
LayerCache = pp.LayerKV | tuple[jax.Array, jax.Array]


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
        Where a decoder has them, it gives `sm_scale`, `soft_cap` and `sinks` of `paged_attention`.
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
        **options: Any,
    ) -> tuple[jax.Array | UnmergedAttention, LayerCache | None]:
        """As the call with what `split_qkv` returns: qkv [..., Hkv, Hq / Hkv + 2, D].

        If unmerged, out may be what `between_attentions` merges. Options are those of the call.
        """


@runtime_checkable
class LatentAttend(Attend, Protocol):
    """An `Attend` over a cache of latents, which it also norms and rotates: the engine's."""

    def latent(
        self,
        q_nope: jax.Array,
        q_pe: jax.Array,
        latents: jax.Array,
        cache: LayerCache | None,
        *,
        rotation: Rotation,
        norm: jax.Array,
        eps: float,
        sm_scale: float,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Absorbed queries [..., H, C] and [..., H, R] of new latents [..., C + R] to [..., H, C].

        A latent is K of all heads, and its first C elements, normed, are V.
        """


@runtime_checkable
class ParallelAttend(Attend, Protocol):
    """An `Attend` that knows the devices of a mesh and adds up over them: the engine's."""

    @property
    def peers(self) -> Peers | None:
        """The devices; None: there is one."""

    def embed(self, token_ids: jax.Array, table: jax.Array) -> jax.Array:
        """table[token_ids], where each device has a part of the rows."""

    def row_linear(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x @ weight.T, whose columns are sharded."""

    def row_linear_norm(
        self, x: jax.Array, weight: jax.Array, residual: jax.Array, norm: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """residual + x @ weight.T, whose columns are sharded; and its RMS norm."""


@runtime_checkable
class RoutedAttend(Attend, Protocol):
    """An `Attend` that reports to which experts tokens went, and may give them: the engine's."""

    @property
    def routed_experts(self) -> jax.Array | None:
        """Experts i32[T, layers with experts, k] to use, as `Decoder` takes them, or None."""

    def record(self, experts: jax.Array) -> None:
        """Take the experts i32[T, k] of the next layer with experts."""


def dense_attend() -> Attend:
    """Causal attention within each row of [B, T], for training; a cache passes through."""

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache | None,
        *,
        sliding_window: int | None,
        sm_scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        if soft_cap is not None or sinks is not None:  # which JAX's attention lacks
            return _attend_by_logits(q, k, v, sliding_window, sm_scale, soft_cap, sinks), cache
        window = None
        if sliding_window is not None:  # no more than there are keys, for JAX adds it to positions
            window = (min(sliding_window, q.shape[1]) - 1, 0)
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=sm_scale,
            is_causal=True,
            local_window_size=window,
            implementation="cudnn" if _cudnn_takes(q) else None,
        )
        return out, cache

    return attend


def _attend_by_logits(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sliding_window: int | None,
    sm_scale: float | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attend with all logits f32[B, Hkv, G, T, T] in memory."""
    *batch, num_tokens, _, head_dim = q.shape
    heads = q.reshape(*batch, num_tokens, k.shape[-2], -1, head_dim)
    how: Any = dict(preferred_element_type=jnp.float32)
    logits = jnp.einsum("...qhgd,...khd->...hgqk", heads, k, **how)
    logits *= head_dim**-0.5 if sm_scale is None else sm_scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    distance = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)
    # No more than there are keys: a window of a config may not fit 32 bits.
    window = num_tokens if sliding_window is None else min(sliding_window, num_tokens)
    logits = jnp.where((distance >= 0) & (distance < window), logits, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(k.shape[-2], -1, 1, 1)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits)[..., :num_tokens].astype(v.dtype)
    return jnp.einsum("...hgqk,...khd->...qhgd", weights, v).reshape(q.shape)


def _cudnn_takes(q: jax.Array) -> bool:
    half = q.dtype in (jnp.float16, jnp.bfloat16)
    head_dim = q.shape[-1]
    return jax.default_backend() == "gpu" and half and head_dim % 8 == 0 and head_dim <= 128
