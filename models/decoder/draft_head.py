"""A head that drafts for a decoder: a decoder layer over a token and the hidden state before it.

As in EAGLE (Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML
2024) it continues the hidden states of the decoder, whose embeddings and output layer it uses. Its
own layer has the norm before attention and the one behind the MLP, which EAGLE's leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.decoder.adapter import EngineModel, engine_model
from models.decoder.attend import Attend, LayerCache
from models.decoder.checkpoint import read_config, read_params, write_checkpoint
from models.decoder.config import ModelConfig
from models.decoder.decoder import Decoder
from models.decoder.modules import Linear
from models.files import CheckpointError
from pallas_paged import LayerKV

ARCHITECTURE = "PallasPagedDraftHead"
# What a head has of its decoder: what embeddings, output layer and texts depend on.
_SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "tie_word_embeddings",
    "embedding_scale",
    "logits_soft_cap",
    "eos_token_ids",
    "max_position_embeddings",
)
_SHARED_MODULES = ("embed_tokens", "lm_head")


def is_own(path: Sequence[Any], value: Any = None) -> bool:
    """Return whether a parameter is the head's, by its path."""
    return path[0] not in _SHARED_MODULES


class DraftHead(Decoder):
    """A decoder of one layer that takes hidden states beside tokens."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Draw weights; `config` is that of `head_config`, and `shares` comes next."""
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)

    def shares(self, target: Decoder) -> None:
        """Take the embeddings and the output layer of a decoder, the same arrays."""
        for name in _SHARED_MODULES:
            setattr(self, name, getattr(target, name))

    def draft(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        before: jax.Array,
        attend: Attend,
        cache: Sequence[LayerCache] | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...] | None]:
        """Compute hidden states as those of the target.

        Args:
            tokens, positions, attend, cache: as of `Decoder`.
            before: [..., E], hidden states of the tokens before, the target's or its own.

        Returns:
            hidden [..., E], and the cache as `attend` left it.
        """
        x = jnp.concatenate([self.embed(tokens, attend), before], axis=-1) @ self.fc.matrix.T
        return self(tokens, positions, attend, cache, embedded=x)


class EngineHead(EngineModel):
    """A `DraftHead` without its weights; meets the engine's `DraftHead` protocol."""

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def read_hidden(self, params: nnx.State, hidden: jax.Array) -> jax.Array:
        """Return the hidden states of the target `[..., E]` as they are."""
        return hidden

    def __call__(  # type: ignore[override]
        self,
        params: nnx.State,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Any,
        cache: tuple[LayerKV, ...],
        before: jax.Array,
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """Compute the hidden states `[T, E]` of tokens behind the hidden states `before`."""
        head: Any = nnx.merge(self.graphdef, params)
        return head.draft(tokens, positions, before, attend, cache)


def engine_draft(draft: Decoder) -> tuple[EngineModel, nnx.State]:
    """Split a draft model or a head: "model" of a `speculative_config`, and `draft_params`."""
    if not isinstance(draft, DraftHead):
        return engine_model(draft)
    parts: Any = nnx.split(draft)  # of a subclass
    graphdef, params = parts
    dtype = draft.embed_tokens.weight.get_value().dtype
    return EngineHead(config=draft.config, dtype=dtype, graphdef=graphdef), params


def head_config(target: ModelConfig, **sizes: int) -> ModelConfig:
    """Return the sizes of a head of a decoder.

    Args:
        target: of the decoder.
        sizes: `intermediate_size`, `num_q_heads`, `num_kv_heads`, `head_dim`; by default those of
            the decoder.
    """
    own = ("intermediate_size", "num_q_heads", "num_kv_heads", "head_dim")
    names = (*own, "rms_norm_eps", "rope_theta", *_SHARED_FIELDS)
    fields: dict[str, Any] = {name: getattr(target, name) for name in names}
    return ModelConfig(num_layers=1, **fields | sizes)


def save_draft_head(folder: str | Path, head: DraftHead) -> None:
    """Write a head without what it shares, in the dtype of its weights."""
    plain = dataclasses.replace(head.config, embedding_scale=None, logits_soft_cap=None)
    state = nnx.state(head, nnx.Param)
    own = [x for x in nnx.to_flat_state(state) if is_own(x[0])]
    dtype = head.fc.weight[...].dtype.name
    contents = plain.to_hugging_face() | {"architectures": [ARCHITECTURE], "torch_dtype": dtype}
    contents |= {"model_type": "pallas_paged_draft_head"}
    write_checkpoint(Path(folder), own, plain, contents)


def load_draft_head(folder: str | Path, target: Decoder) -> DraftHead:
    """Read a head from its folder, in the dtype of the target's embeddings.

    Args:
        folder: from `save_draft_head`.
        target: the decoder for which it drafts, whose embeddings and output layer it uses.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor is missing, unexpected or of another
            shape, or the head is of another decoder.
    """
    folder = Path(folder)
    config = read_config(folder, ARCHITECTURE)
    for name in ("hidden_size", "vocab_size"):
        value, wanted = getattr(config, name), getattr(target.config, name)
        if value != wanted:
            raise CheckpointError(f"{folder}: {name}={value} must be the decoder's, {wanted}")
    shared = {name: getattr(target.config, name) for name in _SHARED_FIELDS}
    config = dataclasses.replace(config, **shared)
    dtype = target.embed_tokens.weight.get_value().dtype

    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: DraftHead(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    each = nnx.to_flat_state(state)
    own = [x for x in each if is_own(x[0])]
    loaded = dict(each) | dict(read_params(folder, own, config, dtype))
    head = nnx.merge(graphdef, nnx.from_flat_state(loaded))
    head.shares(target)
    return head
