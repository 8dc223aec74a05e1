"""The interpreter finds no race in the Mosaic kernels, and finds one that is planted.

A race is a read and a write, or two writes, of shared or device memory that no barrier orders. The
interpreter compares vector clocks, so it finds a race in whatever order the threads ran.
"""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.experts import fused_experts, grouped_matmul
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support import experts_oracle, raw
from tests.support.attention_calls import with_lse
from tests.support.attention_cases import SharedPrefixes, mosaic_case
from tests.support.marks import slow
from tests.support.quantized_cases import Quantized

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops
from tests.support.planted_race import SIZE, copy_by_two

pytestmark = [
    # The interpreter multiplies the poisoned values too.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.skipif(jax.default_backend() == "gpu", reason="the interpreter is for CPUs"),
]

# Several programs; some share a row; both stages of a ring are used again.
DECODE = mosaic_case(seq_lens=(150, 0, 70), pages_per_seq=16, num_kv_heads=1)
RAGGED = dataclasses.replace(DECODE, q_lens=(20, 0, 3))
PREFIXES = SharedPrefixes(DECODE, seq_lens=(150, 140, 70), prefix_lens=(64,), cu_group_sizes=(0, 3))
INT8, FP8 = (Quantized(case=RAGGED, kv_dtype=x) for x in ("int8", "float8_e4m3fn"))
CONFIG = pp.MosaicSm90RaggedConfig(block_k=64, num_programs=3, num_stages=2, num_consumers=2)
SPLIT_CONFIG = dataclasses.replace(CONFIG, fixed_split_size=128)
SOME = dict(sliding_window=11, sinks=np.float32([1.0, -3.0, 0.0, 8.0]))
SOME |= dict(alibi_slopes=np.float32([0.5, 0.25, 0.125, 0.0]))


@pytest.fixture(autouse=True)
def detect_races(monkeypatch):
    """Interpreted kernels raise where they have a race."""
    jax.clear_caches()  # what was traced without it
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(ops, "interpreter", lambda interpret: parameters)
    yield
    jax.clear_caches()
    reset_gpu_interpret_mode_state()  # which an exception leaves as it was


def attend(function, case, **options):
    arrays = case.make()[0] if isinstance(case, Quantized) else case.make()
    return with_lse(function, *arrays, implementation="mosaic_sm90_interpret", **options)


ragged = partial(attend, raw.ragged_paged_attention, config=CONFIG)
cascade = partial(attend, raw.cascade_attention)


# Both stages are used again, and the last block has no other beside it.
LATENTS = mosaic_case(
    seq_lens=(310, 0, 70), num_q_heads=24, num_kv_heads=1, head_dim=512 + 64, pages_per_seq=20
)


def latents(kv_dtype=None):
    made = (
        LATENTS.make() if kv_dtype is None else Quantized(case=LATENTS, kv_dtype=kv_dtype).make()[0]
    )
    q, pages, v, tables, lens, *scales = made
    how = dict(sm_scale=0.1, return_lse=True, implementation="mosaic_sm90_interpret")
    how |= dict(zip(["k_scales"], scales, strict=False))
    return raw.mla_attention(q, pages, v[..., :512], tables, lens, **how)


def gradient_of_groups():
    """Groups with one block and more, two programs, and each stage of the ring more than once."""
    x, d_out = (experts_oracle.draw(i, 400, n, dtype="bfloat16") for i, n in ((1, 64), (2, 384)))
    w, sizes = np.zeros((3, 64, 384), jnp.bfloat16), np.array([30, 350, 15], np.int32)
    how = dict(implementation="mosaic_sm90", interpret=True)
    _, back = jax.vjp(lambda w: grouped_matmul(x, w, sizes, **how), w)
    return jax.jit(back)(d_out)


def experts(num_tokens):
    draw = partial(experts_oracle.draw, dtype="bfloat16")
    weights = draw(2, 4, 128, 2, 320), draw(3, 4, 320, 128)
    args = draw(1, num_tokens, 320), *weights, *experts_oracle.routes(4, num_tokens, 4, 2)
    how = dict(implementation="mosaic_sm90", interpret=True)
    return jax.jit(lambda *args: fused_experts(*args, **how))(*args)


FOUND = "RACE DETECTED"
CALLS = {"with options": partial(ragged, RAGGED, **SOME), "of int8": partial(ragged, INT8)}
MORE = {  # what the others run too
    "ragged": partial(ragged, RAGGED),
    "ragged with splits": partial(ragged, RAGGED, config=SPLIT_CONFIG),
    "ragged with three consumers": partial(
        ragged, RAGGED, config=dataclasses.replace(CONFIG, num_consumers=3)
    ),
    "ragged of fp8": partial(ragged, FP8),
    "cascade": partial(cascade, PREFIXES),
    "latents": latents,
    "latents of fp8": partial(latents, "float8_e4m3fn"),
    "experts of few tokens": partial(experts, 9),
    "experts of sorted tokens": partial(experts, 150),
    "gradient of groups": gradient_of_groups,
}


@pytest.fixture
def has_race(capsys):
    """Runs a call and returns whether the interpreter found a race: it raises, or prints it."""

    def run(call):
        try:
            jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as e:
            # JAX 0.11 prints it and goes on, until something else fails.
            if FOUND in str(e) + capsys.readouterr().out:
                return True
            raise
        return FOUND in capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", [*CALLS, *slow(MORE)])
def test_no_kernel_has_a_race(name, has_race):
    assert not has_race((CALLS | MORE)[name])


def test_a_kernel_that_does_not_wait_has_a_race(has_race, monkeypatch):
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *_, **__: None)
    try:
        assert has_race(MORE["ragged"])
    except jax.errors.JaxRuntimeError as e:
        # In some orders of the threads the interpreter notices something else first: the end of a
        # barrier without a wait, or an index that was read before it was there.
        assert re.search("no threads observed|Out-of-bounds", str(e))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_planted_race_is_found(ordered, has_race):
    x = jnp.ones(SIZE)
    assert has_race(lambda: copy_by_two(x, ordered=ordered)) == (not ordered)
