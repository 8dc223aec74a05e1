"""The cache of ragged paged attention "v3": its sizes, its padding, and the slots of new tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.checks import as_array, checked_array


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """The sizes of a call and of its cache, which may be padded."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    # The cache as `[num_pages, page_size, 2 * KV heads, elements of a head]`.
    pages_shape: tuple[int, int, int, int]

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array) -> CacheSizes:
        """Return the sizes of these arrays.

        Raises:
            ValueError: shapes do not go together.
        """
        if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2]:
            raise ValueError(
                f"queries.shape={q.shape} must be [T, num_q_heads, head_dim], and keys.shape="
                f"{k.shape} and values.shape={v.shape} [T, num_kv_heads, head_dim]"
            )
        _, num_q_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        if not num_kv_heads or num_q_heads % num_kv_heads:
            raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
        if cache.ndim not in (4, 5) or 0 in cache.shape:
            raise ValueError(
                f"kv_cache.shape={cache.shape} must be [num_pages, page_size, 2 * num_kv_heads,"
                " head_dim], or have its third axis split in two"
            )
        num_pages, page_size, *_, elements = cache.shape
        num_heads = cache.size // (num_pages * page_size * elements)
        if num_heads * elements == 2 * num_kv_heads * head_dim:  # also where K and V share an axis
            num_heads, elements = 2 * num_kv_heads, head_dim
        if num_heads % 2 or num_heads < 2 * num_kv_heads or elements < head_dim:
            raise ValueError(
                f"kv_cache.shape={cache.shape} must have an even number of heads, K and V of at"
                f" least {num_kv_heads=}, with at least {head_dim=} elements"
            )
        return cls(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            pages_shape=(num_pages, page_size, num_heads, elements),
        )

    def _more_heads(self, num_heads: int) -> int:
        """Return how many heads of padding follow `num_heads` of K, V or queries."""
        group = num_heads // self.num_kv_heads
        return group * (self.pages_shape[2] // 2) - num_heads

    def padded(self, x: jax.Array) -> jax.Array:
        """Return `x [T, heads, head_dim]` with zeros for the padding of the cache."""
        heads, elements = self._more_heads(x.shape[1]), self.pages_shape[3] - self.head_dim
        return jnp.pad(x, ((0, 0), (0, heads), (0, elements))) if heads or elements else x

    def padded_heads(self, x: ArrayLike | None) -> jax.Array | None:
        """Return `x [num_q_heads]` with zeros for the heads of padding."""
        if x is None:
            return None
        x = checked_array("attention_sink", x, jnp.float32, (self.num_q_heads,))
        heads = self._more_heads(self.num_q_heads)
        return jnp.pad(x, (0, heads)) if heads else x


def check_floats(cache: jax.Array, **arrays: jax.Array) -> None:
    """Raise ValueError unless all arrays are floating, or of the dtype of the cache."""
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != cache.dtype:
            raise ValueError(f"{name}.dtype={x.dtype.name} must be floating, or that of the cache")


def check_tuning(function: str, tuning: Mapping[str, Any], allowed: Any) -> None:
    """Raise TypeError unless all keywords are of a `TypedDict` of those that are not used."""
    unknown = tuning.keys() - allowed.__annotations__.keys()
    if unknown:
        raise TypeError(f"{function}() got unexpected keyword arguments {unknown}")


def checked_rows(
    kv_lens: ArrayLike, page_indices: ArrayLike, cu_q_lens: ArrayLike, distribution: ArrayLike
) -> tuple[jax.Array, ...]:
    """Return the lengths, i32`[S, pages_per_seq]` tables, offsets and number of rows of a call."""
    lens = checked_array("kv_lens", kv_lens, jnp.int32)
    offsets = checked_array("cu_q_lens", cu_q_lens, jnp.int32, (lens.size + 1,))
    num_seqs = checked_array("distribution", distribution, jnp.int32, (3,))[2]
    shape = as_array("page_indices", page_indices).shape
    pages = checked_array("page_indices", page_indices, jnp.int32, shape)
    size, count = pages.size, lens.size
    if not size or not count or size % count or shape[0] not in (count, size):
        raise ValueError(
            f"page_indices.shape={shape} must be [S * pages_per_seq] with S={count} rows"
        )
    return lens, pages.reshape(count, -1), offsets, num_seqs


def new_slots(
    num_tokens: int,
    num_pages: int,
    page_size: int,
    lens: jax.Array,  # i32[S]
    tables: jax.Array,  # i32[S, pages_per_seq]
    offsets: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
) -> jax.Array:
    """Return the slot of each new token, i32`[T]`; -1 where no live row owns it."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    alive = jnp.arange(lens.size) < num_seqs
    row = jnp.sum(alive & (offsets[1:] <= tokens[:, None]), axis=1, dtype=jnp.int32)
    owned = row < jnp.minimum(num_seqs, lens.size)
    row = jnp.minimum(row, lens.size - 1)
    position = lens[row] - offsets[row + 1] + tokens
    owned &= (position >= 0) & (position < tables.shape[1] * page_size)
    page = tables.at[row, position // page_size].get(mode="fill", fill_value=-1)
    owned &= (page >= 0) & (page < num_pages)
    return jnp.where(owned, page * page_size + position % page_size, -1)
