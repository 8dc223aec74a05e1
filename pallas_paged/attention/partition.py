"""Runs attention on each device's heads and rows, under `jit` and any mesh.

XLA's partitioner can't look into a Pallas kernel: it would gather the K/V pages of all devices.
Under Auto axes attention is therefore custom partitioned: the partitioner asks here for the
sharding of each array, given the shardings it found. Under Explicit axes those are in the types,
and `shard_map` divides the call. In `shard_map` the arrays are a device's own already.

The sharding of the pages decides, since they must not move: query heads are sharded like their KV
heads, and further where a device has one KV head. Other arrays are small, and follow.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_paged.attention.tuning import tuning_key
from pallas_paged.pages.layout import AXIS_NAMES
from pallas_paged.pages.sharding import mesh_axes

Axes = tuple[str, ...]  # names of an array's axes; axes of one name are sharded alike
AxisSharding = Mapping[str, tuple[str, ...]]  # the mesh axes that shard each axis, by its name

KV_HEADS, Q_HEADS = "num_kv_heads", "num_q_heads"
_POOL = ("k_pages", "v_pages", "k_scales", "v_scales")
# The packages whose code can be in a program of attention.
CODE = tuple(f"pallas_paged.{room}" for room in ("attention", "decoder", "kernels", "pages"))
# What the kernels are to XLA. JAX promises for no other version that it knows them.
KERNEL_CALLS = [
    export.DisabledSafetyCheck.custom_call(name)
    for name in ("__gpu$xla.gpu.triton", "mosaic_gpu", "mosaic_gpu_v2")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRule:
    """Which axes of a call's arrays may be sharded, and which are the same axis."""

    names: tuple[str, ...]  # names of the arguments
    inputs: tuple[Axes, ...]  # their axes
    outputs: tuple[Axes, ...]  # the axes of the results
    shardable_axes: tuple[str, ...]  # axes that may be sharded; all others are replicated
    divides_groups: bool = True  # whether the query heads of one KV head may be on several devices

    @property
    def shardy(self) -> str:
        """The rule in Shardy's notation."""
        ins, outs = (", ".join(map(" ".join, words)) for words in (self.inputs, self.outputs))
        return f"{ins} -> {outs}"

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Axes that Shardy replicates, without the pool's own: it would gather the pool."""
        arrays = zip(self.names, self.inputs, strict=True)
        moved = dict.fromkeys(a for name, axes in arrays if name not in _POOL for a in axes)
        return tuple(axis for axis in moved if axis not in self.shardable_axes)

    def batched(self, axis: str, in_batched: Sequence[bool]) -> ShardingRule:
        """Return the rule under `vmap`: `axis` first, in each input where `in_batched`."""
        return dataclasses.replace(
            self,
            inputs=tuple(
                (axis, *a) if b else a for a, b in zip(self.inputs, in_batched, strict=True)
            ),
            outputs=tuple((axis, *a) for a in self.outputs),
            shardable_axes=(*self.shardable_axes, axis),
        )


def explicit_mesh(arrays: Sequence[jax.Array]) -> AbstractMesh | None:
    """Return the mesh of arrays whose types hold their shardings, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def on_explicit_mesh(
    mesh: AbstractMesh,
    local: Callable[..., tuple[jax.Array, ...]],
    rule: ShardingRule,
    arrays: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Run `local` on each device's part of arrays on their explicit mesh.

    Raises:
        ValueError: pages or scales are sharded along another axis than the KV heads, or not alike.
    """
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    sharding = axis_sharding(rule, [x.shape for x in arrays], specs, mesh)
    ins, outs = (
        tuple(_spec(sharding, axes) for axes in words) for words in (rule.inputs, rule.outputs)
    )
    moved = (jax.reshard(x, NamedSharding(mesh, s)) for x, s in zip(arrays, ins, strict=True))
    # Results are replicated over the mesh axes that their specs leave out, which JAX can't check.
    run = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return run(*moved)


def on_each_device(
    local: Callable[..., tuple[jax.Array, ...]], rule: ShardingRule, *, platform: str
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a jitted function that runs `local` on each device's part of its arrays.

    Args:
        local: a function that is hashable, with a `repr` of its own. Its attribute `one_device` is
            whether it can't be divided: JAX orders callbacks into Python on one device only.
        rule: the sharding rule of its arrays.
        platform: the platform of the devices, as JAX names it.

    Where K/V pages or their scales are sharded along another axis than the KV heads, or not alike,
    the function raises ValueError, and where it is differentiated itself, NotImplementedError.
    """
    return _build(local, rule, "cuda" if platform == "gpu" else platform)


@functools.cache
def _build(local: Any, rule: ShardingRule, platform: str) -> Callable[..., Any]:
    def partition(mesh: Mesh, args: Sequence[Any], _: Any) -> tuple[Any, ...]:
        mesh = mesh_of(args)
        specs = [x.sharding.spec for x in args]
        sharding = axis_sharding(rule, [x.shape for x in args], specs, mesh)
        ins, outs = (
            tuple(NamedSharding(mesh, _spec(sharding, axes)) for axes in words)
            for words in (rule.inputs, rule.outputs)
        )
        return mesh, functools.partial(_run_lowered, local, platform), outs, ins

    jitted = jax.jit(local)  # custom partitioning takes no constants, and jit keeps them inside
    partitioned: Any = custom_partitioning(lambda *args: jitted(*args))
    partitioned.def_partition(
        partition,
        # For the partitioner before Shardy.
        infer_sharding_from_operands=lambda *args: partition(*args)[2],
        sharding_rule=rule.shardy,
        need_replication_factors=rule.replicated_axes,
    )

    @custom_vmap
    def batchable(*args: jax.Array) -> Any:
        return partitioned(*args)

    @batchable.def_vmap
    def _(size: int, in_batched: Sequence[bool], *args: jax.Array) -> Any:
        mapped = _Mapped(local=local, in_batched=tuple(in_batched))
        axis = f"vmap_{len(rule.shardable_axes)}"
        out = _build(mapped, rule.batched(axis, in_batched), platform)(*args)
        return out, (True,) * len(out)

    def call(*args: jax.Array) -> Any:
        here, mesh = jax.sharding.get_abstract_mesh(), explicit_mesh(args)
        if here.manual_axes:  # also where others are not, which custom partitioning can't compile
            return local(*args)
        if mesh is not None:
            return on_explicit_mesh(mesh, local, rule, args)
        # On one device it is lowered as `local` itself, unless that device is abstract.
        one_device = local.one_device or (here.size == 1 and not here.empty)
        return local(*args) if one_device else batchable(*args)

    function: Any = jax.custom_vjp(call)

    def forward(*_: Any) -> None:
        raise NotImplementedError(
            "the gradient of attention by GPU kernels has no gradient itself; "
            "implementation='xla' has gradients of any order"
        )

    function.defvjp(forward, lambda *_: None)
    # In a jit of its own, so that the layers of a model share the trace; and since outside of jit
    # the partitioner would never see it. Programs are cached by their text, which `local` may
    # not be a part of: its digest is in the name.
    function.__name__ = f"attention_{_digest(local)}"
    return jax.jit(function)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mapped:
    """A function under `vmap`, hashable."""

    local: Any
    in_batched: tuple[bool, ...]
    one_device = False

    def __call__(self, *args: jax.Array) -> Any:
        return jax.vmap(self.local, in_axes=tuple(0 if b else None for b in self.in_batched))(*args)


def _run_lowered(local: Any, platform: str, *args: jax.Array) -> Any:
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args)
    return _lowered(local, platform, *shapes).call(*args)


@functools.lru_cache(maxsize=64)  # the calls of one program
def _lowered(local: Any, platform: str, *shapes: jax.ShapeDtypeStruct) -> export.Exported:
    """Return `local` lowered, since the partitioner asks for it again in every layer."""
    lower = export.export(jax.jit(local), platforms=(platform,), disabled_checks=KERNEL_CALLS)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # not the caller's
        return lower(*shapes)


@functools.cache
def _digest(local: Any) -> str:
    """Return a digest of the static arguments of `local`, the library's code and tuning file."""
    text = f"{sources_key(*CODE)} {tuning_key()} {local}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def sources_key(*packages: str) -> str:
    """Return a hash of the Python files of packages, names and contents.

    Raises:
        ValueError: one is not a package that can be imported.
    """
    found = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"{package=} must be the name of a package that can be imported")
        for folder in spec.submodule_search_locations:
            for path in sorted(Path(folder).rglob("*.py")):
                found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def mesh_of(args: Sequence[Any]) -> Mesh:
    """Return the mesh of the arrays of a call as the partitioner shows them.

    Raises:
        ValueError: one has another sharding than a NamedSharding.
    """
    if not all(isinstance(x.sharding, NamedSharding) for x in args):
        raise ValueError("the arrays of a call must be on one mesh, with a NamedSharding each")
    return args[0].sharding.mesh


def axis_sharding(
    rule: ShardingRule,
    shapes: Sequence[tuple[int, ...]],
    specs: Sequence[PartitionSpec],
    mesh: Any,
) -> AxisSharding:
    """Return the mesh axes that shard each shardable axis.

    Raises:
        ValueError: K/V pages or their scales are sharded along another axis than the KV heads, or
            not alike.
    """
    sizes: dict[str, int] = {}
    given: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, axes, shape, spec in zip(rule.names, rule.inputs, shapes, specs, strict=True):
        sizes.update(zip(axes, shape, strict=True))
        padded = (*spec, *[None] * (len(axes) - len(spec)))
        given[name] = dict(zip(axes, map(mesh_axes, padded), strict=True))
    _check_pool(rule, given)

    sharding: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()

    def parts(names: Sequence[str]) -> int:
        return math.prod(mesh.shape[name] for name in names)

    def unused(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in used)

    def take(axis: str, names: Sequence[str]) -> None:
        sharding[axis] = unused(names) if sizes[axis] % parts(unused(names)) == 0 else ()
        used.update(sharding[axis])

    for axis, names in given["k_pages"].items():
        if axis in rule.shardable_axes:
            take(axis, names)
    if Q_HEADS in rule.shardable_axes:
        # The query heads of a KV head are on several devices only where these have no other.
        heads, names = sharding[KV_HEADS], given["q"][Q_HEADS]
        within = heads + unused(names[len(heads) :])
        alone = parts(heads) == sizes[KV_HEADS] and sizes[Q_HEADS] % parts(within) == 0
        alone &= rule.divides_groups
        sharding[Q_HEADS] = within if alone and names[: len(heads)] == heads else heads
        used.update(sharding[Q_HEADS])
    for axis in rule.shardable_axes:
        if axis not in sharding:
            wishes = (
                given[name].get(axis) for name in dict.fromkeys(("q", *rule.names)) if name in given
            )
            take(axis, next(filter(None, wishes), ()))
    return sharding


def _check_pool(rule: ShardingRule, given: Mapping[str, Mapping[str, tuple[str, ...]]]) -> None:
    cure = (
        "shard pages and scales along the KV heads alone, as "
        "pallas_paged.pages.sharding.kv_pool_sharding "
        "does, or call attention in jax.shard_map"
    )
    for name in _POOL:
        for axis, names in given.get(name, {}).items():
            if names and axis == AXIS_NAMES["2"]:
                raise ValueError(f"{name} is sharded between K and V over {names}: {cure}")
            if names and axis not in rule.shardable_axes:
                raise ValueError(
                    f"{name} is sharded along {axis} over {names} of the mesh, so that a device "
                    f"would need the pages of others: {cure}"
                )
            wanted = given["k_pages"].get(axis, names)
            if names != wanted:
                raise ValueError(
                    f"{name} is sharded along {axis} over {names} of the mesh, and k_pages over "
                    f"{wanted}: {cure}"
                )


def _spec(sharding: AxisSharding, axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(sharding.get(axis) or None for axis in axes))
