"""Attention under JAX's strict promotion rules, against a float64 oracle."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import assert_close, cascade, decode, ragged
from tests.support.attention_cases import TOLERANCE, Case
from tests.support.attention_options import OPTIONS
from tests.support.marks import slow
from tests.support.promotion import assert_is_strict, strict_promotion
from tests.support.quantized_cases import Quantized

SMALL = Case(head_dim=16, seq_lens=(37, 5, 0, 61))
RAGGED = dataclasses.replace(SMALL, q_lens=(11, 5, 1, 2), num_tokens=20)
NAMES = ("window", "cap", "alibi", "sinks", "scale")
EVERYTHING = {key: value for name in NAMES for key, value in OPTIONS[name].items()}
SPLIT = dict(fixed_split_size=64)
GROUPS = (np.int32([16, 0, 0, 37]), np.int32([0, 1, 1, 3, 4]))  # prefixes, and where groups begin
CALLS = {
    "decode": (decode, SMALL, EVERYTHING),
    "decode, fixed splits": (decode, SMALL, SPLIT),
    "ragged": (ragged, RAGGED, EVERYTHING),
    "ragged, tree, fixed splits": (ragged, RAGGED, EVERYTHING | OPTIONS["tree"] | SPLIT),
    "cascade": (cascade, SMALL, EVERYTHING),
}
PAGES = {
    "of the queries' dtype": lambda case: (case.make(),) * 2,
    "int8": lambda case: Quantized(
        case=dataclasses.replace(case, dtype="bfloat16"), kv_dtype="int8"
    ).make(),
    "int8 per layer": lambda case: Quantized(case=case, kv_dtype="int8", per_tensor=True).make(),
}


def test_the_rules_are_in_force():
    with strict_promotion():
        assert_is_strict()


QUICK = [
    ("decode", "int8"),
    ("decode, fixed splits", "of the queries' dtype"),
    ("ragged", "int8 per layer"),
    ("ragged, tree, fixed splits", "int8"),
    ("cascade", "of the queries' dtype"),
]


@pytest.mark.parametrize(
    ("name", "pages"),
    [*QUICK, *slow(x for x in itertools.product(CALLS, PAGES) if x not in QUICK)],
)
def test_attention(name, pages, implementation):
    function, case, options = CALLS[name]
    case = case.on(implementation)
    arrays, meant = PAGES[pages](case)
    if function is cascade:
        arrays = (*arrays[:5], *GROUPS, *arrays[5:])
    call = options | dict(implementation=implementation)
    with strict_promotion():
        eager = function.__wrapped__(*arrays, **call)
        results = eager, function(*arrays, **call)
    expected = {key: value for key, value in options.items() if key != "fixed_split_size"}
    for actual in results:
        assert_close(actual, meant, TOLERANCE[arrays[0].dtype.name], **expected)


@pytest.mark.parametrize("name", ["ragged", "cascade", *slow(["decode"])])
def test_rows_tables_and_scales_that_callers_have(name, implementation):
    function, case, options = CALLS[name]
    arrays = case.on(implementation).make()
    meant = [*arrays[:4], arrays[4] * (np.arange(4) < 3).astype(np.int32), *arrays[5:]]
    flat = [*arrays[:3], arrays[3].reshape(-1), *arrays[4:], *(GROUPS if name == "cascade" else ())]
    expected = dict(options, sm_scale=options["sm_scale"] * 0.5)
    if name == "ragged":
        expected |= dict(causal=False)
        meant[5] = np.minimum(arrays[5], arrays[5][3])
    call = dict(expected, sm_scale=options["sm_scale"], q_scale=0.5, implementation=implementation)
    with strict_promotion():
        eager = function.__wrapped__(*flat, num_seqs=jnp.int32(3), **call)
        results = eager, function(*flat, num_seqs=3, **call)
    for actual in results:
        assert_close(actual, meant, TOLERANCE[arrays[0].dtype.name], **expected)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_merged_states(mode):
    outs, lses = np.ones((3, 2, 4, 16), np.float32), np.zeros((3, 2, 4), np.float32)
    outs = outs * np.float32([[[[1]]], [[[2]]], [[[6]]]])
    for dtype in (jnp.float32, jnp.bfloat16):
        with strict_promotion():
            out, lse = mode(pp.merge_attention_states)(jnp.asarray(outs, dtype), lses)
        assert out.dtype == dtype
        np.testing.assert_allclose(np.asarray(out, np.float32), 3, rtol=1e-6)
        np.testing.assert_allclose(lse, np.log(3), rtol=1e-6)


def test_the_gradient():
    """JAX traces the backward pass after the call has returned."""
    q, k_pages, v_pages, *rest = RAGGED.make()

    def loss(q, k_pages, v_pages, slopes, sinks):
        options = dict(sliding_window=11, soft_cap=1.5, alibi_slopes=slopes, sinks=sinks)
        options |= dict(implementation="xla")  # the only one with a gradient
        out = pp.ragged_paged_attention(q, k_pages, v_pages, *rest, **options)
        return jnp.sin(out).sum()

    per_head = OPTIONS["alibi"]["alibi_slopes"], OPTIONS["sinks"]["sinks"]
    gradient = jax.grad(loss, argnums=range(5))
    expected = jax.jit(gradient)(q, k_pages, v_pages, *per_head)
    with strict_promotion():
        actual = jax.jit(gradient)(q, k_pages, v_pages, *per_head)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)
