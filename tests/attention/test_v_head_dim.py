"""K and V of two head_dims: V may have fewer elements than K, as in DeepSeek's prompts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from pallas_paged.kernels.families import FAMILIES
from tests.support import raw
from tests.support.attention_calls import assert_close, assert_same_bits, cascade, decode, ragged
from tests.support.attention_cases import NarrowCase, SharedPrefixes
from tests.support.attention_oracle import relative_error
from tests.support.devices import implementations_here
from tests.support.page_layouts import call_in_layout, of_heads
from tests.support.placement import collectives, mesh_2d, place
from tests.support.quantized_cases import Quantized

DECODE = NarrowCase(seq_lens=(37, 5, 0, 64))
RAGGED = replace(DECODE, q_lens=(9, 1, 0, 30), num_tokens=44)
CALLS = [(decode, DECODE), (ragged, RAGGED)]
BOTH = pytest.mark.parametrize(("function", "case"), CALLS, ids=["decode", "ragged"])
SINKS = np.linspace(-1, 2, 4, dtype=np.float32)
OPTIONS = dict(soft_cap=3.0, sliding_window=20, sinks=SINKS)
MOSAIC = [x for x in implementations_here() if x.startswith("mosaic")]


@BOTH
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_results_have_the_head_dim_of_v_and_match_the_oracle(function, case, options):
    arrays = case.make()
    actual = function(*arrays, **options)
    assert actual[0].shape[-1] == 24
    assert_close(actual, arrays, case.tolerance, **options)


@pytest.mark.parametrize("implementation", MOSAIC)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_kernels_match_the_oracle(implementation, dtype, options):
    rows = dict(seq_lens=(700, 0, 65, 300), q_lens=(700, 0, 1, 130), pages_per_seq=44)
    case = replace(RAGGED, page_size=16, dtype=dtype, **rows).on(implementation)
    call = partial(ragged, implementation=implementation, **options)
    first = call(*case.make())
    assert_close(first, case.make(), case.tolerance, **options)
    for how in (dict(poison=False), dict(order=1), *[{}] * 100):
        assert_same_bits(call(*case.make(**how)), first)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_pages_of_two_arrays_may_be_in_any_layout(kv_layout):
    arrays = RAGGED.make()
    call = call_in_layout(kv_layout, arrays)
    attend = partial(raw.ragged_paged_attention, kv_layout=kv_layout, return_lse=True)
    assert_close(jax.jit(attend)(**call), arrays, RAGGED.tolerance)


def test_shared_prefixes_are_merged():
    case = SharedPrefixes(DECODE, seq_lens=(19, 0, 17, 3), prefix_lens=(16,), cu_group_sizes=(0, 4))
    arrays = case.make()
    assert_close(cascade(*arrays), arrays[:5], 1e-5)


def test_int8_pages_have_scales_as_others():
    quantized = Quantized(case=RAGGED, kv_dtype="int8")
    stored, meant = quantized.make()
    assert stored[2].shape[-1] == 24
    assert_close(ragged(*stored), meant, RAGGED.tolerance)


@pytest.mark.parametrize("implementation", MOSAIC)
def test_gradient_of_kernels_is_that_of_xla(implementation):
    rows = dict(seq_lens=(70, 30), q_lens=(70, 9), num_tokens=80, page_size=16)
    q, k, v, *rest = replace(RAGGED, **rows).on(implementation).make(poison=False)

    def gradient(implementation):
        def loss(q, k, v):
            out = raw.ragged_paged_attention(q, k, v, *rest, implementation=implementation)
            return jnp.sin(out.astype(jnp.float32)).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    for found, wanted in zip(gradient(implementation), gradient("xla"), strict=True):
        assert relative_error(np.float32(found), np.float32(wanted)) < 0.02


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@BOTH
def test_each_device_attends_with_its_own_heads(function, case, kind):
    del function
    entry = raw.paged_attention if case.q_lens is None else raw.ragged_paged_attention
    arrays = case.make()
    on = mesh_2d(2, names=("tensor",), kind=kind)
    specs = dict(q=P(None, "tensor"), k_pages=P("tensor"), v_pages=P("tensor"))
    call = place(call_in_layout("HPND", arrays), on, specs)
    compiled = jax.jit(partial(entry, return_lse=True)).lower(**call).compile()
    assert collectives(compiled) == []
    assert_close(jax.tree.map(np.asarray, compiled(**call)), arrays, case.tolerance)


def test_new_tokens_are_written_with_their_own_head_dims():
    rng, slots = np.random.default_rng(0), np.int32([3, -1, 12])
    k, v = (np.float32(rng.standard_normal((3, 2, dim))) for dim in (8, 6))
    layer = pp.LayerKV(np.zeros((4, 4, 2, 8), np.float32), np.zeros((4, 4, 2, 6), np.float32))
    layer = jax.jit(pp.write_kv)(layer, k, v, slots)
    for pages, tokens in ((layer.k_pages, k), (layer.v_pages, v)):
        expected = np.zeros((16, *tokens.shape[1:]), np.float32)
        expected[slots[[0, 2]]] = tokens[[0, 2]]
        np.testing.assert_array_equal(pages, expected.reshape(pages.shape))
    with pytest.raises(ValueError, match=r"head_dim=8\], of v head_dim=6, like the pages, got"):
        pp.write_kv(layer, k, k, slots)


@BOTH
@pytest.mark.parametrize("family", FAMILIES)
def test_families_refuse_other_sizes_by_name(family, function, case, any_jax):
    del function
    entry = raw.paged_attention if case.q_lens is None else raw.ragged_paged_attention
    message = rf"'{family}' needs K and V of one head_dim.*, not \(32, 24\)"
    with pytest.raises(NotImplementedError, match=message):
        entry(*case.make(), **raw.by(f"{family}_interpret"))


@pytest.mark.parametrize("family", ["mosaic_sm90", "mosaic_sm80"])
def test_kernels_have_no_one_byte_pages_of_two_head_dims(family, any_jax):
    case = RAGGED.on(family)
    stored, _ = Quantized(case=case, kv_dtype="int8").make()
    with pytest.raises(NotImplementedError, match="needs pages of q's dtype bfloat16, not of int8"):
        ragged(*stored, implementation=f"{family}_interpret")


@pytest.mark.parametrize("dim", [0, 33])
def test_v_has_from_one_element_up_to_those_of_k(dim):
    pages = np.zeros((4, 4, 2, 32), np.float32)
    message = f"head_dim={dim} of v_pages must be from 1 to head_dim=32 of k_pages"
    with pytest.raises(ValueError, match=message):
        pp.LayerKV(pages, np.zeros((4, 4, 2, dim), np.float32))


def test_v_in_one_array_with_k_has_the_same_head_dim():
    both = np.zeros((4, 2, 4, 2, 32), np.float32)
    assert pp.LayerKV(both, kv_layout="2NHD").dim_of_v == 32
    layer = pp.LayerKV(both[:, 0], of_heads(np.zeros((2, 4, 4, 24), np.float32), "NHD"))
    assert (layer.head_dim, layer.dim_of_v) == (32, 24)
