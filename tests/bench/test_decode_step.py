"""The bench of one decode step of a model, on a CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.serving.models import SHAPES, num_bytes, random_model, weight_bytes
from bench.steps import __main__ as decode_step
from bench.steps import gap, step
from tests.bench.fakes import rows

TINY = ["--shapes", "tiny", "--rows", "2", "--length", "16", "--steps", "4"]
MODES = ["--modes", "step", "sampled loop", "generate", "--num-scheduler-steps", "4"]


def test_kernels_of_a_profile_have_median_times_and_their_steps_are_counted() -> None:
    runs = [[("a", 2.0), ("b", 3.0), ("a", 4.0)], [("a", 9.0), ("a", 5.0), ("b", 4.0)]]
    runs.append([("b", 9.0), ("a", 3.0), ("a", 4.0)])
    times = [one for run in runs for one in run]
    assert step.ordered(times, 3) == [["a", 3.0], ["b", 4.0], ["a", 4.0]]
    assert step.ordered(times[:-1], 3) is None
    counts = {"paged_decode": 31, "paged_decode_merge": 32, "gemm": 160}
    assert step.recorded_steps(counts, 16) == 2
    assert step.recorded_steps({"gemm": 160}, 16) == 0


def test_modes_differ_by_their_steps_and_their_sampling(dry_run, monkeypatch) -> None:
    """Without a model and an engine: what each mode asks of it, and what the tables show."""
    asked = []

    def measure(decoder, params, **sizes):
        asked.append((len(params), params[0].temperature, sizes.get("num_scheduler_steps")))
        found = {"num_seqs": len(params), "context": 20.0, "wall_us": 150.0, "kernel_us": None}
        return found | {"limit_us": None, "kernels": None, "reason": f"no. {len(asked)}"}

    for name in ("measure_step", "measure_generate"):
        monkeypatch.setattr(decode_step, name, measure)
    monkeypatch.setattr(decode_step, "random_model", lambda shape: None)
    monkeypatch.setattr(decode_step.gc, "collect", lambda: 0)  # takes long behind other tests
    _, tables = dry_run(decode_step, *TINY, *MODES)
    assert asked == [(2, 0.0, 1), (2, 0.8, 4), (2, 0.0, 4)]
    names = [row[:2] for row in rows(tables)]
    assert names[1:] == [["tiny, 2 x 20", mode] for mode in ("step", "sampled loop", "generate")]
    assert "No kernel times: no. 1." in tables
    decode_step.main([*TINY, "--sampling"])
    assert [one[1] for one in asked[3:]] == [0.0, 0.8, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.slow  # compiles programs of its own
def test_the_experts_that_rows_hit_are_counted_once_in_each_step():
    decoder = random_model(SHAPES["tiny-experts"])
    experts = decoder.config.experts
    tokens = np.arange(24, dtype=np.int32).reshape(4, 6)
    one, equal, all_ = (step.experts_hit(decoder, x) for x in (tokens[:1], tokens[[0, 0]], tokens))
    assert one == equal == experts.num_experts_per_tok < all_ <= experts.n_routed_experts
    both = [weight_bytes(decoder, hit) for hit in (0.0, float(experts.n_routed_experts))]
    layers = [layer.mlp for layer in decoder.layers[1:]]  # the first has none
    assert both[1] - both[0] == sum(num_bytes(mlp.experts) for mlp in layers)


def test_the_gap_of_a_step_is_divided_into_its_parts():
    f = jax.jit(lambda x: jnp.sin(x) @ x)
    f(jnp.ones((4, 4)))  # its program is found by the names of its instructions
    (module,) = f.lower(jnp.ones((4, 4))).compile().runtime_executable().hlo_modules()
    names = re.findall(r"%([\w.]+) = .*dot_general", module.to_string())
    kernels = [{"name": names[-1].replace(".", "_"), "us": 50.0}, {"name": "paged_x", "us": 30.0}]
    kernels += [{"name": "loop_fusion", "us": 5.0}, {"name": "nvjet_tst", "us": 20.0}]
    parts = gap.times_of(kernels)
    assert parts == {"attention": 30.0, "products": 70.0, "rest": 5.0}
    result = {"parts_us": parts, "kernel_us": 105.0, "wall_us": 125.0, "limit_us": 80.0}
    result |= {"weight_bytes": 3e9, "kv_bytes": 1e9}
    over = gap.gap_of(result)
    assert over == {"products": 10.0, "attention": 10.0, "rest": 5.0, "launches": 20.0}
    assert gap.gap_of(result | {"limit_us": None}) is None
