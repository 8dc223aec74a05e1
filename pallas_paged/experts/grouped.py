"""The product of grouped rows: each row times the matrix of its group."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from pallas_paged.checks import (
    as_array,
    check_flag,
    check_implementation,
    check_interpret,
    checked_array,
    default_promotion,
)
from pallas_paged.experts import xla
from pallas_paged.experts.plan import Groups
from pallas_paged.kernels.device import INTERPRET_INSTEAD, Device
from pallas_paged.kernels.mosaic import support as mosaic_support

ExpertsImplementation = Literal["mosaic_sm90", "xla"]
"""Names of the implementations of products of experts: kernels for Hopper GPUs, or XLA's loops."""
_DTYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))


@dataclasses.dataclass(frozen=True)
class How:
    """What is static of a call."""

    implementation: ExpertsImplementation  # the one that runs
    interpret: bool = False  # whether kernels are interpreted


@default_promotion()
def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    implementation: ExpertsImplementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return the rows of `x`, sorted by group, times the matrix of their group.

    Sums are in f32, in one order, so the same inputs give the same bits. There are gradients of the
    first order for `x` and `w`. In `jax.shard_map` a device computes its own part of the arrays;
    elsewhere arrays must be on one device.

    Args:
        x: bf16, f16 or f32 `[M, K]`. Rows past the last group may hold anything.
        w: of the dtype of x, `[G, K, N]` as `jax.lax.ragged_dot` and megablox take it.
        group_sizes: `i32[G]`, the number of rows of each group, at least 0; M or less in all.
        transpose_rhs: `w` is `[G, N, K]`, as checkpoints keep weights. No copy is made of either.
        implementation: `"mosaic_sm90"`, kernels for a Hopper GPU; `"xla"`, a loop over tiles of
            rows; or None for the kernels where they can do the call.
        interpret: run the kernels of `"mosaic_sm90"` interpreted, on any device.

    Returns:
        `[M, N]` of the dtype of x; zeros for rows past the last group.

    Raises:
        ValueError: shapes or dtypes do not fit, or there is no such implementation.
        NotImplementedError: the implementation can't do this call; the message says why.
    """
    check_flag("transpose_rhs", transpose_rhs)
    x, w = as_array("x", x), as_array("w", w)
    if x.ndim != 2 or w.ndim != 3:
        raise ValueError(f"{x.shape=} must be [M, K], and {w.shape=} have an axis of groups first")
    check_dtypes(x=x, w=w)
    num_groups, *matrix = w.shape
    if transpose_rhs:
        matrix.reverse()
    if matrix[0] != x.shape[1] or 0 in (*x.shape, *w.shape):
        order = "[G, N, K]" if transpose_rhs else "[G, K, N]"
        raise ValueError(f"{w.shape=} must be {order} with K of {x.shape=}, and nothing empty")
    sizes = checked_array("group_sizes", group_sizes, jnp.int32, (num_groups,))
    how = resolve(implementation, interpret, dtype=x.dtype, sizes=matrix)
    return grouped(how, transpose_rhs, jnp.asarray(x), jnp.asarray(w), Groups.of(sizes))


def check_dtypes(**arrays: jax.Array) -> None:
    """Raise ValueError unless all arrays have one dtype that the products take."""
    found = {name: x.dtype for name, x in arrays.items()}
    first = next(iter(found.values()))
    for name, dtype in found.items():
        if dtype not in _DTYPES or dtype != first:
            raise ValueError(
                f"{name}.dtype={dtype.name} must be bfloat16, float16 or float32, and that of "
                f"{', '.join(found)}"
            )


def resolve(implementation: Any, interpret: bool, *, dtype: Any, sizes: Any) -> How:
    """Return how a call with x and matrices of `dtype`, of these sizes, runs."""
    check_implementation(implementation, get_args(ExpertsImplementation))
    check_interpret(interpret, implementation)
    if implementation == "xla":
        return How("xla")
    reason = _why_not(dtype, sizes, interpret)
    if reason is None:
        return How("mosaic_sm90", interpret)
    if implementation is not None:
        raise NotImplementedError(f"{implementation=} {reason}")
    return How("xla")


def _why_not(dtype: Any, sizes: Any, interpret: bool) -> str | None:
    """Return why the kernels can't do a call, or None."""
    if dtype == jnp.float32:
        return "needs bfloat16 or float16, not float32"
    if any(size % 64 for size in sizes):
        return f"needs matrices of sizes that are multiples of 64, not {tuple(sizes)}"
    if (reason := mosaic_support.why_not_jax()) is not None or interpret:
        return reason
    device = Device.here()
    if not device.is_hopper:
        return f"needs a Hopper GPU, not {device.kind!r}: {INTERPRET_INSTEAD}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped(how: How, transpose_rhs: bool, x: jax.Array, w: jax.Array, groups: Groups) -> jax.Array:
    """Return `grouped_matmul` of groups whose rows follow one another."""
    if how.implementation == "mosaic_sm90":
        from pallas_paged.experts.kernels import calls

        return calls.grouped_matmul(
            x, w, groups, transpose_rhs=transpose_rhs, interpret=how.interpret
        )
    return xla.grouped_matmul(x, w, groups, transpose_rhs=transpose_rhs)


@default_promotion()  # also where a caller has left the one of the entry
def _forward(how: How, transpose_rhs: bool, x: jax.Array, w: jax.Array, groups: Groups) -> Any:
    return grouped(how, transpose_rhs, x, w, groups), (x, w, groups)


@default_promotion()
def _backward(how: How, transpose_rhs: bool, residuals: Any, d_out: jax.Array) -> Any:
    x, w, groups = residuals
    a, b = (d_out, x) if transpose_rhs else (x, d_out)
    d_x = grouped(how, not transpose_rhs, d_out, w, groups)
    if how.implementation == "mosaic_sm90":
        from pallas_paged.experts.kernels import calls

        d_w = calls.weight_gradient(a, b, groups, interpret=how.interpret)
    else:
        d_w = xla.weight_gradient(a, b, groups)
    return d_x, d_w, None  # groups are integers


grouped.defvjp(_forward, _backward)
