"""What a call runs, while it is traced: the model, and its draft model beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_paged.decoder.peers import Peers
from pallas_paged.engine.device.attend import AttentionKernels, PagedAttend
from pallas_paged.engine.device.batch import NOT_SAMPLED, Batch, ChunkBatch, Mappings
from pallas_paged.engine.device.state import EngineState
from pallas_paged.engine.model import Model
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.pool import KVPool
from pallas_paged.pages.table import slot_mapping


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a call runs, while it is traced.

    Attributes:
        model, params, batch, kernels, peers: as given.
        draft: what it runs of the draft model, if there is one; that has no `draft`.
        first_layer: of the model, in the pool: a draft model's layers follow those of its target.
    """

    model: Model
    params: Any
    batch: Batch
    kernels: AttentionKernels
    peers: Peers | None
    draft: Call | None = None
    first_layer: int = 0

    def hidden(
        self,
        state: EngineState,
        tokens: jax.Array,
        token_rows: jax.Array,
        positions: jax.Array,
        *,
        decode_rows: jax.Array,
        chunks: ChunkBatch | None,
        before: jax.Array | None = None,
    ) -> tuple[EngineState, jax.Array, Mappings, jax.Array | None]:
        """Run the model on new tokens.

        Args:
            state: with pages for the tokens.
            tokens, token_rows, positions: `i32[T]`; rows of padding are out of range.
            decode_rows, chunks: which of the tokens these are, as in `PagedAttend`.
            before: `[T, D]`, of a `DraftHead`: what it takes of the token before each.

        Returns:
            The state with their K and V, the hidden states `[T, E]`, where K and V are, and the
            experts `i32[T, L, k]` if the mode asks for them.

        Raises:
            ValueError: while tracing: the hidden states are not `[T, E]`, the cache is not what
                `attend` returned for each layer, or given experts were not used.
        """
        mappings = tuple(slot_mapping(table, token_rows, positions) for table in state.tables)
        spec, pool, windows = self.model.kv_cache_spec, state.pool.layers, None
        end = self.first_layer + spec.num_layers
        cache = pool[self.first_layer : end]
        if len(mappings) > 1:
            windows = state.tables[1], mappings[1], int(spec.groups[1].sliding_window or 0)
        attend = PagedAttend(
            state.table,
            mappings[0],
            decode_rows,
            chunks,
            num_kv_heads=[spec.of(group).num_kv_heads for group in spec.groups],
            kernels=self.kernels,
            peers=self.peers,
            sliding_window=spec.sliding_window,
            windows=windows,
        )
        positions = jnp.maximum(positions, 0)
        taken: Any = () if before is None else (before,)
        hidden, layers = self.model(self.params, tokens, positions, attend, cache, *taken)
        if hidden.ndim != 2 or len(hidden) != len(tokens):
            size = f"[T={len(tokens)}, E]"
            raise ValueError(f"the model's hidden states must be {size}: {hidden.shape=}")
        if len(layers) != len(cache):
            raise ValueError(f"the model's cache must have {len(cache)} layers, not {len(layers)}")
        for index, (new, old) in enumerate(zip(layers, cache, strict=True)):
            if not isinstance(new, LayerKV) or new.k_pages is old.k_pages:
                what = f"layer {index} of the model's cache"
                raise ValueError(f"{what} must be what `attend` returned")
        if attend.ignores_experts:
            raise ValueError("the model must use attend.routed_experts to take given experts")
        everything = (*pool[: self.first_layer], *layers, *pool[end:])
        state = replace(state, pool=KVPool(layers=everything))
        experts = attend.recorded if self.batch.mode.routed_experts else None
        return state, hidden, mappings, experts

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the logits `f32[S, vocab_size]` of hidden states `[S, E]`.

        Raises:
            ValueError: while tracing: the model's are others.
        """
        logits = self.model.logits(self.params, hidden)
        wanted = len(hidden), self.model.vocab_size
        if logits.shape != wanted or logits.dtype != jnp.float32:
            raise ValueError(
                f"the model's logits must be f32{[*wanted]}, as of model.vocab_size, not "
                f"{logits.dtype}{[*logits.shape]}"
            )
        return logits


class Packed(NamedTuple):
    """Tokens of R rows, one row after another, in arrays of T entries; those behind are padding.

    Attributes:
        slots: `i32[T]`, of the rows, out of range for padding.
        is_token: `bool[T]`.
        positions: `i32[T]`, 0 for padding.
        places: `(i32[T], i32[T])`, the row of each, and its place among the tokens of the row.
        starts, ends: `i32[R]`, where the tokens of each row begin and end.
    """

    slots: jax.Array
    is_token: jax.Array
    positions: jax.Array
    places: tuple[jax.Array, jax.Array]
    starts: jax.Array
    ends: jax.Array

    @classmethod
    def of(
        cls, slots: jax.Array, lens: jax.Array, q_lens: jax.Array, width: int, num_slots: int
    ) -> Packed:
        """Pack at most `width` tokens of each row.

        Args:
            slots, lens, q_lens: `i32[R]`: slots of the rows, their tokens before these, and the
                number of these.
            width: so that T = R * width, and up to 7 more: a kernel of 8 rows would pad each layer.
            num_slots: out of range of the slots.
        """
        ends = jnp.cumsum(q_lens, dtype=jnp.int32)
        starts = ends - q_lens
        place = jnp.arange(-(-lens.size * width // 8) * 8, dtype=jnp.int32)
        row = jnp.searchsorted(ends, place, side="right", method="compare_all").astype(jnp.int32)
        is_token, offset = row < lens.size, place - starts.at[row].get(mode="clip")
        return cls(
            slots=slots.at[row].get(mode="fill", fill_value=num_slots),
            is_token=is_token,
            positions=jnp.where(is_token, lens.at[row].get(mode="clip") + offset, 0),
            places=(row, offset),
            starts=starts,
            ends=ends,
        )

    def take(self, x: jax.Array) -> jax.Array:
        """Return the entries `[T, ...]` of `[R, width, ...]`; those of padding mean nothing."""
        return x.at[self.places].get(mode="clip")


def read_hidden(call: Call, hidden: jax.Array, dtype: Any) -> jax.Array:
    """Return what the `DraftHead` of a call takes of the model's hidden states `[T, E]`.

    Raises:
        ValueError: while tracing: it is not `[T, hidden_size]`.
    """
    assert call.draft is not None
    head: Any = call.draft.model
    found = head.read_hidden(call.draft.params, hidden)
    if found.shape != (len(hidden), head.hidden_size):
        size = f"[T={len(hidden)}, hidden_size={head.hidden_size}]"
        raise ValueError(f"read_hidden of the draft head must return {size}, not {found.shape}")
    return found.astype(dtype)


def follow(
    call: Call,
    state: EngineState,
    tokens: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    *,
    hidden: jax.Array,
    decode_rows: jax.Array,
    chunks: ChunkBatch | None,
    after: jax.Array,
) -> EngineState:
    """Store the K and V that the draft model, if there is one, has of what `call` computes.

    So each page has those of both models: one that is shared, copied or cached lacks nothing.

    Args:
        call, state, tokens, token_rows, positions, decode_rows, chunks: as in `Call.hidden`. Tokens
            of a row stand one after another.
        hidden: `[T, E]`, that the model has returned.
        after: `i32`, the last result of the model's own that devices add up, at least
            `NOT_SAMPLED`: they add up one thing at a time.
    """
    if call.draft is None:
        return state
    if call.peers is not None:
        tokens = jnp.where(jnp.any(after < NOT_SAMPLED), 0, tokens)
    if chunks is not None:  # those are the experts of the other model
        chunks = replace(chunks, routed_experts=None)
    before, last_hidden = None, state.last_hidden
    if last_hidden is not None:
        read = read_hidden(call, hidden, last_hidden.dtype)
        continues = token_rows[1:] == token_rows[:-1]
        first = last_hidden.at[token_rows].get(mode="fill", fill_value=0)
        before = jnp.where(jnp.pad(continues, (1, 0))[:, None], jnp.roll(read, 1, axis=0), first)
        ends = jnp.where(jnp.pad(continues, (0, 1)), len(last_hidden), token_rows)
        last_hidden = last_hidden.at[ends].set(read, mode="drop")
    # A draft model's layers are in the pool of layers without a window.
    alone, *_ = call.draft.hidden(
        replace(state, window_table=None),
        tokens,
        token_rows,
        positions,
        decode_rows=decode_rows,
        chunks=chunks,
        before=before,
    )
    return replace(state, pool=alone.pool, last_hidden=last_hidden)
