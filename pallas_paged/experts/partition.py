"""Runs routed experts on each device's part of the weights, under `jit` and any mesh.

XLA's partitioner can't look into a kernel, nor divide a loop over experts: it would gather the
weights of all devices. Under Auto axes the call is therefore custom partitioned, as attention is,
and under Explicit axes `shard_map` divides it. The weights must not move, so they decide: a device
has some of the experts or some of their features, adds up its part, and a sum over devices follows.
In `shard_map` the arrays are a device's own already.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from pallas_paged.attention.partition import explicit_mesh, mesh_of, sources_key
from pallas_paged.checks import default_promotion
from pallas_paged.pages.sharding import mesh_axes

# The axes of the arrays: tokens t, experts x, features f, and those that are never sharded.
_AXES = {
    "x": "te",
    "gate_up": "xfpe",
    "down": "xef",
    "gate_up_bias": "xfp",
    "down_bias": "xe",
    "expert_indices": "tk",
    "expert_weights": "tk",
    "d_out": "te",
}
_SHARDABLE = "txf"
_MeshAxes = tuple[str, ...]
_CODE = tuple(f"pallas_paged.{room}" for room in ("experts", "kernels"))


@dataclasses.dataclass(frozen=True)
class Routed:
    """A function of arrays by their names in `_AXES`, which is hashable."""

    function: Callable[..., tuple[jax.Array, ...]]  # of arrays by name; it returns a tuple
    results: tuple[str, ...]  # the arguments whose axes the results have
    static: tuple[Any, ...]  # its further arguments by position
    # Whether it can't be divided: JAX orders callbacks into Python, which interpreted kernels make,
    # on one device only.
    one_device: bool

    @default_promotion()  # JAX also calls it after the entry has returned
    def __call__(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return self.function(*self.static, **arrays)


def on_each_device(routed: Routed, arrays: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Return the results of `routed`, each device computing with its part of the weights."""
    if routed.one_device or jax.sharding.get_abstract_mesh().manual_axes:
        return routed(**arrays)
    names, values = tuple(arrays), tuple(arrays.values())
    mesh = explicit_mesh(values)
    if mesh is None:
        return _partitioned(routed, names)(*values)
    parts = _Parts.of(names, [jax.typeof(x).sharding.spec for x in values])
    ins = [parts.spec(name) for name in names]
    run = jax.shard_map(
        functools.partial(parts.run, routed, names),
        mesh=mesh,
        in_specs=tuple(ins),
        out_specs=tuple(map(parts.spec, routed.results)),
        check_vma=False,  # JAX can't check what the sums replicate
    )
    return run(*(jax.reshard(x, NamedSharding(mesh, s)) for x, s in zip(values, ins, strict=True)))


@functools.cache
def _partitioned(routed: Routed, names: tuple[str, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return routed(**dict(zip(names, arrays, strict=True)))

    def partition(mesh: Any, args: Sequence[Any], _: Any) -> tuple[Any, ...]:
        mesh = mesh_of(args)
        parts = _Parts.of(names, [x.sharding.spec for x in args])
        ins, outs = (
            tuple(NamedSharding(mesh, parts.spec(name)) for name in found)
            for found in (names, routed.results)
        )
        return mesh, functools.partial(parts.run, routed, names), outs, ins

    jitted = jax.jit(local)  # custom partitioning takes no constants, and jit keeps them inside
    partitioned: Any = custom_partitioning(lambda *arrays: jitted(*arrays))
    axes = [[" ".join(_AXES[name]) for name in found] for found in (names, routed.results)]
    partitioned.def_partition(
        partition,
        infer_sharding_from_operands=lambda *args: partition(*args)[2],
        sharding_rule=" -> ".join(map(", ".join, axes)),
        need_replication_factors=tuple(
            dict.fromkeys(x for name in names for x in _AXES[name] if x not in _SHARDABLE)
        ),
    )

    @custom_vmap
    def batchable(*arrays: jax.Array) -> Any:
        return partitioned(*arrays)

    @batchable.def_vmap
    def _(_: int, in_batched: Sequence[bool], *arrays: jax.Array) -> Any:
        out = jax.vmap(local, in_axes=tuple(0 if b else None for b in in_batched))(*arrays)
        return out, (True,) * len(out)

    def function(*arrays: jax.Array) -> Any:
        return batchable(*arrays)

    # In a jit of its own, so that layers share the trace, and outside of jit it is partitioned too.
    # Programs are cached by their text, which the function may not be a part of.
    text = f"{sources_key(*_CODE)} {routed.function.__name__} {routed.static} {names}"
    function.__name__ = f"experts_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return jax.jit(function)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The mesh axes that shard tokens, experts and features, by letter in `_AXES`."""

    axes: Mapping[str, _MeshAxes]

    @classmethod
    def of(cls, names: Sequence[str], specs: Sequence[PartitionSpec]) -> _Parts:
        given = {}
        for name, spec in zip(names, specs, strict=True):
            entries = (*spec, *[None] * (len(_AXES[name]) - len(spec)))
            given[name] = dict(zip(_AXES[name], map(mesh_axes, entries), strict=True))
        experts, features = (given["gate_up"][axis] for axis in "xf")
        tokens = tuple(x for x in given["x"]["t"] if x not in (*experts, *features))
        return cls({"x": experts, "f": features, "t": tokens})

    def spec(self, name: str) -> PartitionSpec:
        """Return the sharding of an array."""
        return PartitionSpec(*(self.axes.get(axis) or None for axis in _AXES[name]))

    def run(
        self, routed: Routed, names: Sequence[str], *arrays: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return the results of a device, sums over devices included."""
        given = dict(zip(names, arrays, strict=True))
        experts, features = self.axes["x"], self.axes["f"]
        if experts:  # those of other devices have no expert here
            first = lax.axis_index(experts) * len(given["gate_up"])
            given["expert_indices"] = given["expert_indices"] - first.astype(jnp.int32)
        if features and "down_bias" in given:
            is_first = lax.axis_index(features) == 0
            given["down_bias"] = jnp.where(is_first, given["down_bias"], 0)
        results = routed(**given)
        summed = []
        for name, result in zip(routed.results, results, strict=True):
            # A bias of `down` needs no feature for its gradient.
            over = "tx" if name == "down_bias" else _SHARDABLE
            axes = tuple(a for axis in over if axis not in _AXES[name] for a in self.axes[axis])
            summed.append(lax.psum(result, axes) if axes else result)
        return tuple(summed)
