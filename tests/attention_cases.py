"""Inputs of attention with everything that a row does not own filled with poison."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-3}


@dataclass(frozen=True)
class Case:
    """Shapes, lengths and dtype of one call; `make` draws its arrays."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 8
    seq_lens: tuple[int, ...] = (37, 5, 64)
    pages_per_seq: int = 8
    dtype: str = "float32"

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads}/{self.head_dim}"
        return f"{heads}-page{self.page_size}-rows{len(self.seq_lens)}-{self.dtype}"

    def make(self, *, seed: int = 0, poison: bool = True, order: int = 0) -> tuple[np.ndarray, ...]:
        """Returns q, k_pages, v_pages, block_tables, seq_lens as NumPy arrays.

        Args:
            seed: of the tokens' values.
            poison: put NaN and infinities in the slots and pages that no row owns, and any int32
                in the entries of the block tables that no row needs; else zeros.
            order: of the pages in the pool; the tokens' values do not depend on it.
        """
        lens = np.array(self.seq_lens, np.int32)
        num_seqs, size = len(lens), self.page_size
        num_blocks = -(-lens // size)
        num_pages = int(num_blocks.sum()) + 3
        pages = np.random.default_rng(order).permutation(num_pages)
        rng = np.random.default_rng(seed)
        junk = np.random.default_rng(seed + 1)
        if poison:
            info = np.iinfo(np.int32)
            tables = junk.integers(info.min, info.max, (num_seqs, self.pages_per_seq), np.int32)
        else:
            tables = np.zeros((num_seqs, self.pages_per_seq), np.int32)
        shape = (self.num_kv_heads, num_pages, size, self.head_dim)
        empty = junk.choice([np.nan, np.inf, -np.inf], shape) if poison else np.zeros(shape)
        k_pages, v_pages = empty.copy(), empty.copy()
        q = rng.standard_normal((num_seqs, self.num_q_heads, self.head_dim))
        taken = 0
        for b, (length, blocks) in enumerate(zip(lens, num_blocks, strict=True)):
            tables[b, :blocks] = pages[taken : taken + blocks]
            taken += blocks
            positions = np.arange(length)
            where = (slice(None), tables[b, positions // size], positions % size)
            for array in (k_pages, v_pages):
                array[where] = rng.standard_normal((self.num_kv_heads, length, self.head_dim))
        dtype = jnp.dtype(self.dtype)
        return q.astype(dtype), k_pages.astype(dtype), v_pages.astype(dtype), tables, lens
