"""The bench of one decode step of a model, on a CPU."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from bench import decode_step
from models.config import ModelConfig
from models.decoder import Decoder


def test_one_step_of_a_loop() -> None:
    def kernels(steps, scale=1.0):
        loop = [("cond", 1.0), ("a", 2.0), ("b", 3.0), ("a", 4.0)] * steps
        run = [("copy", 9.0), ("b", 9.0), *loop, ("cond", 1.0), ("out", 5.0)]
        return [(name, us * scale) for name, us in run]

    step = decode_step.one_step(kernels(1), [kernels(4, s) for s in (1.0, 2.0, 7.0)], 4)
    assert step == [("cond", 2.0), ("a", 4.0), ("b", 6.0), ("a", 8.0)]
    with pytest.raises(RuntimeError, match="do not all run the same list"):
        decode_step.one_step(kernels(1), [kernels(4)[:-1]], 4)


def test_decode_step_runs_on_the_cpu() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_layers": 1}
    config = ModelConfig(**sizes, num_q_heads=2, num_kv_heads=1, head_dim=16)
    model = Decoder(config, rngs=nnx.Rngs(0))
    state = decode_step.start_rows(model, config, num_seqs=2, length=5, num_steps=3)
    result = decode_step.measure(model, state, num_steps=3, iterations=1, implementation="xla")
    if jax.default_backend() == "gpu":
        assert result["kernel_us"] > 0
    else:
        assert "need a GPU" in result["reason"] and "no kernel times" in decode_step.report(result)
