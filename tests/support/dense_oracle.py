"""A tiny decoder of `models/`, and its generation without a cache."""

from functools import partial

import jax
import numpy as np
from flax import nnx

from models.decoder import Decoder, ModelConfig, dense_attend, engine_model
from tests.support.oracle import Oracle

_SIZES = dict(vocab_size=40, hidden_size=32, intermediate_size=48, max_position_embeddings=64)
CONFIG = ModelConfig(num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=16, **_SIZES)


def tiny_model(config: ModelConfig = CONFIG) -> Decoder:
    """A random decoder in f32, scaled up so that its logits are far apart."""
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    return nnx.merge(graphdef, jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params))


def positions_of(tokens: np.ndarray) -> np.ndarray:
    """Positions of tokens i32[..., T] that are complete sequences."""
    return np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int32), tokens.shape)


def dense_logits(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Logits f32[B, T, V] after each token i32[B, T], in rows without a cache."""
    graphdef, params = nnx.split(model)
    return np.asarray(logits_of(params, tokens, graphdef))


@partial(jax.jit, static_argnames="graphdef")
def logits_of(params: nnx.State, tokens: np.ndarray, graphdef: nnx.GraphDef) -> jax.Array:
    """As `dense_logits`, with other weights than those of the model."""
    model = nnx.merge(graphdef, params)
    hidden, cache = model(tokens, positions_of(tokens), dense_attend())
    assert cache is None
    return model.logits(hidden)


class DenseOracle(Oracle):
    """The tokens that a decoder must generate, one sequence at a time."""

    def __init__(self, model: Decoder):
        super().__init__(*engine_model(model))
