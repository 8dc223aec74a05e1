"""Generation without a cache: the model runs on the whole text for every token."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig
from models.decoder import Decoder, dense_attend
from models.sampling import RowSampling, sample

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


class DenseOracle:
    """The tokens that a model must generate, one row at a time."""

    def __init__(self, model: Decoder):
        graphdef, params = nnx.split(model)

        @jax.jit
        def last_logits(tokens: jax.Array, length: jax.Array) -> jax.Array:
            model = nnx.merge(graphdef, params)
            positions = jnp.arange(tokens.size)[None]
            hidden, _ = model(tokens[None], positions, dense_attend())
            return model.logits(hidden[:, length - 1])  # [1, V]

        self._last_logits = last_logits
        self._sample = jax.jit(sample)

    def continue_(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        key: jax.Array | None = None,
        params: RowSampling | None = None,
    ) -> list[int]:
        """The next num_tokens tokens: greedy, or drawn with `fold_in(key, position)`."""
        tokens = np.zeros(CONFIG.max_position_embeddings, np.int32)
        tokens[: len(prompt)] = prompt
        for end in range(len(prompt), len(prompt) + num_tokens):
            step_key = None if key is None else jax.random.fold_in(key, end)[None]
            tokens[end] = self._sample(self._last_logits(tokens, end), step_key, params)[0]
        return tokens[len(prompt) : len(prompt) + num_tokens].tolist()
