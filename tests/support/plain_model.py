"""A transformer in plain JAX: the weights are a dict, the model is functions of them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_paged.engine import KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class PlainModel:
    """Sizes, and functions of the weights: what the engine calls a `Model`."""

    vocab_size: int = 64
    max_model_len: int = 128
    eos_token_ids: tuple[int, ...] = ()
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    sliding_window: int | None = None
    dtype: str = "float32"

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            sliding_windows=(self.sliding_window,) * self.num_layers,
        )

    def init(self, seed):
        """Return random NumPy weights of a seed or key; the tokens before matter much."""
        if not isinstance(seed, int):
            seed = jax.random.key_data(seed)
        rng = np.random.default_rng(seed)
        size = self.num_heads * self.head_dim
        shapes = dict(qkv=(size, size + 2 * self.num_kv_heads * self.head_dim), out=(size, size))
        shapes |= dict(up=(size, 4 * size), down=(4 * size, size))
        shapes = {name: (self.num_layers, *shape) for name, shape in shapes.items()}
        shapes |= dict(embed=(self.vocab_size, size), head=(size, self.vocab_size))
        return {
            name: (2 * rng.standard_normal(shape) / shape[-2] ** 0.5).astype(jnp.dtype(self.dtype))
            for name, shape in shapes.items()
        }

    def param_specs(self, params):
        """Return the shardings of the weights, for `EngineConfig(tensor_parallel_size=N)`."""
        columns, rows = P(None, None, "tensor"), P(None, "tensor")
        specs = dict(qkv=columns, out=rows, up=columns, down=rows)
        return specs | dict(embed=P("tensor"), head=P(None, "tensor"))

    def __call__(self, params, tokens, positions, attend, cache):
        """Run on packed tokens i32[T] at positions i32[T]; return hidden [T, E] and the cache."""
        x, layers = params["embed"][tokens], []
        for index, layer in enumerate(cache):
            heads = (rms_norm(x) @ params["qkv"][index]).reshape(len(tokens), -1, self.head_dim)
            ends = (self.num_heads, self.num_heads + self.num_kv_heads)
            q, k, v = jnp.split(heads, ends, axis=1)  # [T, heads, D]
            q, k = rotate(q, positions), rotate(k, positions)
            out, layer = attend(q, k, v, layer, sliding_window=self.sliding_window)
            x += out.reshape(x.shape) @ params["out"][index]
            x += jax.nn.silu(rms_norm(x) @ params["up"][index]) @ params["down"][index]
            layers.append(layer)
        return rms_norm(x), tuple(layers)

    def logits(self, params, hidden):
        """Return f32[..., V] of hidden [..., E]."""
        return (hidden @ params["head"]).astype(jnp.float32)


def rms_norm(x):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def rotate(x, positions):
    """Rotate the pairs (i, i + D / 2) of x [T, heads, D] by their positions."""
    frequencies = 10000.0 ** -jnp.arange(0, 1, 2 / x.shape[-1])
    angles = jnp.outer(positions.astype(jnp.float32), frequencies)[:, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def dense_logits(model, params, tokens, padding=0):
    """Return f32[T, V] of one sequence i32[T], after `padding` tokens, without pages."""
    positions = jnp.arange(len(tokens)) - padding

    def attend(q, k, v, cache, *, sliding_window=None):
        age = positions[:, None] - positions  # of each key, for each query
        seen = (age >= 0) & (age < (sliding_window or len(tokens))) & (positions >= 0)
        out = jax.nn.dot_product_attention(q[None], k[None], v[None], mask=seen[None, None])
        return out[0], cache

    no_cache = (None,) * model.kv_cache_spec.num_layers
    hidden, _ = model(params, tokens, positions, attend, no_cache)
    return model.logits(params, hidden)


def greedy_tokens(model, params, prompt, num_tokens):
    """Return the next tokens of a prompt; each comes from all tokens before it."""
    end = len(prompt) + num_tokens
    tokens = np.zeros(model.max_model_len, np.int32)
    tokens[: len(prompt)] = prompt
    tokens = _append(model, params, tokens, len(prompt), end)
    return np.asarray(tokens)[len(prompt) : end].tolist()


def _append(model, params, tokens, start, end):
    def step(position, tokens):
        logits = dense_logits(model, params, tokens)[position - 1]
        return tokens.at[position].set(jnp.argmax(logits).astype(jnp.int32))

    return jax.lax.fori_loop(start, end, step, tokens)


_append = jax.jit(_append, static_argnames="model")
