"""A paged KV cache in one pytree: the page table, the pool, and attention over both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike

from pallas_paged.attention.dispatch import rising_offsets
from pallas_paged.attention.entries import paged_attention, ragged_paged_attention
from pallas_paged.attention.mla import mla_attention
from pallas_paged.attention.options import RaggedAttentionOptions
from pallas_paged.checks import (
    INT32_MAX,
    as_array,
    check_integer,
    checked_array,
    default_promotion,
    pytree,
)
from pallas_paged.pages import table as page_table
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.layout import KVLayout
from pallas_paged.pages.pool import KVPool, copy_pages, create_kv_pool, write_kv
from pallas_paged.pages.sharding import page_table_sharding
from pallas_paged.pages.table import Integers, PageTable


@pytree
class PagedKVCache:
    """The keys and values of sequences in pages: immutable, for `jit`, `scan` and `while_loop`.

    A method returns a new cache. A step calls `extend` once, and then `write` and `attend` for each
    layer. Donate the cache where it is an argument of a jitted function, or each call copies it.

        cache, ok = cache.extend(jnp.ones(max_seqs, jnp.int32))
        for layer in range(num_layers):
            cache = cache.write(layer, k, v)
            out = cache.attend(layer, q)

    The functions beneath, `pallas_paged.extend`, `write_kv`, `paged_attention` and so on, take
    `table` and `pool.layers` alone.

    Attributes:
        table: which sequence owns which page.
        pool: the pages of all layers.
        num_new_tokens: i32`[max_seqs]`, tokens that the last `extend` added to each sequence; 0 for
            all after another method has changed the table.
    """

    table: PageTable
    pool: KVPool
    num_new_tokens: jax.Array

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        max_seqs: int,
        pages_per_seq: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: DTypeLike,
        kv_layout: KVLayout = "NHD",
        sharding: NamedSharding | None = None,
    ) -> PagedKVCache:
        """Return an empty cache.

        Args:
            num_layers, num_pages, page_size, num_kv_heads, head_dim, dtype, kv_layout, sharding: as
                in `create_kv_pool`. On a mesh the table is replicated.
            v_head_dim: as in `create_kv_pool`.
            max_seqs, pages_per_seq: as in `create_page_table`.

        Raises:
            ValueError: as those functions.
        """
        table = page_table.create_page_table(
            num_pages=num_pages,
            page_size=page_size,
            max_seqs=max_seqs,
            pages_per_seq=pages_per_seq,
        )
        pool = create_kv_pool(
            num_layers=num_layers,
            num_pages=num_pages,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            kv_layout=kv_layout,
            sharding=sharding,
        )
        new = jnp.zeros(max_seqs, jnp.int32)
        if sharding is not None:
            table, new = jax.device_put((table, new), page_table_sharding(sharding.mesh))
        return cls(table=table, pool=pool, num_new_tokens=new)

    @property
    def seq_lens(self) -> jax.Array:
        """i32`[max_seqs]`, tokens of each sequence."""
        return self.table.seq_lens

    def extend(
        self, num_new_tokens: Integers, *, max_new_tokens: int | None = None
    ) -> tuple[PagedKVCache, jax.Array]:
        """Reserve room for new tokens at the end of sequences; all or nothing for each.

        Args:
            num_new_tokens: i32 or bool `[max_seqs]`.
            max_new_tokens: as in `pallas_paged.extend`.

        Returns:
            The cache, and ok bool`[max_seqs]`: False where no page was left, and then the sequence
            keeps its tokens.
        """
        wanted = as_array("num_new_tokens", num_new_tokens)
        if wanted.dtype in (jnp.bool, jnp.int32):
            # Not weakly typed: a jitted step would compile again for the other type of its result.
            wanted = jnp.asarray(wanted, jnp.int32)
        table, ok = page_table.extend(self.table, wanted, max_new_tokens=max_new_tokens)
        return replace(self, table=table, num_new_tokens=jnp.where(ok, wanted, 0)), ok

    @default_promotion()
    def write(
        self, layer: int, k: ArrayLike, v: ArrayLike | None, cu_q_lens: ArrayLike | None = None
    ) -> PagedKVCache:
        """Write the K/V of the tokens of the last `extend` into a layer.

        Older tokens stay as they are, so sequences without new tokens keep all that they have.

        Args:
            layer: index of the layer. Static.
            k: floating `[max_seqs, num_kv_heads, head_dim]`, one token for each sequence, or with
                `cu_q_lens` `[T, num_kv_heads, head_dim]`, the tokens of one sequence after another.
            v: the same shape; None of latents.
            cu_q_lens: i32`[max_seqs + 1]`, as in `ragged_paged_attention`. Tokens before
                those that the last `extend` added are dropped.

        Raises:
            ValueError: as `write_kv`, or there is no such layer.
        """
        max_seqs, lens = self.table.max_seqs, self.table.seq_lens
        shape = as_array("k", k).shape
        tokens = jnp.arange(shape[0] if shape else 0, dtype=jnp.int32)
        if cu_q_lens is None:
            if tokens.shape != lens.shape:
                raise ValueError(f"k.shape={shape} must begin with {max_seqs=} without cu_q_lens")
            seqs, positions = tokens, lens - 1
        else:
            offsets = checked_array("cu_q_lens", cu_q_lens, jnp.int32, (max_seqs + 1,))
            offsets = rising_offsets(offsets, tokens.size)  # as attention takes them
            seqs = jnp.searchsorted(offsets[1:], tokens, side="right").astype(jnp.int32)
            ends = (lens - offsets[1:]).at[seqs].get(mode="fill", fill_value=0)
            positions = ends + tokens
        first_new = jnp.subtract(lens, self.num_new_tokens)
        first_new = first_new.at[seqs].get(mode="fill", fill_value=INT32_MAX)
        is_new = positions >= first_new
        slots = page_table.slot_mapping(self.table, seqs, jnp.where(is_new, positions, -1))
        layers = list(self.pool.layers)
        layers[layer] = write_kv(self._layer(layer), k, v, slots)
        return replace(self, pool=KVPool(layers=tuple(layers)))

    def attend(
        self,
        layer: int,
        q: ArrayLike,
        cu_q_lens: ArrayLike | None = None,
        *,
        return_lse: bool = False,
        **options: Unpack[RaggedAttentionOptions],
    ) -> Any:
        """Attend to all tokens of a layer, those of the last `extend` among them.

        Args:
            layer: index of the layer. Static.
            q: `[max_seqs, num_q_heads, head_dim]` for `paged_attention`, or with `cu_q_lens`
                `[T, num_q_heads, head_dim]` for `ragged_paged_attention`.
            cu_q_lens: as in `write`.
            return_lse, **options: as in those functions.

        Returns:
            As those functions.
        """
        at = self._layer(layer), self.table.block_tables, self.table.seq_lens
        call: Any = paged_attention if cu_q_lens is None else ragged_paged_attention
        offsets = () if cu_q_lens is None else (cu_q_lens,)
        return call(q, *at, *offsets, return_lse=return_lse, **options)

    def attend_latents(
        self,
        layer: int,
        q_nope: ArrayLike,
        q_pe: ArrayLike,
        cu_q_lens: ArrayLike | None = None,
        *,
        return_lse: bool = False,
        **options: Unpack[RaggedAttentionOptions],
    ) -> Any:
        """Attend to all tokens of a layer of latents, as `attend`, by `mla_attention`.

        Args:
            layer: index of the layer. Static.
            q_nope, q_pe, return_lse, **options: as in `mla_attention`, for `max_seqs` sequences.
            cu_q_lens: as in `write`.

        Returns:
            As `mla_attention`.
        """
        at = self._layer(layer), self.table.block_tables, self.table.seq_lens
        call: Any = mla_attention
        return call(q_nope, q_pe, *at, cu_q_lens, return_lse=return_lse, **options)

    def fork(self, src: Integers, dst: Integers) -> tuple[PagedKVCache, jax.Array]:
        """Fill empty sequences `dst` as `src`, which share their full pages from then on.

        Args:
            src, dst: i32`[F]`, as in `pallas_paged.fork`.

        Returns:
            The cache and ok bool`[F]`.
        """
        return self._copied(*page_table.fork(self.table, src, dst))

    def truncate(self, new_lens: Integers) -> tuple[PagedKVCache, jax.Array]:
        """Shorten sequences to their first `new_lens` tokens, as after a rejected speculation.

        Args:
            new_lens: i32`[max_seqs]`, as in `pallas_paged.truncate`.

        Returns:
            The cache and ok bool`[max_seqs]`.
        """
        return self._copied(*page_table.truncate(self.table, new_lens))

    def free(self, rows: Integers) -> PagedKVCache:
        """Empty sequences, bool`[max_seqs]`; pages without references are free again."""
        return self._with_table(page_table.free(self.table, rows))

    def _layer(self, layer: int) -> LayerKV:
        check_integer("layer", layer, 0, len(self.pool.layers) - 1)
        return self.pool.layers[layer]

    def _copied(
        self, table: PageTable, copies: page_table.PageCopies, ok: jax.Array
    ) -> tuple[PagedKVCache, jax.Array]:
        return replace(self._with_table(table), pool=copy_pages(self.pool, copies)), ok

    def _with_table(self, table: PageTable) -> PagedKVCache:
        return replace(self, table=table, num_new_tokens=jnp.zeros_like(self.num_new_tokens))
