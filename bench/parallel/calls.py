"""Calls on several GPUs: attention over KV heads or over pages, and sums over devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from bench.measuring import timing
from bench.measuring.measure import chain, relative_error
from bench.measuring.shapes import Case, Shape, make_case, uniform
from pallas_paged.attention import context_parallel
from pallas_paged.attention.context_parallel import CONTEXT_AXIS
from pallas_paged.engine.device.program import GPU_OPTIONS
from pallas_paged.pages.sharding import TENSOR_AXIS, kv_pool_sharding

_NUM_CALLS = 8  # in a row, like the layers of a model
# K/V of each call are many times the L2, so that one set of pages is enough.
ATTENTION = (uniform(64, 4096), uniform(256, 1024), uniform(16, 32768), uniform(1, 131072))
CONTEXT = (uniform(1, 2**20), uniform(1, 2**20, num_kv_heads=1), uniform(8, 2**17))
TINY = Shape(name="tiny", seq_lens=(70, 9), num_q_heads=8, num_kv_heads=8, head_dim=16)

# (q, k_pages, v_pages, block_tables or LocalPages, seq_lens) -> out
Attend = Callable[..., jax.Array]
SUMS = ((1, 4096), (8, 4096), (64, 4096), (64, 5120), (256, 4096))
_NUM_SUMS = 32
# XLA's options: its own kernels are the default since JAX 0.11.
_SUMS: dict[str, dict[str, Any]] = {
    "default": {},
    "NCCL": {"xla_gpu_experimental_use_collective_kernels": ""},
    "NCCL, symmetric buffers": {
        "xla_gpu_experimental_use_collective_kernels": "",
        "xla_gpu_experimental_enable_nccl_symmetric_buffers": True,
    },
}


def _attention(q: Any, k: Any, v: Any, tables: Any, lens: Any) -> jax.Array:
    layer = pp.LayerKV(k, v, kv_layout="HPND")
    return pp.paged_attention(q, layer, tables, lens, sm_scale=1.0)  # q of the bench is scaled


def measure_attention(shape: Shape, counts: Sequence[int], iterations: int) -> Iterator[dict]:
    """Measure a call with KV heads sharded over devices: by plain `jit`, and by `shard_map`.

    A chain of calls is one CUDA graph, as the layers of an engine's step are.
    """
    case = _one_set(shape)
    for count in counts:
        mesh = make_mesh(count, TENSOR_AXIS)
        heads = NamedSharding(mesh, P(None, TENSOR_AXIS))
        pages = kv_pool_sharding(mesh, kv_layout="HPND")
        replicated = NamedSharding(mesh, P())
        specs = (heads.spec, pages.spec, pages.spec, P(), P())
        by_shard_map = jax.shard_map(_attention, mesh=mesh, in_specs=specs, out_specs=heads.spec)
        args = (
            jax.device_put(case.q, heads),
            jax.device_put(case.k_pages, pages),
            jax.device_put(case.v_pages, pages),
            jax.device_put(case.tables[0], replicated),
            jax.device_put(case.seq_lens, replicated),
        )
        for way, attend in (("jit", _attention), ("shard_map", by_shard_map)):
            if count > 1 or way == "jit":
                found = _measure(case, attend, args, iterations, GPU_OPTIONS)
                yield {"way": way, "devices": count} | found


def measure_context(shape: Shape, counts: Sequence[int], iterations: int) -> Iterator[dict]:
    """Measure a call with the pages of each row sharded over devices."""
    case = _one_set(shape)
    for count in counts:
        if count == 1:
            args = (case.q, case.k_pages, case.v_pages, case.tables[0], case.seq_lens)
            found = _measure(case, _attention, args, iterations)
            yield {"way": "one pool", "devices": count} | found
            continue
        mesh = make_mesh(count, CONTEXT_AXIS)
        spread = _spread_pages(count, NamedSharding(mesh, P(None, CONTEXT_AXIS)))
        replicated = functools.partial(jax.device_put, device=NamedSharding(mesh, P()))
        lens = replicated(case.seq_lens)
        pages = jax.jit(
            functools.partial(context_parallel.local_pages, page_size=shape.page_size, mesh=mesh)
        )(replicated(case.tables[0]), lens)

        def attend(q: Any, k: Any, v: Any, pages: Any, lens: Any, mesh: Mesh = mesh) -> jax.Array:
            layer = pp.LayerKV(k, v, kv_layout="HPND")
            return context_parallel.paged_attention(q, layer, pages, mesh=mesh, sm_scale=1.0)

        args = (replicated(case.q), spread(case.k_pages), spread(case.v_pages), pages, lens)
        yield {"way": "context", "devices": count} | _measure(case, attend, args, iterations)


def measure_sums(
    sizes: tuple[int, int], counts: Sequence[int], iterations: int
) -> Iterator[dict[str, Any]]:
    """Measure a sum over devices of bf16 `[rows, hidden_size]`, as after each half of a layer.

    The time is that of a chain of sums, where each waits for the one before, less that of the same
    chain without sums.
    """
    for count in counts:
        if count == 1:
            continue
        mesh = make_mesh(count, TENSOR_AXIS)
        x = jax.device_put(
            jnp.ones((count, *sizes), jnp.bfloat16), NamedSharding(mesh, P(TENSOR_AXIS))
        )
        for way, options in _SUMS.items():
            if not _is_gpu():
                options = {}
            elif jax.__version_info__ < (0, 11) and options:
                continue
            us = []
            for with_sums in (True, False):
                sums = jax.shard_map(
                    functools.partial(_chain_of_sums, with_sums=with_sums),
                    mesh=mesh,
                    in_specs=P(TENSOR_AXIS),
                    out_specs=P(TENSOR_AXIS),
                )
                run = jax.jit(sums, compiler_options=options)
                times = timing.wall_times(run, (x,), iterations=iterations)
                us.append(timing.spread(times)["median"] / _NUM_SUMS)
            name = f"[{sizes[0]}, {sizes[1]}]"
            yield {"name": name, "way": way, "devices": count, "us": us[0] - us[1]}


def _chain_of_sums(x: jax.Array, *, with_sums: bool) -> jax.Array:
    for _ in range(_NUM_SUMS):
        total = lax.psum(x, TENSOR_AXIS) if with_sums else x
        # As the residual add: the next sum needs this one.
        x = lax.optimization_barrier(x + total * jnp.bfloat16(0.01))
    return x


def _is_gpu() -> bool:
    return jax.default_backend() == "gpu"


def make_mesh(count: int, axis: str) -> Mesh:
    """Return a mesh of one axis over the first devices."""
    return Mesh(np.array(jax.devices()[:count]), (axis,), axis_types=(AxisType.Auto,))


def _one_set(shape: Shape) -> Case:
    """Return the data of a shape whose calls all read the first set of its pages."""
    case = make_case(shape)
    return dataclasses.replace(case, tables=np.broadcast_to(case.tables[:1], case.tables.shape))


def _spread_pages(count: int, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a function that puts page p onto device `p % count`, as `context_parallel` wants."""

    def spread(pages: jax.Array) -> jax.Array:
        pages = jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % count), (0, 0), (0, 0)))
        parts = pages.reshape(pages.shape[0], -1, count, *pages.shape[2:])
        return parts.swapaxes(1, 2).reshape(pages.shape)

    return lambda pages: jax.device_put(jax.jit(spread)(pages), sharding)


def _measure(
    case: Case,
    attend: Attend,
    args: tuple[Any, ...],
    iterations: int,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Check a call and return its wall time in a chain of calls, compiled with XLA's options."""
    q, k, v, pages, lens = args
    run = jax.jit(chain(attend), compiler_options=options if _is_gpu() else None)
    chained: tuple[Any, ...] = (q, ((k, v, pages),) * _NUM_CALLS, (lens,), {})
    error = relative_error(case, [np.asarray(out) for out in run(*chained)])
    if not error <= 1e-2:
        raise RuntimeError(f"{case.shape.name}: {error=:.3g}")
    times = timing.wall_times(run, chained, iterations=iterations)
    return {
        "name": case.shape.name,
        "num_bytes": case.shape.num_bytes,
        "us": timing.spread([us / _NUM_CALLS for us in times]),
        "relative_l2": error,
    }
