"""Merge of a row's partial states within the decode kernel, by the program that ends last.

A program that has left a partial state counts it. The one that finds all others counted merges
them, in the order of the keys, so which one it is changes no bit. A row that one program has alone
needs no partial state at all. That saves a kernel for each layer, and its wait for all programs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.call import result_shape
from pallas_paged.kernels.logits import LN_2
from pallas_paged.kernels.triton import merge
from pallas_paged.kernels.triton.specs import kv_head

_MOST_STATES = 16  # that the merge loads at once: 64 registers of a thread


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Final:
    """Final results of a call, or their types, or refs to those of one KV head."""

    out: Any  # [B, Hkv, G, D]
    lse: Any  # f32[B, Hkv, G]
    counts: Any  # i32[Hkv, B], partial states of each row that have been left; 0 at first

    @classmethod
    def types(cls, shape: tuple[int, int, int, int], dtype: Any) -> Final:
        """Return the types, with `out` of this shape and dtype."""
        num_seqs, num_kv_heads, group, _ = shape
        return cls(
            out=result_shape(shape, dtype),
            lse=result_shape((num_seqs, num_kv_heads, group), jnp.float32),
            counts=result_shape((num_kv_heads, num_seqs), jnp.int32),
        )

    @property
    def specs(self) -> Final:
        """Block specs of a program's KV head."""
        axes = Final(out=1, lse=1, counts=0)
        return jax.tree.map(kv_head, self, axes)


def zero_empty_rows(
    final: Final, unit_ends_ref: Any, program: jax.Array, num_programs: int
) -> None:
    """Write the results of a program's share of the rows without keys, that no program visits."""
    num_seqs, group, head_dim = final.out.shape
    heads = jnp.arange(pl.next_power_of_2(group))
    dims = jnp.arange(pl.next_power_of_2(head_dim))
    mask = (heads < group)[:, None] & (dims < head_dim)[None, :]

    @pl.loop(0, pl.cdiv(jnp.maximum(num_seqs - program, 0), num_programs))
    def _(i):
        row = program + i * num_programs
        start = jnp.where(row > 0, unit_ends_ref[jnp.maximum(row - 1, 0)], 0)

        @pl.when(start == unit_ends_ref[row])
        def _():
            place = final.out.at[row[None, None], heads[:, None], dims[None, :]]
            plgpu.store(place, jnp.zeros(mask.shape, final.out.dtype), mask=mask)
            none = jnp.full(heads.shape, -jnp.inf, jnp.float32)
            plgpu.store(final.lse.at[row[None], heads], none, mask=heads < group)


def leave_state(
    state: tuple[jax.Array, jax.Array, list[jax.Array]],  # m, l and acc for each of `dims`
    final: Final,
    outs_ref: Any,  # f32[num_partials, G, D]
    lses_ref: Any,  # f32[num_partials, G]
    sinks_ref: Any,  # f32[G] or None
    *,
    row: jax.Array,
    partial: jax.Array,
    first: jax.Array,
    num_partials: jax.Array,
    dims: list[jax.Array],
    num_programs: int,
    fixed_split: bool,
    interpret: bool,
) -> None:
    """Write the result of a row, or a partial state and, after the last one, their merge.

    Args:
        row: index of the row.
        partial: index of the state.
        first, num_partials: index of the row's first state, and their number.
        dims: indices of the elements in each accumulator.
        num_programs: of each KV head.
        fixed_split: whether the order of the sums must not depend on the batch.
        interpret: whether the kernel is interpreted.
    """
    m_i, l_i, acc = state
    num_seqs, group, head_dim = final.out.shape
    heads = jnp.arange(m_i.size)
    head_mask = heads < group

    def sinks_of(heads):
        return None if sinks_ref is None else plgpu.load(sinks_ref.at[heads], mask=heads < group)

    @pl.when(num_partials == 1)
    def _():
        sinks = sinks_of(heads)
        for d, x in zip(dims, acc, strict=True):
            out, lse = merge.finish((m_i * LN_2, l_i, x), sinks)
            plgpu.store(
                final.out.at[row[None, None], heads[:, None], d],
                out.astype(final.out.dtype),
                mask=head_mask[:, None] & (d < head_dim),
            )
        plgpu.store(final.lse.at[row[None], heads], lse, mask=head_mask)

    @pl.when(num_partials > 1)
    def _():
        for d, x in zip(dims, acc, strict=True):
            plgpu.store(
                outs_ref.at[partial[None, None], heads[:, None], d],
                x / l_i[:, None],
                mask=head_mask[:, None] & (d < head_dim),
            )
        lse = m_i * LN_2 + jnp.log(l_i)
        plgpu.store(lses_ref.at[partial[None], heads], lse, mask=head_mask)
        if interpret:  # one program after another
            count = final.counts[row]
            final.counts[row] = count + 1
        else:
            plgpu.debug_barrier()  # the atomic addition orders the stores of this thread alone
            count = plgpu.atomic_add(final.counts, (row,), jnp.int32(1))

        @pl.when(count == num_partials - 1)
        def _():
            if not interpret:
                plgpu.debug_barrier()
            heads = jnp.arange(pl.next_power_of_2(group))
            all_dims = jnp.arange(pl.next_power_of_2(head_dim))
            # An even batch has about this many states to a row.
            block_s = 8 if fixed_split else pl.next_power_of_2(num_programs // num_seqs + 2)
            block_s = min(block_s, max(_MOST_STATES * 512 // (heads.size * all_dims.size), 1))
            found = merge.merge_partials(
                outs_ref, lses_ref, first, num_partials, heads, all_dims, block_s
            )
            out, lse = merge.finish(found, sinks_of(heads))
            mask = (heads < group)[:, None] & (all_dims < head_dim)[None, :]
            place = final.out.at[row[None, None], heads[:, None], all_dims[None, :]]
            plgpu.store(place, out.astype(final.out.dtype), mask=mask)
            plgpu.store(final.lse.at[row[None], heads], lse, mask=heads < group)
