"""The pool: writes, page copies, updates in place."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.kv_pools import copies_of, make_pool, pool_bytes
from tests.support.page_tables import INT32_MAX, INT32_MIN, i32

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def numbered_pool(**sizes):
    """A pool in which every element is different."""
    pool = make_pool(**sizes)
    leaves, treedef = jax.tree.flatten(pool)
    size = leaves[0].size
    return jax.tree.unflatten(
        treedef,
        [
            (jnp.arange(size) + i * size).reshape(x.shape).astype(x.dtype)
            for i, x in enumerate(leaves)
        ],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_created_pool_is_zero_and_layers_have_their_own_buffers(dtype):
    pool = make_pool(dtype=dtype)
    leaves = jax.tree.leaves(pool)
    assert len(pool.layers) == 2
    assert all(layer.k_scales is None and layer.v_scales is None for layer in pool.layers)
    assert {(x.shape, x.dtype) for x in leaves} == {((2, 4, 2, 3), jnp.dtype(dtype))}
    assert not any(np.any(x) for x in leaves)
    # One buffer behind two leaves could not be donated.
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_layers=0), "num_layers=0 must be a positive integer"),
        (dict(num_kv_heads=-2), "num_kv_heads=-2 must be a positive integer"),
        (dict(head_dim=1.0), r"head_dim=1.0 must be a positive integer"),
        (dict(num_pages=0), "num_pages=0 must be a positive integer"),
        (dict(page_size=3), "page_size=3 must be a power of two from 1 to 256"),
        (dict(num_pages=2**31), r"num_pages=2147483648 \* page_size=2 \+ 1 must be at most"),
        (
            dict(dtype=jnp.int16),
            "dtype=int16 must be one of float32, bfloat16, float16, int8, float8",
        ),
        (dict(dtype=np.float64), "dtype=float64 must be one of"),
        (dict(dtype=None), "dtype=None must be one of float32"),
        (dict(dtype="nope"), "dtype='nope' must be one of float32"),
        (dict(dtype=[1]), r"dtype=\[1\] must be one of float32"),
        (dict(num_pages=None), "num_pages=None must be a positive integer"),
        (dict(page_size="2"), "page_size='2' must be a positive integer"),
    ],
)
def test_create_refuses(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_pool(**sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 2])
def test_write_kv_writes_the_named_slots_and_nothing_else(dtype, page_size):
    pool = numbered_pool(page_size=page_size, dtype=dtype)
    num_slots = 4 * page_size
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 8, 2, 3)).astype(np.float32)
    slots = i32(2, num_slots, 0, -1, num_slots - 1, INT32_MAX, INT32_MIN, -num_slots)
    layer = pool.layers[0]
    got = jax.jit(pp.write_kv)(layer, k, v, slots)
    assert got.k_scales is None and got.v_scales is None
    for name, tokens in (("k_pages", k), ("v_pages", v)):
        pages, new = getattr(layer, name), getattr(got, name)
        want = np.array(pages).reshape(2, num_slots, 3)
        for token, slot in zip(tokens, slots, strict=True):
            if 0 <= slot < num_slots:
                want[:, slot] = token.astype(want.dtype)
        assert new.dtype == dtype and new.shape == pages.shape
        np.testing.assert_array_equal(np.asarray(new).reshape(want.shape), want)


def test_write_kv_of_zero_tokens():
    pool = numbered_pool()
    none = np.zeros((0, 2, 3), np.float32)
    layer = pp.write_kv(pool.layers[0], none, none, i32())
    np.testing.assert_array_equal(layer.k_pages, pool.layers[0].k_pages)
    np.testing.assert_array_equal(layer.v_pages, pool.layers[0].v_pages)


def write_arguments(**changes):
    pages, tokens = np.zeros((2, 4, 2, 3), np.float32), np.zeros((5, 2, 3), np.float32)
    arguments = dict(k_pages=pages, v_pages=pages, k=tokens, v=tokens, slots=i32(0, 1, 2, 3, 4))
    arguments |= changes
    layer = pp.LayerKV(k_pages=arguments.pop("k_pages"), v_pages=arguments.pop("v_pages"))
    return dict(layer=layer) | arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(k_pages=np.zeros((4, 2, 3), np.float32)), r"\[num_kv_heads, .*float32\(4, 2, 3\)"),
        (dict(v_pages=np.zeros((2, 4, 4, 3), np.float32)), r"alike, got .*float32\(2, 4, 4, 3\)"),
        (dict(v_pages=np.zeros((2, 4, 2, 3), np.float16)), r"float32\(.*float16\(2, 4, 2, 3\)"),
        (dict(v_pages=np.zeros((2, 4, 2, 3), np.int8)), r"float32\(.*int8\(2, 4, 2, 3\)"),
        (dict(k_pages=np.zeros((2, 4, 2, 3), np.int16)), r"k_pages.dtype=int16 must be one of flo"),
        (dict(v_pages=np.zeros((2, 4, 2, 3), np.int16)), r"float32\(.*int16\(2, 4, 2, 3\)"),
        (dict(k=np.zeros((5, 2, 3), np.int32)), r"k must be floating, got int32"),
        (dict(k=np.zeros((5, 3, 3), np.float32)), r"num_kv_heads=2, head_dim=3\].*\(5, 3, 3\)"),
        (dict(k=np.zeros((5, 6), np.float32)), r"k and v must be .* got \(5, 6\)"),
        (dict(v=np.zeros((4, 2, 3), np.float32)), r"k and v must be .* and \(4, 2, 3\)"),
        (dict(slots=i32(0, 1)), r"slots must be int32\[5\], got int32\[2\]"),
        (dict(slots=np.arange(5)), r"slots must be int32\[5\], got int64\[5\]"),
    ],
)
def test_write_kv_refuses(changes, message):
    arguments = write_arguments(**changes)
    with pytest.raises(ValueError, match=message):
        pp.write_kv(**arguments)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (lambda layer: pp.KVPool(layers=(layer,)), "KVPool"),
        (lambda layer: None, "NoneType"),
        (lambda layer: layer.k_pages, "ndarray"),
        (lambda layer: (layer.k_pages, layer.v_pages), "tuple"),
    ],
    ids=["pool", "none", "pages", "tuple"],
)
def test_write_kv_takes_a_layer_only(layer, kind):
    arguments = write_arguments()
    arguments["layer"] = layer(arguments["layer"])
    with pytest.raises(ValueError, match=rf"^layer must be a LayerKV, got {kind}\b"):
        pp.write_kv(**arguments)
    with pytest.raises(ValueError, match=rf"^layer must be a LayerKV, got {kind}\b"):
        jax.eval_shape(lambda: pp.write_kv(**arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(k_pages=None), "layer.k_pages=None must be an array"),
        (dict(v_pages="pages"), "layer.v_pages='pages' must be an array"),
        (dict(k_pages=np.zeros((2, 4, 2, 3))), "k_pages.dtype=float64 must be one of float32"),
        (dict(k=None), "k=None must be an array"),
        (dict(v="tokens"), "v='tokens' must be an array"),
        (dict(k=[[1.0], [2.0, 3.0]]), r"k=\[\[1.0\], \[2.0, 3.0\]\] must be an array"),
        (dict(v=np.array(["a"])), "v must be floating, got <U1"),
        (dict(slots=None), "slots=None must be an array"),
        (dict(slots=[2**40, 1, 2, 3, 4]), r"slots=\[1099511627776, .*must hold integers of int32"),
        (dict(slots=[0.0] * 5), r"slots must be int32\[5\], got float32\[5\]"),
    ],
)
def test_write_kv_names_bad_arrays(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        pp.write_kv(**write_arguments(**changes))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_layer_goes_through_jit_loops_and_donation(dtype):
    layer = make_pool(dtype=dtype).layers[0]
    tokens = np.random.default_rng(0).standard_normal((8, 1, 2, 3)).astype(np.float32)
    expected = pp.write_kv(layer, tokens[:, 0], -tokens[:, 0], np.arange(8, dtype=np.int32))

    def write(layer, i):
        token = jnp.asarray(tokens)[i]
        return pp.write_kv(layer, token, -token, i[None])

    def scan(layer):
        slots = jnp.arange(8, dtype=jnp.int32)
        return jax.lax.scan(lambda layer, i: (write(layer, i), None), layer, slots)[0]

    def loop(layer):
        def step(carry):
            return write(*carry), carry[1] + 1

        start = layer, jnp.int32(0)
        return jax.lax.while_loop(lambda carry: carry[1] < 8, step, start)[0]

    for run in (scan, loop):
        donated = jax.tree.map(jnp.array, layer)
        filled = jax.jit(run, donate_argnums=0)(donated)
        assert isinstance(filled, pp.LayerKV)
        assert jax.tree.structure(filled) == jax.tree.structure(layer)
        assert len(jax.tree.leaves(filled)) == (2 if dtype == "float32" else 4)
        assert all(x.is_deleted() for x in jax.tree.leaves(donated))
        for actual, wanted in zip(jax.tree.leaves(filled), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_pages_copies_every_layer_and_reads_before_it_writes(dtype):
    pool = numbered_pool(dtype=dtype)
    # Page 1 is overwritten and read in the same call.
    copied = jax.jit(pp.copy_pages)(pool, copies_of(i32(0, 1), i32(1, 3)))
    for before, after in zip(jax.tree.leaves(pool), jax.tree.leaves(copied), strict=True):
        np.testing.assert_array_equal(after, np.asarray(before)[:, [0, 0, 2, 1]])


def test_copy_pages_drops_padding():
    pool = numbered_pool()
    src = i32(4, 0, -1, 0, INT32_MAX, 0, INT32_MIN, 4)
    dst = i32(0, 4, 1, -1, 2, INT32_MIN, 3, 4)
    copied = pp.copy_pages(pool, copies_of(src.reshape(2, 4), dst.reshape(2, 4)))
    for before, after in zip(jax.tree.leaves(pool), jax.tree.leaves(copied), strict=True):
        np.testing.assert_array_equal(after, before)


def test_copy_pages_copies_scales_too():
    pool = numbered_pool()
    scales = tuple(jnp.arange(16.0).reshape(2, 4, 2) + i for i in range(2))
    layers = [
        replace(layer, k_scales=scale, v_scales=-scale)
        for layer, scale in zip(pool.layers, scales, strict=True)
    ]
    copied = pp.copy_pages(pp.KVPool(layers=tuple(layers)), copies_of(i32(2), i32(0)))
    for before, after in zip(scales, copied.layers, strict=True):
        np.testing.assert_array_equal(after.k_scales, np.asarray(before)[:, [2, 1, 2, 3]])
        np.testing.assert_array_equal(after.v_scales, -np.asarray(before)[:, [2, 1, 2, 3]])


@pytest.mark.parametrize(
    ("pages", "rule"),
    [
        (None, "=None must be an array"),
        ("0", "='0' must be an array"),
        ([[0], [1, 2]], r"=\[\[0\], \[1, 2\]\] must be an array"),
        ([2**40], r"=\[1099511627776\] must hold integers of int32"),
        ([0.0], r" must be int32\[1\], got float32\[1\]"),
    ],
)
def test_copy_pages_names_bad_arrays(pages, rule):
    for name in ("src_pages", "dst_pages"):
        copies = pp.PageCopies(**dict(src_pages=i32(0), dst_pages=i32(1)) | {name: pages})
        with pytest.raises(ValueError, match=f"^copies.{name}{rule}"):
            pp.copy_pages(make_pool(), copies)


def test_copy_pages_refuses():
    with pytest.raises(ValueError, match=r"src_pages must be int32\[1\], got float32\[1\]"):
        pp.copy_pages(make_pool(), copies_of(np.zeros(1, np.float32), i32(0)))
    with pytest.raises(ValueError, match=r"dst_pages must be int32\[1\], got int32\[2\]"):
        pp.copy_pages(make_pool(), copies_of(i32(0), i32(0, 1)))


def abstract_pool():
    return jax.eval_shape(lambda: make_pool(num_pages=4096, page_size=16, head_dim=64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_donated_write_is_in_place(dtype):
    if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12):
        pytest.skip("this XLA CPU compiler widens bfloat16 scatters, whole operand included")
    pages = jax.ShapeDtypeStruct((2, 4096, 16, 64), dtype)
    tokens = jax.ShapeDtypeStruct((8, 2, 64), jnp.float32)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    layer = pp.LayerKV(k_pages=pages, v_pages=pages)
    write = jax.jit(pp.write_kv, donate_argnums=0)
    memory = write.lower(layer, tokens, tokens, slots).compile().memory_analysis()
    size = pages.size * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes == 2 * size
    assert memory.temp_size_in_bytes < size // 100


def test_donated_copy_is_in_place():
    pool, pages = abstract_pool(), jax.ShapeDtypeStruct((4,), jnp.int32)
    copies = pp.PageCopies(src_pages=pages, dst_pages=pages)
    compiled = jax.jit(pp.copy_pages, donate_argnums=0).lower(pool, copies).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes(pool)
    assert memory.temp_size_in_bytes < pool_bytes(pool) // 100


def test_decode_loop_writes_in_place():
    pool = abstract_pool()
    table = jax.eval_shape(
        lambda: pp.create_page_table(num_pages=4096, page_size=16, max_seqs=8, pages_per_seq=64)
    )

    def loop(table, pool):
        rows = jnp.arange(8, dtype=jnp.int32)
        ones = jnp.ones(8, jnp.int32)

        def step(carry):
            table, pool, ok = carry
            table, ok = pp.extend(table, ones, max_new_tokens=1)
            slots = pp.slot_mapping(table, rows, table.seq_lens - 1)
            kv = jnp.broadcast_to(slots.astype(jnp.float32)[:, None, None], (8, 2, 64))
            layers = tuple(pp.write_kv(layer, kv, kv, slots) for layer in pool.layers)
            return table, pp.KVPool(layers=layers), ok

        return jax.lax.while_loop(lambda carry: jnp.all(carry[2]), step, (table, pool, ones > 0))

    compiled = jax.jit(loop, donate_argnums=(0, 1)).lower(table, pool).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes(pool) // 100
