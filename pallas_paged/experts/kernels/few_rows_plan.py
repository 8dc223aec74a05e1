"""The plan of few rows as one Pallas-Triton kernel of one program: which experts have tokens.

XLA makes seven or eight small kernels of it. Here a thread has an expert, and sees each pair.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_MOST_WARPS = 16
_PAIRS = 128  # compared at once


def _plan_kernel(
    indices_ref,  # i32[T, k]
    fields_ref,  # i32[num_tiles, 5]
    count_ref,  # i32[1]
    rows_ref,  # i32[T, k]
    tiles_ref,  # i32[X], scratch: the tile of each expert
    *,
    copied: int,
    interpret: bool,
) -> None:
    (num_tokens, k), (num_experts,) = indices_ref.shape, tiles_ref.shape
    num_tiles = fields_ref.shape[0]
    token, choice, expert = (
        jnp.arange(pl.next_power_of_2(n), dtype=jnp.int32) for n in (num_tokens, k, num_experts)
    )
    is_expert = expert < num_experts

    at_once = min(max(_PAIRS // len(choice), 1), 32)  # tokens, which share a word

    def add(i, words):
        t = i * at_once + jnp.arange(at_once, dtype=jnp.int32)[:, None]
        exists = (t < num_tokens) & (choice < k)[None, :]
        index = plgpu.load(indices_ref.at[t, choice[None, :]], mask=exists, other=-1)
        is_chosen = (index[:, :, None] == expert[None, None, :]) & is_expert[None, None, :]
        is_any = jnp.sum(is_chosen, axis=1, dtype=jnp.int32) > 0
        bits = jnp.sum(jnp.where(is_any, 1 << (t & 31), 0), axis=0, dtype=jnp.int32)
        place = i * at_once >> 5
        return tuple(word | jnp.where(place == n, bits, 0) for n, word in enumerate(words))

    zeros = jnp.zeros_like(expert)
    words = lax.fori_loop(0, pl.cdiv(num_tokens, at_once), add, (zeros, zeros))
    is_active = (words[0] | words[1]) != 0
    end = jnp.cumsum(is_active, dtype=jnp.int32)
    count = jnp.sum(is_active, dtype=jnp.int32)
    # Behind the tiles that count are those of experts without tokens.
    tile = jnp.where(is_active, end - 1, count + expert - end)
    row = tile * copied
    for i, field in enumerate((expert, row, row, *words)):
        plgpu.store(fields_ref.at[tile, i], field, mask=is_expert & (tile < num_tiles))
    count_ref[0] = count
    plgpu.store(tiles_ref.at[expert], tile, mask=is_expert)
    if not interpret:
        plgpu.debug_barrier()

    token, choice = token[:, None], choice[None, :]
    exists = (token < num_tokens) & (choice < k)
    index = plgpu.load(indices_ref.at[token, choice], mask=exists, other=-1)
    has_expert = (index >= 0) & (index < num_experts)
    tile = plgpu.load(tiles_ref.at[index], mask=has_expert, other=0)
    row = jnp.where(has_expert, tile * copied + token, num_tiles * copied)
    plgpu.store(rows_ref.at[token, choice], row, mask=exists)


def few_rows_plan(
    indices: jax.Array, *, num_experts: int, copied: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return tiles of all tokens, one for each expert that any of them has.

    Args:
        indices: `i32[T, k]` of up to 64 tokens; a pair whose index is not in `0..num_experts - 1`
            has no expert.
        copied: rows from one tile to the next, T or more.

    Returns:
        `fields i32[min(X, T * k), 5]` and `count i32[1]` as `GroupedInputs` has them, with a bit of
        each token that has the expert, and `i32[T, k]`: the row of each pair. That is the one
        behind all tiles for pairs without an expert.
    """
    num_tiles = min(num_experts, indices.size)
    shapes: Any = (num_tiles, 5), (1,), indices.shape, (num_experts,)
    fields, count, rows, _ = pl.pallas_call(
        functools.partial(_plan_kernel, copied=copied, interpret=interpret),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(
            num_warps=min(pl.next_power_of_2(pl.cdiv(num_experts, 32)), _MOST_WARPS), num_stages=1
        ),
        interpret=interpret,
        name="few_rows_plan",
    )(indices)
    return fields, count, rows
