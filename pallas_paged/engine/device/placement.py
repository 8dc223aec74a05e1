"""Where the arrays of one replica are: JAX's default device, or a mesh of one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding

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
        return cls(devices=tuple(jnp.empty(0).devices()))

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
    def whole(self) -> Sharding:
        """The sharding of what every device has as a whole."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return page_table_sharding(self.mesh)

    def put(self, tree: Any) -> Any:
        """Return a pytree of arrays as a whole on every device."""
        return jax.tree.map(lambda x: put(x, self.whole), tree)


def placements(
    tensor_parallel: int, data_parallel: int, devices: Sequence[jax.Device] | None
) -> list[Placement]:
    """Return where the replicas are; arguments as in `EngineConfig` and `Engine`.

    Raises:
        ValueError: there are too few devices, or they are of processes that can't serve together.
    """
    num_devices = tensor_parallel * data_parallel
    if devices is None:
        if num_devices == 1:
            return [Placement.default()]
        devices = jax.local_devices()
        if len(devices) < num_devices:
            devices = jax.devices()
    sizes = f"{tensor_parallel=} * {data_parallel=}"
    if len(devices) < num_devices:
        raise ValueError(f"{sizes} must be at most {len(devices)}, the number of devices")
    devices = devices[:num_devices]
    if len(set(devices)) < num_devices:
        raise ValueError(f"devices={[*devices]} must all be different")
    starts = range(0, num_devices, tensor_parallel)
    found = [Placement.on(devices[start : start + tensor_parallel]) for start in starts]
    processes = {device.process_index for device in devices}
    if processes == {jax.process_index()}:
        return found
    if processes != set(range(jax.process_count())):
        raise ValueError(
            f"{sizes} takes devices of the processes {sorted(processes)}, but must take some of "
            f"each of the {jax.process_count()} processes, or of this one only"
        )
    if data_parallel > 1:
        raise ValueError(
            f"{data_parallel=} must be 1 where the devices are of several processes: make an "
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
    def whole(self) -> NamedSharding:
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


@lru_cache(maxsize=64)
def jit_whole(function: Callable[..., Any], sharding: NamedSharding, donated: int) -> Any:
    """Return a jitted function of arrays that every device has as a whole.

    Args:
        function: takes positional arguments; a jitted one is jitted anew.
        sharding: of all arguments and results.
        donated: how many of the first arguments are donated.
    """
    return jax.jit(
        unwrap(function),
        in_shardings=sharding,
        out_shardings=sharding,
        donate_argnums=tuple(range(donated)),
    )
