"""Attention of one row whose merge is left to the kernel that follows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from pallas_paged import dispatch
from pallas_paged.attention import paged_attention
from pallas_paged.checks import default_promotion
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.validation import checked_arrays, logit_options

_ARRAYS = (
    "k_pages",
    "v_pages",
    "block_tables",
    "seq_lens",
    "k_scales",
    "v_scales",
    "alibi_slopes",
    "sinks",
)
_OPTIONS = ("sm_scale", "soft_cap", "sliding_window")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeferredAttention:
    """A call of `paged_attention` that is not made yet.

    Attributes:
        q: `[B, Hq, D]`.
        given: the other arguments, by name: arrays, options of the logits, `kv_layout` and
            `implementation`.
    """

    q: jax.Array
    given: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, int]:
        """That of the result, `[B, Hq * D]`."""
        num_seqs, num_heads, head_dim = self.q.shape
        return num_seqs, num_heads * head_dim

    def out(self) -> jax.Array:
        """Make the call; return `[B, Hq * D]`."""
        return paged_attention(self.q, **self.given).reshape(self.shape)

    @default_promotion()
    def states(self) -> DecodeStates | None:
        """Make the call without its merge; return None if its implementation has none.

        Raises:
            ValueError, NotImplementedError: as `paged_attention`.
        """
        given = self.given
        arrays = checked_arrays(
            q=self.q,
            **{name: given.get(name) for name in _ARRAYS},
            kv_layout=given.get("kv_layout", "HPND"),
            one_query_a_row=True,
        )
        options: dict[str, Any] = {name: given.get(name) for name in _OPTIONS}
        return dispatch.decode_states(
            arrays,
            options=logit_options(arrays.head_dim, **options),
            implementation=given.get("implementation"),
        )
