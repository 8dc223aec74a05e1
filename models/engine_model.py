"""The decoder as a model of the engine: sizes and structure here, weights apart."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from models.config import ModelConfig
from models.decoder import Decoder
from pallas_paged.engine.kv_cache import KVCacheSpec
from pallas_paged.engine.model import Attend
from pallas_paged.kv_pool import LayerKV


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """A `Decoder` without its weights; meets the engine's `Model` protocol.

    Attributes:
        config: sizes of the decoder.
        dtype: of the weights.
        graphdef: structure of the decoder, as `nnx.split` returns it.
    """

    config: ModelConfig
    dtype: Any
    graphdef: nnx.GraphDef[Decoder]

    def __hash__(self) -> int:
        return hash((self.config, self.dtype))  # a step hashes the model; the structure is large

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        config = self.config
        return KVCacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            sliding_windows=config.sliding_windows or None,
            k_scales=config.k_scales or None,
            v_scales=config.v_scales or None,
        )

    def __call__(
        self,
        params: nnx.State,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: tuple[LayerKV, ...],
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """Compute the hidden states `[T, E]` of `tokens` `i32[T]` at `positions` `i32[T]`."""
        decoder: Any = nnx.merge(self.graphdef, params)  # whose attention also takes other caches
        return decoder(tokens, positions, attend, cache)

    def logits(self, params: nnx.State, hidden: jax.Array) -> jax.Array:
        """Map hidden states `[..., E]` to scores of the next token, `f32[..., V]`."""
        return nnx.merge(self.graphdef, params).logits(hidden)


def engine_model(decoder: Decoder) -> tuple[EngineModel, nnx.State]:
    """Split a decoder for the engine: `Engine(*engine_model(decoder))`.

    Returns:
        The model, the same object for all decoders of equal sizes and dtypes, so that their engines
        share compiled steps; and the weights, in the structure that `Engine.update_params` expects.
    """
    graphdef, params = nnx.split(decoder)
    dtype = decoder.embed_tokens.weight[...].dtype
    return _interned(decoder.config, dtype, graphdef), params


@functools.cache
def _interned(config: ModelConfig, dtype: Any, graphdef: nnx.GraphDef[Decoder]) -> EngineModel:
    return EngineModel(config=config, dtype=dtype, graphdef=graphdef)
