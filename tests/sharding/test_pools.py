"""Pools on a mesh: made, written and copied by each device for its own heads."""

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
from pallas_paged.sharding import kv_head_repeats, kv_pool_sharding, page_table_sharding
from tests.support.devices import mesh
from tests.support.kv_pools import copies_of, make_pool, pool_bytes
from tests.support.marks import slow
from tests.support.page_tables import i32
from tests.support.placement import collectives, mesh_2d, several

SIZES = dict(num_kv_heads=8, num_pages=7, page_size=4, head_dim=16)
STORED = {
    "bfloat16": dict(dtype=jnp.bfloat16),
    "int8": dict(dtype=jnp.int8),
    "fp8 of one scale": dict(dtype="float8_e4m3fn", k_scales=[0.01, 0.02], v_scales=[0.01, 0.03]),
}
AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
KINDS = pytest.mark.parametrize("kind", AXIS_TYPES, ids=lambda kind: kind.name)


def mesh_of(kind):
    return mesh_2d(several().size, names=("tensor",), kind=kind)


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def buffers(tree):
    """Where each device has its part of each array."""
    return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)
            for s in x.addressable_shards]  # fmt: skip


@KINDS
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("cut", [True, False], ids=["tokens by heads", "whole tokens"])
def test_each_device_writes_its_own_heads_in_place(stored, kind, cut):
    on = mesh_of(kind)
    layer = make_pool(**SIZES, **STORED[stored]).layers[0]
    k, v = np.random.default_rng(0).standard_normal((2, 6, 8, 16), np.float32)
    slots = i32(0, 3, 9, 27, 28, -1)
    want = pp.write_kv(layer, k, v, slots)
    pool = make_pool(**SIZES, **STORED[stored], sharding=kv_pool_sharding(on))
    tokens = jax.device_put((k, v), NamedSharding(on, P(None, "tensor") if cut else P()))
    arguments = (pool.layers[0], *tokens, jax.device_put(slots, page_table_sharding(on)))
    compiled = jax.jit(pp.write_kv, donate_argnums=0).lower(*arguments).compile()
    assert collectives(compiled) == []
    before = buffers((pool.layers[0].k_pages, pool.layers[0].v_pages))
    got = compiled(*arguments)
    assert buffers((got.k_pages, got.v_pages)) == before
    assert_same(got, want)


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        *zip(STORED, itertools.cycle(AXIS_TYPES), strict=False),
        *slow(zip(STORED, itertools.cycle(AXIS_TYPES[::-1]), strict=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", ["kernel", *slow(["xla"])])
def test_each_device_rotates_and_writes_its_own_heads(stored, kind, implementation):
    on = mesh_of(kind)
    if implementation == "kernel":
        implementation = "triton" if jax.default_backend() == "gpu" else "triton_interpret"
    write = partial(pp.rotate_and_write_kv, implementation=implementation)
    layer = make_pool(**SIZES, **STORED[stored]).layers[0]
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.standard_normal((6, 8, 5, 16)), jnp.bfloat16)
    options = dict(
        rotation=tuple(rng.standard_normal((2, 6, 1, 8), np.float32)),
        q_norm=np.float32(rng.standard_normal(16)),
        k_norm=np.float32(rng.standard_normal(16)),
    )
    slots = i32(0, 3, 9, 27, 28, -1)
    want = jax.jit(write)(layer, qkv, slots, **options)
    pool = make_pool(**SIZES, **STORED[stored], sharding=kv_pool_sharding(on))
    whole = page_table_sharding(on)
    arguments = (
        pool.layers[0],
        jax.device_put(qkv, NamedSharding(on, P(None, "tensor"))),
        jax.device_put(slots, whole),
    )
    options = jax.device_put(options, whole)
    compiled = jax.jit(write, donate_argnums=0).lower(*arguments, **options).compile()
    assert collectives(compiled) == []
    before = buffers((pool.layers[0].k_pages, pool.layers[0].v_pages))
    got = compiled(*arguments, **options)
    assert got[0].sharding.spec[:2] == (None, "tensor")
    if implementation != "triton_interpret":
        assert buffers((got[1].k_pages, got[1].v_pages)) == before
    assert_same(got, want)


@KINDS
@pytest.mark.parametrize("stored", STORED)
def test_each_device_copies_pages_of_its_own_heads_in_place(stored, kind):
    on = mesh_of(kind)
    pool = make_pool(**SIZES, **STORED[stored])
    rng = np.random.default_rng(0)
    pool = jax.tree.map(
        lambda x: jnp.asarray(rng.integers(1, 100, x.shape)).astype(x.dtype) if x.ndim else x, pool
    )
    copies = copies_of(i32(0, 2, 99, 1), i32(5, 0, 1, -1))
    want = jax.tree.map(np.asarray, pp.copy_pages(pool, copies))
    placed = jax.tree.map(
        lambda x: jax.device_put(x, kv_pool_sharding(on) if x.ndim else page_table_sharding(on)),
        jax.tree.map(jnp.copy, pool),
    )
    copies = jax.device_put(copies, page_table_sharding(on))
    compiled = jax.jit(pp.copy_pages, donate_argnums=0).lower(placed, copies).compile()
    assert collectives(compiled) == []
    before = buffers([x for x in jax.tree.leaves(placed) if x.ndim])
    got = compiled(placed, copies)
    assert buffers([x for x in jax.tree.leaves(got) if x.ndim]) == before
    assert_same(got, want)


@KINDS
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_a_pool_is_created_on_its_devices(stored, shape, kind):
    on = mesh_2d(*shape, names=("data", "tensor")[-len(shape) :], kind=kind)
    pool = make_pool(**SIZES, **STORED[stored], sharding=kv_pool_sharding(on))
    want = make_pool(**SIZES, **STORED[stored])
    assert_same(pool, want)
    for x in jax.tree.leaves(pool):
        heads = (2,) if x.ndim else ()
        assert {s.data.shape for s in x.addressable_shards} == {(*heads, *x.shape[1:])}
        assert x.sharding.device_set == set(on.devices.flat)
    pages = [x for x in jax.tree.leaves(pool) if x.ndim]
    assert len(set(buffers(pages))) == len(pages) * on.size  # so that all can be donated


def test_no_device_ever_has_all_of_a_pool():
    sharding = kv_pool_sharding(mesh(4))
    created = jax.jit(lambda: make_pool(**SIZES), out_shardings=sharding).lower().compile()
    memory = created.memory_analysis()
    assert memory.output_size_in_bytes <= pool_bytes(make_pool(**SIZES)) // 4 + 64
    assert memory.temp_size_in_bytes == 0


def test_a_pool_is_cut_along_another_axis_of_the_mesh():
    on = mesh_2d(2, 4, names=("kv", "copy"))
    pool = make_pool(**SIZES | dict(num_kv_heads=2), sharding=kv_pool_sharding(on, "kv"))
    shards = pool.layers[0].k_pages.addressable_shards
    assert [s.data.shape[0] for s in shards] == [1] * 8


def test_shardings_that_a_pool_can_not_have_are_refused():
    on = mesh(4)
    with pytest.raises(ValueError, match=r"num_kv_heads=2 must be a multiple of the 4 devices"):
        make_pool(num_kv_heads=2, sharding=kv_pool_sharding(on))
    for wrong in (NamedSharding(on, P(None, "tensor")), P("tensor"), jax.devices()[0]):
        with pytest.raises(ValueError, match="must be a NamedSharding that cuts the KV heads"):
            make_pool(num_kv_heads=4, sharding=wrong)
    with pytest.raises(ValueError, match=r"axis='heads' must be one of .*'tensor'"):
        kv_pool_sharding(on, "heads")


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "num_devices", "repeats"),
    [(32, 8, 1, 1), (32, 8, 4, 1), (32, 8, 8, 1), (32, 8, 16, 2), (8, 1, 8, 8), (16, 2, 8, 4)],
)
def test_every_device_has_as_many_kv_heads(num_q_heads, num_kv_heads, num_devices, repeats):
    sizes = dict(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, num_devices=num_devices)
    assert kv_head_repeats(**sizes) == repeats
    assert num_kv_heads * repeats == max(num_kv_heads, num_devices)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 8, 3), "num_q_heads=32 must be a multiple of num_devices=3"),
        ((12, 6, 4), "num_devices=4 must divide num_kv_heads=6 or be a multiple of it"),
        ((12, 8, 4), "num_q_heads=12 must be a multiple of num_kv_heads=8"),
        ((32, 8, 0), "num_devices=0 must be a positive integer"),
    ],
)
def test_heads_that_can_not_be_divided_are_refused(sizes, message):
    names = ("num_q_heads", "num_kv_heads", "num_devices")
    with pytest.raises(ValueError, match=message):
        kv_head_repeats(**dict(zip(names, sizes, strict=True)))
