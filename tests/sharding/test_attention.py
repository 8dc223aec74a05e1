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
from tests.support.attention_options import config_of
from tests.support.devices import H200, implementations_here, mesh
from tests.support.marks import slow
from tests.support.placement import (
    BY_HEADS,
    BY_ROWS,
    collectives,
    mesh_2d,
    named,
    place,
    several,
)
from tests.support.quantized_cases import Quantized

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
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
STATIC = ("soft_cap", "sliding_window", "sm_scale")
KERNELS = [name for name in implementations_here() if name != "xla"]
TREE = np.random.default_rng(7).random((4, 6, 6)) < 0.5


class Call:
    """An entry with arrays, and what it should give."""

    def __init__(
        self, name, implementation, *, options=OPTIONS, num_kv_heads=8, per_tensor=None, **static
    ):
        """The oracle has the options, the entry alone what is static; per_tensor: int8 pages."""
        attention, case = CALLS[name]
        case, options = case.on(implementation), dict(options)
        if num_kv_heads != 8:
            case = replace(case, num_kv_heads=num_kv_heads)
        if name == "ragged" and options:
            options["tree_mask"] = TREE
        self.tolerance = SMALL.on(implementation).tolerance
        if per_tensor is None:
            arrays = case.make()
            meant = arrays if name != "cascade" else arrays[:5]
        else:
            arrays, meant = Quantized(case=case, kv_dtype="int8", per_tensor=per_tensor).make()
            self.tolerance = 1e-2
        self.meant, self.options = meant, dict(options)
        static |= {key: options.pop(key) for key in STATIC if key in options}
        self.arrays = named(attention, arrays) | options
        self.entry = partial(attention, implementation=implementation, return_lse=True, **static)

    def __call__(self, arrays, **options):
        return self.entry(**arrays, **options)

    def check(self, on, specs=BY_HEADS, *, result=None, moves=False):
        """Run on a mesh: the results are right, and devices exchange nothing, but if `moves`."""
        placed = place(self.arrays, on, specs)
        compiled = jax.jit(self).lower(placed).compile()
        assert collectives(compiled) == [] or moves
        results = compiled(placed)
        self.assert_right(results)
        if result is not None:
            assert [tuple(x.sharding.spec)[:2] for x in results] == [result] * 2

    def assert_right(self, results):
        assert_close(jax.tree.map(np.asarray, results), self.meant, self.tolerance, **self.options)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decode", AUTO),
        ("ragged", EXPLICIT),
        *slow([("decode", EXPLICIT), ("ragged", AUTO), ("cascade", AUTO), ("cascade", EXPLICIT)]),
    ],
    ids=str,
)
def test_each_device_attends_with_its_own_heads_and_every_option(implementation, name, kind):
    call = Call(name, implementation)
    call.check(mesh_2d(several().size, names=("tensor",), kind=kind), result=(None, "tensor"))


@pytest.mark.parametrize(
    ("name", "per_tensor", "kind"),
    [
        ("decode", False, EXPLICIT),
        ("ragged", True, AUTO),
        *slow([("decode", True, AUTO), ("ragged", False, EXPLICIT)]),
    ],
    ids=str,
)
def test_rows_of_int8_pages_by_number_and_flat_tables(implementation, name, per_tensor, kind):
    """The last row is not one; a config divides the work for the heads of a device."""
    static = (
        {"fixed_split_size": 64}
        if per_tensor
        else {"config": config_of(implementation, ragged=name == "ragged")}
    )
    call = Call(name, implementation, options={}, per_tensor=per_tensor, **static)
    call.arrays["block_tables"] = call.arrays["block_tables"].reshape(-1)
    call.arrays["num_seqs"] = np.int32(3)
    call.meant[4][3:] = 0
    if name == "ragged":
        call.meant[5][4:] = call.meant[5][3]
    on = mesh_2d(2, 2, names=("data", "tensor"), kind=kind)
    rows = "data" if name == "decode" else None
    call.check(on, BY_ROWS if rows else BY_HEADS, result=(rows, "tensor"))


def test_cascade_of_xla():
    Call("cascade", "xla").check(mesh_2d(2, names=("tensor",), kind=EXPLICIT))


@pytest.mark.parametrize(
    ("name", "option"), slow([("decode", "fixed_split_size"), ("ragged", "config")])
)
def test_work_is_divided_for_the_heads_of_a_device(implementation, name, option):
    value = 64 if option == "fixed_split_size" else config_of(implementation, ragged=True)
    Call(name, implementation, options={}, **{option: value}).check(mesh(2))


@pytest.mark.parametrize("num_kv_heads", [2, *slow([1])])
def test_devices_share_the_query_heads_of_one_kv_head(implementation, num_kv_heads):
    call = Call("decode", implementation, options={}, num_kv_heads=num_kv_heads)
    on = mesh_2d(2, 2, names=("kv", "copy"))
    pages = P("kv") if num_kv_heads == 2 else P()
    q = P(None, ("kv", "copy"))
    call.check(on, {"q": q, "k_pages": pages, "v_pages": pages}, moves=implementation == "xla")


def test_queries_that_are_whole_are_cut_as_the_pages(implementation):
    call = Call("decode", implementation, options={})
    placed = place(call.arrays, mesh(2), {"k_pages": P("tensor"), "v_pages": P("tensor")})
    with jax.enable_x64(True):  # which is not to reach a device
        compiled = jax.jit(call).lower(placed).compile()
    pool = f"[8,{call.arrays['k_pages'].shape[1]}"
    assert not [line for line in collectives(compiled) if pool in line]
    call.assert_right(compiled(placed))


def in_shard_map(call, arrays, on):
    return jax.shard_map(
        call,
        mesh=on,
        in_specs=({key: BY_HEADS.get(key, P()) for key in arrays},),
        out_specs=P(None, "tensor"),
        check_vma=True,
    )


@pytest.mark.parametrize("name", CALLS)
def test_shard_map_checks_types(implementation, name):
    if implementation == "triton_interpret":
        pytest.skip("JAX's interpreter indexes arrays of devices with constants")
    call = Call(name, implementation)
    placed = place(call.arrays, mesh(2))
    lowered = jax.jit(in_shard_map(call, call.arrays, mesh(2))).lower(placed)
    if name != "ragged" or implementation != "xla":
        compiled = lowered.compile()
        assert collectives(compiled) == []
        call.assert_right(compiled(placed))


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
    on = AbstractMesh((2,), ("tensor",), (EXPLICIT if explicit else AUTO,), abstract_device=H200)
    shapes = {
        key: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(on, BY_HEADS.get(key, P()))
        )
        for key, x in arrays.items()
    }
    call = partial(attention, implementation=family, return_lse=True)
    run = lambda arrays: call(**arrays)  # noqa: E731
    if not explicit:
        run = in_shard_map(run, arrays, on)

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


@pytest.mark.parametrize("implementation", [*KERNELS, *slow(["xla"])])
def test_eager_calls_leave_the_results_on_their_devices(implementation):
    call = Call("decode", implementation, options={})
    results = call(place(call.arrays, mesh(2)))
    assert [tuple(x.sharding.spec)[:2] for x in results] == [(None, "tensor")] * 2
    call.assert_right(results)


@pytest.mark.parametrize("own_pools", [True, *slow([False])], ids=["a pool for each", "one pool"])
def test_vmap(implementation, own_pools):
    call = Call("decode", implementation, options={})
    mapped = [key for key in call.arrays if own_pools or not key.endswith("pages")]
    batched = {
        key: np.stack([x, np.roll(x, 1, axis=0)]) if key in mapped else x
        for key, x in call.arrays.items()
    }
    each = jax.vmap(call, in_axes=({key: 0 if key in mapped else None for key in call.arrays},))
    specs = {
        key: P("data", *BY_HEADS.get(key, P())) if key in mapped else BY_HEADS.get(key, P())
        for key in call.arrays
    }
    placed = place(batched, mesh_2d(2, 2, names=("data", "tensor")), specs)
    compiled = jax.jit(each).lower(placed).compile()
    assert collectives(compiled) == []
    results = jax.tree.map(np.asarray, compiled(placed))
    for index in range(2):
        one = [x[index] if key in mapped else x for key, x in batched.items()]
        assert_close([x[index] for x in results], one, call.tolerance)


DIFFERENTIATED = ("q", "k_pages", "v_pages", "sinks")


def gradient(call, arrays):
    """The gradients of a loss of `out` and `lse`, and their program."""

    def loss(given, rest):
        out, lse = call(given | rest)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

    given = {key: x for key, x in arrays.items() if key in DIFFERENTIATED}
    rest = {key: x for key, x in arrays.items() if key not in DIFFERENTIATED}
    compiled = jax.jit(jax.grad(loss)).lower(given, rest).compile()
    return compiled(given, rest), compiled


def assert_same_gradients(found, call):
    """As those of XLA on one device, without the NaN that no row owns."""
    arrays = {key: np.nan_to_num(x, posinf=0, neginf=0) for key, x in call.arrays.items()}
    wanted, _ = gradient(partial(call, implementation="xla"), arrays)
    for key in found:
        np.testing.assert_allclose(
            np.asarray(found[key]), np.asarray(wanted[key]), rtol=1e-4, atol=1e-5, err_msg=key
        )


@pytest.mark.parametrize("kind", [EXPLICIT, *slow([AUTO])], ids=lambda kind: kind.name)
def test_gradients_of_xla(kind):
    call = Call("ragged", "xla", options={})
    arrays = {key: np.nan_to_num(x, posinf=0, neginf=0) for key, x in call.arrays.items()}
    found, _ = gradient(call, place(arrays, mesh_2d(2, names=("tensor",), kind=kind)))
    assert_same_gradients(found, call)


def test_gradients_of_pages_that_several_devices_read():
    """Devices have query heads of one KV head, and rows of their own."""
    call = Call("decode", "triton_interpret", num_kv_heads=2)
    on = mesh_2d(2, 2, 2, names=("rows", "kv", "copy"))
    heads = ("kv", "copy")
    specs = {"q": P("rows", heads), "k_pages": P("kv"), "v_pages": P("kv"), "sinks": P(heads)}
    found, _ = gradient(call, place(call.arrays, on, specs | {"seq_lens": P("rows")}))
    for key in ("k_pages", "v_pages"):
        assert found[key].sharding.is_equivalent_to(NamedSharding(on, P("kv")), 4)
    assert_same_gradients(found, call)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("ragged", AUTO), ("ragged", EXPLICIT), ("decode", AUTO)], ids=str
)
def test_gradients_of_the_kernels_lie_as_their_arrays(name, kind):
    call = Call(name, "triton_interpret")
    on = mesh_2d(several().size, names=("tensor",), kind=kind)
    found, compiled = gradient(call, place(call.arrays, on))
    for key, x in found.items():
        assert x.sharding.is_equivalent_to(NamedSharding(on, BY_HEADS[key]), x.ndim)
    assert not [line for line in collectives(compiled) if "all-gather" in line]
    assert_same_gradients(found, call)


@pytest.mark.slow
def test_gradients_in_shard_map():
    call = Call("decode", "triton_interpret", options={})
    rows = {"q": P("data"), "block_tables": P("data"), "seq_lens": P("data")}
    attend = jax.shard_map(
        call, mesh=mesh_2d(2, names=("data",)),
        in_specs=({key: rows.get(key, P()) for key in call.arrays},), out_specs=P("data"),
        check_vma=False,
    )  # fmt: skip
    found, _ = gradient(attend, call.arrays)
    assert_same_gradients(found, call)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=lambda kind: kind.name)
def test_pages_that_would_be_gathered_are_refused(kind):
    call = Call("decode", "triton_interpret", options={})
    pages = {key: call.arrays[key][:, :6] for key in ("k_pages", "v_pages")}
    on = mesh_2d(2, names=("tensor",), kind=kind)
    placed = place(call.arrays | pages, on, {"k_pages": P(None, "tensor")})
    message = "k_pages is cut along num_pages over .'tensor',."
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message) as caught:
        jax.jit(call)(placed)
    assert "cut pages and scales along the KV heads alone" in str(caught.value)
