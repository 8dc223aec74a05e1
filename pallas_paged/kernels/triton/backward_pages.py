"""Gradients of pages from gradients of each row's keys, a Pallas-Triton kernel.

A program adds the gradients that the readers of some tokens of a page have, in the order of
readers. Pages that none reads get 0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_paged.kernels.backward_plan import PageReaders
from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.triton.specs import full_specs, kv_head
from pallas_paged.pages.layout import PageLayout

_TOKENS = 32  # of a program, at most


def _pages_kernel(
    k_ref,  # f32[B * keys_per_row, D]
    v_ref,  # like k_ref
    readers: PageReaders,  # of refs
    *d_refs,  # one or two arrays of pages
    page_size: int,
    keys_per_row: int,
    layout: PageLayout,
):
    """One program: the gradients of some tokens of one page, for one KV head."""
    head, page, part = (pl.program_id(i) for i in range(3))
    tokens = part * _TOKENS + jnp.arange(min(page_size, _TOKENS))
    dims = jnp.arange(k_ref.shape[1])[None, :]
    zeros = jnp.zeros((tokens.size, dims.size), jnp.float32)

    def add(reader, sums):
        first = readers.row[reader] * keys_per_row + readers.block[reader] * page_size
        slots = (first + tokens)[:, None]
        return tuple(
            total + plgpu.load(ref.at[slots, dims])
            for total, ref in zip(sums, (k_ref, v_ref), strict=True)
        )

    sums = lax.fori_loop(readers.first[page], readers.end[page], add, (zeros, zeros))
    for kv, total in enumerate(sums):
        place = layout.index(
            jnp.full((1, 1), kv),
            P=page[None, None],
            N=tokens[:, None],
            H=head[None, None],
            D=dims,
        )
        ref = d_refs[kv % len(d_refs)]
        plgpu.store(ref.at[place], total.astype(ref.dtype))


def add_readers(
    arrays: Arrays,
    of_keys: tuple[jax.Array, jax.Array],  # f32[Hkv, B * keys_per_row, D], of K and of V
    *,
    options: LogitOptions,
    interpret: bool,
) -> list[jax.Array]:
    """Return the gradients of the pages, like the pages. head_dim is a power of two."""
    page_size, num_kv_heads = arrays.page_size, arrays.num_kv_heads
    with jax.named_scope("backward_plan"):
        readers = PageReaders.of(arrays, options)
    pages = [x for x in (arrays.k_pages, arrays.v_pages) if x is not None]
    return pl.pallas_call(
        functools.partial(
            _pages_kernel,
            page_size=page_size,
            keys_per_row=of_keys[0].shape[1] // arrays.num_seqs,
            layout=arrays.layout,
        ),
        grid=(num_kv_heads, readers.first.size, pl.cdiv(page_size, _TOKENS)),
        in_specs=[*kv_head(of_keys, 0), full_specs(readers)],
        out_specs=full_specs(pages),
        out_shape=[result_shape(x.shape, x.dtype) for x in pages],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="attention_gradient_of_pages",
    )(*of_keys, readers)
