"""The work of a ragged call as the Mosaic kernels read it: packed descriptors, tree masks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays, result_shape, varying_by_device
from pallas_paged.kernels.logits import LogitOptions, base2_logits, visible
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.ragged_plan import Plan, PlanShape, make_plan
from pallas_paged.kernels.ragged_plan_kernel import (
    PackedPlan,
    can_plan,
    packed_types,
    plan_by_kernel,
)
from pallas_paged.kernels.ragged_tiles import Tiles

DESCRIPTOR_WORDS = 32  # i32 of a packed descriptor: TMA copies at least this many


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorkDescriptor(Tiles):
    """A work item: scalars of its tile, and the index of its partial state, or -1."""

    partial: Any

    @property
    def before(self) -> Any:
        """Keys older than all queries of the sequence."""
        return self.kv_len - self.q_len

    def last_seen(self, positions: jax.Array, *, causal: bool) -> jax.Array:
        """Return the last key i32`[R]` that queries at these positions see, but for a tree mask.

        Args:
            causal: whether a query sees no later key.
        """
        last = jnp.minimum(positions, self.kv_len - 1)
        # Else one value for all rows, but a vector: scalars alone have no layout to infer.
        return last if causal else jnp.maximum(last, self.kv_len - 1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MergeDescriptor:
    """A split tile: scalars, `q_start`, `q_len` and `offset` as in `Tiles`."""

    num_items: Any  # work items of the tile; 0 past the last split tile
    partial: Any  # index of the tile's first partial state; the others follow
    q_start: Any
    q_len: Any
    offset: Any


@pytree
class RaggedOutputs:
    """Results of a kernel of work items and of its merge: arrays, refs or types."""

    out: Any  # `[T * Hq, D of V]`, or `[T, Hq, D of V]`
    partials: Any  # of split tiles; None in the merge
    lse: Any  # f32, as `out` without the last axis; None where it is not wanted

    @classmethod
    def types(
        cls, shape: tuple[int, ...], partials: tuple[int, ...], dtype: Any, *, with_lse: bool
    ) -> RaggedOutputs:
        """Return the types for shapes of `out` and of `partials.lse`."""
        # The merge has references to results, which all devices have alike.
        lse = result_shape(shape[:-1], jnp.float32, varying=False)
        return cls(
            out=result_shape(shape, dtype, varying=False),
            partials=ops.Partials(
                out=result_shape((*partials, shape[-1]), jnp.float32),
                lse=result_shape(partials, jnp.float32),
            ),
            lse=lse if with_lse else None,
        )


def of_tokens(
    out: jax.Array, lse: jax.Array | None, num_tokens: int, num_q_heads: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return results of the merge as `(out [T, Hq, D], lse f32[T, Hq])` of a device."""
    out = varying_by_device(out.reshape(num_tokens, num_q_heads, -1))
    if lse is not None:
        lse = varying_by_device(lse.reshape(num_tokens, num_q_heads))
    return out, lse


_Descriptor = TypeVar("_Descriptor", WorkDescriptor, MergeDescriptor)


def fields_of(kind: type) -> list[str]:
    """Return the names of the words of a descriptor, in order."""
    return [field.name for field in dataclasses.fields(kind)]


def unpack(kind: type[_Descriptor], ref: Any, index: Any) -> _Descriptor:
    """Load the descriptor of a work item or of a split tile."""
    return kind(**{name: ref[index, i] for i, name in enumerate(fields_of(kind))})


def pack_plan(plan: Plan, head_tiles: int, *, words: int = DESCRIPTOR_WORDS) -> PackedPlan:
    """Return the descriptors of a plan, packed to `words` i32, and the count of work tiles."""
    *of_tile, _ = names = fields_of(WorkDescriptor)
    work = jnp.stack([*(getattr(plan.items, name) for name in of_tile), plan.partial], axis=1)
    merges = work[plan.first_item][:, [names.index(n) for n in fields_of(MergeDescriptor)[1:]]]
    return PackedPlan(
        items=jnp.pad(work, ((0, 0), (0, words - len(names)))),
        merges=jnp.concatenate([plan.num_items[:, None], merges], axis=1),
        count=jnp.sum(plan.items.q_len > 0, dtype=jnp.int32).reshape(1) * head_tiles,
    )


def packed_plan(
    arrays: Arrays,
    shape: PlanShape,
    head_tiles: int = 1,
    *,
    words: int = DESCRIPTOR_WORDS,
    interpret: bool,
) -> PackedPlan:
    """Return the plan of a call as `pack_plan` does, made by a kernel where there is one."""
    lens = arrays.seq_lens, arrays.cu_q_lens
    if arrays.q_positions is None and can_plan(shape) and not interpret:
        types = packed_types(shape, words)
        return plan_by_kernel(*lens, types, shape, count_factor=head_tiles, interpret=False)
    return pack_plan(make_plan(*lens, arrays.q_positions, shape), head_tiles, words=words)


def tree_bits(tree_mask: jax.Array) -> jax.Array:
    """Return the bits of each row of masks bool`[B, M, M]` as i32`[B, M, words]`, the last 0."""
    size = tree_mask.shape[-1]
    num_words = -(-size // 32) + 1
    bits = jnp.pad(tree_mask, ((0, 0), (0, 0), (0, num_words * 32 - size)))
    bits = bits.reshape(*bits.shape[:2], num_words, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def positions_in_logits(arrays: Arrays, options: LogitOptions) -> jax.Array | None:
    """Return `arrays.q_positions` where logits depend on positions, else None."""
    depend = arrays.alibi_slopes is not None or options.sliding_window is not None
    return arrays.q_positions if depend else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryRows:
    """What the logits of query rows depend on, and which keys the rows see."""

    options: LogitOptions  # of the logits
    before: Any  # keys older than all queries of the sequence
    positions: jax.Array  # i32`[R]`
    last_seen: jax.Array  # i32`[R]`, the last key that each may see
    slopes: jax.Array | None  # f32`[R]` of ALiBi, or None
    tree_words: Any  # i32`[words, R]`, the bits of each row's tree mask, the last word 0; or None
    layout: Any = ops.WGMMA  # of matrices of the rows in registers

    def logits(self, s: jax.Array, keys: jax.Array) -> tuple[jax.Array, Any]:
        """Return `base2_logits` of q.k f32`[R, K]` for keys at positions i32`[R, K]`."""
        if self.slopes is None:
            return base2_logits(s, self.options, None, keys)
        distances = keys - ops.bcast(self.positions, s)
        return base2_logits(s, self.options, ops.bcast(self.slopes, s), distances)

    def sees(self, first_key: Any, keys: jax.Array) -> jax.Array:
        """Return which keys of a block, at positions i32`[R, K]` from `first_key` on, rows see."""
        tree = functools.partial(self._sees_in_tree, first_key, keys)
        return visible(
            keys,
            self.positions,
            self.options,
            last=self.last_seen,
            tree=None if self.tree_words is None else tree,
            bcast=functools.partial(ops.bcast, like=keys),
        )

    def _sees_in_tree(self, first_key: Any, keys: jax.Array) -> jax.Array:
        newest = keys - self.before
        first_word = (first_key - self.before) >> 5
        bits = ops.full(keys.shape, 0, self.layout, jnp.int32)
        for i in range((keys.shape[1] + 30) // 32 + 1):  # the first key may be any bit of its word
            # Words past the end of a mask are 0, as the last one is.
            word = jnp.clip(first_word + i, 0, self.tree_words.shape[0] - 1)
            word = ops.load(self.tree_words.at[word], self.layout.reduce(1))
            bits = jnp.where(newest >> 5 == first_word + i, ops.bcast(word, keys), bits)
        return (newest < 0) | ((bits >> (newest & 31)) & 1 == 1)
