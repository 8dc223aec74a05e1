"""Attention over pages of every layout: the bits of the default layout."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_calls import STATIC, assert_close, assert_same_bits
from tests.support.attention_cases import Case, SharedPrefixes
from tests.support.attention_options import OPTIONS, chosen_options
from tests.support.marks import slow
from tests.support.page_layouts import LAYOUTS, OTHERS, call_in_layout
from tests.support.quantized_cases import Quantized

CASE = Case(head_dim=16, seq_lens=(37, 5, 0, 61))
RAGGED = dataclasses.replace(CASE, q_lens=(11, 5, 1, 2), num_tokens=20)
CALLS = {"decode": (pp.paged_attention, CASE), "ragged": (pp.ragged_paged_attention, RAGGED)}


def attend(name, kv_layout, arrays, **options):
    """(out, lse) of an entry, whose pages and scales are transposed by NumPy first."""
    static = {key: options.pop(key) for key in (*STATIC, "causal") if key in options}
    entry = partial(CALLS[name][0], kv_layout=kv_layout, return_lse=True, **static)
    return jax.jit(entry)(**call_in_layout(kv_layout, arrays), **options)


# Every layout and every entry, over pages of each kind.
IN_TURN = [*zip(itertools.cycle(CALLS), OTHERS, strict=False)]
OTHER_TURN = [x for x in itertools.product(CALLS, OTHERS) if x not in IN_TURN]


@pytest.mark.parametrize(("name", "kv_layout"), [*IN_TURN, *slow(OTHER_TURN)])
def test_pages_of_any_layout_give_the_same_bits(name, kv_layout, implementation):
    arrays = CALLS[name][1].on(implementation).make()
    got = attend(name, kv_layout, arrays, implementation=implementation)
    assert_same_bits(got, attend(name, "HPND", arrays, implementation=implementation))


@pytest.mark.parametrize(
    ("name", "kv_layout"),
    [
        ("decode", "HND"),
        ("ragged", "NH2D"),
        *slow([("decode", "NH2D"), ("ragged", "HND")]),
        *slow(itertools.product(CALLS, ["NHD", "2NHD", "N2HD"])),
    ],
)
def test_all_options_together(name, kv_layout, implementation):
    names = [option for option in OPTIONS if name == "ragged" or option != "tree"]
    call, oracle = chosen_options(names, ragged=name == "ragged", implementation=implementation)
    case = CALLS[name][1].on(implementation)
    arrays = case.make()
    assert_close(attend(name, kv_layout, arrays, **call), arrays, case.tolerance, **oracle)


@pytest.mark.parametrize("per_tensor", [False, *slow([True])])
@pytest.mark.parametrize(("name", "kv_layout"), [*OTHER_TURN, *slow(IN_TURN)])
def test_quantized_pages(name, kv_layout, per_tensor, implementation):
    kv_dtype = {"decode": "int8", "ragged": "float8_e4m3fn"}[name]
    case = dataclasses.replace(CALLS[name][1], dtype="bfloat16")
    arrays, meant = Quantized(case=case, kv_dtype=kv_dtype, per_tensor=per_tensor).make()
    got = attend(name, kv_layout, arrays, implementation=implementation)
    assert_same_bits(got, attend(name, "HPND", arrays, implementation=implementation))
    assert_close(got, meant, case.tolerance)


@pytest.mark.parametrize("kv_layout", ["HND", *slow(["NH2D"])])
@pytest.mark.parametrize("page_size", [1, *slow([256])])
@pytest.mark.parametrize("name", CALLS)
def test_small_and_large_pages(name, page_size, kv_layout, implementation):
    case = dataclasses.replace(
        CALLS[name][1], page_size=page_size, pages_per_seq=64 if page_size == 1 else 1
    ).on(implementation)
    arrays = case.make()
    got = attend(name, kv_layout, arrays, implementation=implementation)
    assert_same_bits(got, attend(name, "HPND", arrays, implementation=implementation))


@pytest.mark.parametrize("kv_layout", ["2NHD", *slow(["HND", "N2HD"])])
def test_shared_prefixes(kv_layout, implementation):
    shared = SharedPrefixes(
        case=CASE, seq_lens=(37, 29, 0, 61), prefix_lens=(24, 8), cu_group_sizes=(0, 2, 4)
    ).on(implementation)
    *arrays, prefix_lens, groups = shared.make()

    def run(kv_layout):
        entry = partial(pp.cascade_attention, kv_layout=kv_layout, implementation=implementation)
        return jax.jit(entry)(
            **call_in_layout(kv_layout, arrays), prefix_lens=prefix_lens, cu_group_sizes=groups
        )

    np.testing.assert_array_equal(np.asarray(run(kv_layout)), np.asarray(run("HPND")))


@pytest.mark.parametrize("kv_layout", OTHERS)
def test_gradients_have_the_layout_of_the_pages(kv_layout):
    q, k_pages, v_pages, *rest = dataclasses.replace(RAGGED, num_kv_heads=2).make(poison=False)

    def gradients(kv_layout):
        call = call_in_layout(kv_layout, (q, k_pages, v_pages, *rest))
        pages = call.pop("k_pages"), call.pop("v_pages")

        def loss(pages):
            out = pp.ragged_paged_attention(
                k_pages=pages[0], v_pages=pages[1], kv_layout=kv_layout, implementation="xla",
                **call,
            )  # fmt: skip
            return (out**2).sum()

        return jax.jit(jax.grad(loss))(pages)

    want = call_in_layout(kv_layout, (q, *gradients("HPND"), *rest))
    for got, expected in zip(gradients(kv_layout), (want["k_pages"], want["v_pages"]), strict=True):
        if expected is not None:
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("decode", "int8"),
        ("ragged", "float32"),
        *slow([("decode", "float32"), ("ragged", "int8")]),
    ],
)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_xla_makes_nothing_of_the_size_of_a_pool(name, kv_layout, kv_dtype):
    case = dataclasses.replace(CALLS[name][1], num_pages=4000)
    arrays, _ = Quantized(case=case, kv_dtype="int8").make()
    call = call_in_layout(kv_layout, arrays)
    if kv_dtype == "float32":
        for key in ("k_pages", "v_pages"):
            call[key] = None if call[key] is None else call[key].astype(np.float32)
        del call["k_scales"], call["v_scales"]
    entry = partial(CALLS[name][0], kv_layout=kv_layout, implementation="xla")
    compiled = jax.jit(entry).lower(**call).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < call["k_pages"].nbytes // 4


def refused(kv_layout, message, **changes):
    call = call_in_layout("HPND", CASE.make()) | changes
    with pytest.raises(ValueError, match=message):
        pp.paged_attention(**call, kv_layout=kv_layout)


def test_pages_that_are_not_of_the_layout_are_refused():
    one = np.zeros((5, 8, 4, 16), np.float32)
    refused("NHDX", "kv_layout='NHDX' must be one of .*'HPND', 'NHD'")
    refused(["NHD"], r"kv_layout=\['NHD'\] must be one of")
    refused("NH2D", "v_pages must be None with kv_layout='NH2D', whose k_pages hold K and V")
    refused("NHD", "v_pages=None must be an array", v_pages=None)
    refused("2NHD", r"must be \[num_pages, 2, page_size, num_kv_heads, head_dim\] with kv_layout=",
            k_pages=one, v_pages=None)  # fmt: skip
    refused("NH2D", r"must be \[num_pages, page_size, 2 \* num_kv_heads, head_dim\]",
            k_pages=one[:, :, :3], v_pages=None)  # fmt: skip
    refused("N2HD", "num_q_heads=4 must be a multiple of num_kv_heads=3",
            k_pages=np.zeros((5, 8, 6, 16), np.float32), v_pages=None)  # fmt: skip
