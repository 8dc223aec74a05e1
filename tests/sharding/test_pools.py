"""Pools of every layout on a mesh: each device makes, writes and copies its own KV heads."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from pallas_paged.pages.sharding import kv_head_repeats, kv_pool_sharding
from tests.support import raw
from tests.support.devices import mesh
from tests.support.kv_pools import copies_of, make_pool, pool_bytes
from tests.support.lowering import named, pairwise
from tests.support.marks import slow
from tests.support.page_layouts import LAYOUTS, layer_in_layout
from tests.support.placement import buffers, collectives, mesh_2d, several

SIZES = dict(num_layers=1, num_kv_heads=8, num_pages=7, page_size=4, head_dim=16)
STORED = {
    "bfloat16": dict(dtype="bfloat16"),
    "int8": dict(dtype="int8"),
    "fp8 of one scale": dict(dtype="float8_e4m3fn", k_scales=[2**-6], v_scales=[2**-5]),
}
KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
ROWS = pairwise(kv_layout=LAYOUTS, stored=list(STORED), kind=list(KINDS), sharded=[True, False])
SLOTS = np.int32([0, 3, 9, 27, 28, -1])


def on_mesh(kind):
    return mesh_2d(several().size, names=("tensor",), kind=KINDS[kind])


def pool_on(on, kv_layout, stored):
    sharding = kv_pool_sharding(on, kv_layout=kv_layout)
    return make_pool(**SIZES, **STORED[stored], kv_layout=kv_layout, sharding=sharding)


def assert_holds(layer, kv_layout, wanted):
    """A layer has the bits of a layer of the default layout."""
    for name, x in layer_in_layout(kv_layout, wanted).items():
        assert (getattr(layer, name) is None) == (x is None)
        if x is not None:
            np.testing.assert_array_equal(getattr(layer, name), x, err_msg=name)


def check_step(step, layer, arguments, stored, in_place=True):
    """Every device does its part of a step that donates a layer, and gets what one device does.

    The step goes from a layer and arrays, each with its spec, to the next layer, in its memory, and
    to a result by heads or None.
    """
    on, kv_layout = layer.k_pages.sharding.mesh, layer.kv_layout
    placed = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in arguments]
    compiled = jax.jit(step, donate_argnums=0).lower(layer, *placed).compile()
    assert collectives(compiled) == []
    pages = [x for x in jax.tree.leaves(layer) if x.ndim]
    before, sizes = buffers(pages), [x.size // on.size for x in pages]
    assert len(set(before)) == len(pages) * on.size  # so that all can be donated
    layer, result = compiled(layer, *placed)
    pages = [x for x in jax.tree.leaves(layer) if x.ndim]
    assert not in_place or buffers(pages) == before
    assert [x.addressable_shards[0].data.size for x in pages] == sizes
    plain = make_pool(**SIZES, **STORED[stored]).layers[0]
    wanted, wanted_result = jax.jit(step)(plain, *(x for x, _ in arguments))
    assert_holds(layer, kv_layout, wanted)
    if result is not None:
        assert result.sharding.spec[:2] == (None, "tensor")
        np.testing.assert_array_equal(result, wanted_result)


def write_and_copy(layer, k, v, slots, copies):
    layers = (pp.write_kv(layer, k, v, slots),)
    return pp.copy_pages(pp.KVPool(layers=layers), copies).layers[0], None


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_each_device_creates_writes_and_copies_its_own_heads_in_place(row):
    on = on_mesh(row["kind"])
    pool = pool_on(on, row["kv_layout"], row["stored"])
    for x in jax.tree.leaves(pool):
        assert x.sharding.device_set == set(on.devices.flat)
        assert {s.data.size for s in x.addressable_shards} == {x.size // on.size if x.ndim else 1}
    plain = make_pool(**SIZES, **STORED[row["stored"]])
    assert_holds(pool.layers[0], row["kv_layout"], plain.layers[0])
    tokens = np.random.default_rng(0).standard_normal((2, 6, 8, 16), np.float32)
    copies = copies_of(np.int32([0, 2, 99, 1]), np.int32([5, 0, 1, -1]))
    spec = P(None, "tensor") if row["sharded"] else P()
    arguments = [*((x, spec) for x in tokens), (SLOTS, P()), (copies, P())]
    check_step(write_and_copy, pool.layers[0], arguments, row["stored"])


def rotating(stored, implementation):
    """A step of `rotate_and_write_kv`, and its arguments with their specs."""
    rng = np.random.default_rng(0)
    dtype = make_pool(**SIZES, **STORED["bfloat16"]).layers[0].k_pages.dtype
    # Numbers of 8 bits: their products are exact, and sums of them the same if they are fused.
    qkv, q_norm, k_norm, *rotation = (
        rng.standard_normal(shape).astype(dtype).astype(np.float32)
        for shape in [(6, 8, 5, 16), 16, 16, (6, 8), (6, 8)]
    )
    norms = {} if stored == "int8" else dict(q_norm=q_norm, k_norm=k_norm)

    def step(layer, qkv, slots, options):
        how = options | raw.by(implementation)
        return pp.rotate_and_write_kv(layer, qkv, slots, **how)[::-1]

    options = dict(rotation=tuple(rotation), **norms)
    return step, [(qkv.astype(dtype), P(None, "tensor")), (SLOTS, P()), (options, P())]


@pytest.mark.parametrize(
    ("kv_layout", "stored", "kind"),
    [
        ("HPND", "fp8 of one scale", "Auto"),
        *slow([("2NHD", "int8", "Explicit")]),
        *slow([("HPND", "bfloat16", "Explicit"), ("HPND", "int8", "Auto")]),
        *slow([("HND", "int8", "Auto"), ("NHD", "bfloat16", "Auto")]),
        *slow([("NH2D", "bfloat16", "Explicit")]),
    ],
)
@pytest.mark.parametrize("implementation", ["kernel", *slow(["xla"])])
def test_each_device_rotates_and_writes_its_own_heads(kv_layout, stored, kind, implementation):
    if implementation == "kernel":
        implementation = "triton" if jax.default_backend() == "gpu" else "triton_interpret"
    layer = pool_on(on_mesh(kind), kv_layout, stored).layers[0]
    step, arguments = rotating(stored, implementation)
    check_step(step, layer, arguments, stored, in_place=implementation != "triton_interpret")


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_types_on_an_explicit_mesh_say_which_heads_a_device_has(kv_layout, stored):
    """What is written lies as the pool, and queries and results of attention lie with it."""
    on = on_mesh("Explicit")
    write, arguments = rotating(stored, "triton_interpret")

    def step(layer, *arguments):
        layer, q = write(layer, *arguments)
        tables, lens = np.zeros((6, 2), np.int32), np.full(6, 8, np.int32)
        how = raw.by("triton_interpret")
        return layer, q, pp.paged_attention(q, layer, tables, lens, **how)

    given = pool_on(on, kv_layout, stored).layers[0]
    placed = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in arguments]
    layer, *results = jax.eval_shape(step, given, *placed)
    for new, old in zip(jax.tree.leaves(layer), jax.tree.leaves(given), strict=True):
        assert new.sharding == jax.typeof(old).sharding
    assert [x.sharding.spec[:2] for x in results] == [(None, "tensor")] * 2


def test_no_device_ever_has_all_of_a_pool():
    sharding = kv_pool_sharding(mesh(4), kv_layout="HPND")
    created = jax.jit(lambda: make_pool(**SIZES), out_shardings=sharding).lower().compile()
    memory = created.memory_analysis()
    assert memory.output_size_in_bytes <= pool_bytes(make_pool(**SIZES)) // 4 + 64
    assert memory.temp_size_in_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_other_axes_of_a_mesh_have_copies_of_a_pool(kind):
    on = mesh_2d(2, 2, names=("kv", "copy"), kind=KINDS[kind])
    pool = make_pool(**SIZES, sharding=kv_pool_sharding(on, "kv", kv_layout="HPND"))
    for x in jax.tree.leaves(pool):
        assert [s.data.shape for s in x.addressable_shards] == [(4, 7, 4, 16)] * 4
        assert [s.index[0].start for s in x.addressable_shards] == [0, 0, 4, 4]


def test_shardings_that_a_pool_can_not_have_are_refused():
    on = mesh_2d(2, 2, names=("a", "b"))
    sharding = NamedSharding(on, P(("a", "b")))
    with pytest.raises(ValueError, match=r"num_kv_heads=2 must be a multiple of the 4 devices"):
        make_pool(num_kv_heads=2, sharding=sharding)
    for wrong in (NamedSharding(on, P(None, "a")), P("a"), jax.devices()[0]):
        with pytest.raises(ValueError, match="must be a NamedSharding of the KV heads"):
            make_pool(num_kv_heads=4, sharding=wrong)
    with pytest.raises(ValueError, match=r"axis='tensor' must be one of .*'a', 'b'"):
        kv_pool_sharding(on)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        *[((32, 8, 1), 1), ((32, 8, 4), 1), ((32, 8, 8), 1), ((32, 8, 16), 2)],
        *[((8, 1, 8), 8), ((16, 2, 8), 4)],
        ((32, 8, 3), "num_q_heads=32 must be a multiple of num_devices=3"),
        ((12, 6, 4), "num_devices=4 must divide num_kv_heads=6 or be a multiple of it"),
        ((12, 8, 4), "num_q_heads=12 must be a multiple of num_kv_heads=8"),
        ((32, 8, 0), "num_devices=0 must be a positive integer"),
    ],
)
def test_every_device_has_as_many_kv_heads_or_the_sizes_are_refused(sizes, expected):
    names = ("num_q_heads", "num_kv_heads", "num_devices")
    sizes = dict(zip(names, sizes, strict=True))
    if isinstance(expected, int):
        assert kv_head_repeats(**sizes) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            kv_head_repeats(**sizes)
