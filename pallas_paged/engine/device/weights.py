"""The parameters of a model on the devices of a replica."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from pallas_paged.engine.device.placement import Placement, put
from pallas_paged.engine.model import Model


class Weights:
    """Puts parameters onto the devices of a replica, as the model wants them cut.

    Attributes:
        structure: of the pytree.
        leaves: its arrays, which the step takes.
    """

    def __init__(self, model: Model, params: Any, placement: Placement):
        """Put the first parameters.

        Raises:
            ValueError: one is not an array of numbers, or `model.param_specs` does not fit them.
        """
        _check_leaves(params)
        leaves, self.structure = jax.tree.flatten(params)
        self._shardings = _shardings(model, params, placement)
        self.leaves = tuple(map(put, leaves, self._shardings))

    def check(self, params: Any) -> None:
        """Raise ValueError if other parameters differ in structure, shapes or dtypes."""
        structure = jax.tree.structure(params)
        if structure != self.structure:  # type: ignore[operator]
            raise ValueError(f"params have the structure {structure}, not {self.structure}")
        _check_leaves(params)
        paths = jax.tree_util.tree_flatten_with_path(params)[0]
        for (path, new), old in zip(paths, self.leaves, strict=True):
            if (np.shape(new), jnp.result_type(new)) != (old.shape, old.dtype):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is {jnp.result_type(new)}{np.shape(new)}, "
                    f"but {old.dtype}{old.shape} was compiled"
                )

    def put(self, params: Any) -> tuple[jax.Array, ...]:
        """Return the leaves of other parameters on the devices; `leaves` are as before.

        Arrays that are there with the right sharding are not copied.
        """
        return tuple(map(put, jax.tree.leaves(params), self._shardings))


def shapes_of(params: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the dtype of each parameter, by its path.

    Raises:
        ValueError: one is not an array of numbers.
    """
    _check_leaves(params)
    return {
        jax.tree_util.keystr(path): (np.shape(leaf), jnp.result_type(leaf).name)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }


def _check_leaves(params: Any) -> None:
    """Raise ValueError if a leaf is not an array of numbers."""
    if params is None:
        raise ValueError(f"{params=} must be a pytree of arrays")
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if isinstance(leaf, jax.Array):  # also keys of random numbers
            continue
        is_array = isinstance(leaf, np.ndarray | np.generic | int | float)
        dtype = np.asarray(leaf).dtype if is_array else np.dtype(object)
        if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_)):
            name = f"params{jax.tree_util.keystr(path)}"
            raise ValueError(f"{name}={reprlib.repr(leaf)} must be an array of numbers")


def _shardings(model: Model, params: Any, placement: Placement) -> list[Sharding]:
    """Return where each leaf of the parameters belongs."""
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    if placement.mesh is None:
        return [placement.whole] * len(paths)
    specs_of = getattr(model, "param_specs", None)
    if specs_of is None:
        return [_own_sharding(leaf, placement) for _, leaf in paths]
    specs, found = jax.tree.flatten(specs_of(params), is_leaf=_is_spec)
    if found != structure:  # type: ignore[operator]
        raise ValueError(f"param_specs have the structure {found}, but params {structure}")
    for (path, leaf), spec in zip(paths, specs, strict=True):
        name = f"param_specs{jax.tree_util.keystr(path)}={spec}"
        if not _is_spec(spec):
            raise ValueError(f"{name} must be a PartitionSpec")
        if len(spec) > np.ndim(leaf):
            raise ValueError(f"{name} has more entries than an array of shape {np.shape(leaf)}")
        for size, axes in zip(np.shape(leaf), spec, strict=False):
            names = (axes,) if isinstance(axes, str) else axes or ()
            if not set(names) <= set(placement.mesh.axis_names):
                raise ValueError(f"{name} must name no other axis than {placement.mesh.axis_names}")
            parts = math.prod(placement.mesh.shape[name] for name in names)
            if size % parts:
                raise ValueError(f"{name} cuts an axis of {size} elements into {parts} parts")
    return [NamedSharding(placement.mesh, spec) for spec in specs]


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _own_sharding(leaf: Any, placement: Placement) -> Sharding:
    """The sharding that an array has on the replica's devices in their order, or a copy on each."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and (*sharding.mesh.devices.flat,) == placement.devices:
        return sharding
    return placement.whole
