"""How the benches measure: kernel times by CUPTI, wall times, the read floor, provenance."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from bench.measuring import profiler

# (block of i32, warps, programs per SM) of the read kernel; the fastest counts.
_READ_CONFIGS = (
    (1024, 4, 16),
    (2048, 4, 8),
    (2048, 4, 16),
    (4096, 4, 8),
    (4096, 8, 4),
    (8192, 8, 4),
)
_READ_GRAIN = 4 * max(block for block, _, _ in _READ_CONFIGS)


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and 10th to 90th percentile of repeated times."""
    p10, median, p90 = (float(x) for x in np.percentile(times, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90}


def _require_gpu() -> None:
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"kernel times need a GPU, not {jax.default_backend()!r}")


def kernel_times(compiled: Any, args: tuple, *, iterations: int) -> list[list[profiler.Timed]]:
    """Own times (`profiler.own_times`) of the GPU kernels of each run, in order of start.

    Args:
        compiled: a jitted or compiled function.
        args: its arguments.
        iterations: runs to report; two more run first and are left out.

    Raises:
        RuntimeError: if there is no GPU, no CUPTI, or the runs launched different kernels.
    """
    _require_gpu()

    def run_all() -> None:
        jax.block_until_ready([compiled(*args) for _ in range(iterations + 1)])

    jax.block_until_ready(compiled(*args))  # first-time work is not in the profile
    kernels = profiler.record(run_all)
    if not kernels:
        raise RuntimeError("CUPTI reported no kernels")
    return profiler.split_runs(profiler.own_times(kernels), iterations + 1)[1:]


def wall_times(compiled: Any, args: tuple, *, iterations: int) -> list[float]:
    """Host-clock microseconds per run, one value for each of `iterations` batches of queued runs.

    A batch lasts 20 ms or 100 runs, so that the wait at its end does not matter.
    """
    jax.block_until_ready(compiled(*args))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    runs = int(np.clip(20e-3 / (time.perf_counter() - start), 1, 100))
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(runs)])
        times.append((time.perf_counter() - start) / runs * 1e6)
    return times


def compile_all(lowered: Iterable[Any]) -> list[Any]:
    """Compile in parallel while the iterator `lowered` makes the next entry.

    An entry that is an exception, or whose compilation raises one, gives that exception.
    """

    def compile_one(entry: Any) -> Any:
        if isinstance(entry, Exception):
            return entry
        try:
            return entry.compile()
        except Exception as error:  # a peer may fail in any way; the caller reports it
            return error

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(compile_one, lowered))


def _read_kernel(x_ref, start_ref, prev_ref, out_ref, *, block, num_blocks, num_programs):
    program = pl.program_id(0)
    start = start_ref[0] + program
    count = lax.div(num_blocks - 1 - program + num_programs, num_programs)

    def body(i, acc):
        return acc + x_ref[pl.ds((start + i * num_programs) * block, block)]

    acc = lax.fori_loop(0, count, body, jnp.zeros((block,), jnp.int32))
    out_ref[program] = jnp.sum(acc) + prev_ref[program]


def read(
    x: jax.Array,
    start: jax.Array,
    prev: jax.Array,
    *,
    num_bytes: int,
    block: int,
    num_warps: int,
    interpret: bool = False,
) -> jax.Array:
    """Read `num_bytes` of x once, without other work that takes time.

    Args:
        x: `i32[n]`.
        start: `i32[1]`, first block to read.
        prev: `i32[num_programs]`, added to the result so that a read can wait for another one.
        num_bytes: bytes to read, a multiple of `4 * block`.
        block: i32 elements per load.
        num_warps: warps per program.
        interpret: run the kernel in interpret mode.

    Returns:
        `i32[num_programs]`, whose sum is the sum of all that was read and of `prev`.
    """
    from jax.experimental.pallas import triton as plgpu

    kernel = functools.partial(
        _read_kernel, block=block, num_blocks=num_bytes // (4 * block), num_programs=len(prev)
    )
    return pl.pallas_call(
        kernel,
        grid=(len(prev),),
        out_shape=jax.ShapeDtypeStruct(prev.shape, jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
        interpret=interpret,
        name="read_floor",
    )(x, start, prev)


def floor_times(
    num_bytes: int, *, num_sets: int, num_calls: int, iterations: int
) -> dict[str, float]:
    """The `spread` of microseconds that a kernel takes to read `num_bytes`, cold, at its best.

    Args:
        num_bytes: bytes of one call, rounded up to 32 KiB.
        num_sets: disjoint ranges of memory among which the calls rotate.
        num_calls: calls per run; the time per call is reported.
        iterations: runs.

    Raises:
        RuntimeError: if there is no GPU or no config compiles.
    """
    _require_gpu()
    num_bytes = -(-num_bytes // _READ_GRAIN) * _READ_GRAIN
    make = jax.jit(
        lambda key: lax.bitcast_convert_type(
            jax.random.bits(key, (num_sets * num_bytes // 4,), jnp.uint32), jnp.int32
        )
    )
    x = make(jax.random.key(0, impl="rbg"))
    num_sms = jax.devices()[0].core_count

    spreads, errors, calls = [], [], []
    for block, _, per_sm in _READ_CONFIGS:
        first = [i % num_sets * (num_bytes // (4 * block)) for i in range(num_calls)]
        # Arguments, not constants, so that only the reads run on the GPU.
        starts = tuple(jnp.array([block_index], jnp.int32) for block_index in first)
        calls.append((x, starts, jnp.zeros((num_sms * per_sm,), jnp.int32)))

    def chain(block: int, num_warps: int) -> Any:
        read_once = jax.jit(  # lowered once for all calls
            functools.partial(read, num_bytes=num_bytes, block=block, num_warps=num_warps)
        )

        def run(x, starts, out):
            for start in starts:
                out = read_once(x, start, out)
            return out

        return jax.jit(run)

    lowered = (
        chain(block, num_warps).lower(*args)
        for (block, num_warps, _), args in zip(_READ_CONFIGS, calls, strict=True)
    )
    for compiled, args in zip(compile_all(lowered), calls, strict=True):
        if isinstance(compiled, Exception):
            errors.append(compiled)
            continue
        wall_times(compiled, args, iterations=2)  # raises the GPU's clocks
        runs = kernel_times(compiled, args, iterations=iterations)
        spreads.append(spread([sum(us for _, us in run) / num_calls for run in runs]))
    if not spreads:
        raise RuntimeError(f"no read kernel could be compiled: {errors[0]}")
    return min(spreads, key=lambda found: found["median"])


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout else None


def describe_run(module: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """Device, versions, date and command of a run of `python -m module`; None: of this one."""
    return {
        "device": jax.devices()[0].device_kind,
        "driver": _driver(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "command": command(module, argv),
    }


def command(module: str, argv: Sequence[str] | None) -> str:
    """The command line of a run of `python -m module`."""
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])


def page(meta: dict[str, Any], *blocks: str) -> str:
    """Tables and words as text, with the provenance of their numbers at the end."""
    return "\n\n".join([*blocks, provenance(meta)]) + "\n"


def provenance(meta: dict[str, Any]) -> str:
    """The lines under a table that give the device, versions, date and command."""
    return (
        f"{meta['device']}, JAX {meta['jax']}, driver {meta['driver']}, {meta['date']}.\n"
        f"Command: `{meta['command']}`"
    )
