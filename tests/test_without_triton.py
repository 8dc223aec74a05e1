"""The library in a JAX without the Triton lowering of Pallas.

A process that hides Triton runs these tests: the first test starts one, and so does
`TESTS_WITHOUT_TRITON=1 python -m pytest`, for any tests.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import Engine, EngineConfig, SamplingParams
from pallas_paged.experts import fused_experts
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support import experts_oracle, raw, without_triton
from tests.support.attention_cases import mosaic_case
from tests.support.attention_oracle import relative_error
from tests.support.devices import lower_for_cuda
from tests.support.kernel_calls import kernel_calls
from tests.support.marks import needs_mosaic, slow
from tests.support.plain_model import PlainModel, greedy_tokens

hidden = pytest.mark.skipif(not without_triton.is_hidden(), reason="Triton is not hidden")
# One of each kernel that Triton has: what `None` does in its place.
NAMES = {
    "decode bfloat16", "decode int8", "ragged with options", "cascade float8_e4m3fn",
    "rotary write int8", "sampling",
}  # fmt: skip
CALLS = {call.name: call for call in kernel_calls() if call.name in NAMES}


@pytest.mark.skipif(without_triton.is_hidden(), reason="Triton is hidden already")
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="two processes share the GPU's memory")
@pytest.mark.slow
def test_in_a_process_that_hides_triton():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", Path(__file__)],
        env=os.environ | {without_triton.VARIABLE: "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


@hidden
class TestHidden:
    def test_import_brings_no_triton(self):
        assert not [name for name in without_triton.HIDDEN if name in sys.modules]
        with pytest.raises(ImportError, match="triton"):
            from jax.experimental.pallas import triton  # noqa: F401

    @pytest.mark.parametrize("name", sorted(CALLS))
    def test_none_lowers_for_a_hopper_gpu_without_triton(self, name):
        call = CALLS[name]
        run = dataclasses.replace(call, family=None).run
        text = lower_for_cuda(run, *call.shapes()).as_text()
        assert "triton" not in text
        if name in ("decode bfloat16", "ragged with options") and not mosaic_support.why_not_jax():
            assert "custom_call @mosaic_gpu" in text

    @needs_mosaic
    @pytest.mark.parametrize("num_queries", [3, *slow([130])])  # by XLA, by Mosaic
    def test_a_mosaic_call_has_a_gradient(self, num_queries):
        lens = dict(seq_lens=(num_queries + 9, 1), q_lens=(num_queries, 1), pages_per_seq=10)
        case = mosaic_case(num_q_heads=2, num_kv_heads=1, **lens)
        q, k_pages, v_pages, *rest = (jnp.asarray(x) for x in case.make())

        def loss(differentiated, implementation):
            out = raw.ragged_paged_attention(*differentiated, *rest, implementation=implementation)
            return jnp.sin(out.astype(jnp.float32)).sum()

        at = q, k_pages, v_pages
        kernels, reference = (jax.grad(loss)(at, name) for name in ("mosaic_sm90_interpret", "xla"))
        for got, want in zip(kernels, reference, strict=True):
            assert relative_error(got, np.asarray(want, np.float64)) < 0.01

    @needs_mosaic
    def test_few_tokens_have_experts(self):
        draw = functools.partial(experts_oracle.draw, dtype="bfloat16")
        weights = draw(2, 4, 64, 2, 64, scale=0.125), draw(3, 4, 64, 64, scale=0.125)
        args = draw(1, 3, 64), *weights, *experts_oracle.routes(4, 3, 4, 2)
        how = dict(implementation="mosaic_sm90", interpret=True)
        out = jax.jit(functools.partial(fused_experts, **how))(*args)
        assert relative_error(out, experts_oracle.fused_experts(*args)) < 1e-2

    def test_the_engine_serves(self):
        model, prompt = PlainModel(), [5, 2, 3, 7]
        params = model.init(0)
        config = EngineConfig(num_pages=32, max_num_seqs=2, max_num_batched_tokens=16)
        engine = Engine(model, params, config=config)
        greedy = SamplingParams(max_tokens=6, temperature=0.0)
        drawn = SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9, seed=1)
        first, second = engine.generate([prompt, prompt], [greedy, drawn])
        assert first.outputs[0].token_ids == greedy_tokens(model, params, prompt, 6)
        assert len(second.outputs[0].token_ids) == 6
