"""GPU kernels of a stretch of a program, by JAX's profiler (CUPTI): which ran, and when."""

from __future__ import annotations

import collections
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions

Kernel = tuple[str, float, float]  # name, start and end in microseconds
Timed = tuple[str, float]  # name, microseconds


def record(run: Callable[[], object]) -> list[Kernel]:
    """The GPU kernels of a call, which waits for them, in the order in which they began."""
    # Otherwise some versions of XLA's tracer keep apart what would overlap.
    os.environ["TF_GPU_CUPTI_FORCE_CONCURRENT_KERNEL"] = "1"
    options = ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = Path(folder).glob("**/*.xplane.pb")
        return kernels_of(ProfileData.from_file(str(path)))


def kernels_of(profile: ProfileData) -> list[Kernel]:
    """The GPU kernels of a profile; copies and fills are none."""
    kernels = [
        (event.name, event.start_ns / 1e3, event.end_ns / 1e3)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        for event in line.events
        if any(name == "kernel_details" for name, _ in event.stats)
    ]
    return sorted(kernels, key=lambda kernel: kernel[1])


def own_times(kernels: Sequence[Kernel]) -> list[Timed]:
    """Microseconds of each kernel in which none that began before it runs.

    So they add up to the time in which any kernel runs, and one that starts early only to wait for
    the one before (programmatic dependent launch) is not charged with the waiting.
    """
    times, reached = [], float("-inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        times.append((name, max(0.0, end - max(start, reached))))
        reached = max(reached, end)
    return times


def split_runs(times: Sequence[Timed], num_runs: int) -> list[list[Timed]]:
    """The times of each of equal runs, one after another.

    Raises:
      RuntimeError: if there are no kernels, or they are not those of equal runs.
    """
    size, rest = divmod(len(times), num_runs)
    runs = [list(times[i * size : (i + 1) * size]) for i in range(num_runs)]
    names = [collections.Counter(name for name, _ in run) for run in runs]
    if rest or not size or any(found != names[0] for found in names):
        raise RuntimeError(f"{len(times)} kernels are not those of {num_runs} equal runs")
    return runs
