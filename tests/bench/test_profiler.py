"""Kernel times from a profile, and the kernel of the read floor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from bench import profiler, timing

# Two streams; picoseconds after 1 us. API calls, copies and host events are not kernels.
PROFILE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #7(Compute,MemcpyD2D)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 5000000 duration_ps: 4000000
             stats { metadata_id: 1 str_value: "regs:32" } }
    events { metadata_id: 2 offset_ps: 7500000 duration_ps: 3500000
             stats { metadata_id: 1 str_value: "regs:40" } }
    events { metadata_id: 3 offset_ps: 9000000 duration_ps: 1000000
             stats { metadata_id: 2 str_value: "size:4" } }
  }
  lines {
    name: "Stream #8(Compute)" timestamp_ns: 2000
    events { metadata_id: 4 offset_ps: 0 duration_ps: 1000000
             stats { metadata_id: 1 str_value: "regs:32" } }
  }
  event_metadata { key: 1 value { id: 1 name: "decode" } }
  event_metadata { key: 2 value { id: 2 name: "merge" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyD2D" } }
  event_metadata { key: 4 value { id: 4 name: "cumsum" } }
  stat_metadata { key: 1 value { id: 1 name: "kernel_details" } }
  stat_metadata { key: 2 value { id: 2 name: "memcpy_details" } }
}
planes {
  name: "/host:CUPTI"
  lines { events { metadata_id: 1 duration_ps: 9000000
                   stats { metadata_id: 1 str_value: "regs:32" } } }
  event_metadata { key: 1 value { id: 1 name: "cuLaunchKernel" } }
  stat_metadata { key: 1 value { id: 1 name: "kernel_details" } }
}
"""


def test_kernels_of_a_profile_by_start_time() -> None:
    found = profiler.kernels_of(ProfileData.from_text_proto(PROFILE))
    assert found == [("cumsum", 2.0, 3.0), ("decode", 6.0, 10.0), ("merge", 8.5, 12.0)]


def test_overlapping_time_counts_once() -> None:
    kernels = [("a", 0.0, 4.0), ("b", 3.0, 6.0), ("c", 8.0, 9.0), ("d", 8.5, 8.75)]
    want = [("a", 4.0), ("b", 2.0), ("c", 1.0), ("d", 0.0)]
    assert profiler.own_times(kernels) == want
    assert profiler.own_times(kernels[::-1]) == want
    later = [(name, start + 100, end + 100) for name, start, end in kernels]
    assert profiler.own_times([*later, *kernels]) == want * 2


def test_split_runs_needs_equal_runs() -> None:
    times = [("a", 4.0), ("b", 2.0), ("b", 3.0), ("a", 1.0)]  # two streams: the order may vary
    assert profiler.split_runs(times, 2) == [times[:2], times[2:]]
    for kernels in ([], times[:3], [*times[:2], ("a", 1.0), ("a", 2.0)]):
        with pytest.raises(RuntimeError, match="2 equal runs"):
            profiler.split_runs(kernels, 2)


def test_record_runs_the_call_once() -> None:
    calls = []
    kernels = profiler.record(lambda: calls.append(jax.block_until_ready(jnp.arange(8) * 2)))
    assert len(calls) == 1
    assert bool(kernels) == (jax.default_backend() == "gpu")


def test_first_run_is_not_reported(monkeypatch) -> None:
    def record(run):
        run()
        return [("a", 10.0 * i, 10.0 * i + 1 + i) for i in range(3)]

    calls = []
    monkeypatch.setattr(timing, "_require_gpu", lambda: None)
    monkeypatch.setattr(profiler, "record", record)
    runs = timing.kernel_times(calls.append, (jnp.ones(()),), iterations=2)
    assert runs == [[("a", 2.0)], [("a", 3.0)]] and len(calls) == 4
    monkeypatch.setattr(profiler, "record", lambda run: [])
    with pytest.raises(RuntimeError, match="no kernels"):
        timing.kernel_times(calls.append, (jnp.ones(()),), iterations=2)


@pytest.mark.parametrize("start", [0, 5])
def test_read_kernel_reads_each_block_once(start) -> None:
    block, num_blocks, num_programs = 32, 7, 3
    x = jax.random.randint(jax.random.key(0), (12 * block,), -(1 << 20), 1 << 20, jnp.int32)
    prev = jnp.arange(num_programs, dtype=jnp.int32)
    first = jnp.array([start], jnp.int32)
    options = {"num_bytes": 4 * block * num_blocks, "block": block, "num_warps": 4}
    out = timing.read(x, first, prev, interpret=True, **options)
    want = x[start * block : (start + num_blocks) * block].sum() + prev.sum()
    assert out.sum() == want
