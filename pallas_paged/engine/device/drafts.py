"""Drafts of the next tokens of rows, found in their own tokens; all on the device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_paged.checks import pytree
from pallas_paged.engine.speculative_config import SpeculativeConfig


@pytree
class DraftCounts:
    """What a call with drafts has verified, of all rows together.

    Attributes:
        num_steps: `i32[]`, steps of the model.
        num_rows: `i32[]`, rows, one for each of those steps that it took part in.
        num_drafts: `i32[]`, of those, the ones that had drafts.
        num_draft_tokens: `i32[]`, drafts.
        num_accepted_per_pos: `i32[num_speculative_tokens]`, drafts that were right, by their place
            behind the newest token.
    """

    num_steps: jax.Array
    num_rows: jax.Array
    num_drafts: jax.Array
    num_draft_tokens: jax.Array
    num_accepted_per_pos: jax.Array


@partial(jax.jit, donate_argnames="history")
def set_history(history: jax.Array, slot: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Set the tokens of a slot.

    Args:
        history: `i32[S, L]`, tokens of all slots; donated.
        slot: `i32[]`; nothing happens where it is out of range.
        token_ids: `i32[L]`, padded with any.
    """
    return history.at[slot].set(token_ids, mode="drop")


def add_sampled(
    history: jax.Array,
    slots: jax.Array,
    seq_lens: jax.Array,
    token_ids: jax.Array,
    is_sampled: jax.Array,
) -> jax.Array:
    """Add the tokens that a call without drafts has sampled.

    Args:
        history: `i32[S, L]`
        slots: `i32[R]`, of the rows, out of range for padding.
        seq_lens: `i32[R]`, tokens of the rows whose K/V are in the pages after the call: all but
            the last one sampled.
        token_ids: `i32[K, R]`, of each row the first ones.
        is_sampled: `bool[K, R]`, which of them there are.
    """
    steps = jnp.arange(len(token_ids), dtype=jnp.int32)[:, None]
    places = seq_lens + 1 - jnp.sum(is_sampled, axis=0) + steps
    places = jnp.where(is_sampled, places, history.shape[1])
    return history.at[slots, places].set(jnp.maximum(token_ids, 0), mode="drop")


def find_ngrams(
    history: jax.Array, num_tokens: jax.Array, config: SpeculativeConfig
) -> tuple[jax.Array, jax.Array]:
    """Draft what followed the newest tokens of each row where these stood before.

    The longest of them that stood before count, and of several such places the latest. Drafts that
    would come from beyond the newest token go on with what was drafted first, so that a text with a
    short period is drafted to its end.

    Args:
        history: `i32[R, L]`, tokens of rows.
        num_tokens: `i32[R]`, how many of those there are; the others mean nothing.
        config: static, how many drafts a row has, and how many of the newest tokens must have stood
            there.

    Returns:
        Drafts `i32[R, num_speculative_tokens]`, and how many of them there are, `i32[R]`: all or
        none.
    """
    num_drafts, most = config.num_speculative_tokens, config.prompt_lookup_max
    least = config.prompt_lookup_min
    assert most is not None and least is not None  # as its constructor leaves them
    length = history.shape[1]
    end = jnp.arange(length, dtype=jnp.int32)  # of the earlier tokens
    newest = num_tokens[:, None] - 1
    goes_on = end < newest
    matched = jnp.zeros(history.shape, jnp.int32)
    for age in range(most):
        wanted = jnp.take_along_axis(history, jnp.maximum(newest - age, 0), axis=1)
        earlier = jnp.pad(history[:, : length - age], ((0, 0), (age, 0)), constant_values=-1)
        goes_on &= (earlier == wanted) & (newest >= age)
        matched += goes_on
    longest = jnp.max(matched, axis=1, keepdims=True)
    found = jnp.max(jnp.where(matched == longest, end, -1), axis=1, keepdims=True)
    is_found = longest >= least
    period = jnp.maximum(newest - found, 1)
    ahead = jnp.arange(num_drafts, dtype=jnp.int32) % period
    drafts = jnp.take_along_axis(history, jnp.clip(found + 1 + ahead, 0, length - 1), axis=1)
    return drafts, jnp.where(is_found[:, 0], num_drafts, 0)
