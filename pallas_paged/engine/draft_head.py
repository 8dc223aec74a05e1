"""What a draft head is to the engine: layers that draft from the hidden states of a model."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from pallas_paged.engine.model import Attend, KVCacheSpec
from pallas_paged.pages.layer import LayerKV


class DraftHead(Protocol):
    """Drafts from a token and what the model made of the tokens before it.

    Layers for multi-token prediction, as of DeepSeek-V3, and the heads of EAGLE are such; a `Model`
    whose hidden states have those of several layers side by side, which its `logits` skips, serves
    those of EAGLE-3. All but the attributes and methods here is as of `Model`. Where the head uses
    the embeddings or the output layer of the model, `draft_params` has the same arrays, which are
    not copied.

    Attributes:
        hidden_size: elements of what it takes of a token, D.
        vocab_size, max_model_len, eos_token_ids, kv_cache_spec: as of `Model`.
    """

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def kv_cache_spec(self) -> KVCacheSpec: ...
    def __hash__(self) -> int: ...

    def read_hidden(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Return what the head takes of the model's hidden states `[..., E]`: `[..., D]`."""

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: tuple[LayerKV, ...],
        before: jax.Array,
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """Compute the hidden states of new tokens.

        Args:
            params, tokens, positions, attend, cache: as of `Model`.
            before: `[T, D]`, for each token what `read_hidden` made of the token before it; behind
                a draft the head's own hidden state. 0 for the first token of a sequence, and where
                the token before came from the prefix cache.

        Returns:
            Hidden states `[T, D]`, and the cache as `attend` returned it.
        """

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Map hidden states `[..., D]` of the head to scores, `f32[..., vocab_size]`."""
