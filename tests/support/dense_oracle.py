"""A tiny decoder of `models/`, and its generation without a cache."""

from __future__ import annotations

import jax
from flax import nnx

from models.config import ModelConfig
from models.decoder import Decoder
from models.engine_model import engine_model
from tests.support.oracle import Oracle

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)


def tiny_model(config: ModelConfig = CONFIG) -> Decoder:
    """A random decoder in f32, scaled up so that its logits are far apart."""
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    return nnx.merge(graphdef, jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params))


class DenseOracle(Oracle):
    """The tokens that a decoder must generate, one sequence at a time."""

    def __init__(self, model: Decoder):
        super().__init__(*engine_model(model))
