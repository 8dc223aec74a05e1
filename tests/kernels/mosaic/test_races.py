"""The interpreter finds no race in the Mosaic kernels, and finds one that is planted.

A race is a read and a write, or two writes, of shared or device memory that no barrier orders. The
interpreter compares vector clocks, so it finds a race in whatever order the threads ran.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import pallas_paged as pp
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_cases import SharedPrefixes, mosaic_case
from tests.support.attention_options import OPTIONS
from tests.support.marks import slow

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.linear import linear
from tests.support.planted_race import SIZE, copy_by_two

pytestmark = [
    # The interpreter multiplies the poisoned values too.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.skipif(jax.default_backend() == "gpu", reason="the interpreter is for CPUs"),
]

# Several programs, of which some share a row; both stages of a ring are used again.
DECODE = mosaic_case(seq_lens=(150, 0, 70), pages_per_seq=16, num_kv_heads=1)
RAGGED = dataclasses.replace(DECODE, q_lens=(20, 0, 3), seq_lens=(150, 0, 70))
PREFIXES = SharedPrefixes(
    case=DECODE, seq_lens=(150, 140, 70), prefix_lens=(64,), cu_group_sizes=(0, 3)
)
CONFIGS = {
    "decode": pp.MosaicDecodeConfig(block_k=64, num_programs=3, num_stages=2),
    "ragged": pp.MosaicRaggedConfig(block_k=64, num_programs=3, num_stages=2, num_consumers=2),
}
SOME = {key: value for name in ("window", "alibi", "sinks") for key, value in OPTIONS[name].items()}


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
    return function(*case.make(), implementation="mosaic_gpu_interpret", **options)


def attend_decode(**options):
    return attend(pp.paged_attention, DECODE, config=CONFIGS["decode"], **options)


def attend_ragged(**options):
    return attend(pp.ragged_paged_attention, RAGGED, config=CONFIGS["ragged"], **options)


def attend_cascade():
    configs = dict(config=CONFIGS["decode"], prefix_config=CONFIGS["ragged"])
    return attend(pp.cascade_attention, PREFIXES, **configs)


def multiply(*shape):
    x, weight = jnp.ones((1, shape[-1]), jnp.bfloat16), jnp.ones(shape, jnp.bfloat16)
    return linear(x, weight, out_dtype=jnp.float32, num_programs=2, interpret=True)


FOUND = "RACE DETECTED"
CALLS = {
    "decode": attend_decode,
    "decode with options": partial(attend_decode, **SOME),
    "ragged": attend_ragged,
    "ragged with options": partial(attend_ragged, **SOME),
    "cascade": attend_cascade,
    "linear": partial(multiply, 320, 2048),
    "linear with SwiGLU": partial(multiply, 192, 2, 512),
}
# What the others run too.
MORE = ("decode", "ragged", "cascade")


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


@pytest.mark.parametrize("name", [*(x for x in CALLS if x not in MORE), *slow(MORE)])
def test_no_kernel_has_a_race(name, has_race):
    assert not has_race(CALLS[name])


@pytest.mark.parametrize("name", ["decode", "linear"])  # no offset is read after a wait
def test_a_kernel_that_does_not_wait_has_a_race(name, has_race, monkeypatch):
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *_, **__: None)
    try:
        assert has_race(CALLS[name])
    except jax.errors.JaxRuntimeError as e:
        # In some orders of the threads the interpreter notices this first.
        assert "no threads observed" in str(e)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_planted_race_is_found(ordered, has_race):
    x = jnp.ones(SIZE)
    assert has_race(lambda: copy_by_two(x, ordered=ordered, interpret=True)) == (not ordered)
