"""The invariants of a page table, checked on the host."""

from __future__ import annotations

import jax
import numpy as np

from pallas_paged.checks import as_array
from pallas_paged.pages.table import Integers, PageTable, on_table


@on_table
def check_page_table(table: PageTable, retained: Integers = ()) -> None:
    """Check every invariant of a concrete table, on the host.

    Args:
        retained: i32`[...]`, pages retained and not yet released, such as the `pages` of a prefix
            cache; a page is named once per reference.

    Raises:
        ValueError: the first broken invariant, with its values; or the table is traced.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((table, retained))):
        raise ValueError(
            "check_page_table runs on the host: call it outside jit, on a concrete PageTable"
        )
    blocks, lens, refs = map(np.asarray, (table.block_tables, table.seq_lens, table.ref_counts))
    num_free = np.asarray(table.num_free)
    num_pages, page_size = table.num_pages, table.page_size
    capacity = table.pages_per_seq * page_size

    holds = (num_free >= 0) & (num_free <= num_pages)
    _require(holds, f"num_free must be in [0, {num_pages=}]", "the stack", num_free=num_free)
    holds = (lens >= 0) & (lens <= capacity)
    _require(holds, f"seq_lens must be in [0, {capacity}]", "row", seq_lens=lens)

    lens = lens[:, None]
    column = np.arange(table.pages_per_seq)
    is_dropped = (blocks == num_pages) & (column < lens // page_size)
    is_dropped = np.logical_and.accumulate(is_dropped, axis=1)  # by free_before: the first blocks
    is_block = (column < -(-lens // page_size)) & ~is_dropped
    holds = np.where(is_block, (blocks >= 0) & (blocks < num_pages), blocks == num_pages)
    rule = f"a block needs a page in [0, {num_pages=}), an unused one the sentinel {num_pages}"
    _require(holds, rule, "row", "block", page=blocks, seq_lens=lens)
    ordered = np.sort(blocks, axis=1)
    holds = (ordered[:, 1:] != ordered[:, :-1]) | (ordered[:, 1:] == num_pages)
    _require(holds, "a row must not hold a page twice", "row", page=ordered[:, 1:])

    stack = np.asarray(table.free_pages)[:num_free]
    holds = (stack >= 0) & (stack < num_pages)
    _require(holds, f"a free page must be in [0, {num_pages=})", "free_pages entry", page=stack)
    given = as_array("retained", retained)
    held = np.asarray(given).ravel() if given.size else np.zeros(0, np.int32)
    if not np.issubdtype(held.dtype, np.integer):
        raise ValueError(f"retained must be integers, got {held.dtype}")
    holds = (held >= 0) & (held < num_pages)
    _require(holds, f"a retained page must be in [0, {num_pages=})", "retained entry", page=held)
    entries = np.bincount(blocks[is_block], minlength=num_pages)
    times_retained = np.bincount(held, minlength=num_pages)
    rule = "ref_counts must count the block table entries and the times that a page is retained"
    counts = dict(ref_counts=refs, entries=entries, retained=times_retained)
    _require(refs == entries + times_retained, rule, "page", **counts)
    times_free = np.bincount(stack, minlength=num_pages)
    rule = "a page must be free once if ref_counts is 0, else never"
    _require(times_free == (refs == 0), rule, "page", ref_counts=refs, times_free=times_free)

    is_tail = (lens % page_size > 0) & (column == lens // page_size)
    tail_refs = np.where(is_tail, refs[np.where(is_tail, blocks, 0)], 1)
    rule = "a partial last page must not be shared"
    _require(tail_refs == 1, rule, "row", "block", page=blocks, ref_counts=tail_refs)


def _require(holds: np.ndarray, rule: str, *axes: str, **values: np.ndarray) -> None:
    """Raise ValueError with the rule and the values at the first place where it does not hold."""
    if not holds.all():
        index = tuple(np.argwhere(~holds)[0])
        place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, index, strict=False))
        broken = {name: np.broadcast_to(v, holds.shape)[index] for name, v in values.items()}
        found = ", ".join(f"{name}={value}" for name, value in broken.items())
        raise ValueError(f"{rule}, got {found} at {place}")
