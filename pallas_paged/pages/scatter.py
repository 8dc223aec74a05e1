"""Gathers from pages of any layout, and scatters into them in place."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def take_pages(x: jax.Array, axis: int, pages: jax.Array, *, mode: str = "clip") -> jax.Array:
    """Return the pages i32[n] along an axis; zeros for others with mode "fill"."""

    def take(x: jax.Array, pages: jax.Array) -> jax.Array:
        return x.at[pages].get(mode=mode, fill_value=0, wrap_negative_indices=False)

    return _per_head(take, x, pages) if axis else take(x, pages)


def set_pages(x: jax.Array, axis: int, pages: jax.Array, values: jax.Array) -> jax.Array:
    """Return pages or scales with `values` at the pages i32[n] along an axis."""
    return _per_head(_set, x, pages, values) if axis else _set(x, pages, values)


def set_tokens(x: jax.Array, axes: str, slots: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return pages or scales with tokens `[T, ...]` at the slots i32[T].

    The axes of both have the same order; those of `x` have a letter each, as in `PageLayout`.
    """
    page_axis, page_size = axes.index("P"), x.shape[axes.index("N")]
    if "PN" in axes:
        flat = x.reshape(*x.shape[:page_axis], -1, *x.shape[page_axis + 2 :])
        if page_axis:
            return _per_head(_set, flat, slots, tokens.swapaxes(0, 1)).reshape(x.shape)
        return _set(flat, slots, tokens).reshape(x.shape)
    # All axes up to N have indices, in order. XLA's GPU compiler moves scattered axes to the front,
    # and so would copy the pool.
    middle = jnp.arange(x.shape[1])
    places = slots[:, None] // page_size, middle, slots[:, None] % page_size
    return x.at[places].set(tokens, mode="drop", wrap_negative_indices=False)


def _set(x: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    return x.at[places].set(values, mode="drop", wrap_negative_indices=False)


def _per_head(
    function: Callable[..., jax.Array], x: jax.Array, places: jax.Array, *values: jax.Array
) -> jax.Array:
    """Return `function(x[h], places, *(v[h] for v in values))` of every head h.

    Heads are a batch dimension of the gather or scatter, its indices included. On a mesh each
    device then works on its own heads. A head among the indices would gather the new tokens of all
    heads on each device, and one without indices of its own is an axis of the window: XLA's GPU
    compiler moves the scattered axes in front of it, and so transposes the pool.
    """
    return jax.vmap(function)(x, jnp.broadcast_to(places, (x.shape[0], places.size)), *values)
