"""Low-latency all-reduce over NVLink, and the layers that use it, for decode steps on a mesh.

XLA finds the collectives of a program from its shardings, and gives them to NCCL, which the host
starts one by one. The functions here run in `shard_map` instead. On the GPUs of one process they
are a kernel that writes into the memory of the other GPUs, see `decoder.kernels.all_reduce`. So
a loop of decode steps is one CUDA graph, as it is on one GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_paged.checks import pytree
from pallas_paged.decoder.kernels.peer_memory import memory_bytes
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90 import support
from pallas_paged.kernels.mosaic_sm90.config import REDUCE_ROWS, reduce_parts

__all__ = ["Peers", "create_peers", "embed", "row_linear", "row_linear_norm"]

_PACKET = 8  # bytes of data
# The largest array on two devices that the kernel adds up; NCCL is faster with larger ones.
_MAX_BYTES = 2 << 20


@pytree
class Peers:
    """The memory of devices that write to one another.

    Attributes:
        addresses: `i32[N, 2 * N + 2]`, sharded over the N devices, from `create_peers`.
        memory: `i32[N, size]`, sharded over the devices: where the others write.
        mesh: the mesh, of one axis.
        capacity: bytes of the largest array that the kernel adds up; 0: it adds up none.
    """

    addresses: jax.Array
    memory: jax.Array
    mesh: Mesh = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})

    @property
    def axis(self) -> str:
        return self.mesh.axis_names[0]

    def run(
        self,
        local: Callable[..., Any],
        specs: Sequence[Any],
        *arrays: Any,
        out_specs: Any = None,
    ) -> Any:
        """Run `local` on each device's part of arrays, after its `DevicePeers`.

        Two sums must not run at the same time: each sum of a program must depend on the sums
        before it, as in layers that follow one another.

        Args:
            local: the function.
            specs: the sharding of each array.
            arrays: arrays or pytrees of them.
            out_specs: the sharding of the results; None: they are replicated.
        """
        sharded = PartitionSpec(self.axis)

        def body(addresses: jax.Array, memory: jax.Array, *arrays: jax.Array) -> Any:
            return local(
                DevicePeers(self.axis, self.capacity, addresses.reshape(-1), memory), *arrays
            )

        run = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(sharded, sharded, *specs),
            out_specs=PartitionSpec() if out_specs is None else out_specs,
            check_vma=False,  # which can't know that sums are replicated
        )
        return run(self.addresses, self.memory, *arrays)


@dataclasses.dataclass(frozen=True)
class DevicePeers:
    """`Peers` as one device has them inside of `Peers.run`, with the same attributes."""

    axis: str
    capacity: int
    addresses: jax.Array
    memory: jax.Array

    @property
    def index(self) -> jax.Array:
        """Index of this device, `i32[]`."""
        return self.addresses[-2]

    @property
    def size(self) -> int:
        """Number of devices."""
        return int(self.addresses.size) // 2 - 1

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum of `x` over the devices."""
        rows = x
        if x.ndim != 2 or not _packets(x):
            rows = x.reshape(1, -1)
            rows = jnp.pad(rows, ((0, 0), (0, -x.size % _PACKET)))
        if not self._can_add_up(rows):
            return lax.psum(x, self.axis)
        (out,) = self._kernel(rows)
        return out.ravel()[: x.size].reshape(x.shape)

    def add_and_norm(
        self,
        x: jax.Array,
        residual: jax.Array,
        weight: jax.Array,
        eps: float,
    ) -> tuple[jax.Array, jax.Array]:
        """Return `residual` `[T, E]` plus the sum of `x`, and its RMS norm."""
        kinds = {x.dtype, residual.dtype, weight.dtype}
        if kinds == {jnp.dtype(jnp.bfloat16)} and self._can_add_up(x):
            return self._kernel(x, residual, weight, eps=eps)
        out = residual + self.sum(x)
        return out, rms_norm(out, weight, eps)

    def linear_add_and_norm(
        self,
        x: jax.Array,
        weight: jax.Array,
        residual: jax.Array,
        norm: jax.Array,
        eps: float,
    ) -> tuple[jax.Array, jax.Array]:
        """Return `residual` plus the sum of `x @ weight.T`, and its RMS norm with weight `norm`.

        Few rows keep a GPU busy only where programs divide the columns among them (split K). The
        kernel that adds up over the devices adds up their partial products, too.
        """
        kinds = {x.dtype, weight.dtype, residual.dtype, norm.dtype}
        parts = reduce_parts(num_rows=x.shape[0], num_columns=x.shape[1])
        if parts == 1 or kinds != {jnp.dtype(jnp.bfloat16)} or not self._can_add_up(residual):
            return self.add_and_norm(x @ weight.T, residual, norm, eps)
        return self._kernel(partial_products(x, weight, parts), residual, norm, eps=eps)

    def _can_add_up(self, x: jax.Array) -> bool:
        """Return whether the kernel can add up `x` `[rows, E]`."""
        fits = x.size * x.dtype.itemsize <= self.capacity and x.shape[0] <= REDUCE_ROWS
        return fits and x.dtype in (jnp.bfloat16, jnp.float32) and _packets(x)

    def _kernel(self, *arrays: jax.Array, **options: Any) -> Any:
        from pallas_paged.decoder.kernels.all_reduce import all_reduce

        x, *others = arrays
        with jax.enable_x64(False):
            return all_reduce(
                x, self.addresses, self.memory, *others, capacity=self.capacity, **options
            )

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the f32 `x` of all devices, `[N, ...]`."""
        places = jnp.arange(self.size).reshape(-1, *[1] * x.ndim)
        return self.sum(jnp.where(places == self.index, x, 0.0))


def create_peers(mesh: Mesh) -> Peers:
    """Return the memory for sums over a mesh of one axis; its capacity is 0 without a kernel."""
    size, capacity, num_bytes = mesh.size, 0, 4
    if _has_kernel(mesh):
        capacity = _MAX_BYTES // (size - 1) // 128 * 128
        num_bytes = memory_bytes(size, capacity)
    sharded = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    shape = size, num_bytes // 4
    memory = jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=sharded)()
    pointers = [0] * size
    if capacity:
        memory.block_until_ready()
        parts = {shard.device: shard.data for shard in memory.addressable_shards}
        pointers = [parts[device].unsafe_buffer_pointer() for device in mesh.devices.flat]
    rows = np.array([[*pointers, rank] for rank in range(size)], np.uint64).view(np.int32)
    addresses = jax.make_array_from_callback(rows.shape, sharded, lambda index: rows[index])
    return Peers(addresses=addresses, memory=memory, mesh=mesh, capacity=capacity)


def _has_kernel(mesh: Mesh) -> bool:
    """Return whether the devices of a mesh can add up by the kernel.

    Devices of other processes have addresses of their own.
    """
    devices = mesh.devices.flatten().tolist()
    is_here = {device.process_index for device in devices} == {jax.process_index()}
    if len(devices) == 1 or not is_here or mosaic_support.why_not_jax() is not None:
        return False
    return support.why_not_device(Device.here()) is None and _can_access(devices)


def _can_access(devices: list[Any]) -> bool:
    """Return whether each GPU can access the memory of all others, by the CUDA driver."""
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceCanAccessPeer
    except (OSError, AttributeError):
        return False
    found, ids = ctypes.c_int(), [device.local_hardware_id for device in devices]
    return all(
        ask(ctypes.byref(found), a, b) == 0 and found.value for a in ids for b in ids if a != b
    )


def row_linear(x: jax.Array, weight: jax.Array, peers: Peers | None) -> jax.Array:
    """Return row-parallel `x @ weight.T`: K is sharded.

    Args:
        x: `[T, K]`, K sharded over the devices.
        weight: `[N, K]`, likewise.
        peers: the devices; None: there is one.

    Returns:
        `[T, N]`, replicated.
    """
    if peers is None:
        return x @ weight.T
    columns = PartitionSpec(None, peers.axis)
    return peers.run(lambda here, x, weight: here.sum(x @ weight.T), (columns, columns), x, weight)


def row_linear_norm(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array,
    norm: jax.Array,
    eps: float,
    peers: Peers | None,
) -> tuple[jax.Array, jax.Array]:
    """Return `residual + row_linear(x, weight)`, and its RMS norm: `[T, N]` each.

    Args:
        x, weight, peers: as in `row_linear`.
        residual: `[T, N]`, replicated.
        norm: `[N]`, the weight of the norm.
        eps: epsilon of the norm.
    """
    if peers is None:
        out = residual + x @ weight.T
        return out, rms_norm(out, norm, eps)
    columns, replicated = PartitionSpec(None, peers.axis), PartitionSpec()
    specs = columns, columns, replicated, replicated

    def local(here: DevicePeers, x: Any, weight: Any, residual: Any, norm: Any) -> Any:
        return here.linear_add_and_norm(x, weight, residual, norm, eps)

    return peers.run(local, specs, x, weight, residual, norm)


def embed(token_ids: jax.Array, table: jax.Array, peers: Peers | None) -> jax.Array:
    """Return `table[token_ids]` of a table whose rows are sharded.

    Args:
        token_ids: `i32[T]`, in range.
        table: `[V, E]`, V sharded over the devices.
        peers: the devices; None: there is one.

    Returns:
        `[T, E]`, replicated.
    """
    if peers is None:
        return table[token_ids]

    def local(here: DevicePeers, token_ids: jax.Array, table: jax.Array) -> jax.Array:
        rows = token_ids - here.index * table.shape[0]
        # Others have the rows that are not here.
        rows = jnp.where(rows < 0, table.shape[0], rows)
        return here.sum(table.at[rows].get(mode="fill", fill_value=0))

    return peers.run(local, (PartitionSpec(), PartitionSpec(peers.axis)), token_ids, table)


def partial_products(x: jax.Array, weight: jax.Array, parts: int) -> jax.Array:
    """Return `x @ weight.T` as the sum over the first axis, f32 `[parts, T, N]`.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`.
        parts: a divisor of K.
    """
    x, weight = (y.reshape(y.shape[0], parts, -1) for y in (x, weight))
    dims = (((2,), (2,)), ((1,), (1,)))
    return lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32)


def _packets(x: jax.Array) -> bool:
    """Return whether the bytes of a row of `x` are a multiple of a packet's."""
    return x.shape[-1] * x.dtype.itemsize % _PACKET == 0
