"""Attention under plain jit on a mesh: devices attend with their own heads and move nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_calls import assert_close
from tests.support.attention_cases import Case, SharedPrefixes
from tests.support.devices import H200, mesh
from tests.support.marks import slow
from tests.support.placement import (
    BY_HEADS,
    BY_ROWS,
    NAMES,
    collectives,
    mesh_2d,
    named,
    place,
    several,
)
from tests.support.quantized_cases import Quantized

SMALL = Case(
    num_q_heads=16, num_kv_heads=8, head_dim=16, page_size=8, seq_lens=(13, 0, 5, 16),
    pages_per_seq=2,
)  # fmt: skip
RAGGED = replace(SMALL, q_lens=(3, 0, 5, 1), num_tokens=10)
SHARED = SharedPrefixes(
    case=SMALL, seq_lens=(13, 9, 5, 16), prefix_lens=(8,), cu_group_sizes=(0, 2)
)
CALLS = {
    "decode": (pp.paged_attention, SMALL),
    "ragged": (pp.ragged_paged_attention, RAGGED),
    "cascade": (pp.cascade_attention, SHARED),
}
SLOPES = np.linspace(0, 0.5, 16, dtype=np.float32)
OPTIONS = dict(alibi_slopes=SLOPES, sinks=4 * SLOPES, soft_cap=1.5, sliding_window=9, sm_scale=-0.7)
TREE = np.random.default_rng(7).random((4, 6, 6)) < 0.5
STATIC = ("soft_cap", "sliding_window", "sm_scale")


def call_of(name, implementation, *, options=OPTIONS):
    """An entry with its static arguments, and its arrays by name."""
    attention, case = CALLS[name]
    case = case.on(implementation)
    options = dict(options)
    if name == "ragged" and options:
        options["tree_mask"] = TREE
    static = {key: options.pop(key) for key in STATIC if key in options}
    arrays = named(attention, case.make()) | options
    return partial(attention, implementation=implementation, return_lse=True, **static), arrays


def run(call, arrays):
    """The result of a call under jit with nothing but its arrays, and the compiled program."""
    compiled = jax.jit(lambda arrays: call(**arrays)).lower(arrays).compile()
    return compiled(arrays), compiled


def assert_same_as_one_device(call, arrays, results):
    out, lse = results
    want_out, want_lse = jax.jit(lambda arrays: call(**arrays))(arrays)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(want_lse), rtol=1e-5, atol=1e-5)
    close = dict(rtol=2e-2, atol=2e-2) if out.dtype != jnp.float32 else dict(rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(want_out, np.float32), **close
    )


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [("decode", 8), *slow([("cascade", 2), ("decode", 2), ("ragged", 8)])],
)
def test_each_device_attends_with_its_own_heads(implementation, name, num_devices):
    call, arrays = call_of(name, implementation, options={})
    results, compiled = run(call, place(arrays, mesh(num_devices)))
    assert collectives(compiled) == []
    assert [x.sharding.spec for x in results] == [P(None, "tensor")] * 2
    assert_same_as_one_device(call, arrays, results)


@pytest.mark.parametrize("name", ["ragged", *slow(["decode", "cascade"])])
def test_all_options_at_once(implementation, name):
    call, arrays = call_of(name, implementation)
    results, compiled = run(call, place(arrays, several()))
    assert collectives(compiled) == []
    assert_same_as_one_device(call, arrays, results)
    if name != "cascade":  # whose arguments the oracle does not take
        positional = [arrays[key] for key in NAMES[CALLS[name][0]]]
        tree = {"tree_mask": TREE} if name == "ragged" else {}
        tolerance = CALLS[name][1].on(implementation).tolerance
        assert_close(results, positional, tolerance, **OPTIONS, **tree)


@pytest.mark.parametrize(
    ("name", "per_tensor"),
    [("decode", True), ("ragged", False), *slow([("decode", False), ("ragged", True)])],
)
def test_quantized_pages(implementation, name, per_tensor):
    attention, case = CALLS[name]
    stored, meant = Quantized(case=case, kv_dtype="int8", per_tensor=per_tensor).make()
    call = partial(attention, implementation=implementation, return_lse=True)
    arrays = named(attention, stored)
    results, compiled = run(call, place(arrays, several()))
    assert collectives(compiled) == []
    assert_close(results, meant, 1e-2)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("decode", "config"),
        ("ragged", "fixed_split_size"),
        *slow([("decode", "fixed_split_size"), ("ragged", "config")]),
    ],
)
def test_work_is_divided_for_the_heads_of_a_device(implementation, name, option):
    attention, case = CALLS[name]
    loop = dict(block_k=64, num_programs=16, num_stages=2)
    configs = {
        "triton": {
            "decode": pp.DecodeConfig(num_warps=2, **loop),
            "ragged": pp.RaggedConfig(num_warps=2, block_q=16, **loop),
        },
        "mosaic_gpu": {
            "decode": pp.MosaicDecodeConfig(**loop),
            "ragged": pp.MosaicRaggedConfig(num_consumers=2, **loop),
        },
        "mosaic_sm80": {
            "decode": pp.MosaicSm80DecodeConfig(**loop),
            "ragged": pp.MosaicSm80RaggedConfig(
                block_q=64, block_k=64, num_warpgroups=1, num_programs=16
            ),
        },
    }
    family = implementation.removesuffix("_interpret")
    options = {"fixed_split_size": 64}
    if option == "config":
        options = {"config": configs.get(family, configs["triton"])[name]}
    arrays = named(attention, case.on(implementation).make())
    call = partial(attention, implementation=implementation, return_lse=True, **options)
    results, compiled = run(call, place(arrays, mesh(2)))
    assert collectives(compiled) == []
    assert_same_as_one_device(call, arrays, results)


def test_rows_on_several_devices_too(implementation):
    call, arrays = call_of("decode", implementation)
    on = mesh_2d(2, 2, names=("data", "tensor"))
    results, compiled = run(call, place(arrays, on, BY_ROWS))
    assert collectives(compiled) == []
    assert [x.sharding.spec for x in results] == [P("data", "tensor")] * 2
    assert_same_as_one_device(call, arrays, results)


def test_kv_heads_fewer_than_devices_on_a_mesh_of_two_axes(implementation):
    attention, case = pp.paged_attention, replace(SMALL, num_kv_heads=2).on(implementation)
    arrays = named(attention, case.make())
    call = partial(attention, implementation=implementation, return_lse=True)
    on = mesh_2d(2, 4, names=("kv", "copy"))
    specs = {"q": P(None, ("kv", "copy")), "k_pages": P("kv"), "v_pages": P("kv")}
    results, compiled = run(call, place(arrays, on, specs))
    assert [x for x in collectives(compiled) if implementation != "xla"] == []
    assert_same_as_one_device(call, arrays, results)


def test_one_kv_head_serves_the_query_heads_of_all_devices(implementation):
    attention, case = pp.paged_attention, replace(SMALL, num_kv_heads=1).on(implementation)
    arrays = named(attention, case.make())
    call = partial(attention, implementation=implementation, return_lse=True)
    results, compiled = run(
        call, place(arrays, several(), {"q": P(None, "tensor"), "k_pages": P()})
    )
    assert collectives(compiled) == []
    assert_same_as_one_device(call, arrays, results)


@pytest.mark.parametrize("name", ["ragged", *slow(["decode", "cascade"])])
def test_explicit_mesh(implementation, name):
    call, arrays = call_of(name, implementation)
    on = mesh_2d(2, 2, names=("data", "tensor"), kind=AxisType.Explicit)
    placed = place(arrays, on, BY_ROWS if name == "decode" else BY_HEADS)
    results, compiled = run(call, placed)
    assert collectives(compiled) == []
    rows = "data" if name == "decode" else None
    assert [tuple(x.sharding.spec)[:2] for x in results] == [(rows, "tensor")] * 2
    assert_same_as_one_device(call, arrays, results)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decode", AxisType.Explicit),
        ("cascade", AxisType.Explicit),
        ("ragged", AxisType.Auto),
        *slow([("decode", AxisType.Auto), ("cascade", AxisType.Auto)]),
        *slow([("ragged", AxisType.Explicit)]),
    ],
    ids=str,
)
def test_rows_given_as_data_and_flat_tables(implementation, name, kind):
    call, arrays = call_of(name, implementation)
    arrays["block_tables"] = arrays["block_tables"].reshape(-1)
    arrays["num_seqs"] = np.int32(3)
    on = mesh_2d(2, 2, names=("data", "tensor"), kind=kind)
    specs = BY_ROWS if name == "decode" else BY_HEADS
    results, compiled = run(call, place(arrays, on, specs))
    assert collectives(compiled) == []
    assert_same_as_one_device(call, arrays, results)


def in_shard_map(call, arrays, on):
    return jax.shard_map(
        lambda arrays: call(**arrays),
        mesh=on,
        in_specs=({key: BY_HEADS.get(key, P()) for key in arrays},),
        out_specs=P(None, "tensor"),
        check_vma=True,
    )


@pytest.mark.parametrize("name", CALLS)
def test_shard_map_checks_types(implementation, name):
    if implementation == "triton_interpret":
        pytest.skip("JAX's interpreter indexes arrays of devices with constants")
    call, arrays = call_of(name, implementation)
    placed = place(arrays, mesh(2))
    compiled = jax.jit(in_shard_map(call, arrays, mesh(2))).lower(placed).compile()
    assert collectives(compiled) == []
    assert_same_as_one_device(call, arrays, compiled(placed))


@pytest.mark.parametrize("family", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize(
    ("name", "explicit"),
    [
        ("decode", False),
        ("ragged", True),
        ("cascade", False),
        *slow([("decode", True), ("ragged", False), ("cascade", True)]),
    ],
)
def test_kernels_lower_for_several_gpus(name, family, explicit):
    if family == "mosaic_gpu" and mosaic_support.why_not_jax():
        pytest.skip(mosaic_support.why_not_jax())
    attention, case = CALLS[name]
    case = replace(case if name != "cascade" else SMALL, head_dim=64, page_size=16, dtype="float16")
    if name == "ragged":  # with tiles of queries for the backward kernels of both families
        lens = dict(q_lens=(3, 0, 250, 5), seq_lens=(13, 0, 250, 16))
        case = replace(case, **lens, pages_per_seq=16, num_pages=40)
    arrays = case.make()
    if name == "cascade":
        arrays = (*arrays, np.int32([8]), np.int32([0, 2]))
    arrays = named(attention, arrays) | {"sinks": SLOPES}
    if name != "ragged":  # whose gradient Mosaic has without slopes only
        arrays["alibi_slopes"] = SLOPES
    kind = AxisType.Explicit if explicit else AxisType.Auto
    on = AbstractMesh((2,), ("tensor",), (kind,), abstract_device=H200)
    shapes = {
        key: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(on, BY_HEADS.get(key, P()))
        )
        for key, x in arrays.items()
    }
    call = partial(attention, implementation=family, return_lse=True)
    run = (lambda arrays: call(**arrays)) if explicit else in_shard_map(call, arrays, on)

    def gradients(arrays):
        rest = {key: x for key, x in arrays.items() if key not in ("q", "k_pages")}

        def loss(q, k_pages):
            return (run(rest | {"q": q, "k_pages": k_pages})[0] ** 2).sum()

        return jax.grad(loss, argnums=(0, 1))(arrays["q"], arrays["k_pages"])

    for function in (run, gradients):
        with jax.sharding.use_abstract_mesh(on):
            lowered = jax.jit(function).trace(shapes).lower(lowering_platforms=("cuda",))
        assert "custom_call @CustomSPMDPartitioning" not in lowered.as_text()
    if name == "ragged":
        assert ("attention_gradient_of_pages" in lowered.as_text()) == (family == "mosaic_gpu")


def test_eager_calls_leave_the_results_on_their_devices(implementation):
    call, arrays = call_of("decode", implementation, options={})
    results = call(**place(arrays, several()))
    assert [tuple(x.sharding.spec)[:2] for x in results] == [(None, "tensor")] * 2
    assert_same_as_one_device(call, arrays, results)


def test_queries_that_are_whole_are_cut_as_the_pages(implementation):
    call, arrays = call_of("decode", implementation, options={})
    specs = {"k_pages": P("tensor"), "v_pages": P("tensor")}
    results, compiled = run(call, place(arrays, several(), specs))
    pool = f"[8,{arrays['k_pages'].shape[1]}"
    assert not [line for line in collectives(compiled) if pool in line]
    assert_same_as_one_device(call, arrays, results)


@pytest.mark.parametrize("own_pools", [True, *slow([False])], ids=["a pool for each", "one pool"])
def test_vmap(implementation, own_pools):
    call, arrays = call_of("decode", implementation, options={})
    mapped = [key for key in arrays if own_pools or not key.endswith("pages")]
    batched = {
        key: np.stack([x, np.roll(x, 1, axis=0)]) if key in mapped else x
        for key, x in arrays.items()
    }
    axes = {key: 0 if key in mapped else None for key in arrays}
    each = jax.vmap(lambda arrays: call(**arrays), in_axes=(axes,))
    on = mesh_2d(2, 4, names=("data", "tensor"))
    specs = {
        key: P("data", *BY_HEADS.get(key, P())) if key in mapped else BY_HEADS.get(key, P())
        for key in arrays
    }
    results, compiled = run(lambda **arrays: each(arrays), place(batched, on, specs))
    assert collectives(compiled) == []
    assert_same_as_one_device(lambda **arrays: each(arrays), batched, results)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_gradients_of_xla(kind):
    _, arrays = call_of("ragged", "xla", options={})
    arrays = {key: np.nan_to_num(x) for key, x in arrays.items()}

    def loss(q, rest):
        out = pp.ragged_paged_attention(q, **rest, implementation="xla")
        return (out.astype(jnp.float32) ** 2).sum()

    def gradient(arrays):
        rest = {key: x for key, x in arrays.items() if key != "q"}
        return jax.jit(jax.grad(loss))(arrays["q"], rest)

    on = mesh_2d(several().size, names=("tensor",), kind=kind)
    np.testing.assert_allclose(
        np.asarray(gradient(place(arrays, on))), np.asarray(gradient(arrays)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ragged", AxisType.Auto),
        *slow([("ragged", AxisType.Explicit), ("decode", AxisType.Auto)]),
    ],
    ids=str,
)
def test_gradients_of_the_kernels_lie_as_their_arrays(name, kind):
    call, arrays = call_of(name, "triton_interpret")
    differentiated = ("q", "k_pages", "v_pages", "sinks")

    def loss(given, rest):
        out, lse = call(**given, **rest)
        return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

    def gradient(arrays):
        given = {key: jnp.asarray(arrays[key]) for key in differentiated}
        rest = {key: x for key, x in arrays.items() if key not in differentiated}
        compiled = jax.jit(jax.grad(loss)).lower(given, rest).compile()
        return compiled(given, rest), compiled

    wanted, _ = gradient(arrays)
    on = mesh_2d(several().size, names=("tensor",), kind=kind)
    got, compiled = gradient(place(arrays, on))
    for key in differentiated:
        lies_at = NamedSharding(on, BY_HEADS[key])
        assert got[key].sharding.is_equivalent_to(lies_at, got[key].ndim)
        np.testing.assert_allclose(np.asarray(got[key]), wanted[key], rtol=1e-4, atol=1e-5)
    assert not [line for line in collectives(compiled) if "all-gather" in line]


def test_gradients_of_pages_that_several_devices_read():
    """Devices have query heads of one KV head, and rows of their own."""
    call, arrays = call_of("decode", "triton_interpret", options={})
    specs = {"q": P("data", "tensor"), "k_pages": P(), "v_pages": P(), "seq_lens": P("data")}
    on = mesh_2d(2, 2, names=("data", "tensor"))

    def gradient(arrays):
        rest = {key: x for key, x in arrays.items() if key not in ("q", "k_pages")}

        def loss(q, k_pages):
            return (call(q=q, k_pages=k_pages, **rest)[0] ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays["q"], arrays["k_pages"])

    wanted = gradient({key: jnp.asarray(x) for key, x in arrays.items()})
    for got, expected in zip(gradient(place(arrays, on, specs)), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4, atol=1e-5)


def test_gradients_in_shard_map():
    call, arrays = call_of("decode", "triton_interpret", options={})
    on = mesh_2d(2, names=("data",))
    rows = {"q": P("data"), "block_tables": P("data"), "seq_lens": P("data")}
    specs = {key: rows.get(key, P()) for key in arrays}

    def loss(given, rest):
        attend = jax.shard_map(
            lambda given: call(**given)[0], mesh=on, in_specs=(specs,), out_specs=P("data"),
            check_vma=False,
        )  # fmt: skip
        return (attend(given | rest) ** 2).sum()

    def plain(given, rest):
        return (call(**given, **rest)[0] ** 2).sum()

    given = {key: jnp.asarray(arrays[key]) for key in ("q", "k_pages")}
    rest = {key: x for key, x in arrays.items() if key not in given}
    got, wanted = (jax.jit(jax.grad(f))(given, rest) for f in (loss, plain))
    for key in given:
        np.testing.assert_allclose(np.asarray(got[key]), wanted[key], rtol=1e-4, atol=1e-5)


CUT_WRONGLY = {
    "pages": ({"k_pages": P(None, "tensor")}, "k_pages is cut along num_pages over .'tensor',."),
    "slots": ({"v_pages": P(None, None, "tensor")}, "v_pages is cut along page_size"),
    "elements": ({"k_pages": P(None, None, None, "tensor")}, "k_pages is cut along kv_head_dim"),
    "scales": ({"k_scales": P(None, "tensor")}, "k_scales is cut along num_pages"),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("cut", CUT_WRONGLY)
def test_pages_that_would_be_gathered_are_refused(cut, kind):
    specs, message = CUT_WRONGLY[cut]
    stored, _ = Quantized(case=replace(SMALL, head_dim=32), kv_dtype="int8").make()
    arrays = named(pp.paged_attention, (*stored[:5], *stored[5:]))
    on = mesh_2d(2, names=("tensor",), kind=kind)
    arrays = {key: np.pad(x, ((0, 0), (0, x.shape[1] % 2), *[(0, 0)] * (x.ndim - 2)))
              if key in ("k_pages", "v_pages", "k_scales", "v_scales") else x
              for key, x in arrays.items()}  # fmt: skip
    placed = {
        key: jax.device_put(x, NamedSharding(on, specs.get(key, P()))) for key, x in arrays.items()
    }
    call = partial(pp.paged_attention, implementation="triton_interpret")
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message) as caught:
        jax.jit(lambda arrays: call(**arrays))(placed)
    assert "cut pages and scales along the KV heads alone" in str(caught.value)
