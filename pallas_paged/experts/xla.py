"""The products by XLA, on any device: loops over tiles of rows, each times one group's matrix.

No array has an axis of rows and one of groups. These define the results, but for rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.experts.plan import Groups, tiles_of

_MAX_BLOCK = 128  # rows of a tile
_MAX_GRADIENT_BLOCK = 512  # each adds to a matrix of f32, so more rows are fewer bytes


def grouped_matmul(x: jax.Array, w: jax.Array, groups: Groups, *, transpose_rhs: bool) -> jax.Array:
    """Return the rows of `x` times the matrices of their groups; zeros for rows of no group."""
    num_rows = len(x)
    block = _block(num_rows, _MAX_BLOCK)
    tiles = tiles_of(groups, num_rows=num_rows, block=block)
    x = jnp.pad(x, ((0, block), (0, 0)))
    place = jnp.arange(block)[:, None]

    def multiply(i: jax.Array, out: jax.Array) -> jax.Array:
        group, row, lo, hi = tiles.fields[i]
        rows = lax.dynamic_slice_in_dim(x, row, block)
        matrix = lax.dynamic_index_in_dim(w, group, keepdims=False)
        axes = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
        product = lax.dot_general(rows, matrix, axes, preferred_element_type=jnp.float32)
        before = lax.dynamic_slice_in_dim(out, row, block)
        after = jnp.where((place >= lo) & (place < hi), product.astype(out.dtype), before)
        return lax.dynamic_update_slice_in_dim(out, after, row, axis=0)

    out = jnp.zeros((len(x), w.shape[1 if transpose_rhs else 2]), x.dtype)
    return lax.fori_loop(0, tiles.count[0], multiply, out)[:num_rows]


def weight_gradient(a: jax.Array, b: jax.Array, groups: Groups) -> jax.Array:
    """Return `[G, K, N]`: for each group the product of its rows of `a [M, K]` and `b [M, N]`.

    Sums are in f32. The rows of no group may hold anything.
    """
    block = _block(len(a), _MAX_GRADIENT_BLOCK)
    a, b = (jnp.pad(x, ((0, block), (0, 0))) for x in (a, b))
    place = jnp.arange(block)[:, None]

    def of_group(group: jax.Array, out: jax.Array) -> jax.Array:
        start, size = groups.starts[group], groups.sizes[group]

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            row = start + i * block
            # Selected, because NaN times 0 is NaN.
            a_rows, b_rows = (
                jnp.where(place < size - i * block, lax.dynamic_slice_in_dim(x, row, block), 0)
                for x in (a, b)
            )
            axes = (((0,), (0,)), ((), ()))
            return total + lax.dot_general(a_rows, b_rows, axes, preferred_element_type=jnp.float32)

        total = jnp.zeros(out.shape[1:], jnp.float32)
        total = lax.fori_loop(0, (size + block - 1) // block, add, total)
        return lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), group, axis=0)

    shape = (len(groups.sizes), a.shape[1], b.shape[1])
    return lax.fori_loop(0, shape[0], of_group, jnp.zeros(shape, a.dtype))


def rows_at(rows: jax.Array, row: jax.Array) -> jax.Array:
    """Return rows in f32; zeros past the end."""
    return rows.at[row].get(mode="fill", fill_value=0).astype(jnp.float32)


def weighted_sum(rows: jax.Array, weights: jax.Array | None, places: jax.Array) -> jax.Array:
    """Return the sum over k of weights `[T, k]` times the rows at `places i32[T, k]`.

    XLA makes one loop of it, in which no array has axes of T, k and E. The barrier keeps it out of
    the norm that follows: to fuse k gathers with that takes XLA seconds of a compilation.
    """
    total = jnp.zeros((len(places), rows.shape[1]), jnp.float32)
    for j in range(places.shape[1]):
        term = rows_at(rows, places[:, j])
        if weights is not None:  # of padding it may be anything
            is_row = (places[:, j] < len(rows))[:, None]
            term = jnp.where(is_row, term * weights[:, j, None].astype(jnp.float32), 0)
        total = total + term
    return lax.optimization_barrier(total.astype(rows.dtype))


def _block(num_rows: int, most: int) -> int:
    return min(most, -(-num_rows // 8) * 8)
