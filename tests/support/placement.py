"""The arrays of attention on a mesh, and the collectives of a compiled program."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import raw
from tests.support.devices import mesh

_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
)
POSITIONAL = ("q", "k_pages", "v_pages", "block_tables", "seq_lens")
NAMES = {
    raw.paged_attention: POSITIONAL,
    raw.ragged_paged_attention: (*POSITIONAL, "cu_q_lens"),
    raw.cascade_attention: (*POSITIONAL, "prefix_lens", "cu_group_sizes"),
}
# Along heads; everything else is replicated.
BY_HEADS = dict.fromkeys(("k_pages", "v_pages", "alibi_slopes", "sinks"), P("tensor"))
BY_HEADS["q"] = P(None, "tensor")
# Rows too, of a mesh with another axis.
BY_ROWS = BY_HEADS | dict(q=P("data", "tensor"), block_tables=P("data"), seq_lens=P("data"))


def mesh_2d(*shape: int, names: tuple[str, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of several axes; skips the test where there are fewer devices."""
    devices = mesh(int(np.prod(shape))).devices
    return Mesh(devices.reshape(shape), names, axis_types=(kind,) * len(shape))


def several(most: int = 4) -> Mesh:
    """A mesh of `most` devices, or of those that are here; skips the test where there is one."""
    return mesh(max(2, min(most, jax.device_count())))


def place(
    arrays: Mapping[str, Any], on: Mesh, specs: Mapping[str, P] = BY_HEADS
) -> dict[str, jax.Array]:
    """Named arrays on a mesh; scales are sharded as pages are, unless there is one for all."""

    def spec(name: str, x: Any) -> P:
        if name in ("k_scales", "v_scales") and np.ndim(x):
            first = arrays["k_pages"].ndim - np.ndim(x) - 1  # K and V may be an axis of pages
            return P(*specs["k_pages"][first:])
        return specs.get(name, P())

    return {name: jax.device_put(x, NamedSharding(on, spec(name, x))) for name, x in arrays.items()}


def shapes_on(on: Any, arrays: Mapping[str, Any], specs: Mapping[str, P] = BY_HEADS) -> Any:
    """Shapes, dtypes and shardings of named arrays on a mesh, which may be abstract."""

    def shape(x: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, spec))

    return {name: shape(x, specs.get(name, P())) for name, x in arrays.items()}


def collectives(compiled: jax.stages.Compiled) -> list[str]:
    """The lines of a program in which devices exchange data."""
    return [line.strip() for line in compiled.as_text().splitlines() if _COLLECTIVE.search(line)]


def buffers(tree: Any) -> list[int]:
    """Where each device has its part of each array."""
    leaves = jax.tree.leaves(tree)
    return [part.data.unsafe_buffer_pointer() for x in leaves for part in x.addressable_shards]


def named(attention: Any, arrays: Iterable[Any]) -> dict[str, Any]:
    """The positional arguments of an entry, by name; scales may follow."""
    return dict(zip((*NAMES[attention], "k_scales", "v_scales"), arrays, strict=False))
