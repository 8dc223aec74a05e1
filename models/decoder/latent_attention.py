"""Multi-head latent attention, of DeepSeek V2 and V3, around an `Attend`."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.decoder.attend import Attend, LatentAttend, LayerCache
from models.decoder.config import ModelConfig
from models.decoder.modules import Linear, RMSNorm, residual_stddev
from models.decoder.rotary import Rotation
from pallas_paged.decoder.rotary_write import rotate

_EPS = 1e-6  # of both norms; rms_norm_eps of config.json is that of the others


class LatentAttention(nnx.Module):
    """All heads share one latent of a token, and one rotary key.

    With a cache of latents the projections from them to K and to V are absorbed: they multiply
    queries and outputs, and not the context. Without one, K and V are made for each head.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        del layer  # all are alike
        sizes, heads, hidden_size = config.latent, config.num_q_heads, config.hidden_size
        assert sizes is not None
        self.sizes = sizes
        linear = partial(Linear, dtype=dtype, rngs=rngs)
        norm = partial(RMSNorm, eps=_EPS, dtype=dtype)
        self.q_proj = None if sizes.q_lora_rank else linear(hidden_size, heads, config.head_dim)
        if sizes.q_lora_rank is not None:
            self.q_a_proj = linear(hidden_size, sizes.q_lora_rank)
            self.q_a_layernorm = norm(sizes.q_lora_rank)
            self.q_b_proj = linear(sizes.q_lora_rank, heads, config.head_dim)
        self.kv_a_proj_with_mqa = linear(hidden_size, sizes.cached_dim)
        self.kv_a_layernorm = norm(sizes.kv_lora_rank)
        # Files have both as kv_b_proj. Each is a matrix of its own, because XLA would copy a slice.
        self.k_up_proj = linear(sizes.kv_lora_rank, heads, sizes.qk_nope_head_dim)
        self.v_up_proj = linear(sizes.kv_lora_rank, heads, sizes.v_head_dim)
        stddev = residual_stddev(config)
        self.o_proj = linear(heads * sizes.v_head_dim, hidden_size, stddev=stddev)

    def __call__(
        self, x: jax.Array, rotation: Rotation, attend: Attend, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend with the normed residual [..., E]; the product of `o_proj` comes after."""
        if self.q_proj is not None:
            q = x @ self.q_proj.matrix.T
        else:
            q = self.q_a_layernorm(x @ self.q_a_proj.matrix.T) @ self.q_b_proj.matrix.T
        q = q.reshape(*q.shape[:-1], -1, self.sizes.head_dim)
        q_nope, q_pe = jnp.split(q, [self.sizes.qk_nope_head_dim], axis=-1)
        latents = x @ self.kv_a_proj_with_mqa.matrix.T
        if isinstance(attend, LatentAttend):
            out, cache = attend.latent(
                jnp.einsum("...hd,hdc->...hc", q_nope, self.k_up_proj.weight[...]),
                q_pe,
                latents,
                cache,
                rotation=rotation,
                norm=self.kv_a_layernorm.weight[...],
                eps=_EPS,
                sm_scale=self.sizes.sm_scale,
            )
            out = jnp.einsum("...hc,hdc->...hd", out, self.v_up_proj.weight[...])
        else:
            out, cache = self._by_heads(q_nope, q_pe, latents, rotation, attend, cache)
        return out.reshape(*out.shape[:-2], -1), cache

    def _by_heads(
        self,
        q_nope: jax.Array,
        q_pe: jax.Array,
        latents: jax.Array,
        rotation: Rotation,
        attend: Attend,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        latents, k_pe = jnp.split(latents, [self.sizes.kv_lora_rank], axis=-1)
        latents = self.kv_a_layernorm(latents)
        k_nope, v = (
            jnp.einsum("...c,hdc->...hd", latents, proj.weight[...])
            for proj in (self.k_up_proj, self.v_up_proj)
        )
        q_pe, k_pe = rotate(q_pe, *rotation), rotate(k_pe[..., None, :], *rotation)
        q = jnp.concatenate([q_nope, q_pe], axis=-1)
        k_pe = jnp.broadcast_to(k_pe, (*k_nope.shape[:-1], k_pe.shape[-1]))
        k = jnp.concatenate([k_nope, k_pe], axis=-1)
        # An `Attend` has V of the size of K, and the scale of that size.
        v_size = v.shape[-1]
        size = max(q.shape[-1], v_size)
        q, k, v = (
            jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]) for x in (q, k, v)
        )
        q = q * jnp.asarray(self.sizes.sm_scale * math.sqrt(size), q.dtype)
        out, cache = attend(q, k, v, cache, sliding_window=None)
        return out[..., :v_size], cache
