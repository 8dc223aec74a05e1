"""Calls of the grouped product on Hopper: tiles and configs from static sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.experts.kernels import weight_gradient as gradient
from pallas_paged.experts.kernels.config import (
    ALIGN,
    FEW_ROWS,
    WG_ROWS,
    GroupedConfig,
    few_rows_config,
    many_rows_config,
)
from pallas_paged.experts.kernels.grouped import Epilogue, GroupedInputs, grouped_product
from pallas_paged.experts.plan import Groups, Tiles, sort_pairs, tiles_of
from pallas_paged.experts.xla import weighted_sum
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.triton.family import TRITON

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
    more = max(-num_rows % ALIGN, config.copy_rows - num_rows)  # what a copy needs
    tiles = tiles_of(with_rest, num_rows=num_rows, block=config.block_rows, align=ALIGN)
    inputs = GroupedInputs(
        x=jnp.pad(x, ((0, more), (0, 0))),
        rows=None,
        w=w,
        bias=None,
        fields=_fields(tiles, config),
        count=tiles.count,
    )
    how = Epilogue(transpose_rhs=transpose_rhs, zeros=True)
    return grouped_product(inputs, num_rows=num_rows, config=config, how=how, interpret=interpret)


def weight_gradient(a: jax.Array, b: jax.Array, groups: Groups, *, interpret: bool) -> jax.Array:
    """Return `[G, K, N]`: for each group the product of its rows of `a [M, K]` and `b [M, N]`."""
    more = max(-len(a) % ALIGN, WG_ROWS - len(a))
    a, b = (jnp.pad(x, ((0, more), (0, 0))) for x in (a, b))
    inputs = gradient.GradientInputs(a=a, b=b, starts=groups.starts, sizes=groups.sizes)
    programs = _num_programs(interpret)
    return gradient.weight_gradient(inputs, num_programs=programs, interpret=interpret)


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
    bias = weights.gate_up_bias
    products = (
        _Product(
            w=weights.gate_up,
            bias=None if bias is None else bias.swapaxes(1, 2),
            how=Epilogue(is_pair=True, swiglu_limit=swiglu_limit),
        ),
        _Product(w=weights.down, bias=weights.down_bias, how=Epilogue()),
    )
    # The plan of few rows is a Triton kernel.
    is_few = len(x) <= FEW_ROWS and TRITON.why_not_jax() is None
    run = _few_rows if is_few else _many_rows
    rows, places = run(x, expert_indices, products, interpret)
    return weighted_sum(rows, expert_weights, places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    """One of the two products: its weight and the static rest."""

    w: jax.Array
    bias: jax.Array | None
    how: Epilogue

    @property
    def sizes(self) -> Any:
        """K, and rows of a matrix of the weight, gate and up counted each."""
        return dict(k=self.w.shape[-1], n=self.w[0].size // self.w.shape[-1])


def _many_rows(
    x: jax.Array, indices: jax.Array, products: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the rows of all pairs, and where each pair is: its experts' rows are together."""
    num_experts = len(products[0].w)
    pairs = sort_pairs(indices, num_experts, align=ALIGN)
    num_rows = len(pairs.pairs)
    rows: Any = jnp.minimum(pairs.tokens, len(x) - 1)  # copied by the first product
    for product in products:
        config = many_rows_config(
            n=product.sizes["n"],
            average=indices.size // num_experts,
            num_programs=_num_programs(interpret),
        )
        tiles = tiles_of(pairs.groups, num_rows=num_rows, block=config.block_rows)
        inputs = GroupedInputs(
            x=x,
            rows=rows,
            w=product.w,
            bias=product.bias,
            fields=_fields(tiles, config),
            count=tiles.count,
        )
        x = grouped_product(
            inputs, num_rows=num_rows, config=config, how=product.how, interpret=interpret
        )
        rows = None
    return x, pairs.rows


def _few_rows(
    x: jax.Array, indices: jax.Array, products: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return rows for all tokens and active experts, and the row of each pair.

    All tokens go through each expert that one of them has, which takes no more time than its own:
    wgmma has 64 rows, and the weights are read once. So no pairs are sorted.
    """
    from pallas_paged.experts.kernels.few_rows_plan import few_rows_plan

    num_experts, (num_tokens, k) = len(products[0].w), indices.shape
    copied = -(-num_tokens // ALIGN) * ALIGN
    fields, count, places = few_rows_plan(
        indices, num_experts=num_experts, copied=copied, interpret=interpret
    )
    # All tokens are the rows of every tile of the first product.
    rows = jnp.pad(x, ((0, copied - num_tokens), (0, 0)))
    active = num_experts * (1 - (1 - k / num_experts) ** num_tokens)
    for product in products:
        config = few_rows_config(
            num_rows=num_tokens,
            active=active,
            is_pair=product.how.is_pair,
            num_programs=_num_programs(interpret),
            **product.sizes,
        )
        inputs = GroupedInputs(
            x=rows, rows=None, w=product.w, bias=product.bias, fields=fields, count=count
        )
        how = dataclasses.replace(product.how, has_same_rows=product.how.is_pair)
        rows = grouped_product(
            inputs, num_rows=len(fields) * copied, config=config, how=how, interpret=interpret
        )
    return rows, places


def _fields(tiles: Tiles, config: GroupedConfig) -> jax.Array:
    group, row, lo, hi = tiles.fields.T
    place = jnp.arange(config.num_consumers * WG_ROWS)
    stored = (place >= lo[:, None]) & (place < hi[:, None])
    return jnp.stack([group, row, row, *_words(stored)], axis=1)


def _words(stored: jax.Array) -> Any:
    """Return the words `i32[num_tiles]` of bits of `bool[num_tiles, 32 * num_words]`."""
    bits = stored.reshape(len(stored), -1, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=2, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32).T


def _num_programs(interpret: bool) -> int:
    return _INTERPRETED_PROGRAMS if interpret else Device.here().num_sms
