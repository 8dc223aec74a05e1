"""Drafts of the next tokens of rows, found in the tokens of slots; all on the device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_paged.checks import INT32_MAX, pytree
from pallas_paged.engine.config import SpeculativeConfig

Array = Any  # of NumPy on the host, of JAX in the compiled step


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


@partial(jax.jit, donate_argnames="history")
def set_history(
    history: History, slot: jax.Array, token_ids: jax.Array, group: jax.Array
) -> History:
    """Set the tokens of a slot.

    Args:
        history: of all slots; donated.
        slot: `i32[]`; nothing happens where it is out of range.
        token_ids: `i32[L]`, padded with -1.
        group: `i32[]`
    """
    return History(
        token_ids=history.token_ids.at[slot].set(token_ids, mode="drop"),
        groups=history.groups.at[slot].set(group, mode="drop"),
    )


def add_tokens(
    history: History, slots: jax.Array, places: jax.Array, token_ids: jax.Array
) -> History:
    """Add new tokens of R rows.

    Args:
        history: of all slots.
        slots: `i32[R]` or `i32[R, 1]`, out of range for padding.
        places: `i32[..., R]` or `i32[R, W]`, of the tokens; out of range for those that are none.
        token_ids: likewise.
    """
    tokens = jnp.maximum(token_ids, 0)  # -1 is of bad logits, which end a row
    return replace(history, token_ids=history.token_ids.at[slots, places].set(tokens, mode="drop"))


def add_sampled(
    history: History,
    slots: jax.Array,
    seq_lens: jax.Array,
    token_ids: jax.Array,
    is_sampled: jax.Array,
) -> History:
    """Add the tokens that a call without drafts has sampled.

    Args:
        history: of all slots.
        slots: `i32[R]`, of the rows, out of range for padding.
        seq_lens: `i32[R]`, tokens of the rows whose K/V are in the pages after the call: all but
            the last one sampled.
        token_ids: `i32[K, R]`, of each row the first ones.
        is_sampled: `bool[K, R]`, which of them there are.
    """
    steps = jnp.arange(len(token_ids), dtype=jnp.int32)[:, None]
    places = seq_lens + 1 - jnp.sum(is_sampled, axis=0) + steps
    return add_tokens(history, slots, jnp.where(is_sampled, places, INT32_MAX), token_ids)


def find_drafts(
    history: History, slots: jax.Array, num_tokens: jax.Array, config: SpeculativeConfig
) -> tuple[jax.Array, jax.Array]:
    """Draft what followed the newest tokens of each row where these stood before.

    The longest of them that stood before count; of several such places one in the row itself, and
    then the latest. Drafts from the row that would come from beyond its newest token go on with
    what was drafted first, so that a text with a short period is drafted to its end.

    Args:
        history: of S slots.
        slots: `i32[R]`, of the rows; what is returned for one out of range means nothing.
        num_tokens: `i32[R]`, how many tokens rows have.
        config: static. "suffix" looks in all slots of a row's group, and drafts no more tokens
            than have matched times its factor.

    Returns:
        Drafts `i32[R, num_speculative_tokens]`, and how many of them there are, `i32[R]`.
    """
    own = history.token_ids.at[slots].get(mode="clip")  # [R, L]
    newest = num_tokens[:, None] - 1
    if config.method == "suffix":
        # [R, S, L]: XLA does not store it, but computes it within the two maxima.
        texts = history.token_ids[None]
        groups = history.groups.at[slots].get(mode="clip")
        searched = (groups[:, None] == history.groups)[:, :, None]
        is_own = slots[:, None] == jnp.arange(history.groups.size)
    else:
        texts = own[:, None]
        searched, is_own = jnp.bool_(True), jnp.ones((slots.size, 1), bool)
    _, num_texts, length = texts.shape
    # Where earlier tokens end, which another follows.
    following = jnp.pad(texts[:, :, 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1)
    goes_on = searched & (following >= 0)
    matched = jnp.zeros(1, jnp.int32)
    for age in range(config.longest_match):
        wanted = jnp.take_along_axis(own, jnp.maximum(newest - age, 0), axis=1)[:, :, None]
        earlier = jnp.pad(
            texts[:, :, : length - age], ((0, 0), (0, 0), (age, 0)), constant_values=-1
        )
        goes_on &= (earlier == wanted) & (newest >= age)[:, :, None]
        matched = matched + goes_on
    longest = jnp.max(matched, axis=(1, 2))
    end = jnp.arange(length, dtype=jnp.int32)
    order = jnp.where(is_own[:, :, None], length, 0) + end
    order = order * num_texts + jnp.arange(num_texts, dtype=jnp.int32)[:, None]
    place = jnp.max(jnp.where(matched == longest[:, None, None], order, -1), axis=(1, 2))
    text, found = place % num_texts, place // num_texts
    is_own_place = (found >= length)[:, None]
    found = (found % length)[:, None]
    period = jnp.maximum(newest - found, 1)
    ahead = jnp.arange(config.num_speculative_tokens, dtype=jnp.int32)
    places = found + 1 + jnp.where(is_own_place, ahead % period, ahead)
    rows = text if config.method == "suffix" else jnp.arange(slots.size)
    source = history.token_ids if config.method == "suffix" else own
    drafts = source.at[rows[:, None], places].get(mode="fill", fill_value=-1)
    counts = jnp.min(jnp.where(drafts < 0, ahead, ahead.size), axis=1)
    counts = jnp.minimum(counts, (config.drafts_of_a_token * longest).astype(jnp.int32))
    return jnp.maximum(drafts, 0), jnp.where(longest >= config.shortest_match, counts, 0)
