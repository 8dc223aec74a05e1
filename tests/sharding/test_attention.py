"""Attention under plain jit on a mesh: devices attend with their own heads and move nothing."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.pages.sharding import kv_pool_sharding
from tests.support import raw
from tests.support.attention_calls import assert_close
from tests.support.attention_cases import Case, SharedPrefixes
from tests.support.attention_configs import config_of
from tests.support.devices import H200, implementations_here, mesh
from tests.support.marks import by_implementation, slow
from tests.support.page_layouts import call_in_layout
from tests.support.placement import (
    BY_HEADS,
    BY_ROWS,
    collectives,
    mesh_2d,
    named,
    place,
    several,
    shapes_on,
)
from tests.support.quantized_cases import Quantized

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SMALL = Case(
    num_q_heads=16, num_kv_heads=8, head_dim=16, page_size=8, seq_lens=(13, 0, 5, 16),
    pages_per_seq=2,
)  # fmt: skip
RAGGED = replace(SMALL, q_lens=(3, 0, 5, 1), num_tokens=10)
SHARED = SharedPrefixes(SMALL, seq_lens=(13, 9, 5, 16), prefix_lens=(8,), cu_group_sizes=(0, 2))
CALLS = {"decode": (raw.paged_attention, SMALL), "ragged": (raw.ragged_paged_attention, RAGGED)}
CALLS["cascade"] = raw.cascade_attention, SHARED
SLOPES = np.linspace(0, 0.5, 16, dtype=np.float32)
OPTIONS = dict(alibi_slopes=SLOPES, sinks=4 * SLOPES, soft_cap=1.5, sliding_window=9, sm_scale=-0.7)
STATIC = ("soft_cap", "sliding_window", "sm_scale")
TREE = np.random.default_rng(7).random((4, 6, 6)) < 0.5


class Call:
    """An entry with arrays, and what it should give."""

    def __init__(
        self, name, implementation, *, options=OPTIONS, num_kv_heads=8, per_tensor=None,
        kv_layout="HPND", **static,
    ):  # fmt: skip
        """The oracle has the options, the entry alone what is static; per_tensor: int8 pages."""
        attention, case = CALLS[name]
        case = case.on(implementation)
        if num_kv_heads != 8:
            case = replace(case, num_kv_heads=num_kv_heads)
        if per_tensor is None:
            self.tolerance = SMALL.on(implementation).tolerance
            arrays = case.make()
            self.meant = arrays[:5] if name == "cascade" else arrays
        else:
            self.tolerance = 1e-2
            quantized = Quantized(case=case, kv_dtype="int8", per_tensor=per_tensor)
            arrays, self.meant = quantized.make()
        self.options = options | ({"tree_mask": TREE} if name == "ragged" and options else {})
        static |= {key: x for key, x in self.options.items() if key in STATIC}
        rest = {key: x for key, x in self.options.items() if key not in STATIC}
        self.arrays, self.kv_layout = named(attention, arrays) | rest, kv_layout
        self.arrays |= call_in_layout(kv_layout, arrays[:5] if name == "cascade" else arrays)
        static |= dict(implementation=implementation, kv_layout=kv_layout, return_lse=True)
        self.entry = partial(attention, **static)

    def __call__(self, arrays, **options):
        return self.entry(**arrays, **options)

    def check(self, on, specs=BY_HEADS, *, result=None):
        """Run on a mesh: the results are right, and devices exchange nothing."""
        if self.kv_layout != "HPND":
            pages = kv_pool_sharding(on, kv_layout=self.kv_layout).spec
            specs = specs | dict(k_pages=pages, v_pages=pages)
        placed = place(self.arrays, on, specs)
        compiled = jax.jit(self).lower(placed).compile()
        assert collectives(compiled) == []
        results = compiled(placed)
        self.assert_right(results)
        if result is not None:
            assert [tuple(x.sharding.spec)[:2] for x in results] == [result] * 2

    def assert_right(self, results):
        assert_close(jax.tree.map(np.asarray, results), self.meant, self.tolerance, **self.options)


@pytest.mark.parametrize(
    ("name", "kind", "kv_layout", "implementation"),
    by_implementation(
        [("decode", AUTO, "HPND"), ("ragged", EXPLICIT, "NH2D")],
        implementations_here(),
        [
            *[("decode", EXPLICIT, "2NHD"), ("ragged", AUTO, "HND")],
            *[("cascade", AUTO, "NHD"), ("cascade", EXPLICIT, "HPND")],
        ],
    ),
    ids=str,
)
def test_devices_attend_with_their_heads_and_every_option(implementation, name, kind, kv_layout):
    call = Call(name, implementation, kv_layout=kv_layout)
    call.check(mesh_2d(several().size, names=("tensor",), kind=kind), result=(None, "tensor"))


@pytest.mark.parametrize(
    ("name", "per_tensor", "kind", "kv_layout", "implementation"),
    by_implementation(
        [("decode", False, EXPLICIT, "NHD"), ("ragged", True, AUTO, "HPND")],
        implementations_here(),
        [
            *[("decode", True, AUTO, "HND"), ("decode", False, AUTO, "NH2D")],
            ("ragged", False, EXPLICIT, "2NHD"),
        ],
    ),
    ids=str,
)
def test_int8_pages_by_number_and_flat_tables(implementation, name, per_tensor, kind, kv_layout):
    """The last row is not one; a config divides the work for the heads of a device."""
    config = config_of(implementation, ragged=name == "ragged")
    static = {"fixed_split_size": 64} if per_tensor else {"config": config}
    call = Call(
        name, implementation, options={}, per_tensor=per_tensor, kv_layout=kv_layout, **static
    )
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


def test_replicated_queries_are_sharded_as_the_pages(implementation):
    call = Call("decode", implementation, options={})
    placed = place(call.arrays, mesh(2), {"k_pages": P("tensor"), "v_pages": P("tensor")})
    with jax.enable_x64(True):  # must not reach a device
        compiled = jax.jit(call).lower(placed).compile()
    pool = f"[8,{call.arrays['k_pages'].shape[1]}"
    assert not [line for line in collectives(compiled) if pool in line]
    call.assert_right(compiled(placed))


def in_shard_map(call, arrays, on):
    specs = {key: BY_HEADS.get(key, P()) for key in arrays}
    how = dict(mesh=on, in_specs=(specs,), out_specs=P(None, "tensor"), check_vma=True)
    return jax.shard_map(call, **how)


@pytest.mark.parametrize("name", CALLS)
def test_shard_map_checks_the_types_of_attention(implementation, name):
    if implementation == "triton_interpret":
        pytest.skip("JAX's interpreter indexes arrays of devices with constants")
    call = Call(name, implementation)
    placed = place(call.arrays, mesh(2))
    lowered = jax.jit(in_shard_map(call, call.arrays, mesh(2))).lower(placed)
    if name != "ragged" or implementation != "xla":
        compiled = lowered.compile()
        assert collectives(compiled) == []
        call.assert_right(compiled(placed))


DIFFERENTIATED = ("q", "k_pages", "v_pages", "sinks")


def split(arrays):
    """The arrays to differentiate, and the rest."""
    given = {key: x for key, x in arrays.items() if key in DIFFERENTIATED}
    return given, {key: x for key, x in arrays.items() if key not in DIFFERENTIATED}


def gradient_of(call):
    """The gradients of a loss of `out` and `lse` as a jitted function of `split` arrays."""

    def loss(given, rest):
        out, lse = call(given | rest)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("family", ["triton", "mosaic_sm90"])
@pytest.mark.parametrize(
    ("name", "explicit"),
    [
        *[("decode", False), ("ragged", True), ("cascade", False)],
        *slow([("decode", True), ("ragged", False), ("cascade", True)]),
    ],
)
def test_kernels_lower_for_several_gpus(name, family, explicit):
    if family == "mosaic_sm90" and mosaic_support.why_not_jax():
        pytest.skip(mosaic_support.why_not_jax())
    attention = CALLS[name][0]
    case = replace(SMALL, head_dim=64, page_size=16, dtype="float16")
    options = {"sinks": SLOPES, "alibi_slopes": SLOPES}
    if name == "ragged":  # with tiles of queries for the backward kernels of both families
        lens = dict(q_lens=(3, 0, 250, 5), seq_lens=(13, 0, 250, 16))
        case = replace(case, **lens, pages_per_seq=16, num_pages=40)
        del options["alibi_slopes"]  # Mosaic has no gradient of ragged calls with slopes
    if name == "cascade":
        case = replace(SHARED, case=case)
    on = AbstractMesh((2,), ("tensor",), (EXPLICIT if explicit else AUTO,), abstract_device=H200)
    shapes = shapes_on(on, named(attention, case.make()) | options)
    call = partial(attention, implementation=family, return_lse=True)
    run = lambda arrays: call(**arrays)  # noqa: E731
    if not explicit:
        run = in_shard_map(run, shapes, on)
    for function, arguments in ((jax.jit(run), [shapes]), (gradient_of(run), split(shapes))):
        with jax.sharding.use_abstract_mesh(on):
            lowered = function.trace(*arguments).lower(lowering_platforms=("cuda",))
        assert "custom_call @CustomSPMDPartitioning" not in lowered.as_text()
    if name == "ragged":
        assert ("attention_gradient_of_pages" in lowered.as_text()) == (family == "mosaic_sm90")


def without_nan(arrays):
    """XLA reads what no row owns."""
    return {key: np.nan_to_num(x, posinf=0, neginf=0) for key, x in arrays.items()}


def assert_same_gradients(found, call):
    """As those of XLA on one device."""
    wanted = gradient_of(partial(call, implementation="xla"))(*split(without_nan(call.arrays)))
    for key in found:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-4, atol=1e-5, err_msg=key)


INTERPRETED = "triton_interpret"


@pytest.mark.parametrize(
    ("implementation", "name", "kind"),
    [
        ("xla", "ragged", EXPLICIT),
        *slow([("xla", "ragged", AUTO), (INTERPRETED, "ragged", AUTO)]),
        *slow([(INTERPRETED, "ragged", EXPLICIT), (INTERPRETED, "decode", AUTO)]),
    ],
    ids=str,
)
def test_gradients_are_sharded_as_their_arrays(implementation, name, kind):
    call = Call(name, implementation, options={} if implementation == "xla" else OPTIONS)
    arrays = without_nan(call.arrays) if implementation == "xla" else call.arrays
    placed = split(place(arrays, mesh_2d(several().size, names=("tensor",), kind=kind)))
    compiled = gradient_of(call).lower(*placed).compile()
    found = compiled(*placed)
    if implementation != "xla":
        for key, x in found.items():
            assert x.sharding.is_equivalent_to(placed[0][key].sharding, x.ndim)
        assert not [line for line in collectives(compiled) if "all-gather" in line]
    assert_same_gradients(found, call)


def test_gradients_of_pages_that_several_devices_read():
    """Devices have query heads of one KV head, and rows of their own."""
    call = Call("decode", INTERPRETED, num_kv_heads=2)
    on = mesh_2d(2, 2, 2, names=("rows", "kv", "copy"))
    heads = ("kv", "copy")
    specs = {"q": P("rows", heads), "k_pages": P("kv"), "v_pages": P("kv"), "sinks": P(heads)}
    placed = place(call.arrays, on, specs | {"seq_lens": P("rows")})
    found = gradient_of(call)(*split(placed))
    for key in ("k_pages", "v_pages"):
        assert found[key].sharding.is_equivalent_to(NamedSharding(on, P("kv")), 4)
    assert_same_gradients(found, call)
