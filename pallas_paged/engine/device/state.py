"""The state of an engine between calls, on the device, and the small calls that change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field, replace
from functools import lru_cache
from inspect import signature
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.checks import pytree
from pallas_paged.engine.device.placement import Shardings
from pallas_paged.engine.requests.sequence import Sequence
from pallas_paged.engine.sampling.sampler import Array, SamplingMetadata, TokenCounts, hash_prompt
from pallas_paged.engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from pallas_paged.pages.pool import KVPool, copy_pages
from pallas_paged.pages.sharing import attach, release, retain
from pallas_paged.pages.table import PageTable, extend
from pallas_paged.pages.table import fork as fork_rows
from pallas_paged.pages.table import free as free_rows


@pytree
class SlotStates:
    """What each of S slots needs beside its pages; a slot is a row of the page table.

    Attributes:
        last_token_ids: `i32[S]`, the newest token, whose K/V are yet to be written.
        finished: `bool[S]`, whether it has ended; it does not compute until it is set again.
        max_lens: `i32[S]`, tokens at which it ends.
        sampling: sampling parameters; a token of `stop_token_ids` ends the slot.
    """

    last_token_ids: Array
    finished: Array
    max_lens: Array
    sampling: SamplingMetadata


@pytree
class History:
    """The tokens in which drafts are looked for, of S slots.

    Attributes:
        token_ids: `i32[S, L]`, -1 behind the last. A slot that is free keeps its own.
        groups: `i32[S]`, equal for the completions of one request.
    """

    token_ids: Array
    groups: Array


def create_history(num_slots: int, max_len: int) -> History:
    """Return the history of slots without tokens, as NumPy arrays."""
    token_ids = np.full((num_slots, max_len), -1, np.int32)
    return History(token_ids=token_ids, groups=np.full(num_slots, -1, np.int32))


@pytree
class EngineState:
    """All slots of an engine.

    Attributes:
        table: the page table; with a `window_table`, of the layers that see all tokens.
        pool: K/V of all layers.
        slots: the rest of what slots need.
        valid: `bool[]`, whether every page and slot that the host counted on was there.
        window_table: the page table of the layers with a window, with the same rows and lengths,
            if their part of the pool has pages of its own. It is smaller than the other, so the
            number of a layer's pages says which table is its own.
        kept_tokens: static, newest tokens of a row whose pages that table keeps.
        history: the tokens of the slots, in which drafts are looked for; None if the engine never
            speculates.
        counts: the tokens that penalties look at; None without penalties.
        last_hidden: `[S, D]`, what a `DraftHead` takes of the newest token whose K/V are stored; 0
            if the row has computed none. None without a head.
    """

    table: PageTable
    pool: KVPool
    slots: SlotStates
    valid: Array
    window_table: PageTable | None = None
    kept_tokens: int = field(default=0, metadata=dict(static=True))
    history: History | None = None
    counts: TokenCounts | None = None
    last_hidden: Array | None = None

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """The page table, and then the one of layers with a window, if they have one."""
        return (self.table,) if self.window_table is None else (self.table, self.window_table)

    def with_tables(self, tables: Iterable[PageTable]) -> EngineState:
        """Return the state with others in the place of `tables`."""
        table, *windows = tables
        return replace(self, table=table, window_table=windows[0] if windows else None)


@pytree
class TableArrays:
    """What `update_tables` does to a table, in arrays of fixed shapes.

    Attributes:
        retained, released: `i32[P]`, pages, padded with num_pages.
        freed: `bool[S]`, slots.
        slots: `i32[A]`, empty slots that begin with full pages; padded with S.
        pages: `i32[A, pages_per_seq]`, those pages, padded with num_pages.
        first_blocks: `i32[A]`, blocks before those pages; None: 0.
    """

    retained: Array
    freed: Array
    released: Array
    slots: Array
    pages: Array
    first_blocks: Array | None = None


def update_tables(state: EngineState, updates: tuple[TableArrays, ...]) -> EngineState:
    """Retain pages, free slots, release pages and then let slots attach some, in each table."""
    tables, valid = [], state.valid
    for table, update in zip(state.tables, updates, strict=True):
        table, retained = retain(table, update.retained)
        table = release(free_rows(table, update.freed), update.released)
        table, attached = attach(
            table, update.slots, update.pages, first_blocks=update.first_blocks
        )
        valid &= jnp.all(retained | (update.retained >= table.num_pages))  # or padding
        valid &= jnp.all(attached | (update.slots >= table.max_seqs))
        tables.append(table)
    if (last_hidden := state.last_hidden) is not None:
        last_hidden = jnp.where(updates[0].freed[:, None], 0, last_hidden)
    return replace(state.with_tables(tables), valid=valid, last_hidden=last_hidden)


def extend_all(
    tables: Iterable[PageTable], num_new_tokens: jax.Array, *, max_new_tokens: int
) -> tuple[list[PageTable], jax.Array]:
    """Extend the same rows of tables: one that lacks a page in any of them takes none in all.

    Arguments and results are those of `extend`.
    """
    first, *others = tables
    extended, ok = extend(first, num_new_tokens, max_new_tokens=max_new_tokens)
    if not others:
        return [extended], ok
    for table in others:  # of what these calls return, XLA computes the second result alone
        wanted = jnp.where(ok, num_new_tokens, 0)
        ok &= extend(table, wanted, max_new_tokens=max_new_tokens)[1]
    wanted = jnp.where(ok, num_new_tokens, 0)
    each = [extend(x, wanted, max_new_tokens=max_new_tokens)[0] for x in (first, *others)]
    return each, ok


def fork(state: EngineState, src: jax.Array, dst: jax.Array) -> EngineState:
    """Fill empty slots dst `i32[F]` like slots src `i32[F]`, padded with S."""
    tables, copies, valid = [], {}, state.valid
    for old in state.tables:
        table, copies[old.num_pages], ok = fork_rows(old, src, dst)
        valid &= jnp.all(ok | (src >= table.max_seqs))
        tables.append(table)
    each = (copy_pages(KVPool(layers=(x,)), copies[x.num_pages]) for x in state.pool.layers)
    pool = KVPool(layers=tuple(chain.from_iterable(one.layers for one in each)))
    if (last_hidden := state.last_hidden) is not None:
        last_hidden = last_hidden.at[dst].set(last_hidden[src], mode="drop")
    return replace(state.with_tables(tables), pool=pool, valid=valid, last_hidden=last_hidden)


def set_slots(state: EngineState, indices: jax.Array, values: SlotStates) -> EngineState:
    """Set slots.

    Args:
        state: of all S slots.
        indices: `i32[N]`, which to set, padded with S.
        values: leaves with N in place of S; a last token below 0 leaves the slot's own.
    """
    old = state.slots.last_token_ids.at[indices].get(mode="clip")
    tokens = jnp.where(values.last_token_ids < 0, old, values.last_token_ids)
    values = replace(values, last_token_ids=tokens)
    slots = jax.tree.map(lambda x, new: x.at[indices].set(new, mode="drop"), state.slots, values)
    return replace(state, slots=slots)


def set_history(state: EngineState, slots: jax.Array, values: History) -> EngineState:
    """Set the tokens of slots `i32[N]`, padded with S; values have N in place of S."""
    history = jax.tree.map(lambda x, new: x.at[slots].set(new, mode="drop"), state.history, values)
    return replace(state, history=history)


# What changes of a state take and change: the fewer arrays, the sooner the call is dispatched.
CHANGES: dict[Callable[..., EngineState], tuple[str, ...]] = {
    update_tables: ("table", "window_table", "valid", "last_hidden"),
    fork: ("table", "window_table", "valid", "pool", "last_hidden"),
    set_slots: ("slots",),
    set_history: ("history",),
}


@lru_cache(maxsize=64)
def jit_change(function: Callable[..., Any], shardings: Shardings | None) -> Callable[..., Any]:
    """Return a jitted function that changes its first argument, which is donated.

    Args:
        function: returns the first argument, changed.
        shardings: of that on a mesh, where the other arguments are replicated; None: no mesh.
    """
    if shardings is None:
        return jax.jit(function, donate_argnums=0)
    others = (shardings.replicated,) * (len(signature(function).parameters) - 1)
    return jax.jit(
        function,
        in_shardings=(shardings.tree, *others),
        out_shardings=shardings.tree,
        donate_argnums=0,
    )


# Fields of `SamplingParams` that the device has as they are.
_FIELDS = {
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "repetition_penalty": np.float32,
}


def slot_states(num_slots: int, num_eos: int) -> SlotStates:
    """States of slots with greedy default parameters, all finished, as NumPy arrays."""

    def full(value: Any, dtype: Any, *shape: int) -> np.ndarray:
        return np.full((num_slots, *shape), value, dtype)

    return SlotStates(
        last_token_ids=full(0, np.int32),
        finished=full(True, bool),
        max_lens=full(0, np.int32),
        sampling=SamplingMetadata(
            seeds=full(0, np.uint32, 3),
            temperature=full(0, np.float32),
            min_lens=full(0, np.int32),
            stop_token_ids=full(-1, np.int32, MAX_STOP_TOKEN_IDS + num_eos),
            bias_token_ids=full(-1, np.int32, MAX_LOGIT_BIAS),
            bias=full(0, np.float32, MAX_LOGIT_BIAS),
            **{name: full(getattr(SamplingParams, name), x) for name, x in _FIELDS.items()},
        ),
    )


def set_slot(values: SlotStates, entry: int, one: Sequence, last_token_id: int) -> None:
    """Write a sequence's values into an entry of NumPy arrays."""
    request, params, sampling = one.request, one.request.params, values.sampling
    values.last_token_ids[entry] = last_token_id
    values.finished[entry] = False
    values.max_lens[entry] = one.max_len
    if not params.greedy:
        prompt = hash_prompt(request.prompt_token_ids)
        sampling.seeds[entry] = request.seed, prompt, one.output.index
        sampling.temperature[entry] = params.temperature
    for name in _FIELDS:
        getattr(sampling, name)[entry] = getattr(params, name)
    sampling.min_lens[entry] = len(request.prompt_token_ids) + params.min_tokens
    stops = list(one.stop_token_ids)
    sampling.stop_token_ids[entry, : len(stops)] = stops
    if bias := dict(params.logit_bias or ()):
        sampling.bias_token_ids[entry, : len(bias)] = [*bias]
        sampling.bias[entry, : len(bias)] = [*bias.values()]
