"""Drafts that are looked up: what followed the newest tokens of a row where these stood before.

Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_paged.checks import INT32_MAX
from pallas_paged.engine.device.batch import NOT_SAMPLED, Batch
from pallas_paged.engine.device.state import EngineState, History
from pallas_paged.engine.speculative_config import SpeculativeConfig


def add_tokens(
    history: History, slots: jax.Array, places: jax.Array, token_ids: jax.Array
) -> History:
    """Add new tokens of R rows.

    Args:
        history: of all slots.
        slots: `i32[R]` or `i32[R, 1]`, out of range for padding.
        places: `i32[..., R]` or `i32[R, W]`, of the tokens; out of range for padding.
        token_ids: likewise.
    """
    tokens = jnp.maximum(token_ids, 0)  # -1 is of bad logits, which end a row
    return replace(history, token_ids=history.token_ids.at[slots, places].set(tokens, mode="drop"))


def add_sampled(state: EngineState, batch: Batch, token_ids: jax.Array) -> EngineState:
    """Add the tokens `i32[K, R]` that a call without drafts has sampled, if there is a history."""
    if state.history is None:
        return state
    rows = batch.decode_slots
    if batch.chunks is not None:
        rows = jnp.arange(state.table.max_seqs, dtype=jnp.int32)
    # The K/V of all but the last one sampled are in the pages after the call.
    lens = state.table.seq_lens.at[rows].get(mode="fill", fill_value=0)
    is_sampled = token_ids != NOT_SAMPLED  # of each row the first ones
    steps = jnp.arange(len(token_ids), dtype=jnp.int32)[:, None]
    places = lens + 1 - jnp.sum(is_sampled, axis=0) + steps
    places = jnp.where(is_sampled, places, INT32_MAX)
    return replace(state, history=add_tokens(state.history, rows, places, token_ids))


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
    for age in range(min(config.longest_match, length)):
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
