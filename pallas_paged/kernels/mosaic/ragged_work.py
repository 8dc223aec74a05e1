"""The work of a ragged call as the Mosaic kernels read it.

`ragged_plan` makes work items: tiles of query tokens with blocks of keys. Each becomes a packed
descriptor here. Rows of a tile that need more get their own arrays: positions, and the bits of a
tree mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic.config import MosaicRaggedConfig
from pallas_paged.kernels.mosaic.ops import WGMMA, WGMMA_ROW, bcast, full, load
from pallas_paged.kernels.mosaic.ragged_tile import CHUNK, WG_ROWS, TileShape
from pallas_paged.kernels.ragged_plan import Plan, Tiles, make_plan, make_tiles

DESCRIPTOR_WORDS = 32  # i32 of a packed descriptor: TMA copies at least this many


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorkDescriptor(Tiles):
    """A work item: scalars of its tile, and the index of its partial state, or -1."""

    partial: Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MergeDescriptor:
    """A split tile: scalars, `q_start`, `q_len` and `offset` as in `Tiles`."""

    num_items: Any  # work items of the tile; 0 past the last split tile
    partial: Any  # index of the first partial state; those of a tile are consecutive
    q_start: Any
    q_len: Any
    offset: Any


_WORK_FIELDS = [field.name for field in dataclasses.fields(WorkDescriptor)]
_MERGE_FIELDS = [field.name for field in dataclasses.fields(MergeDescriptor)]


def unpack_work(ref: Any, index: Any) -> WorkDescriptor:
    """Load the descriptor of a work item."""
    return WorkDescriptor(**{name: ref[index, i] for i, name in enumerate(_WORK_FIELDS)})


def unpack_merge(ref: Any, index: Any) -> MergeDescriptor:
    """Load the descriptor of a split tile."""
    return MergeDescriptor(**{name: ref[index, i] for i, name in enumerate(_MERGE_FIELDS)})


def pack(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Return packed descriptors: of work i32`[num_items, 32]`, of merges i32`[num_merges, 5]`."""
    columns = [getattr(plan.items, name) for name in _WORK_FIELDS[:-1]]
    work = jnp.stack([*columns, plan.partial], axis=1)
    merges = work[plan.first_item][:, [_WORK_FIELDS.index(name) for name in _MERGE_FIELDS[1:]]]
    work = jnp.pad(work, ((0, 0), (0, DESCRIPTOR_WORDS - len(_WORK_FIELDS))))
    return work, jnp.concatenate([plan.num_items[:, None], merges], axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """The work of a call, or refs to it.

    Attributes:
        items: i32`[num_items, 32]`, packed descriptors.
        count: i32`[1]`, work tiles: work items times head tiles of all KV heads.
        positions: i32`[num_items, warpgroups, 64]` of the rows; None where queries are the newest
            tokens of their sequence, or where positions do not matter.
        tree_words: i32`[num_items, warpgroups, words, 64]`, the bits of each row's tree mask, the
            last word 0; None without a tree.
    """

    items: Any
    count: Any
    positions: Any
    tree_words: Any


def plan_work(
    arrays: Arrays, *, options: LogitOptions, config: MosaicRaggedConfig, tile: TileShape
) -> tuple[Work, jax.Array, int]:
    """Return the work of a call, packed descriptors of its merges, and room for partial states."""
    head_tiles = arrays.num_kv_heads * tile.num_head_tiles
    num_tokens = arrays.q.shape[0]
    tiles = make_tiles(
        arrays.seq_lens,
        arrays.cu_q_lens,
        arrays.q_positions,
        num_tokens=num_tokens,
        group=1,
        block_q=tile.num_tokens,
        align=CHUNK,
        block_k=config.block_k,
        options=options,
        has_tree=arrays.tree_mask is not None,
    )
    plan = make_plan(
        tiles,
        tile_tokens=tile.num_tokens,
        block_k=config.block_k,
        num_programs=max(config.num_programs // head_tiles, 1),
        fixed_split_size=config.fixed_split_size,
        max_kv_len=arrays.max_kv_len,
        num_seqs=arrays.num_seqs,
        align=CHUNK,
    )
    count = jnp.sum(plan.items.q_len > 0, dtype=jnp.int32) * head_tiles
    items, merges = pack(plan)
    token = tokens_of_rows(plan, tile, config.num_consumers)
    positions = tree_words = None
    if arrays.q_positions is not None and (
        arrays.alibi_slopes is not None or options.sliding_window is not None
    ):
        packed = plan.items.q_start[:, None, None] + token
        positions = arrays.q_positions[jnp.clip(packed, 0, num_tokens - 1)]
    if arrays.tree_mask is not None:
        tree_words = pack_tree_mask(arrays.tree_mask, plan, token)
    work = Work(items=items, count=count.reshape(1), positions=positions, tree_words=tree_words)
    return work, merges, plan.num_partials


def tokens_of_rows(plan: Plan, tile: TileShape, num_warpgroups: int) -> jax.Array:
    """Return the token within its sequence of each row, i32`[num_items, warpgroups, 64]`."""
    _, token = tile.place(jnp.arange(num_warpgroups * WG_ROWS).reshape(num_warpgroups, WG_ROWS))
    return plan.items.offset[:, None, None] + token


def pack_tree_mask(tree_mask: jax.Array, plan: Plan, token: jax.Array) -> jax.Array:
    """Return `Work.tree_words` for rows of these tokens."""
    size = tree_mask.shape[-1]
    num_words = -(-size // 32) + 1
    bits = jnp.pad(tree_mask, ((0, 0), (0, 0), (0, num_words * 32 - size)))
    bits = bits.reshape(*bits.shape[:2], num_words, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32)  # [B, M, words]
    known = (token >= 0) & (token < size)
    mine = words[plan.items.row[:, None, None], jnp.where(known, token, 0)]
    return jnp.moveaxis(jnp.where(known[..., None], mine, 0), -1, 2)


def visible_in_tree(words_ref: Any, first_key: Any, before: Any, keys: jax.Array) -> jax.Array:
    """Return which keys each row sees under its tree mask.

    Args:
        words_ref: i32`[words, 64]`, `Work.tree_words` of one warpgroup.
        first_key: the first of `keys`.
        before: keys older than the tree; all rows see them.
        keys: i32`[64, block_k]`.
    """
    newest = keys - before
    first_word = (first_key - before) >> 5
    bits = full(keys.shape, 0, WGMMA, jnp.int32)
    for i in range(keys.shape[1] // 32 + 1):
        # Words past the end of a mask are 0, as the last one is.
        word = jnp.clip(first_word + i, 0, words_ref.shape[0] - 1)
        word = load(words_ref.at[word], WGMMA_ROW)
        bits = jnp.where(newest >> 5 == first_word + i, bcast(word, keys), bits)
    return (newest < 0) | ((bits >> (newest & 31)) & 1 == 1)
