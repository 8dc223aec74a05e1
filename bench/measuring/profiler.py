"""GPU kernels that a call runs, with their times, from JAX's profiler (CUPTI)."""

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
    """Run a call that waits for its kernels; return the kernels by start time."""
    # Otherwise some versions of XLA's tracer serialize kernels that would overlap.
    os.environ["TF_GPU_CUPTI_FORCE_CONCURRENT_KERNEL"] = "1"
    options = ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = Path(folder).glob("**/*.xplane.pb")
        return kernels_of(ProfileData.from_file(str(path)))


def kernels_of(profile: ProfileData) -> list[Kernel]:
    """The GPU kernels of a profile by start time, without copies and fills."""
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
    """Microseconds of each kernel during which no earlier kernel runs.

    They add up to the time during which any kernel runs. A kernel that starts early and waits for
    the previous one (programmatic dependent launch) is not charged for the wait.
    """
    times, reached = [], float("-inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        times.append((name, max(0.0, end - max(start, reached))))
        reached = max(reached, end)
    return times


def split_runs(times: Sequence[Timed], num_runs: int) -> list[list[Timed]]:
    """Split the times of consecutive equal runs into those of each run.

    Raises:
        RuntimeError: if there are no kernels, or the runs have different kernels.
    """
    size, rest = divmod(len(times), num_runs)
    runs = [list(times[i * size : (i + 1) * size]) for i in range(num_runs)]
    names = [collections.Counter(name for name, _ in run) for run in runs]
    if rest or not size or any(found != names[0] for found in names):
        raise RuntimeError(f"{len(times)} kernels do not divide into {num_runs} equal runs")
    return runs
