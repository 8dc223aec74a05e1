"""Decode attention that leaves its split-KV partial states for the next kernel to merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.attention import dispatch
from pallas_paged.attention.arguments import checked_arrays, logit_options
from pallas_paged.checks import default_promotion
from pallas_paged.decoder.rotary_write import Rotation, checked_write
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.write_arrays import WriteArrays
from pallas_paged.pages.pool import LayerKV


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UnmergedAttention:
    """The output of `paged_attention` before its last kernel, without gradients.

    Attributes:
        states: partial states from the decode kernel.
        merge: merges them into `(out [B, Hq, D], lse f32[B, Hq])`.
        dtype: dtype of the output.
    """

    states: DecodeStates
    merge: Callable[[DecodeStates], tuple[jax.Array, jax.Array]]
    dtype: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the merged output, `[B, Hq * D]`."""
        return self.states.unit_ends.shape[0], self.states.num_q_heads * self.states.head_dim

    @default_promotion()
    def merged(self) -> jax.Array:
        """Return the output `[B, Hq * D]`."""
        with jax.enable_x64(False):
            return self.merge(self.states)[0].reshape(self.shape)


@default_promotion()
def unmerged_attention(
    layer: LayerKV,
    q: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    implementation: Any = None,
    **options: Any,
) -> UnmergedAttention | None:
    """Run `paged_attention` without its merge.

    Args:
        layer: the pages.
        q, block_tables, seq_lens, implementation: as in `paged_attention`.
        **options: `sm_scale`, `soft_cap`, `sliding_window`, `alibi_slopes` and `sinks`, as there.

    Returns:
        The partial states; None where the implementation has none, and on a mesh.

    Raises:
        ValueError, NotImplementedError: as `paged_attention`.
    """
    found = _states(layer, q, block_tables, seq_lens, implementation, None, **options)
    return None if found is None else found[0]


@default_promotion()
def write_and_attend(
    layer: LayerKV,
    qkv: jax.Array,
    slots: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    rotation: Rotation | None,
    implementation: Any = None,
    **options: Any,
) -> tuple[UnmergedAttention, LayerKV] | None:
    """Run `rotate_and_write_kv` and then `unmerged_attention`, in one kernel.

    The newest key of each row comes from `qkv` and is written to its slot. Empty rows write
    nothing.

    Args:
        layer, qkv, slots, rotation: as in `rotate_and_write_kv`, with one token for each row.
        block_tables, seq_lens, implementation: as in `paged_attention`.
        **options: as in `unmerged_attention`.

    Returns:
        The partial states and the layer with the new tokens; None where there is no such kernel.
        Triton has one, for pages in two arrays of the dtype of `qkv`, and a rotation of all of
        head_dim, a power of two.

    Raises:
        ValueError, NotImplementedError: as `paged_attention` and `rotate_and_write_kv`.
    """
    head_dim = qkv.shape[-1]
    is_power_of_2 = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    rotates_all = rotation is not None and 2 * jnp.shape(rotation[0])[-1] == head_dim
    if layer.layout.one_array or layer.k_pages.dtype != qkv.dtype:
        return None
    if not (is_power_of_2 and rotates_all):
        return None
    new = checked_write(layer, qkv, slots, rotation, None, None)
    q = qkv[:, :, :-2].reshape(qkv.shape[0], -1, head_dim)  # only its shape is used
    found = _states(layer, q, block_tables, seq_lens, implementation, new, **options)
    if found is None:
        return None
    attention, k_pages, v_pages = found
    return attention, dataclasses.replace(layer, k_pages=k_pages, v_pages=v_pages)


def _states(
    layer: LayerKV,
    q: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    implementation: Any,
    new: WriteArrays | None,
    *,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    **options: Any,
) -> tuple[Any, ...] | None:
    """Return the unmerged attention and, with `new`, the pages."""
    arrays = checked_arrays(
        q=q,
        **vars(layer),
        block_tables=block_tables,
        seq_lens=seq_lens,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        one_query_a_row=True,
    )
    if any(jax.typeof(x).sharding.mesh.size > 1 for x in jax.tree.leaves(arrays)):
        return None
    found = dispatch.decode_states(
        arrays,
        options=logit_options(arrays.head_dim, **options),
        implementation=implementation,
        new=new,
    )
    if found is None:
        return None
    (states, *pages), merge = found
    return UnmergedAttention(states=states, merge=merge, dtype=q.dtype), *pages
