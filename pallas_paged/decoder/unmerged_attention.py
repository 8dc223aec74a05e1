"""Decode attention that leaves its split-KV partial states for the next kernel to merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_paged.attention import dispatch
from pallas_paged.attention.arguments import checked_arrays
from pallas_paged.attention.options import AttentionOptions, check_names, static_options
from pallas_paged.checks import default_promotion
from pallas_paged.decoder.checks import Rotation
from pallas_paged.decoder.rotary_write import checked_write
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.write_arrays import WriteArrays
from pallas_paged.pages.layer import LayerKV

__all__ = ["UnmergedAttention", "unmerged_attention", "write_and_attend"]

_REFUSED = ("num_seqs", "config", "fixed_split_size")


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
    q: jax.Array,
    layer: LayerKV,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    **options: Unpack[AttentionOptions],
) -> UnmergedAttention | None:
    """Run `paged_attention` without its merge.

    Args:
        q, layer, block_tables, seq_lens: as in `paged_attention`.
        **options: of `AttentionOptions`, without `num_seqs`, `config` and `fixed_split_size`.

    Returns:
        The partial states; None where the implementation has none, and on a mesh.

    Raises:
        ValueError, NotImplementedError, TypeError: as `paged_attention`.
    """
    check_names("unmerged_attention", options, AttentionOptions, *_REFUSED)
    found = _states(q, layer, block_tables, seq_lens, options)
    return None if found is None else found[0]


@default_promotion()
def write_and_attend(
    qkv: jax.Array,
    layer: LayerKV,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    slots: jax.Array,
    *,
    rotation: Rotation | None,
    **options: Unpack[AttentionOptions],
) -> tuple[UnmergedAttention, LayerKV] | None:
    """Run `rotate_and_write_kv` and then `unmerged_attention`, in one kernel.

    The newest key of each sequence comes from `qkv` and is written to its slot. Empty sequences
    write nothing.

    Args:
        qkv, layer, slots, rotation: as in `rotate_and_write_kv`, with one token for each sequence.
        block_tables, seq_lens: as in `paged_attention`.
        **options: as in `unmerged_attention`.

    Returns:
        The partial states and the layer with the new tokens; None where there is no such kernel.
        Triton has one, for pages in two arrays of the dtype of `qkv`, and a rotation of all of
        head_dim, a power of two.

    Raises:
        ValueError, NotImplementedError: as `paged_attention` and `rotate_and_write_kv`.
    """
    check_names("write_and_attend", options, AttentionOptions, *_REFUSED)
    head_dim = qkv.shape[-1]
    is_power_of_2 = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    rotates_all = rotation is not None and 2 * jnp.shape(rotation[0])[-1] == head_dim
    if layer.layout.one_array or layer.k_pages.dtype != qkv.dtype:
        return None
    if not (is_power_of_2 and rotates_all):
        return None
    new = checked_write(layer, qkv, slots, rotation, None, None)
    q = qkv[:, :, :-2].reshape(qkv.shape[0], -1, head_dim)  # only its shape is used
    found = _states(q, layer, block_tables, seq_lens, options, new)
    if found is None:
        return None
    attention, k_pages, v_pages = found
    return attention, dataclasses.replace(layer, k_pages=k_pages, v_pages=v_pages)


def _states(
    q: jax.Array,
    layer: LayerKV,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    options: Mapping[str, Any],
    new: WriteArrays | None = None,
) -> tuple[Any, ...] | None:
    """Return the unmerged attention and, with `new`, the pages."""
    arrays = checked_arrays(q, layer, block_tables, seq_lens, options)
    if any(jax.typeof(x).sharding.mesh.size > 1 for x in jax.tree.leaves(arrays)):
        return None
    found = dispatch.decode_states(arrays, static_options(arrays.head_dim, options), new=new)
    if found is None:
        return None
    (states, *pages), merge = found
    return UnmergedAttention(states=states, merge=merge, dtype=q.dtype), *pages
