"""Inputs of attention in which all data outside the rows is poisoned."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-3}


def _on_mosaic(case: Any, implementation: str, **sizes: int) -> Any:
    """The case, or for a Mosaic kernel that of these sizes with 16 bits."""
    if not implementation.startswith("mosaic"):
        return case
    return replace(case, dtype="float16" if case.dtype == "float16" else "bfloat16", **sizes)


def cumulated(q_lens: tuple[int, ...]) -> np.ndarray:
    """The cu_q_lens of rows with these numbers of queries."""
    return np.cumsum([0, *q_lens]).astype(np.int32)


def _parts(arrays: tuple) -> tuple[list, list, list]:
    """Copies of q, pages, tables and lengths of a call; of cu_q_lens, if any; of scales, if any."""
    arrays = [np.array(x) for x in arrays]
    num_offsets = len(arrays[5:]) % 2
    return arrays[:5], arrays[5 : 5 + num_offsets], arrays[5 + num_offsets :]


def of_first_rows(arrays: tuple, num_seqs: int) -> tuple[np.ndarray, ...]:
    """The call with empty rows from num_seqs on."""
    (*arrays, lens), offsets, scales = _parts(arrays)
    lens[num_seqs:] = 0
    return *arrays, lens, *(np.minimum(x, x[num_seqs]) for x in offsets), *scales


def with_dead_rows(arrays: tuple, num_seqs: int) -> tuple[np.ndarray, ...]:
    """The call with anything in the tables, lengths and offsets of rows from num_seqs on."""
    (*arrays, tables, lens), offsets, scales = _parts(arrays)
    dead = len(lens) - num_seqs
    tables[num_seqs:] = np.resize(np.int32([-1, 2**31 - 1, -(2**31)]), dead)[:, None]
    lens[num_seqs:] = np.resize(np.int32([2_000_000, -7, 63]), dead)
    for x in offsets:
        x[num_seqs + 1 :] = np.resize(np.int32([2_000_000, -3, 1]), dead)
    return *arrays, tables, lens, *offsets, *scales


def of_latents(arrays: tuple, v_head_dim: int) -> tuple[np.ndarray, ...]:
    """The call with V that are the first elements of K."""
    q, k_pages, _, *rest = arrays
    return q, k_pages, k_pages[..., :v_head_dim], *rest


def without_tokens_left_of(
    window: int, arrays: tuple, page_size: int, entry: int, groups: Iterable[int] = ()
) -> tuple[np.ndarray, ...]:
    """The call without the tokens left of every query's window: they hold NaN, or 77 in int8.

    The tables hold `entry` for pages of such tokens alone. The rows between two numbers of `groups`
    share their pages.
    """
    (q, *pages, tables, lens), offsets, scales = _parts(arrays)
    q_lens = np.diff(offsets[0]) if offsets else np.minimum(lens, 1)
    first = np.maximum(np.int64(lens) - q_lens + 1 - window, 0)
    for begin, end in itertools.pairwise(groups):
        first[begin:end] = first[begin:end].min(initial=2**31)
    for table, count in zip(tables, first, strict=True):
        tokens = np.arange(count)
        where = (slice(None), table[tokens // page_size], tokens % page_size)
        for x in (*pages, *(x for x in scales if x.ndim)):
            x[where] = 77 if x.dtype == np.int8 else np.nan
    for table, count in zip(tables, first, strict=True):
        table[: count // page_size] = entry
    return q, *pages, tables, lens, *offsets, *scales


@partial(jax.jit, static_argnums=(1, 2))
def enlarged(pages: jax.Array, num_pages: int, axis: int) -> jax.Array:
    """The pages as the last ones of an array of `num_pages`, on a device."""
    shape = (*pages.shape[:axis], num_pages, *pages.shape[axis + 1 :])
    first = num_pages - pages.shape[axis]
    return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, pages.dtype), pages, first, axis)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, lengths and dtype of one call; `make` draws its arrays.

    Without q_lens the case is a decode call, else a ragged call of at least num_tokens query
    tokens. The pool has at least num_pages pages: cases of the same shapes share a program.
    """

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 8
    seq_lens: tuple[int, ...] = (37, 5, 64)
    pages_per_seq: int = 8
    dtype: str = "float32"
    q_lens: tuple[int, ...] | None = None
    num_tokens: int = 0
    num_pages: int = 0

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads}/{self.head_dim}"
        rows = len(self.seq_lens) if self.q_lens is None else f"{self.q_lens}of{self.seq_lens}"
        return f"{heads}-page{self.page_size}-rows{rows}-{self.dtype}".replace(", ", ",")

    def on(self, implementation: str) -> Case:
        """The case, or the nearest one that the implementation supports."""
        is_any = implementation.startswith("mosaic_sm80") or self.head_dim in (64, 128, 256)
        return _on_mosaic(self, implementation, head_dim=self.head_dim if is_any else 64)

    def make(self, *, seed: int = 0, poison: bool = True, order: int = 0) -> tuple[np.ndarray, ...]:
        """Returns q, k_pages, v_pages, block_tables, seq_lens and, if ragged, cu_q_lens.

        With `poison` the slots and pages that no row owns and the padding queries hold NaN and
        infinities, and the entries of the block tables that no row needs any int32; else zeros. The
        values follow from `seed`, and the order of the pages in the pool from `order`.
        """
        lens = np.array(self.seq_lens, np.int32)
        num_seqs, size = len(lens), self.page_size
        num_blocks = -(-lens // size)
        num_pages = max(int(num_blocks.sum()) + 3, self.num_pages)
        pages = np.random.default_rng(order).permutation(num_pages)
        rng = np.random.default_rng(seed)
        junk = np.random.default_rng(seed + 1)
        if poison:
            info = np.iinfo(np.int32)
            tables = junk.integers(info.min, info.max, (num_seqs, self.pages_per_seq), np.int32)
        else:
            tables = np.zeros((num_seqs, self.pages_per_seq), np.int32)
        dtype = jnp.dtype(self.dtype)
        shape = (self.num_kv_heads, num_pages, size, self.head_dim)
        k_pages = np.zeros(shape, dtype)
        if poison:
            nothing = np.array([np.nan, np.inf, -np.inf], dtype)
            k_pages = nothing[junk.integers(0, 3, shape, np.uint8)]
        v_pages = k_pages.copy()
        owned = num_seqs if self.q_lens is None else sum(self.q_lens)
        num_tokens = max(owned, self.num_tokens)
        q = rng.standard_normal((num_tokens, self.num_q_heads, self.head_dim))
        q[owned:] = np.nan if poison else 0
        taken = 0
        for b, (length, blocks) in enumerate(zip(lens, num_blocks, strict=True)):
            tables[b, :blocks] = pages[taken : taken + blocks]
            taken += blocks
            positions = np.arange(length)
            where = (slice(None), tables[b, positions // size], positions % size)
            for array in (k_pages, v_pages):
                array[where] = rng.standard_normal((self.num_kv_heads, length, self.head_dim))
        arrays = (q.astype(dtype), k_pages, v_pages, tables, lens)
        return arrays if self.q_lens is None else (*arrays, cumulated(self.q_lens))


@dataclass(frozen=True, kw_only=True)
class LatentCase(Case):
    """A case whose V are the first 8 of 9 elements of K, like 512 of 576; `of_latents` takes them.

    `head_dim` is that of K.
    """

    num_kv_heads: int = 1

    @property
    def v_head_dim(self) -> int:
        return self.head_dim * 8 // 9

    def on(self, implementation: str) -> LatentCase:
        return _on_mosaic(self, implementation, head_dim=576)


@dataclass(frozen=True, kw_only=True)
class NarrowCase(Case):
    """A case whose V have fewer elements than K."""

    v_head_dim: int = 24

    def make(self, **how) -> tuple[np.ndarray, ...]:
        q, k_pages, v_pages, *rest = super().make(**how)
        return q, k_pages, v_pages[..., : self.v_head_dim], *rest

    def on(self, implementation: str) -> NarrowCase:
        return _on_mosaic(self, implementation, head_dim=192, v_head_dim=128)


# Cases of shapes that the Mosaic kernels take.
mosaic_case = partial(Case, head_dim=64, page_size=16, dtype="bfloat16")


@dataclass(frozen=True)
class SharedPrefixes:
    """Rows of `case` in groups; the rows of a group share the pages of their first tokens."""

    case: Case
    seq_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    cu_group_sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.prefix_lens}of{self.cu_group_sizes}".replace(" ", "")

    def on(self, implementation: str) -> SharedPrefixes:
        """As `Case.on`."""
        return replace(self, case=self.case.on(implementation))

    def make(self) -> tuple[np.ndarray, ...]:
        """Returns what `Case.make` does, and prefix_lens and cu_group_sizes."""
        arrays = replace(self.case, seq_lens=self.seq_lens).make()
        _, k_pages, v_pages, tables, lens = arrays
        for g, prefix in enumerate(self.prefix_lens):
            rows = np.arange(*self.cu_group_sizes[g : g + 2])
            rows = rows[lens[rows] > 0]
            shared = min([prefix, *lens[rows]]) // self.case.page_size
            for b in rows[1:]:
                unused = tables[b, :shared]
                k_pages[:, unused] = v_pages[:, unused] = np.nan
                tables[b, :shared] = tables[rows[0], :shared]
        return *arrays, np.int32(self.prefix_lens), np.int32(self.cu_group_sizes)
