"""The routed MLPs of a model: each token through its experts, and their weighted sum."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_paged.checks import as_array, checked_array, default_promotion, pytree, static_number
from pallas_paged.experts.grouped import ExpertsImplementation, How, check_dtypes, grouped, resolve
from pallas_paged.experts.kernels.config import SWIGLU_ALPHA
from pallas_paged.experts.partition import Routed, on_each_device
from pallas_paged.experts.plan import SortedPairs, sort_pairs
from pallas_paged.experts.xla import rows_at, weight_gradient, weighted_sum


@pytree
class ExpertWeights:
    """The weights of experts."""

    gate_up: jax.Array  # `[X, F, 2, E]`
    down: jax.Array  # `[X, E, F]`
    gate_up_bias: jax.Array | None = None  # `[X, F, 2]` or None
    down_bias: jax.Array | None = None  # `[X, E]` or None


@default_promotion()
def fused_experts(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    expert_indices: jax.Array,
    expert_weights: jax.Array,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    swiglu_limit: float | None = None,
    implementation: ExpertsImplementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return the weighted sums of each token's experts, `down(silu(gate(x)) * up(x))`.

    Only the experts of some token are read. Sums over the k experts of a token are in f32 and in
    the order of k, without atomics, so the same inputs give the same bits. The gradients, of the
    first order, compute the features of the tokens again.

    On a mesh the weights may be sharded by X or by F, and tokens by T; they stay where they are,
    and a sum over devices follows. In `jax.shard_map` a device computes its own part of the arrays,
    and the caller adds up.

    Args:
        x: bf16, f16 or f32 `[T, E]`, tokens.
        gate_up: of the dtype of x, `[X, F, 2, E]`: the row of gate and that of up for each feature.
        down: of the dtype of x, `[X, E, F]`.
        expert_indices: `i32[T, k]`; those outside of `0..X-1` are of no expert: the pair adds
            nothing and reads no weight. All of a token that is padding should be so.
        expert_weights: floating `[T, k]`.
        gate_up_bias: of the dtype of x, `[X, F, 2]`.
        down_bias: of the dtype of x, `[X, E]`.
        swiglu_limit: gpt-oss: `down((up + 1) * gate * sigmoid(1.702 gate))`, with gate at most and
            up in size at most this number.
        implementation: `"mosaic_sm90"`, kernels for a Hopper GPU; `"xla"`, loops over tiles of
            rows; or None for the kernels where they can do the call.
        interpret: run the kernels of `"mosaic_sm90"` interpreted, on any device.

    Returns:
        `[T, E]` of the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit, or there is no such implementation.
        NotImplementedError: the implementation can't do this call; the message says why.
    """
    x, expert_weights = as_array("x", x), as_array("expert_weights", expert_weights)
    biases = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
    given = dict(gate_up=gate_up, down=down) | {n: b for n, b in biases.items() if b is not None}
    weights = ExpertWeights(**{name: as_array(name, array) for name, array in given.items()})
    _check_shapes(x, weights, expert_weights)
    expert_indices = checked_array(
        "expert_indices", expert_indices, jnp.int32, expert_weights.shape
    )
    if swiglu_limit is not None:
        swiglu_limit = static_number("swiglu_limit", swiglu_limit)
        if swiglu_limit <= 0:
            raise ValueError(f"{swiglu_limit=} must be None or more than 0")
    how = resolve(implementation, interpret, dtype=x.dtype, sizes=down.shape[1:])
    x, weights, expert_weights = jax.tree.map(jnp.asarray, (x, weights, expert_weights))
    return _fused(how, swiglu_limit, x, weights, expert_indices, expert_weights)


def _check_shapes(x: jax.Array, weights: ExpertWeights, expert_weights: jax.Array) -> None:
    named = {name: array for name, array in vars(weights).items() if array is not None}
    check_dtypes(x=x, **named)
    if x.ndim != 2 or weights.gate_up.ndim != 4 or 0 in (*x.shape, *weights.gate_up.shape):
        raise ValueError(f"{x.shape=} must be [T, E], and {weights.gate_up.shape=} [X, F, 2, E]")
    num_experts, size = weights.gate_up.shape[:2]
    want = {
        "gate_up": (num_experts, size, 2, x.shape[1]),
        "down": (num_experts, x.shape[1], size),
        "gate_up_bias": (num_experts, size, 2),
        "down_bias": (num_experts, x.shape[1]),
    }
    for name, array in named.items():
        if array.shape != want[name]:
            raise ValueError(
                f"{name}.shape={array.shape} must be {want[name]}, with {x.shape=} and "
                f"{weights.gate_up.shape=}"
            )
    shape = expert_weights.shape
    if len(shape) != 2 or shape[0] != len(x) or shape[1] == 0:
        raise ValueError(f"expert_weights.shape={shape} must be [T, k] with {len(x)} tokens")
    if not jnp.issubdtype(expert_weights.dtype, jnp.floating):
        raise ValueError(f"expert_weights.dtype={expert_weights.dtype.name} must be floating")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    how: How,
    swiglu_limit: float | None,
    x: jax.Array,
    weights: ExpertWeights,
    expert_indices: jax.Array,
    expert_weights: jax.Array,
) -> jax.Array:
    arrays = _named(x, weights, expert_indices, expert_weights)
    (out,) = on_each_device(_routed(_results, ("x",), how, swiglu_limit), arrays)
    return out


def _fused_forward(
    how: How, swiglu_limit: float | None, x: jax.Array, weights: Any, indices: Any, scales: Any
) -> Any:
    return _fused(how, swiglu_limit, x, weights, indices, scales), (x, weights, indices, scales)


def _fused_backward(how: How, swiglu_limit: float | None, saved: Any, d_out: jax.Array) -> Any:
    arrays = _named(*saved)
    names = tuple(name for name in arrays if name != "expert_indices")
    routed = _routed(_gradients, names, how, swiglu_limit)
    found = dict(zip(names, on_each_device(routed, arrays | {"d_out": d_out}), strict=True))
    d_x, d_scales = found.pop("x"), found.pop("expert_weights")
    _, weights, _, _ = saved
    return d_x, dataclasses.replace(weights, **found), None, d_scales


def _routed(
    function: Any, results: tuple[str, ...], how: How, swiglu_limit: float | None
) -> Routed:
    return Routed(function, results, (how, swiglu_limit), one_device=how.interpret)


def _named(
    x: jax.Array, weights: ExpertWeights, expert_indices: jax.Array, expert_weights: jax.Array
) -> dict[str, jax.Array]:
    """Return the arrays of a call by name, without biases that are None."""
    found = vars(weights) | dict(x=x, expert_indices=expert_indices, expert_weights=expert_weights)
    return {name: array for name, array in found.items() if array is not None}


def _results(
    how: How,
    swiglu_limit: float | None,
    *,
    x: jax.Array,
    expert_indices: jax.Array,
    expert_weights: jax.Array,
    **weights: jax.Array,
) -> tuple[jax.Array]:
    """Return the weighted sums of the experts of a device."""
    named = ExpertWeights(**weights)
    if how.implementation == "mosaic_sm90":
        from pallas_paged.experts.kernels import calls

        out = calls.fused_experts(
            x,
            named,
            expert_indices,
            expert_weights,
            swiglu_limit=swiglu_limit,
            interpret=how.interpret,
        )
    else:
        out = _steps(how, swiglu_limit, x, named, expert_indices, expert_weights)
    return (out,)


def _gradients(
    how: How,
    swiglu_limit: float | None,
    *,
    expert_indices: jax.Array,
    d_out: jax.Array,
    **arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """Return the gradients of the other arrays, in their order."""

    def steps(arrays: dict[str, jax.Array]) -> jax.Array:
        weights = dict(arrays)
        x, scales = weights.pop("x"), weights.pop("expert_weights")
        return _steps(how, swiglu_limit, x, ExpertWeights(**weights), expert_indices, scales)

    (found,) = jax.vjp(steps, arrays)[1](d_out)
    return tuple(found[name] for name in arrays)


_fused.defvjp(_fused_forward, _fused_backward)


def _steps(
    how: How,
    swiglu_limit: float | None,
    x: jax.Array,
    weights: ExpertWeights,
    expert_indices: jax.Array,
    expert_weights: jax.Array,
) -> jax.Array:
    """Sort, multiply, activate, multiply and combine, each a step with a gradient."""
    num_experts, size = weights.gate_up.shape[:2]
    pairs = sort_pairs(expert_indices, num_experts)
    rows = _gather(x, pairs)
    matrix = weights.gate_up.reshape(num_experts, 2 * size, -1)
    features = grouped(how, True, rows, matrix, pairs.groups).reshape(len(rows), size, 2)
    if weights.gate_up_bias is not None:
        bias = weights.gate_up_bias.reshape(num_experts, -1)
        features = features + _spread(bias, pairs).reshape(features.shape)
    hidden = swiglu(features[..., 0], features[..., 1], swiglu_limit)
    out = grouped(how, True, hidden, weights.down, pairs.groups)
    if weights.down_bias is not None:
        out = out + _spread(weights.down_bias, pairs)
    return _combine(out, expert_weights, pairs)


def swiglu(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    """Return the activation in f32, rounded to the dtype of gate."""
    dtype = gate.dtype
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if limit is None:
        return (jax.nn.silu(gate) * up).astype(dtype)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return ((up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)).astype(dtype)


# The gradients of gathers are gathers here: JAX would add by atomics, whose order changes. Pairs
# are integers, without a gradient.
@jax.custom_vjp
def _gather(x: jax.Array, pairs: SortedPairs) -> jax.Array:
    """Return the token of each sorted row, `[R, E]`."""
    return x.at[pairs.tokens].get(mode="fill", fill_value=0)


def _gather_backward(pairs: SortedPairs, d_rows: jax.Array) -> Any:
    return weighted_sum(d_rows, None, pairs.rows), None


_gather.defvjp(lambda x, pairs: (_gather(x, pairs), pairs), _gather_backward)


@jax.custom_vjp
def _combine(rows: jax.Array, expert_weights: jax.Array, pairs: SortedPairs) -> jax.Array:
    """Return the weighted sum of each token's rows, `[T, E]`."""
    return weighted_sum(rows, expert_weights, pairs.rows)


def _combine_backward(saved: Any, d_out: jax.Array) -> Any:
    rows, expert_weights, pairs = saved
    scales = expert_weights.reshape(-1, 1).at[pairs.pairs].get(mode="fill", fill_value=0)
    d_rows = scales * d_out.at[pairs.tokens].get(mode="fill", fill_value=0).astype(jnp.float32)
    d_scales = [
        jnp.sum(rows_at(rows, row) * d_out.astype(jnp.float32), axis=1) for row in pairs.rows.T
    ]
    d_weights = jnp.stack(d_scales, axis=1).astype(expert_weights.dtype)
    return d_rows.astype(rows.dtype), d_weights, None


_combine.defvjp(
    lambda rows, scales, pairs: (_combine(rows, scales, pairs), (rows, scales, pairs)),
    _combine_backward,
)


@jax.custom_vjp
def _spread(values: jax.Array, pairs: SortedPairs) -> jax.Array:
    """Return for each sorted row the value `[N]` of its expert; of rows without one, any."""
    ends = pairs.groups.starts + pairs.groups.sizes
    expert = jnp.sum(ends <= jnp.arange(len(pairs.pairs))[:, None], axis=1)
    return values[jnp.minimum(expert, len(values) - 1)]


def _spread_backward(pairs: SortedPairs, d_rows: jax.Array) -> Any:
    ones = jnp.ones((len(d_rows), 1), d_rows.dtype)
    return weight_gradient(ones, d_rows, pairs.groups)[:, 0], None


_spread.defvjp(lambda values, pairs: (_spread(values, pairs), pairs), _spread_backward)
