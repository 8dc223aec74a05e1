"""Kernel times from a profile, and the kernel of the read floor."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from bench.measuring import profiler, timing


def plane(name: str, names: list[str], stat: str, *lines: tuple) -> str:
    """A plane of a profile: lines of a start in nanoseconds and events (name, ps, ps, stat)."""
    text = f'name: "{name}" stat_metadata {{ key: 1 value {{ id: 1 name: "{stat}" }} }}'
    text += 'stat_metadata { key: 2 value { id: 2 name: "memcpy_details" } }'
    for i, each in enumerate(names):
        text += f'event_metadata {{ key: {i} value {{ id: {i} name: "{each}" }} }}'
    for start, *events in lines:
        text += f"lines {{ timestamp_ns: {start}"
        for i, offset, duration, stat_id in events:
            text += f" events {{ metadata_id: {i} offset_ps: {offset} duration_ps: {duration}"
            text += f' stats {{ metadata_id: {stat_id} str_value: "32" }} }}'
        text += "}"
    return f"planes {{ {text} }}"


def test_kernels_of_a_profile_by_start_time() -> None:
    """Of two streams; API calls and copies are no kernels."""
    kernels = [(0, 5_000_000, 4_000_000, 1), (1, 7_500_000, 3_500_000, 1)]
    first = (1000, *kernels, (2, 9_000_000, 1_000_000, 2))
    second = (2000, (3, 0, 1_000_000, 1))
    names = ["decode", "merge", "MemcpyD2D", "cumsum"]
    text = plane("/device:GPU:0", names, "kernel_details", first, second)
    text += plane("/host:CUPTI", ["launch"], "kernel_details", (0, (0, 0, 9_000_000, 1)))
    found = profiler.kernels_of(ProfileData.from_text_proto(text))
    assert found == [("cumsum", 2.0, 3.0), ("decode", 6.0, 10.0), ("merge", 8.5, 12.0)]


def test_overlapping_time_counts_once_and_runs_must_be_equal() -> None:
    kernels = [("a", 0.0, 4.0), ("b", 3.0, 6.0), ("c", 8.0, 9.0), ("d", 8.5, 8.75)]
    want = [("a", 4.0), ("b", 2.0), ("c", 1.0), ("d", 0.0)]
    later = [(name, start + 100, end + 100) for name, start, end in kernels]
    assert profiler.own_times([*later, *kernels[::-1]]) == want * 2
    times = [("a", 4.0), ("b", 2.0), ("b", 3.0), ("a", 1.0)]  # two streams: the order may vary
    assert profiler.split_runs(times, 2) == [times[:2], times[2:]]
    for kernels in ([], times[:3], [*times[:2], ("a", 1.0), ("a", 2.0)]):
        with pytest.raises(RuntimeError, match="2 equal runs"):
            profiler.split_runs(kernels, 2)


def test_record_runs_the_call_once() -> None:
    calls = []
    kernels = profiler.record(lambda: calls.append(jax.block_until_ready(jnp.arange(8) * 2)))
    assert len(calls) == 1 and bool(kernels) == (jax.default_backend() == "gpu")


def test_first_run_is_not_reported(monkeypatch) -> None:
    def record(run):
        run()
        return [("a", 10.0 * i, 10.0 * i + 1 + i) for i in range(3)]

    calls, args = [], (jnp.ones(()),)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(profiler, "record", record)
    runs = timing.kernel_times(calls.append, args, iterations=2)
    assert runs == [[("a", 2.0)], [("a", 3.0)]] and len(calls) == 4
    monkeypatch.setattr(profiler, "record", lambda run: [])
    with pytest.raises(RuntimeError, match="no kernels"):
        timing.kernel_times(calls.append, args, iterations=2)


@pytest.mark.parametrize("start", [0, 5])
def test_read_kernel_reads_each_block_once(start) -> None:
    block, num_blocks, num_programs = 32, 7, 3
    x = jax.random.randint(jax.random.key(0), (12 * block,), -(1 << 20), 1 << 20, jnp.int32)
    prev = jnp.arange(num_programs, dtype=jnp.int32)
    options = {"num_bytes": 4 * block * num_blocks, "block": block, "num_warps": 4}
    out = timing.read(x, jnp.array([start], jnp.int32), prev, interpret=True, **options)
    assert out.sum() == x[start * block : (start + num_blocks) * block].sum() + prev.sum()
