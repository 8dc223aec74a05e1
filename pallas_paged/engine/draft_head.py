"""What a draft head is to the engine: layers that draft from the hidden states of a model."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from pallas_paged.engine.model import Attend, KVCacheSpec
from pallas_paged.pages.layer import LayerKV


class DraftHead(Protocol):
    """Drafts from a token and the model's hidden state of the token before it.

    Examples are the heads of EAGLE, and layers for multi-token prediction as in DeepSeek-V3. For
    EAGLE-3 the model returns the hidden states of several layers side by side, and its `logits`
    reads those of the last layer. What is not described here is as in `Model`. If the head uses the
    embeddings or the output layer of the model, `draft_params` has the same arrays, which are not
    copied.

    Attributes:
        hidden_size: D, elements that it takes of a token's hidden state.
        vocab_size, max_model_len, eos_token_ids, kv_cache_spec: as in `Model`.
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
            before: `[T, D]`, for each token the result of `read_hidden` for the token before it, or
                the head's own hidden state if that is a draft. 0 for the first token of a sequence,
                and where the token before came from the prefix cache.

        Returns:
            Hidden states `[T, D]`, and the cache as `attend` returned it.
        """

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Map hidden states `[..., D]` of the head to scores, `f32[..., vocab_size]`."""
