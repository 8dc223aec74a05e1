"""The plan of ragged work as one Pallas-Triton kernel of one program.

`ragged_plan` defines it; these are the same integers. XLA makes 17 small kernels of that module,
20 us a call on an H200. Here the arrays are vectors of one program. Prefix sums are
scans, and a search is a mark: the first tile of each sequence is marked in memory, and the prefix
sum of the marks gives each tile the ordinal of its sequence. The same leads from work items to
tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.ragged_plan import Plan, PlanShape, Split, candidates, item_of
from pallas_paged.kernels.ragged_tiles import Tiles, tile_of

_FIELDS = [field.name for field in dataclasses.fields(Tiles)]
_PAIRS = 8192  # pairs of sequences that are compared at once
# With more sequences, tiles or work items the plan is a small part of the call.
_MOST_SEQS, _MOST_ITEMS = 1024, 8192


def can_plan(shape: PlanShape) -> bool:
    """Return whether the kernel can make a plan of these sizes, with this JAX."""
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError:
        return False
    few = shape.num_seqs <= _MOST_SEQS and shape.num_items <= _MOST_ITEMS
    # Length and index of a sequence are one number, its place in the order.
    return few and shape.max_kv_len < 2**31 // pl.next_power_of_2(shape.num_seqs)


@pytree
class _Scratch:
    """Refs to device memory that the program writes and reads again, or their types."""

    tile_marks: Any  # i32[num_tiles], 1 at the first tile of each sequence
    rows: Any  # i32[num_seqs], the sequences with tiles in their order
    ends: Any  # i32[num_seqs], where the tiles of each of them end
    item_marks: Any  # i32[num_items], 1 at the first work item of each tile
    fields: Any  # of i32[num_tiles], by name: fields of tiles, and what their items need

    @classmethod
    def types(cls, shape: PlanShape) -> _Scratch:
        """Return the types."""
        of_seqs, of_tiles, of_items = (
            jax.ShapeDtypeStruct((n,), jnp.int32)
            for n in (shape.num_seqs, shape.num_tiles, shape.num_items)
        )
        names = [*_FIELDS, "step", "origin", "first_item", "partial"]
        return cls(
            tile_marks=of_tiles,
            rows=of_seqs,
            ends=of_seqs,
            item_marks=of_items,
            fields=dict.fromkeys(names, of_tiles),
        )


@pytree
class PackedPlan:
    """A plan with a row of device memory for each work item and each split tile."""

    # i32`[num_items, words]`, the fields of `Tiles` in order, then the index of the partial state
    # or -1. Further words are not written.
    items: Any
    # i32`[num_merges, 5]`: the number of work items of a split tile, 0 past the last one, the index
    # of its first partial state, and `q_start`, `q_len` and `offset` of the tile.
    merges: Any
    count: Any  # i32`[1]`, work items times a constant


def _plan_kernel(
    seq_lens_ref,  # i32[B]
    cu_q_lens_ref,  # i32[B + 1]
    plan: Any,  # Plan or PackedPlan, of refs
    scratch: _Scratch,
    *,
    shape: PlanShape,
    count_factor: int,
    interpret: bool,
) -> None:
    from jax.experimental.pallas import triton as plgpu

    num_seqs, num_tiles, num_items = shape.num_seqs, shape.num_tiles, shape.num_items
    packed = isinstance(plan, PackedPlan)

    def indices(size):
        """Return indices into an array of this size, and a mask of those within it."""
        index = jnp.arange(pl.next_power_of_2(size))
        return index, index < size

    def sync():
        if not interpret:
            plgpu.debug_barrier()

    def load(ref, index, mask):
        return plgpu.load(ref.at[index], mask=mask, other=0)

    def scatter(ref, index, value, mask, column=()):
        # The interpreter writes old values back where the mask is off: out of range, not elsewhere.
        index = jnp.where(mask, index, ref.shape[0])
        plgpu.store(ref.at[(index, *column)], value, mask=mask)

    def sequence(index, exists):
        """Return kv_len, q_start, q_len, lead, number of tiles of sequences."""
        kv_len = load(seq_lens_ref, index, exists)
        start = load(cu_q_lens_ref, index, exists)
        q_len = load(cu_q_lens_ref, index + 1, exists) - start
        return kv_len, start, q_len, *shape.count_tiles(start, q_len)

    # Marks are 0 but where they are set below; and so are the merges.
    tile, in_tiles = indices(num_tiles)
    item, in_items = indices(num_items)
    merge, in_merges = indices(shape.num_merges)
    plgpu.store(scratch.tile_marks.at[tile], jnp.zeros_like(tile), mask=in_tiles)
    plgpu.store(scratch.item_marks.at[item], jnp.zeros_like(item), mask=in_items)
    of_merges = plan.merges.at[merge, 0] if packed else plan.num_items.at[merge]
    plgpu.store(of_merges, jnp.zeros_like(merge), mask=in_merges)
    if not packed:
        plgpu.store(plan.first_item.at[merge], jnp.zeros_like(merge), mask=in_merges)
    sync()

    # The order of sequences: those with the most keys first. One sum over all that are not after a
    # sequence gives both where its tiles end and how many sequences with tiles there are up to it.
    seq, in_seqs = indices(num_seqs)
    num_lanes = seq.size

    def ordered(index, exists):
        kv_len, *_, count = sequence(index, exists)
        key = jnp.where(exists, kv_len * num_lanes + (num_lanes - 1 - index), -1)
        return key, count, count * (2 * num_lanes) + (count > 0).astype(jnp.int32)

    key, count, _ = ordered(seq, in_seqs)
    width = min(num_lanes, max(_PAIRS // num_lanes, 1))

    def add(i, sums):
        other = i * width + jnp.arange(width)
        other_key, _, value = ordered(other, other < num_seqs)
        return sums + jnp.where(other_key[:, None] >= key[None, :], value[:, None], 0)

    sums = lax.fori_loop(0, num_lanes // width, add, jnp.zeros((width, num_lanes), jnp.int32))
    sums = jnp.sum(sums, axis=0)
    end, ordinal = sums >> num_lanes.bit_length(), (sums & (2 * num_lanes - 1)) - 1
    some = in_seqs & (count > 0)
    scatter(scratch.tile_marks, end - count, jnp.ones_like(end), some)
    scatter(scratch.rows, ordinal, seq, some)
    scatter(scratch.ends, ordinal, end, some)
    sync()

    # The tokens that belong to no sequence come last.
    total = jnp.sum(count)
    rest_start = cu_q_lens_ref[num_seqs]
    rest_len = shape.num_tokens - rest_start
    rest_lead, rest_count = shape.count_tiles(rest_start, rest_len)
    of_seq, exists = tile < total, tile < total + rest_count
    ordinal = jnp.cumsum(load(scratch.tile_marks, tile, in_tiles)) - 1
    row = load(scratch.rows, ordinal, of_seq)
    end = jnp.where(of_seq, load(scratch.ends, ordinal, of_seq), total + rest_count)
    kv_len, q_start, q_len, lead, _ = sequence(row, of_seq)
    lead = jnp.where(of_seq, lead, rest_lead)
    tiles = tile_of(
        exists,
        shape,
        row=row,
        q_start=jnp.where(of_seq, q_start, rest_start),
        q_len=jnp.where(of_seq, q_len, rest_len),
        kv_len=kv_len,
        offset=(end - 1 - tile) * shape.block_q - lead * shape.group,
    )
    constants = candidates(shape.num_programs)
    lane = jnp.arange(pl.next_power_of_2(len(constants)))
    shares = jnp.zeros(lane.shape, jnp.float32)
    for i, constant in enumerate(constants):  # a kernel captures no arrays
        shares = jnp.where(lane == i, constant, shares)
    split = Split.of(tiles, shape, shares)
    count, has_partials = split.count, split.has_partials.astype(jnp.int32)
    # Two sums in one scan: each is less than 2**15.
    ends = jnp.cumsum(count)
    both = jnp.cumsum(count * has_partials << 15 | has_partials)
    first_item, partial, merge = ends - count, (both >> 15) - count, (both & 2**15 - 1) - 1
    num_found = jnp.sum(count)
    some = in_tiles & (count > 0)
    scatter(scratch.item_marks, first_item, jnp.ones_like(tile), some)
    found = {name: getattr(tiles, name) for name in _FIELDS} | {
        "step": split.step,
        "origin": split.origin,
        "first_item": first_item,
        "partial": jnp.where(has_partials > 0, partial, -1),
    }
    for name, value in found.items():
        plgpu.store(scratch.fields[name].at[tile], value, mask=some)
    of_merge = some & (has_partials > 0)
    if packed:
        values = (count, partial, tiles.q_start, tiles.q_len, tiles.offset)
        for i, value in enumerate(values):
            scatter(plan.merges, merge, value, of_merge, (i,))
        plan.count[0] = num_found * count_factor
    else:
        scatter(plan.first_item, merge, first_item, of_merge)
        scatter(plan.num_items, merge, count, of_merge)
    sync()

    exists = item < num_found  # every tile before one with work items has some
    tile = jnp.cumsum(load(scratch.item_marks, item, in_items)) - 1
    found = {name: load(ref, tile, exists) for name, ref in scratch.fields.items()}
    tiles = Tiles(**{name: found[name] for name in _FIELDS})
    index = item - found["first_item"]
    items = item_of(exists, tiles, index, found["origin"], found["step"])
    has_partial = exists & (found["partial"] >= 0)
    partial = jnp.where(has_partial, found["partial"] + index, -1)
    if packed:
        words = [*(getattr(items, name) for name in _FIELDS), partial]
        column = jnp.arange(pl.next_power_of_2(len(words)))
        mask = in_items[:, None] & (column < len(words))
        plgpu.store(plan.items.at[item[:, None], column[None, :]], _columns(words), mask=mask)
    else:
        plgpu.store(plan.partial.at[item], partial, mask=in_items)
        for name in _FIELDS:
            plgpu.store(getattr(plan.items, name).at[item], getattr(items, name), mask=in_items)


def _columns(x: list[jax.Array]) -> jax.Array:
    """Return `[n, k]` of up to k vectors `[n]`, with k a power of two: stored row by row."""
    size = x[0].size
    width = pl.next_power_of_2(len(x))
    x = [*x, *[jnp.zeros_like(x[0])] * (width - len(x))]
    while len(x) > 1:  # Triton joins two at a time
        half = len(x) // 2
        x = [jnp.stack([x[i], x[i + half]], axis=-1) for i in range(half)]
    return x[0].reshape(size, width)


def plan_types(shape: PlanShape) -> Plan:
    """Return the types of the arrays of a plan."""
    of_items: Any = jax.ShapeDtypeStruct((shape.num_items,), jnp.int32)
    of_merges: Any = jax.ShapeDtypeStruct((shape.num_merges,), jnp.int32)
    return Plan(
        items=Tiles(**dict.fromkeys(_FIELDS, of_items)),
        partial=of_items,
        first_item=of_merges,
        num_items=of_merges,
        num_partials=shape.num_partials,
    )


def packed_types(shape: PlanShape, words: int) -> PackedPlan:
    """Return the types of the arrays of a packed plan."""
    return PackedPlan(
        items=jax.ShapeDtypeStruct((shape.num_items, words), jnp.int32),
        merges=jax.ShapeDtypeStruct((shape.num_merges, 5), jnp.int32),
        count=jax.ShapeDtypeStruct((1,), jnp.int32),
    )


def plan_by_kernel(
    seq_lens: jax.Array,  # i32[B]
    cu_q_lens: jax.Array,  # i32[B + 1], rising, within [0, T]
    types: Any,  # from `plan_types` or `packed_types`
    shape: PlanShape,
    *,
    count_factor: int = 1,
    interpret: bool,
) -> Any:
    """Return the plan, of `types`, of a call whose queries are the newest tokens of their rows.

    The `count` of a packed plan is multiplied by `count_factor`.
    """
    from jax.experimental.pallas import triton as plgpu

    scratch = _Scratch.types(shape)
    outputs, structure = jax.tree.flatten((types, scratch))
    # As operations of `jax.numpy`: in `shard_map` each device has its own if the lengths differ.
    varying = any(jax.typeof(x).manual_axis_type.varying for x in (seq_lens, cu_q_lens))
    outputs = [result_shape(x.shape, x.dtype, varying=varying) for x in outputs]

    def body(seq_lens_ref, cu_q_lens_ref, *refs):
        plan, scratch = jax.tree.unflatten(structure, refs)
        _plan_kernel(
            seq_lens_ref,
            cu_q_lens_ref,
            plan,
            scratch,
            shape=shape,
            count_factor=count_factor,
            interpret=interpret,
        )

    found = pl.pallas_call(
        body,
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps(shape), num_stages=1),
        interpret=interpret,
        name="ragged_plan",
    )(seq_lens, cu_q_lens)
    return jax.tree.unflatten(structure, found)[0]


def num_warps(shape: PlanShape) -> int:
    """Return the warps of the program: so many that a thread has few tiles."""
    return min(max(pl.next_power_of_2(shape.num_items) // 32, 4), 16)
