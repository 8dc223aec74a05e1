"""Calls of the grouped product on Hopper: tiles and configs from static sizes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.experts.kernels.config import (
    ALIGN,
    FEW_ROWS,
    GroupedConfig,
    few_rows_config,
    many_rows_config,
)
from pallas_paged.experts.kernels.grouped import Epilogue, Operands, grouped_product
from pallas_paged.experts.plan import Groups, Tiles, sort_pairs, tiles_of
from pallas_paged.experts.xla import weighted_sum
from pallas_paged.kernels.device import Device

_INTERPRETED_PROGRAMS = 2


def grouped_matmul(
    x: jax.Array, w: jax.Array, groups: Groups, *, transpose_rhs: bool, interpret: bool
) -> jax.Array:
    """Return the rows of `x` times the matrices of their groups; zeros for rows of no group."""
    num_rows, n = len(x), w.shape[1 if transpose_rhs else 2]
    config = many_rows_config(
        n=n, average=num_rows // len(w), num_programs=_num_programs(interpret)
    )
    # The rows after the last group are one more.
    end = groups.starts[-1:] + groups.sizes[-1:]
    with_rest = Groups(
        starts=jnp.append(groups.starts, end), sizes=jnp.append(groups.sizes, num_rows - end)
    )
    x = jnp.pad(x, ((0, _more_rows(num_rows, config)), (0, 0)))
    tiles = tiles_of(with_rest, num_rows=num_rows, block=config.block_rows, align=ALIGN)
    how = Epilogue(transpose_rhs=transpose_rhs, zeros=True)
    return _product(x, w, None, tiles, how, config, num_rows, interpret)


def fused_experts(
    x: jax.Array,
    weights: Any,
    expert_indices: jax.Array,
    expert_weights: jax.Array,
    *,
    swiglu_limit: float | None,
    interpret: bool,
) -> jax.Array:
    """Return `fused_experts`; `weights` are its `ExpertWeights`."""
    num_experts, size = weights.gate_up.shape[:2]
    bias = weights.gate_up_bias
    if bias is not None:
        bias = bias.swapaxes(1, 2)
    run = _few_rows if len(x) <= FEW_ROWS else _many_rows
    steps = (
        (weights.gate_up, bias, Epilogue(is_pair=True, swiglu_limit=swiglu_limit), 2 * size),
        (weights.down, weights.down_bias, Epilogue(), x.shape[1]),
    )
    rows, places = run(x, expert_indices, num_experts, steps, interpret)
    return weighted_sum(rows, expert_weights, places)


def _many_rows(
    x: jax.Array, indices: jax.Array, num_experts: int, steps: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the rows of all pairs, and where each pair is: its experts' rows are together."""
    pairs = sort_pairs(indices, num_experts, align=ALIGN)
    rows = x.at[pairs.tokens].get(mode="fill", fill_value=0)
    num_rows = len(rows)
    for w, bias, how, n in steps:
        average = indices.size // num_experts
        config = many_rows_config(n=n, average=average, num_programs=_num_programs(interpret))
        tiles = tiles_of(pairs.groups, num_rows=num_rows, block=config.block_rows)
        rows = jnp.pad(rows, ((0, _more_rows(num_rows, config)), (0, 0)))
        rows = _product(rows, w, bias, tiles, how, config, num_rows, interpret)
    return rows, pairs.rows


def _few_rows(
    x: jax.Array, indices: jax.Array, num_experts: int, steps: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return rows of which some are pairs, and where each pair is.

    All tokens go through each expert that one of them has, which takes no more time than its own:
    wgmma has 64 rows, and the weights are read once. So no pairs are sorted.
    """
    num_tokens, k = indices.shape
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    is_active = jnp.any(indices.reshape(-1, 1) == experts, axis=0)
    is_before = experts < experts[:, None]
    place = jnp.sum(is_active & is_before, axis=1, dtype=jnp.int32)  # among the active experts
    num_tiles = min(num_experts, indices.size)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    is_tile = is_active & (place == tile[:, None])
    group = jnp.sum(jnp.where(is_tile, experts, 0), axis=1, dtype=jnp.int32)
    count = jnp.sum(is_active, dtype=jnp.int32).reshape(1)
    active = num_experts * (1 - (1 - k / num_experts) ** num_tokens)
    rows, copied, row = x, 0, jnp.zeros_like(tile)
    for w, bias, how, n in steps:
        config = few_rows_config(
            num_rows=num_tokens,
            active=active,
            k=w.shape[-1],
            n=n,
            is_pair=how.is_pair,
            num_programs=_num_programs(interpret),
        )
        copied = config.copy_rows
        rows = jnp.pad(rows, ((0, -len(rows) % copied), (0, 0)))
        zeros, his = jnp.zeros_like(tile), jnp.full_like(tile, copied)
        fields = jnp.stack([group, row, tile * copied, zeros, his], axis=1)
        operands = Operands(x=rows, w=w, bias=bias, fields=fields, count=count)
        rows = grouped_product(
            operands, num_rows=num_tiles * copied, config=config, how=how, interpret=interpret
        )
        row = tile * copied
    is_expert = (indices >= 0) & (indices < num_experts)
    places = place[jnp.clip(indices, 0, num_experts - 1)] * copied
    places += jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    return rows, jnp.where(is_expert, places, len(rows))


def _product(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    tiles: Tiles,
    how: Epilogue,
    config: GroupedConfig,
    num_rows: int,
    interpret: bool,
) -> jax.Array:
    group, row, lo, hi = tiles.fields.T
    fields = jnp.stack([group, row, row, lo, hi], axis=1)
    inputs = Operands(x=x, w=w, bias=bias, fields=fields, count=tiles.count)
    return grouped_product(inputs, num_rows=num_rows, config=config, how=how, interpret=interpret)


def _more_rows(num_rows: int, config: GroupedConfig) -> int:
    """Return rows to add: copies have a multiple of 8 rows, and no more than the array."""
    return max(-num_rows % ALIGN, config.copy_rows - num_rows)


def _num_programs(interpret: bool) -> int:
    return _INTERPRETED_PROGRAMS if interpret else Device.here().num_sms
