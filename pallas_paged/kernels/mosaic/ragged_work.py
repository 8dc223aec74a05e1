"""Pieces of ragged work as the Mosaic kernels read them, and what else each row must be told."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.kernels.mosaic.ops import MATRIX, ROWS, along, full, load
from pallas_paged.kernels.mosaic.ragged_tile import WG_ROWS, TileShape
from pallas_paged.kernels.ragged_plan import Plan

RECORD = 32  # i32 of a piece, as many as a copy to shared memory takes at least
FIELDS = (
    "row", "q_start", "q_len", "kv_len", "first_key", "offset", "lo", "hi", "full_lo", "full_hi",
    "slot",
)  # fmt: skip
MERGE_FIELDS = ("slot", "q_start", "q_len", "offset")


def fields(ref: Any, index: Any) -> dict[str, jax.Array]:
    """The fields of a piece, by name."""
    return {name: ref[index, i] for i, name in enumerate(FIELDS)}


def records(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The plan as the kernels read it: i32[num_pieces, 32] and i32[num_merges, 5]."""
    columns = [getattr(plan.pieces, name) for name in FIELDS[:-1]]
    pieces = jnp.stack([*columns, plan.slot], axis=1)
    merges = pieces[plan.split_pieces][:, [FIELDS.index(n) for n in MERGE_FIELDS]]
    pieces = jnp.pad(pieces, ((0, 0), (0, RECORD - len(FIELDS))))
    return pieces, jnp.concatenate([plan.num_splits[:, None], merges], axis=1)


def tokens_of_rows(
    plan: Plan, tile: TileShape, num_warpgroups: int, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The token of each row among all queries, and within its sequence: i32[pieces, wgs, 64]."""
    _, token = tile.place(jnp.arange(num_warpgroups * WG_ROWS).reshape(num_warpgroups, WG_ROWS))
    within = plan.pieces.offset[:, None, None] + token
    absolute = plan.pieces.q_start[:, None, None] + within
    return jnp.clip(absolute, 0, num_tokens - 1), within


def tree_words(tree_mask: jax.Array, plan: Plan, token: jax.Array) -> jax.Array:
    """Each row's part of the tree mask as bits, the last word 0: i32[pieces, wgs, words, 64]."""
    size = tree_mask.shape[-1]
    num_words = -(-size // 32) + 1
    bits = jnp.pad(tree_mask, ((0, 0), (0, 0), (0, num_words * 32 - size)))
    bits = bits.reshape(*bits.shape[:2], num_words, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32)  # [B, M, words]
    known = (token >= 0) & (token < size)
    mine = words[plan.pieces.row[:, None, None], jnp.where(known, token, 0)]
    return jnp.moveaxis(jnp.where(known[..., None], mine, 0), -1, 2)


def in_tree(words_ref: Any, first_key: Any, before: Any, keys: jax.Array) -> jax.Array:
    """Which keys the bits of a tree mask let through; keys before the newest tokens all are."""
    newest = keys - before
    first_word = (first_key - before) >> 5
    bits = full(keys.shape, 0, MATRIX, jnp.int32)
    for i in range(keys.shape[1] // 32 + 1):
        # The words past a mask's end are 0, as the last one is.
        word = jnp.clip(first_word + i, 0, words_ref.shape[0] - 1)
        word = load(words_ref.at[word], ROWS)
        bits = jnp.where(newest >> 5 == first_word + i, along(word, keys), bits)
    return (newest < 0) | ((bits >> (newest & 31)) & 1 == 1)
