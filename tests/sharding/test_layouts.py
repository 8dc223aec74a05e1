"""Page layouts on a mesh: each device keeps its own KV heads, wherever the layout has them."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from pallas_paged.sharding import kv_pool_sharding
from tests.support.attention_calls import assert_close
from tests.support.attention_cases import Case
from tests.support.kv_pools import copies_of, make_pool
from tests.support.marks import slow
from tests.support.page_layouts import call_in_layout, layer_in_layout
from tests.support.page_tables import i32
from tests.support.placement import collectives, mesh_2d, several
from tests.support.quantized_cases import Quantized

CUT = ["NHD", "HND", "2NHD", "NH2D"]
CASE = Case(
    num_q_heads=16, num_kv_heads=8, head_dim=16, page_size=8, seq_lens=(13, 0, 5, 16),
    pages_per_seq=2, q_lens=(3, 0, 5, 1), num_tokens=10,
)  # fmt: skip
SIZES = dict(num_kv_heads=8, num_pages=7, page_size=4, head_dim=16)
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name
)


def mesh_of(kind):
    return mesh_2d(several().size, names=("tensor",), kind=kind)


def place(call, on, kv_layout):
    """A call's arrays, queries and pages cut over their heads."""
    pages = kv_pool_sharding(on, kv_layout=kv_layout)
    scales = P("tensor") if kv_layout == "HPND" else pages.spec
    if kv_layout == "2NHD":
        scales = P(None, None, "tensor")
    specs = {"q": P(None, "tensor"), "k_pages": pages.spec, "v_pages": pages.spec}
    specs |= {"k_scales": scales, "v_scales": scales}
    return {
        name: jax.device_put(x, NamedSharding(on, specs.get(name, P())))
        for name, x in call.items()
        if x is not None
    }


QUICK = [
    ("NHD", "float32", AxisType.Auto),
    ("HND", "int8", AxisType.Explicit),
    ("2NHD", "int8", AxisType.Auto),
    ("NH2D", "float32", AxisType.Explicit),
]
ALL = itertools.product(CUT, ("float32", "int8"), (AxisType.Auto, AxisType.Explicit))


@pytest.mark.parametrize(
    ("kv_layout", "kv_dtype", "kind"), [*QUICK, *slow(x for x in ALL if x not in QUICK)], ids=str
)
def test_each_device_attends_with_its_own_heads(kv_layout, kv_dtype, kind, implementation):
    if kv_dtype == "int8":
        arrays, meant = Quantized(case=CASE, kv_dtype=kv_dtype).make()
    else:
        case = CASE.on(implementation)
        arrays = meant = case.make()
    placed = place(call_in_layout(kv_layout, arrays), mesh_of(kind), kv_layout)
    entry = partial(
        pp.ragged_paged_attention, kv_layout=kv_layout, implementation=implementation,
        return_lse=True,
    )  # fmt: skip
    call = jax.jit(lambda arrays: entry(**{"v_pages": None} | arrays))
    compiled = call.lower(placed).compile()
    assert collectives(compiled) == []
    results = compiled(placed)
    assert [tuple(x.sharding.spec)[:2] for x in results] == [(None, "tensor")] * 2
    assert_close(results, meant, 1e-2)


@KINDS
@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("kv_layout", CUT)
def test_each_device_writes_and_copies_its_own_heads_in_place(kv_layout, dtype, kind):
    on = mesh_of(kind)
    plain = make_pool(**SIZES, num_layers=1, dtype=dtype)
    pool = make_pool(
        **SIZES, num_layers=1, dtype=dtype, kv_layout=kv_layout,
        sharding=kv_pool_sharding(on, kv_layout=kv_layout),
    )  # fmt: skip
    for x in jax.tree.leaves(pool):
        assert {s.data.size for s in x.addressable_shards} == {x.size // on.size}
    k, v = np.random.default_rng(0).standard_normal((2, 6, 8, 16), np.float32)
    slots, copies = i32(0, 3, 9, 27, 28, -1), copies_of(i32(0, 2, 99, 1), i32(5, 0, 1, -1))

    def step(pool, k, v, slots, copies):
        return pp.copy_pages(pp.KVPool(layers=(pp.write_kv(pool.layers[0], k, v, slots),)), copies)

    whole = NamedSharding(on, P())
    tokens = jax.device_put((k, v), NamedSharding(on, P(None, "tensor")))
    arguments = (pool, *tokens, *jax.device_put((slots, copies), whole))
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    assert collectives(compiled) == []
    before = [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(pool)
              for s in x.addressable_shards]  # fmt: skip
    got = compiled(*arguments)
    assert before == [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(got)
                      for s in x.addressable_shards]  # fmt: skip
    [want] = step(plain, k, v, slots, copies).layers
    for name, x in layer_in_layout(kv_layout, want).items():
        if x is not None:
            np.testing.assert_array_equal(np.asarray(getattr(got.layers[0], name)), x)


@pytest.mark.parametrize(("kv_layout", "dtype", "kind"), QUICK, ids=str)
def test_each_device_rotates_and_writes_its_own_heads(kv_layout, dtype, kind):
    on = mesh_of(kind)
    kernel = "triton" if jax.default_backend() == "gpu" else "triton_interpret"
    write = jax.jit(partial(pp.rotate_and_write_kv, implementation=kernel), donate_argnums=0)
    rng = np.random.default_rng(0)
    # Of 8 bits: products are then exact, and sums of them the same if they are fused.
    qkv, cos, sin = (
        rng.standard_normal(shape).astype(jnp.bfloat16).astype(np.float32)
        for shape in [(6, 8, 5, 16), (6, 8), (6, 8)]
    )
    rotation, slots = (cos, sin), i32(0, 3, 9, 27, 28, -1)
    plain = make_pool(**SIZES, num_layers=1, dtype=dtype).layers[0]
    want_q, want = write(plain, qkv, slots, rotation=rotation)
    pool = make_pool(
        **SIZES, num_layers=1, dtype=dtype, kv_layout=kv_layout,
        sharding=kv_pool_sharding(on, kv_layout=kv_layout),
    )  # fmt: skip
    whole = NamedSharding(on, P())
    arguments = (
        pool.layers[0],
        jax.device_put(qkv, NamedSharding(on, P(None, "tensor"))),
        jax.device_put(slots, whole),
    )
    compiled = write.lower(*arguments, rotation=jax.device_put(rotation, whole)).compile()
    assert collectives(compiled) == []
    q, got = compiled(*arguments, rotation=jax.device_put(rotation, whole))
    np.testing.assert_array_equal(np.asarray(q), np.asarray(want_q))
    for name, x in layer_in_layout(kv_layout, want).items():
        if x is not None:
            written = getattr(got, name)
            assert {s.data.size for s in written.addressable_shards} == {x.size // on.size}
            np.testing.assert_array_equal(np.asarray(written), x)


@KINDS
def test_heads_of_k_before_heads_of_v_can_not_be_cut(kind):
    on = mesh_2d(2, names=("tensor",), kind=kind)
    message = "the first devices would hold K and the others V"
    with pytest.raises(ValueError, match=f"kv_layout='N2HD' must be another on a mesh: {message}"):
        kv_pool_sharding(on, kv_layout="N2HD")
    with pytest.raises(ValueError, match=f"kv_layout='N2HD' must not be cut: {message}"):
        make_pool(**SIZES, kv_layout="N2HD", sharding=NamedSharding(on, P(None, None, "tensor")))
    call = call_in_layout("N2HD", CASE.make())
    call["k_pages"] = jax.device_put(call["k_pages"], NamedSharding(on, P(None, None, "tensor")))
    entry = partial(pp.ragged_paged_attention, kv_layout="N2HD", implementation="triton_interpret")
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.jit(lambda k_pages, call: entry(k_pages=k_pages, v_pages=None, **call))(
            call.pop("k_pages"), {key: x for key, x in call.items() if x is not None}
        )


def test_a_pool_that_is_whole_on_every_device_may_have_any_layout(implementation):
    arrays = CASE.on(implementation).make()
    call = call_in_layout("N2HD", arrays)
    whole = NamedSharding(mesh_of(AxisType.Auto), P())
    placed = {key: jax.device_put(x, whole) for key, x in call.items() if x is not None}
    entry = partial(
        pp.ragged_paged_attention, kv_layout="N2HD", implementation=implementation, return_lse=True
    )
    results = jax.jit(lambda arrays: entry(v_pages=None, **arrays))(placed)
    assert_close(results, arrays, CASE.on(implementation).tolerance)
