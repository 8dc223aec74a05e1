"""A model of latent attention in plain JAX for the engine, and its tokens by NumPy, unabsorbed."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_paged.engine import KVCacheSpec

HEADS, RANK, NOPE, ROPE, VALUE, SIZE = 4, 16, 12, 8, 10, 32
SM_SCALE = 1.5 * (NOPE + ROPE) ** -0.5  # not that of head_dim, as with YaRN
EPS = 1e-3
FREQUENCIES = 10.0 ** -np.arange(ROPE // 2)


@dataclass(frozen=True, kw_only=True)
class LatentModel:
    """Sizes, and functions of the weights: what the engine calls a `Model`."""

    vocab_size: int = 40
    max_model_len: int = 64
    eos_token_ids: tuple[int, ...] = ()
    num_layers: int = 2

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        sizes = dict(num_kv_heads=1, head_dim=RANK + ROPE, v_head_dim=RANK)
        return KVCacheSpec(num_layers=self.num_layers, dtype="float32", **sizes)

    def init(self, seed):
        rng = np.random.default_rng(seed)
        shapes = dict(q=(SIZE, HEADS, NOPE + ROPE), latents=(SIZE, RANK + ROPE), norm=(RANK,))
        shapes |= dict(k_up=(RANK, HEADS, NOPE), v_up=(RANK, HEADS, VALUE))
        shapes = {
            name: (self.num_layers, *shape)
            for name, shape in (shapes | dict(out=(HEADS, VALUE, SIZE))).items()
        }
        shapes |= dict(embed=(self.vocab_size, SIZE), head=(SIZE, self.vocab_size))
        return {name: rng.standard_normal(shape, np.float32) / 3 for name, shape in shapes.items()}

    def param_specs(self, params):
        heads = dict(q=P(None, None, "tensor"), out=P(None, "tensor"))
        heads |= dict(k_up=P(None, None, "tensor"), v_up=P(None, None, "tensor"))
        return {name: heads.get(name, P()) for name in params}

    def __call__(self, params, tokens, positions, attend, cache):
        x, layers = params["embed"][tokens], []
        angles = positions[:, None, None].astype(jnp.float32) * FREQUENCIES.astype(np.float32)
        rotation = jnp.cos(angles), jnp.sin(angles)
        for index, layer in enumerate(cache):
            w = {name: x[index] for name, x in params.items() if name not in ("embed", "head")}
            q_nope, q_pe = jnp.split(jnp.einsum("te,ehd->thd", x, w["q"]), [NOPE], axis=-1)
            q_nope = jnp.einsum("thd,chd->thc", q_nope, w["k_up"])
            how = dict(rotation=rotation, norm=w["norm"], eps=EPS, sm_scale=SM_SCALE)
            out, layer = attend.latent(q_nope, q_pe, x @ w["latents"], layer, **how)
            x += jnp.einsum("thc,chd,hde->te", out, w["v_up"], w["out"])
            layers.append(layer)
        return x, tuple(layers)

    def logits(self, params, hidden):
        return (hidden @ params["head"]).astype(jnp.float32)


def normed(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotated(x, cos, sin):
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def expected_logits(params, tokens):
    """Logits `f64[T, V]` after each token, with K and V of each head."""
    params = {name: np.asarray(x, np.float64) for name, x in jax.device_get(params).items()}
    x = params["embed"][tokens]
    angles = np.arange(len(x))[:, None, None] * FREQUENCIES
    rotation = np.cos(angles), np.sin(angles)
    for index in range(len(params["q"])):
        w = {name: x[index] for name, x in params.items() if name not in ("embed", "head")}
        q_nope, q_pe = np.split(np.einsum("te,ehd->thd", x, w["q"]), [NOPE], axis=-1)
        latent, key = np.split(x @ w["latents"], [RANK], axis=-1)
        latent = normed(latent, w["norm"])
        k_nope, v = (np.einsum("tc,chd->thd", latent, w[name]) for name in ("k_up", "v_up"))
        q_pe, key = rotated(q_pe, *rotation), rotated(key[:, None], *rotation)
        logits = np.einsum("qhd,khd->hqk", q_nope, k_nope)
        logits = (logits + np.einsum("qhd,kd->hqk", q_pe, key[:, 0])) * SM_SCALE
        logits = np.where(np.tri(len(x), dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd,hde->qe", weights, v, w["out"])
    return x @ params["head"]


def greedy_tokens(params, prompt, num_tokens):
    """The next tokens of a prompt."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(expected_logits(params, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
