"""The decoder as a model of the engine: sizes and structure here, weights apart."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import flax
import jax
import numpy as np
from flax import nnx

from models.decoder.config import ModelConfig
from models.decoder.decoder import Decoder
from models.decoder.sharding import param_specs
from pallas_paged import LayerKV
from pallas_paged.engine import Attend, EngineConfig, KVCacheSpec, SamplingParams, sources_key


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
    def cache_key(self) -> str | None:
        """All that its programs follow from: sizes, dtype, structure, sources; None if unknown.

        The sources of a subclass, or of a decoder with modules from elsewhere, are not known here.
        """
        nodes = (getattr(node, "metadata", None) for node in self.graphdef.nodes)
        kinds = {kind.__module__.partition(".")[0] for kind in nodes if isinstance(kind, type)}
        own = type(self).__module__.startswith("models.decoder.")
        if not own or not {"models"} <= kinds <= {"models", "flax"}:
            return None
        sources = sources_key("models.decoder"), flax.__version__
        structure = hashlib.sha256(repr(self.graphdef).encode()).hexdigest()
        return repr((type(self).__name__, self.config, np.dtype(self.dtype), structure, sources))

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
        config, latent = self.config, self.config.latent
        sizes = dict(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        if latent is not None:
            sizes = dict(num_kv_heads=1, head_dim=latent.cached_dim, v_head_dim=latent.kv_lora_rank)
        return KVCacheSpec(
            num_layers=config.num_layers,
            **sizes,
            window_num_kv_heads=config.window_num_kv_heads,
            window_head_dim=config.window_head_dim,
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

    def param_specs(self, params: nnx.State) -> Any:
        """Return how devices share the weights: specs over the mesh axis "tensor"."""
        return param_specs(params)


def engine_model(
    decoder: Decoder, *, max_model_len: int | None = None
) -> tuple[EngineModel, nnx.State]:
    """Split a decoder for the engine: `Engine(*engine_model(decoder))`.

    Args:
        decoder: with its weights.
        max_model_len: most tokens of a sequence in the engine, for rotary scalings that depend on
            it, see `ModelConfig.with_context`. None: what the configuration says.

    Returns:
        The model, the same object for all decoders of equal sizes and dtypes, so that their engines
        share compiled steps; and the weights, in the structure that `Engine.update_params` expects.
    """
    graphdef, params = nnx.split(decoder)
    if max_model_len is not None:
        config = decoder.config.with_context(max_model_len)
        if config != decoder.config:
            decoder = nnx.merge(graphdef, params)  # the same weights
            decoder.config = config
            graphdef, params = nnx.split(decoder)
    dtype = decoder.embed_tokens.weight.get_value().dtype  # of abstract decoders too
    return _interned(decoder.config, dtype, graphdef), params


def engine_config(
    model: EngineModel, requests: Iterable[tuple[int, SamplingParams]], **given: Any
) -> EngineConfig:
    """Return an engine's sizes for these requests only: tokens of each prompt, and its parameters.

    Sizes are rounded up to powers of two, so that similar requests run in the same compiled steps;
    `given` ones stay as they are.
    """
    limit, num_seqs, longest = model.max_model_len, 0, 1
    num_pages, page_size = given.get("num_pages"), given.get("page_size", EngineConfig.page_size)
    if isinstance(num_pages, int) and isinstance(page_size, int):  # EngineConfig refuses others
        limit = min(limit, num_pages * page_size)
    for length, params in requests:
        num_seqs += params.num_seqs
        longest = max(longest, limit if params.max_tokens is None else length + params.max_tokens)
    sizes = {
        "max_num_seqs": min(EngineConfig.max_num_seqs, _power_of_two(num_seqs)),
        "max_model_len": min(limit, _power_of_two(longest)),
    }
    return EngineConfig(**sizes | given)


@functools.cache
def _interned(config: ModelConfig, dtype: Any, graphdef: nnx.GraphDef[Decoder]) -> EngineModel:
    return EngineModel(config=config, dtype=dtype, graphdef=graphdef)


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size` and 1."""
    return 1 << max(size - 1, 0).bit_length()
