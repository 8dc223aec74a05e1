"""The devices of a replica, and the parameters of a model on them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from pallas_paged.engine.model import Model
from pallas_paged.engine.requests.input_processor import check_lists
from pallas_paged.pages.sharding import TENSOR_AXIS, kv_pool_sharding, page_table_sharding


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the arrays of one replica are.

    Attributes:
        devices: those that compute together.
        mesh: of the axis "tensor" over them; None is for JAX's default device alone.
    """

    devices: tuple[jax.Device, ...]
    mesh: Mesh | None = None

    @classmethod
    def default(cls) -> Placement:
        """Return the placement on JAX's default device."""
        return cls(devices=tuple(jax.device_put(np.empty(0)).devices()))  # compiles nothing

    @classmethod
    def on(cls, devices: Sequence[jax.Device]) -> Placement:
        """Return the placement on a mesh of these devices."""
        mesh = Mesh(np.array(devices), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))
        return cls(devices=tuple(devices), mesh=mesh)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def local_devices(self) -> list[jax.Device]:
        """Those of this process."""
        return [one for one in self.devices if one.process_index == jax.process_index()]

    @property
    def num_processes(self) -> int:
        return len({device.process_index for device in self.devices})

    @property
    def pool(self) -> NamedSharding | None:
        """The sharding of K/V pages."""
        return None if self.mesh is None else kv_pool_sharding(self.mesh)

    @property
    def replicated(self) -> Sharding:
        """The sharding of what is replicated on every device."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return page_table_sharding(self.mesh)

    def put(self, tree: Any) -> Any:
        """Return a pytree of arrays, replicated on every device."""
        return jax.tree.map(lambda x: put(x, self.replicated), tree)


def placements(
    tensor_parallel_size: int, data_parallel_size: int, devices: Sequence[jax.Device] | None
) -> list[Placement]:
    """Return where the replicas are; arguments as in `EngineConfig` and `Engine`.

    Raises:
        ValueError: there are too few devices, they are of processes that can't serve together, or
            they are no list of devices.
    """
    num_devices = tensor_parallel_size * data_parallel_size
    if devices is None:
        if num_devices == 1:
            return [Placement.default()]
        devices = jax.local_devices()
        if len(devices) < num_devices:
            devices = jax.devices()
    check_lists(devices=devices)
    for device in devices:
        if not isinstance(device, jax.Device):
            raise ValueError(f"devices has {device!r:.80}, which must be a jax.Device")
    sizes = f"{tensor_parallel_size=} * {data_parallel_size=}"
    if len(devices) < num_devices:
        raise ValueError(f"{sizes} must be at most {len(devices)}, the number of devices")
    devices = devices[:num_devices]
    if len(set(devices)) < num_devices:
        raise ValueError(f"devices={[*devices]} must all be different")
    starts = range(0, num_devices, tensor_parallel_size)
    found = [Placement.on(devices[start : start + tensor_parallel_size]) for start in starts]
    processes = {device.process_index for device in devices}
    if processes == {jax.process_index()}:
        return found
    if processes != set(range(jax.process_count())):
        raise ValueError(
            f"{sizes} takes devices of the processes {sorted(processes)}, but must take some of "
            f"each of the {jax.process_count()} processes, or of this one only"
        )
    if data_parallel_size > 1:
        raise ValueError(
            f"{data_parallel_size=} must be 1 where the devices are of several processes: make an "
            "engine in each process and share the requests out among them"
        )
    return found


@dataclass(frozen=True)
class Shardings:
    """The shardings of a pytree's leaves, in a form that can be hashed."""

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[NamedSharding, ...]

    @classmethod
    def of(cls, tree: Any) -> Shardings:
        """Return those of the arrays of a pytree, which are on one mesh."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(leaf.sharding for leaf in leaves))

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.structure, self.leaves)

    @property
    def replicated(self) -> NamedSharding:
        return page_table_sharding(self.leaves[0].mesh)


def put(x: Any, sharding: Sharding) -> jax.Array:
    """Put an array where the sharding says; one that is there already is not copied.

    The result is committed to its devices: a step compiles anew where arrays once are and once are
    not.

    Args:
        x: an array, the same one in each process of the sharding; or a global one.
        sharding: of the result.
    """
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if sharding.is_fully_addressable or is_global:
        return jax.device_put(x, sharding)
    host = np.asarray(x, jnp.result_type(x))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


class Weights:
    """Puts parameters onto the devices of a replica, sharded as the model wants it.

    Attributes:
        structure: of the pytree.
        leaves: its arrays, which the step takes.
        name: of the parameters in errors.
    """

    def __init__(self, model: Model, params: Any, placement: Placement, name: str = "params"):
        """Put the first parameters.

        Raises:
            ValueError: one is not an array of numbers, or `model.param_specs` does not fit them.
        """
        self.name = name
        _check_leaves(params, name)
        leaves, self.structure = jax.tree.flatten(params)
        self._shardings = _shardings(model, params, placement)
        self.leaves = tuple(map(put, leaves, self._shardings))

    @property
    def are_deleted(self) -> bool:
        return any(leaf.is_deleted() for leaf in self.leaves)

    def check(self, params: Any) -> None:
        """Raise ValueError if other parameters differ in structure, shapes or dtypes."""
        structure = jax.tree.structure(params)
        if structure != self.structure:  # type: ignore[operator]
            what = f"{self.name} have the structure {structure!s:.200}, not {self.structure!s:.200}"
            given, known = map(_names, (params, jax.tree.unflatten(self.structure, self.leaves)))
            differences = [f"without {name}" for name in sorted(known - given)]
            differences += [f"with {name}" for name in sorted(given - known)]
            raise ValueError(": ".join([what, *differences[:1]]))
        _check_leaves(params, self.name)
        paths = jax.tree_util.tree_flatten_with_path(params)[0]
        for (path, new), old in zip(paths, self.leaves, strict=True):
            if (np.shape(new), jnp.result_type(new)) != (old.shape, old.dtype):
                name, new_type = f"{self.name}{jax.tree_util.keystr(path)}", jnp.result_type(new)
                raise ValueError(
                    f"{name} is {new_type}{np.shape(new)}, but {old.dtype}{old.shape} was compiled"
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


def _names(params: Any) -> set[str]:
    """Return the path of each leaf."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path) for path, _ in paths}


def _check_leaves(params: Any, name: str = "params") -> None:
    """Raise ValueError if a leaf is not an array of numbers."""
    if params is None:
        raise ValueError(f"{name}=None must be a pytree of arrays")
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if isinstance(leaf, jax.Array):  # also keys of random numbers
            if leaf.is_deleted():
                where = f"{name}{jax.tree_util.keystr(path)}"
                raise ValueError(f"{where} has been deleted, or donated elsewhere")
            continue
        is_array = isinstance(leaf, np.ndarray | np.generic | int | float)
        dtype = np.asarray(leaf).dtype if is_array else np.dtype(object)
        if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_)):
            name = f"{name}{jax.tree_util.keystr(path)}"
            raise ValueError(f"{name}={reprlib.repr(leaf)} must be an array of numbers")


def _shardings(model: Model, params: Any, placement: Placement) -> list[Sharding]:
    """Return where each leaf of the parameters belongs."""
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    if placement.mesh is None:
        return [placement.replicated] * len(paths)
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
                raise ValueError(f"{name} shards an axis of {size} elements into {parts} parts")
    return [NamedSharding(placement.mesh, spec) for spec in specs]


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _own_sharding(leaf: Any, placement: Placement) -> Sharding:
    """The sharding that an array has on the replica's devices in their order, or a copy on each."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and (*sharding.mesh.devices.flat,) == placement.devices:
        return sharding
    return placement.replicated
