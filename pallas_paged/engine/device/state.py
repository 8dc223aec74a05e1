"""The engine's state on the device, and the jitted calls that change it between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from inspect import unwrap

import jax
import jax.numpy as jnp

from pallas_paged.checks import pytree
from pallas_paged.engine.device.batch import Array
from pallas_paged.engine.device.placement import Shardings
from pallas_paged.engine.sampling.sampler import SamplingMetadata
from pallas_paged.pages.pool import KVPool, copy_pages
from pallas_paged.pages.sharing import attach, release, retain
from pallas_paged.pages.table import PageTable
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
class EngineState:
    """All slots of an engine.

    Attributes:
        table: the page table.
        pool: K/V of all layers.
        slots: the rest of what slots need.
        valid: `bool[]`, whether every page and slot that the host counted on was there.
    """

    table: PageTable
    pool: KVPool
    slots: SlotStates
    valid: jax.Array


@pytree
class TableArrays:
    """What `update_table` does, in arrays of fixed shapes.

    Attributes:
        retained, released: `i32[P]`, pages, padded with num_pages.
        freed: `bool[S]`, slots.
        slots: `i32[A]`, empty slots that begin with full pages; padded with S.
        pages: `i32[A, pages_per_seq]`, those pages, padded with num_pages.
    """

    retained: Array
    freed: Array
    released: Array
    slots: Array
    pages: Array


@partial(jax.jit, donate_argnames=("table", "valid"))
def update_table(
    table: PageTable, valid: jax.Array, update: TableArrays
) -> tuple[PageTable, jax.Array]:
    """Retain pages, free slots, release pages and then let slots attach some; all donated."""
    table, retained = retain(table, update.retained)
    table = release(free_rows(table, update.freed), update.released)
    table, attached = attach(table, update.slots, update.pages)
    retained |= update.retained >= table.num_pages  # padding
    attached |= update.slots >= table.max_seqs
    return table, valid & jnp.all(retained) & jnp.all(attached)


@partial(jax.jit, donate_argnames="state")
def fork(state: EngineState, src: jax.Array, dst: jax.Array) -> EngineState:
    """Fill empty slots dst `i32[F]` like slots src `i32[F]`, padded with S (state donated)."""
    table, copies, ok = fork_rows(state.table, src, dst)
    valid = state.valid & jnp.all(ok | (src >= table.max_seqs))
    return replace(state, table=table, pool=copy_pages(state.pool, copies), valid=valid)


@lru_cache(maxsize=16)
def fork_on(shardings: Shardings) -> Callable[[EngineState, Array, Array], EngineState]:
    """Return `fork` for a state with these shardings."""
    whole, state = shardings.whole, shardings.tree
    return jax.jit(
        unwrap(fork),
        in_shardings=(state, whole, whole),
        out_shardings=state,
        donate_argnums=0,
    )


@partial(jax.jit, donate_argnames="slots")
def set_slots(slots: SlotStates, indices: jax.Array, values: SlotStates) -> SlotStates:
    """Set slots (donated).

    Args:
        slots: all S slots.
        indices: `i32[N]`, which to set, padded with S.
        values: leaves with N in place of S; a last token below 0 leaves the slot's own.
    """
    old = slots.last_token_ids.at[indices].get(mode="clip")
    tokens = jnp.where(values.last_token_ids < 0, old, values.last_token_ids)
    values = replace(values, last_token_ids=tokens)

    return jax.tree.map(lambda x, new: x.at[indices].set(new, mode="drop"), slots, values)
