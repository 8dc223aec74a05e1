"""Which row owns which page: integers only, no K/V.

A `PageTable` is an immutable pytree. Every function here is pure and may run inside `jax.jit`, in a
`lax.while_loop` carry, donated or not. Arrays of `num_pages` elements are only gathered from and
scattered into, so that XLA updates them in place and no call scans the pool. Arguments of a wrong
shape or dtype raise ValueError.

The sentinel for "no page" is `num_pages`, which gathers fill and scatters drop; -1 would wrap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.checks import (
    INT32_MAX,
    checked_array,
    default_promotion,
    pytree,
    validate_pool_size,
    validate_positive,
)
from pallas_paged.pages.stack import PageStack, release_pages, take_pages

Integers = ArrayLike | Sequence[int]
P = ParamSpec("P")
T = TypeVar("T")


@pytree
class PageTable(PageStack):
    """Pages of every row, their reference counts and the stack of free pages.

    Attributes:
        block_tables: i32`[max_seqs, pages_per_seq]`, page of each block; unused = num_pages, and so
            are the first blocks of a row after `free_before`.
        seq_lens: i32`[max_seqs]`, tokens of each row, also those whose pages `free_before` freed;
            0 = empty row.
        ref_counts: i32`[num_pages]`, block table entries that name each page, plus the times that
            it is retained; 0 = free.
        free_pages: i32`[num_pages]`, a stack: the first `num_free` entries are the free pages.
        num_free: i32`[]`.
        page_size: tokens per page, static.
    """

    block_tables: jax.Array
    seq_lens: jax.Array
    page_size: int = field(metadata=dict(static=True))

    @property
    def max_seqs(self) -> int:
        return self.block_tables.shape[0]

    @property
    def pages_per_seq(self) -> int:
        return self.block_tables.shape[1]


def on_table(
    function: Callable[Concatenate[PageTable, P], T],
) -> Callable[Concatenate[PageTable, P], T]:
    """Return a function of a table, also of NumPy arrays, that runs under `default_promotion`."""

    @functools.wraps(function)
    def checked(table: PageTable, *args: P.args, **kwargs: P.kwargs) -> T:
        if not isinstance(table, PageTable):
            raise ValueError(f"table must be a PageTable, got {type(table).__name__}")
        with default_promotion():
            return function(jax.tree.map(jnp.asarray, table), *args, **kwargs)

    return checked


@pytree
class PageCopies:
    """Pages that `copy_pages` must copy before anything is written; sentinel entries are dropped.

    Attributes:
        src_pages: i32`[...]`, pages to read.
        dst_pages: i32`[...]`, pages to write, same shape.
    """

    src_pages: jax.Array
    dst_pages: jax.Array


@default_promotion()
def create_page_table(
    *, num_pages: int, page_size: int, max_seqs: int, pages_per_seq: int
) -> PageTable:
    """Return an empty table with all pages free; pages are handed out as 0, 1, 2, ...

    Args:
        num_pages: pages in the pool.
        page_size: tokens per page, a power of two from 1 to 256.
        max_seqs: rows.
        pages_per_seq: largest number of pages of a row.

    Raises:
        ValueError: a size is not a positive integer, `page_size` is not allowed, or int32 cannot
            count the slots, the tokens of a row or the block table entries.
    """
    validate_pool_size(num_pages, page_size)
    validate_positive(max_seqs=max_seqs, pages_per_seq=pages_per_seq)
    page_size, max_seqs, pages_per_seq = map(int, (page_size, max_seqs, pages_per_seq))
    if pages_per_seq * page_size > INT32_MAX:
        raise ValueError(f"{pages_per_seq=} * {page_size=} must be at most {INT32_MAX}")
    if max_seqs * pages_per_seq > INT32_MAX:
        raise ValueError(f"{max_seqs=} * {pages_per_seq=} must be at most {INT32_MAX}")
    return PageTable(
        block_tables=jnp.full((max_seqs, pages_per_seq), num_pages, jnp.int32),
        seq_lens=jnp.zeros(max_seqs, jnp.int32),
        ref_counts=jnp.zeros(num_pages, jnp.int32),
        free_pages=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.asarray(num_pages, jnp.int32),
        page_size=page_size,
    )


@on_table
def extend(
    table: PageTable, num_new_tokens: Integers, *, max_new_tokens: int | None = None
) -> tuple[PageTable, jax.Array]:
    """Reserve room for new tokens at the end of rows; all or nothing for each row.

    Rows are served by row index while the running total of pages fits. From the first row that does
    not fit, every row that needs a page fails. A row that asks for 0 tokens is ok. A request that
    is negative, over `max_new_tokens` or past `pages_per_seq` pages fails and is not counted.

    Args:
        num_new_tokens: i32`[max_seqs]`.
        max_new_tokens: static bound of every request, and so of the work (1 in a decode step);
            None means a full row.

    Returns:
        The table, whose `seq_lens` count the new tokens, and ok bool`[max_seqs]`; rows that are not
        ok stay as they were.

    Raises:
        ValueError: `max_new_tokens` is not a positive integer.
    """
    wanted = checked_array("num_new_tokens", num_new_tokens, jnp.int32, (table.max_seqs,))
    capacity = table.pages_per_seq * table.page_size
    bound = capacity if max_new_tokens is None else max_new_tokens
    validate_positive(max_new_tokens=bound)
    bound = min(bound, capacity)

    room = capacity - table.seq_lens
    valid = (wanted >= 0) & (wanted <= bound) & (wanted <= room)
    new_lens = table.seq_lens + jnp.where(valid, wanted, 0)
    held = _num_blocks(table.seq_lens, table.page_size)
    need = _num_blocks(new_lens, table.page_size) - held
    width = -(-bound // table.page_size)
    table, ok, pages = take_pages(table, valid, need, width=width)

    rows = jnp.arange(table.max_seqs, dtype=jnp.int32)[:, None]
    blocks = held[:, None] + jnp.arange(width, dtype=jnp.int32)  # [max_seqs, width]
    blocks = jnp.where(pages < table.num_pages, blocks, table.pages_per_seq)
    table = replace(
        table,
        block_tables=table.block_tables.at[rows, blocks].set(pages, mode="drop"),
        seq_lens=jnp.where(ok, new_lens, table.seq_lens),
    )
    return table, ok


@on_table
def free(table: PageTable, rows: Integers) -> PageTable:
    """Empty rows; pages without other references are free again.

    Args:
        rows: bool`[max_seqs]`, the rows to empty; they may be empty already.
    """
    rows = checked_array("rows", rows, jnp.bool_, (table.max_seqs,))
    table = replace(table, seq_lens=jnp.where(rows, 0, table.seq_lens))
    return _release_blocks(table, jnp.broadcast_to(rows[:, None], table.block_tables.shape))


@on_table
def free_before(
    table: PageTable, positions: Integers, *, max_pages: int | None = None
) -> PageTable:
    """Drop the pages of rows that lie wholly before a position; lengths stay as they are.

    For layers with a sliding window: drop what no later query sees. Layers that see all tokens need
    another table. The block table entries become num_pages, and pages without other references are
    free again. A partial last page always stays, because the row will write to it. A `fork` of the
    row has its first pages dropped too, and `truncate` fails where the row's last page would be a
    dropped one.

    Args:
        positions: i32`[max_seqs]`, first token of each row that must stay; 0 or less drops nothing,
            and a position past the row's end is taken as its end.
        max_pages: static bound of the pages that a call drops from a row, and so of the work (1 in
            a decode step); the row's first pages go first, the others in later calls. None means a
            full row.

    Raises:
        ValueError: `max_pages` is not a positive integer.
    """
    positions = checked_array("positions", positions, jnp.int32, (table.max_seqs,))
    width = table.pages_per_seq if max_pages is None else max_pages
    validate_positive(max_pages=width)
    width = min(width, table.pages_per_seq)
    end = jnp.clip(positions, 0, table.seq_lens) // table.page_size  # blocks [0, end) are to go
    rows = jnp.arange(table.max_seqs, dtype=jnp.int32)
    # The blocks dropped before are the first ones, so a binary search counts them, up to `end`.
    first = jnp.zeros_like(end)
    for bit in reversed(range(table.pages_per_seq.bit_length())):
        more = first + (1 << bit)
        last_page = table.block_tables.at[rows, more - 1].get(mode="fill", fill_value=0)
        first = jnp.where((more <= end) & (last_page == table.num_pages), more, first)
    blocks = first[:, None] + jnp.arange(width, dtype=jnp.int32)  # [max_seqs, width]
    blocks = jnp.where(blocks < end[:, None], blocks, table.pages_per_seq)
    pages = table.block_tables.at[rows[:, None], blocks]
    table = release_pages(table, pages.get(mode="fill", fill_value=table.num_pages).ravel())
    return replace(table, block_tables=pages.set(table.num_pages, mode="drop"))


@on_table
def fork(table: PageTable, src: Integers, dst: Integers) -> tuple[PageTable, PageCopies, jax.Array]:
    """Fill empty rows `dst` as rows `src`: full pages are shared, a partial last page is copied.

    Call `copy_pages` with the returned copies before the next write.

    Every entry reads the table as it was before the call. An entry whose src or dst lies outside
    [0, max_seqs) is padding: not ok and otherwise ignored. An entry also fails when dst holds
    tokens, an earlier entry has the same dst, src is the dst of another entry, or no page is left
    for the copy (running total by entry, as in `extend`).

    Args:
        src: i32`[F]`, rows to read; a row may be named more than once, and may be empty.
        dst: i32`[F]`, rows to fill.

    Returns:
        The table, copies `[F]` for `copy_pages`, and ok bool`[F]`.
    """
    src = checked_array("src", src, jnp.int32)
    dst = checked_array("dst", dst, jnp.int32, src.shape)
    no_row = table.max_seqs
    is_fork = (src >= 0) & (src < no_row) & (dst >= 0) & (dst < no_row)
    src, dst = jnp.where(is_fork, src, no_row), jnp.where(is_fork, dst, no_row)
    valid = can_fill(table, dst) & ~jnp.isin(src, dst)

    lens = table.seq_lens.at[src].get(mode="fill", fill_value=0)
    num_full = lens // table.page_size
    has_tail = (lens % table.page_size > 0).astype(jnp.int32)
    blocks = table.block_tables.at[src].get(mode="fill", fill_value=table.num_pages)
    tails = table.block_tables.at[src, num_full].get(mode="fill", fill_value=table.num_pages)
    table, ok, fresh = take_pages(table, valid, has_tail, width=1)  # fresh [F, 1]

    column = jnp.arange(table.pages_per_seq, dtype=jnp.int32)
    is_shared = ok[:, None] & (column < num_full[:, None])
    shared = jnp.where(is_shared, blocks, table.num_pages)  # [F, pages_per_seq]
    blocks = jnp.where(column == num_full[:, None], fresh, shared)
    dst = jnp.where(ok, dst, no_row)
    table = replace(
        table,
        block_tables=table.block_tables.at[dst].set(blocks, mode="drop"),
        seq_lens=table.seq_lens.at[dst].set(lens, mode="drop"),
        ref_counts=table.ref_counts.at[shared].add(1, mode="drop"),
    )
    copies = PageCopies(src_pages=jnp.where(ok, tails, table.num_pages), dst_pages=fresh[:, 0])
    return table, copies, ok


@on_table
def truncate(table: PageTable, new_lens: Integers) -> tuple[PageTable, PageCopies, jax.Array]:
    """Shorten rows to their first `new_lens` tokens.

    A shared page that becomes a row's partial last page is replaced by a copy, because the row may
    write to it: call `copy_pages` with the returned copies before the next write. Copies go to
    pages that were free before the call (running total by row, as in `extend`); released pages are
    free afterwards.

    Args:
        new_lens: i32`[max_seqs]`; a row's own length changes nothing; longer or negative fails, and
            so does a length whose last page `free_before` dropped.

    Returns:
        The table, copies `[max_seqs]` for `copy_pages`, and ok bool`[max_seqs]`; rows that are not
        ok stay as they were.
    """
    new_lens = checked_array("new_lens", new_lens, jnp.int32, (table.max_seqs,))
    valid = (new_lens >= 0) & (new_lens <= table.seq_lens)
    num_full = new_lens // table.page_size
    has_tail = new_lens % table.page_size > 0
    rows = jnp.arange(table.max_seqs, dtype=jnp.int32)
    tails = table.block_tables.at[rows, num_full].get(mode="fill", fill_value=table.num_pages)
    ends = table.block_tables.at[rows, _num_blocks(new_lens, table.page_size) - 1]
    is_dropped = ends.get(mode="fill", fill_value=0, wrap_negative_indices=False) == table.num_pages
    valid &= ~is_dropped | (new_lens == table.seq_lens)
    tail_refs = table.ref_counts.at[tails].get(mode="fill", fill_value=0)
    reown = has_tail & (tail_refs > 1)
    table, ok, fresh = take_pages(table, valid, reown.astype(jnp.int32), width=1)
    reown &= ok

    column = jnp.arange(table.pages_per_seq, dtype=jnp.int32)
    num_kept = num_full + (has_tail & ~reown).astype(jnp.int32)
    table = _release_blocks(table, ok[:, None] & (column >= num_kept[:, None]))
    is_tail = reown[:, None] & (column == num_full[:, None])
    table = replace(
        table,
        block_tables=jnp.where(is_tail, fresh, table.block_tables),
        seq_lens=jnp.where(ok, new_lens, table.seq_lens),
    )
    copies = PageCopies(src_pages=jnp.where(reown, tails, table.num_pages), dst_pages=fresh[:, 0])
    return table, copies, ok


@on_table
def slot_mapping(table: PageTable, rows: Integers, positions: Integers) -> jax.Array:
    """Return the pool slot, page * page_size + offset, of each token.

    Args:
        rows: i32`[T]`.
        positions: i32`[T]`, token index within the row.

    Returns:
        i32`[T]`; a row or position outside the tokens that the row holds, or in a page that
        `free_before` dropped, gives num_pages * page_size, which `write_kv` drops.
    """
    rows = checked_array("rows", rows, jnp.int32)
    positions = checked_array("positions", positions, jnp.int32, rows.shape)
    lens = table.seq_lens.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    held = (positions >= 0) & (positions < lens)
    pages = table.block_tables[rows, positions // table.page_size]
    held &= pages < table.num_pages
    slots = pages * table.page_size + positions % table.page_size
    return jnp.where(held, slots, table.num_pages * table.page_size)


def _num_blocks(num_tokens: jax.Array, page_size: int) -> jax.Array:
    # Never num_tokens + page_size - 1, which could pass int32.
    return num_tokens // page_size + (num_tokens % page_size > 0).astype(jnp.int32)


def can_fill(table: PageTable, rows: jax.Array) -> jax.Array:
    """Return for each of `rows` whether it is an empty row that no earlier entry names."""
    entry = jnp.arange(rows.size, dtype=jnp.int32)
    rows = jnp.where((rows >= 0) & (rows < table.max_seqs), rows, table.max_seqs)
    claims = jnp.full(table.max_seqs, rows.size, jnp.int32).at[rows].min(entry, mode="drop")
    is_first = claims.at[rows].get(mode="fill", fill_value=rows.size) == entry
    return is_first & (table.seq_lens.at[rows].get(mode="fill", fill_value=1) == 0)


def _release_blocks(table: PageTable, dropped: jax.Array) -> PageTable:
    """Release the block table entries where `dropped` bool`[max_seqs, pages_per_seq]`."""
    pages = jnp.where(dropped, table.block_tables, table.num_pages)
    table = release_pages(table, pages.ravel())
    return replace(table, block_tables=jnp.where(dropped, table.num_pages, table.block_tables))
