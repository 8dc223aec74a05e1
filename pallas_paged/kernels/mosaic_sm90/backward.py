"""The backward pass of attention over pages on Hopper: two kernels on packed rows of queries.

The kernel of keys has tiles of single rows, so a page that several rows own gets several sums.
`triton/backward_pages` adds them in the order of rows; without Triton, XLA does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.kernels.backward_plan import PageReaders
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic_sm90 import backward_keys, backward_queries
from pallas_paged.kernels.mosaic_sm90.backward_rows import PackedRows, work_of_keys, work_of_queries
from pallas_paged.kernels.triton.family import TRITON


def gradients(
    arrays: Arrays,
    d_out: jax.Array,  # [T, Hq, D]
    lse: jax.Array,  # f32[T, Hq] in base 2; inf where nothing is seen
    delta: jax.Array,  # f32[T, Hq]
    names: tuple[str, ...],
    *,
    options: LogitOptions,
    interpret: bool,
) -> dict[str, jax.Array]:
    """Return the gradients of the fields `names`, as `kernels.backward` wants them."""
    num_kv_heads, group = arrays.num_kv_heads, arrays.group
    narrow = arrays.head_dim <= 64
    rows = PackedRows.of(arrays)
    packed = backward_keys.QueryRows(
        q=rows.pack(arrays.q, num_kv_heads),
        d_out=rows.pack(d_out, num_kv_heads),
        lse=rows.pack(lse, num_kv_heads, jnp.inf),
        delta=rows.pack(delta, num_kv_heads),
    )

    def inputs(work):
        return backward_keys.BackwardInputs(rows=packed, pages=Pages.of(arrays), work=work)

    found: dict[str, jax.Array] = {}
    if "q" in names:
        block_k = 128 if narrow else 64
        work = work_of_queries(arrays, rows, block_k=block_k, options=options)
        dq = backward_queries.queries_gradient(
            inputs(work), group=group, options=options, block_k=block_k, interpret=interpret
        )
        found["q"] = rows.unpack(dq, arrays.cu_q_lens, arrays.q.shape[0])
    if "k_pages" in names or "v_pages" in names:
        block_q, block_k = backward_keys.BLOCK_Q, backward_keys.BLOCK_K
        tiles_per_row = -(-arrays.max_kv_len // block_k)
        work = work_of_keys(arrays, rows, block_q=block_q, block_k=block_k, options=options)
        of_keys = backward_keys.keys_gradient(
            inputs(work),
            group=group,
            tiles_per_row=tiles_per_row,
            options=options,
            num_stages=4 if narrow else 2,
            interpret=interpret,
        )
        if TRITON.why_not_jax() is None:
            from pallas_paged.kernels.triton.backward_pages import add_readers

            pages = add_readers(arrays, of_keys, options=options, interpret=interpret)
        else:
            pages = _add_readers(arrays, of_keys, options)
        found |= dict(zip(("k_pages", "v_pages"), pages, strict=False))
    return found


def _add_readers(
    arrays: Arrays, of_keys: tuple[jax.Array, jax.Array], options: LogitOptions
) -> list[jax.Array]:
    """Return the sums of the Triton kernel `add_readers`, in the same order, by XLA."""
    layout, page_size = arrays.layout, arrays.page_size
    readers = PageReaders.of(arrays, options)
    blocks = [  # [Hkv, B, pages_per_seq and more, N, D]
        x.reshape(x.shape[0], arrays.num_seqs, -1, page_size, x.shape[-1]) for x in of_keys
    ]

    def add(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        reader = readers.first + i
        reads = (reader < readers.end)[:, None, None]
        reader = jnp.minimum(reader, readers.row.size - 1)
        place = readers.row[reader], readers.block[reader]
        return [
            total + jnp.where(reads, x[:, *place], 0.0)
            for total, x in zip(sums, blocks, strict=True)
        ]

    shape = (arrays.num_kv_heads, readers.first.size, page_size, of_keys[0].shape[-1])
    zeros = [jnp.zeros(shape, jnp.float32) for _ in of_keys]
    sums = lax.fori_loop(0, (readers.end - readers.first).max(), add, zeros)
    dtype, axes = arrays.k_pages.dtype, "HPND"
    if layout.one_array:
        sums, axes = [jnp.stack(sums)], f"2{axes}"
    order = [axes.index(letter) for letter in layout.axes]
    return [x.transpose(order).astype(dtype) for x in sums]
