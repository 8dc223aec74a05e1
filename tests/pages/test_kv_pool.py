"""The pool: created, written and copied, in every page layout and in place."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.kv_pools import assert_written_and_copied_in_place, pool_bytes
from tests.support.lowering import few_with_every_level, named, pairwise
from tests.support.marks import slow
from tests.support.page_layouts import LAYOUTS, layer_in_layout
from tests.support.page_tables import INT32_MAX, INT32_MIN, assert_same, copy_pages, i32, jitted
from tests.support.page_tables import write_kv as jitted_write
from tests.support.quantized_cases import LARGEST, quantize

KV_DTYPES = ["int8", "float8_e4m3fn"]
TINY = np.finfo(np.float32).tiny
H, P, N, D = 3, 5, 4, 6  # heads, pages, tokens of a page, elements of a head
SIZES = dict(num_pages=P, num_kv_heads=H, page_size=N, head_dim=D)
# The dtypes of pages, and the scales of K and V where one scale is for all tokens.
STORED = {
    **{dtype: dict(dtype=dtype) for dtype in ("float32", "bfloat16", "float16", *KV_DTYPES)},
    **{f"{dtype} of one scale": dict(dtype=dtype, scales=(0.01, 0.5)) for dtype in KV_DTYPES},
}


def create(num_layers=2, dtype="float32", **more):
    more = {"kv_layout": "HPND"} | more
    return pp.create_kv_pool(num_layers=num_layers, dtype=dtype, **SIZES | more)


def options_of(stored, num_layers=2):
    scales = STORED[stored].get("scales", ())
    lists = zip(("k_scales", "v_scales"), ([x] * num_layers for x in scales), strict=False)
    return dict(dtype=STORED[stored]["dtype"], num_layers=num_layers, **dict(lists))


def random_layer(dtype, scales=None):
    """A layer of the default layout with random elements and scales."""
    rng = np.random.default_rng(0)
    pages = rng.integers(1, 100, (2, H, P, N, D)).astype(jnp.dtype(dtype))
    if scales is not None:
        scales = np.float32(scales)
    elif dtype in KV_DTYPES:
        scales = rng.uniform(1, 2, (2, H, P, N)).astype(np.float32)
    else:
        scales = None, None
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    return pp.LayerKV(**dict(zip(names, (*pages, *scales), strict=True)), kv_layout="HPND")


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_a_pool_has_the_shapes_of_its_layout(kv_layout, stored):
    plain = random_layer(**STORED[stored])
    want = pp.LayerKV(**layer_in_layout(kv_layout, plain), kv_layout=kv_layout)
    pool = jax.eval_shape(lambda: create(**options_of(stored), kv_layout=kv_layout))
    assert len(pool.layers) == 2
    for layer in pool.layers:
        assert jax.tree.structure(layer) == jax.tree.structure(want)
        for got, x in zip(jax.tree.leaves(layer), jax.tree.leaves(want), strict=True):
            assert (got.shape, got.dtype) == (x.shape, x.dtype)
        assert (layer.num_kv_heads, layer.num_pages, layer.page_size) == (H, P, N)


def test_sizes_of_numpy_do_not_overflow():
    sizes = dict(num_kv_heads=np.int8(100), head_dim=np.int8(8), kv_layout="NH2D")
    [layer] = jax.eval_shape(lambda: create(np.int8(1), **sizes)).layers
    assert layer.k_pages.shape == (P, N, 200, 8)


@pytest.mark.parametrize(("dtype", "num_arrays"), [("float32", 4), ("int8", 8)])
def test_a_created_pool_is_zero_in_buffers_of_its_own(dtype, num_arrays):
    leaves = jax.tree.leaves(create(dtype=dtype))
    # One buffer behind two leaves could not be donated.
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves) == num_arrays
    assert not any(np.any(np.asarray(x)) for x in leaves)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_scales_of_a_checkpoint(dtype):
    scales = dict(k_scales=[TINY, 2], v_scales=np.float32([3, 4]))
    created = jitted(lambda: create(dtype=dtype, **scales))()
    copied = copy_pages(created, pp.PageCopies(src_pages=i32(0), dst_pages=i32(1)))
    for pool in (created, copied):
        found = [x for layer in pool.layers for x in (layer.k_scales, layer.v_scales)]
        assert [x.item() for x in found] == [TINY, 3, 2, 4]
        assert {(x.shape, x.dtype.name) for x in found} == {((), "float32")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_layers=0), "num_layers=0 must be a positive integer"),
        (dict(num_kv_heads=-2), "num_kv_heads=-2 must be a positive integer"),
        (dict(head_dim=1.0), r"head_dim=1.0 must be a positive integer"),
        (dict(page_size=3), "page_size=3 must be a power of two from 1 to 256"),
        (dict(dtype="int16"), "dtype=int16 must be one of float32, bfloat16, float16, int8, floa"),
        (dict(dtype=None), "dtype=None must be one of float32"),
        (dict(dtype="nope"), "dtype='nope' must be one of float32"),
        (dict(kv_layout=None), "kv_layout=None must be one of"),
        (dict(dtype="float16", k_scales=[1, 1], v_scales=[1, 1]), "must be None with pages of flo"),
        (dict(k_scales=[1, 1]), "k_scales and v_scales must be given both, or neither"),
        (dict(k_scales=[1], v_scales=[1, 1]), r"k_scales=\[1.0\] must be num_layers=2 numbers"),
        (dict(k_scales=[1, 1], v_scales=[1, 0]), r"v_scales=\[1.0, 0.0\] must be .* at least 1.1"),
        (dict(k_scales=[1, 1e-45], v_scales=[1, 1]), "at least 1.1"),
        (dict(k_scales=[1, np.nan], v_scales=[1, 1]), r"k_scales\[1\]=nan must be finite"),
        (dict(k_scales=[1, 1], v_scales=[1, 10**400]), r"v_scales\[1\]=10* must be finite"),
        (dict(k_scales=[1, True], v_scales=[1, 1]), r"k_scales\[1\]=True must be a number"),
        (dict(k_scales=[1, "1"], v_scales=[1, 1]), r"k_scales\[1\]='1' must be a number"),
        (dict(k_scales=1.0, v_scales=[1, 1]), "k_scales=1.0 must be num_layers=2 numbers"),
        (dict(k_scales=[1, 1], v_scales="11"), "v_scales='11' must be num_layers=2 numbers"),
        (dict(k_scales=[1, 1], v_scales=np.array(1.0)), "v_scales=.* must be num_layers=2 num"),
    ],
)
def test_create_refuses(changes, message):
    dtype = "int8" if {"k_scales", "v_scales"} & changes.keys() else "float32"
    with pytest.raises(ValueError, match=message):
        create(**dict(dtype=dtype) | changes)


def written_by_numpy(layer, k, v, slots):
    held = (slots >= 0) & (slots < P * N)

    def write(x, tokens):
        flat = x.reshape(H, P * N, *x.shape[3:]).copy()
        flat[:, slots[held]] = tokens[held].swapaxes(0, 1)
        return flat.reshape(x.shape)

    new = {}
    for name, x in (("k", np.float32(k)), ("v", np.float32(v))):
        pages, scales = getattr(layer, f"{name}_pages"), getattr(layer, f"{name}_scales")
        dtype = pages.dtype
        if scales is None:
            x = x.astype(dtype)
        elif np.ndim(scales):
            x, of_tokens = quantize(x, dtype.name)
            new[f"{name}_scales"] = write(scales, of_tokens)
        else:
            x = np.clip(x / scales, -LARGEST[dtype.name], LARGEST[dtype.name])
            x = (np.rint(x) if dtype == np.int8 else x).astype(dtype)
        new[f"{name}_pages"] = write(pages, x)
    return replace(layer, **new)


def copied_by_numpy(layer, src, dst):
    real = (src >= 0) & (src < P) & (dst >= 0) & (dst < P)

    def copied(x):
        after = np.array(x)
        if after.ndim:
            after[:, dst[real]] = x[:, src[real]]
        return after

    return jax.tree.map(copied, layer)


def assert_nearly(got, want):
    """XLA may differ in the last bit of a scale or a quotient, so ties may round differently."""
    for name, x in layer_in_layout(got.kv_layout, want).items():
        actual = getattr(got, name)
        if x is None:
            assert actual is None
        elif name.endswith("scales"):
            assert actual.dtype == np.float32
            np.testing.assert_allclose(actual, x, rtol=2e-7)
        else:
            assert (actual.dtype, actual.shape) == (x.dtype, x.shape)
            off = actual.astype(np.float32) - x.astype(np.float32)
            if actual.dtype.itemsize > 1:
                assert not off.any(), name
            assert (off != 0).mean() <= 0.02
            assert abs(off).max() <= (1 if actual.dtype == np.int8 else 32), name


@jitted
def write_and_copy(layer, k, v, slots, copies):
    layer = pp.write_kv(layer, k, v, slots)
    return layer, pp.copy_pages(pp.KVPool(layers=(layer, layer)), copies)


TOKENS = ["float32", "bfloat16", "float16"]
WRITTEN = pairwise(kv_layout=["HPND"], stored=[*STORED], tokens=TOKENS[:1])
OTHERS = pairwise(kv_layout=LAYOUTS, stored=[*STORED], tokens=TOKENS)


@pytest.mark.parametrize("row", [*WRITTEN, *few_with_every_level(OTHERS)], ids=named)
def test_writes_and_copies_equal_numpy_and_touch_nothing_else(row):
    kv_layout, stored, tokens_dtype = row.values()
    plain = random_layer(**STORED[stored])
    layer = pp.LayerKV(**layer_in_layout(kv_layout, plain), kv_layout=kv_layout)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((2, 9, H, D)) * [[[[1]]], [[[100]]]]).astype(tokens_dtype)
    slots = i32(6, P * N, 0, -1, 19, INT32_MAX, INT32_MIN, -P * N, 13)
    # Page 1 is overwritten and read in the same call; the others are padding.
    src = i32(0, 1, P, 2, -1, 3, INT32_MAX, 4)
    dst = i32(1, 3, 0, P, 0, -1, 2, INT32_MIN)
    copies = pp.PageCopies(src_pages=src.reshape(2, 4), dst_pages=dst.reshape(2, 4))
    got, copied = write_and_copy(layer, k, v, slots, copies)
    want = written_by_numpy(plain, k, v, slots)
    assert jax.tree.structure(got) == jax.tree.structure(layer)
    assert_nearly(got, want)
    assert len(copied.layers) == 2
    for one in copied.layers:
        assert jax.tree.structure(one) == jax.tree.structure(layer)
        assert_nearly(one, copied_by_numpy(want, src, dst))


BIG = dict(num_pages=4096, num_kv_heads=2, page_size=16, head_dim=64)


@pytest.mark.smoke
def test_a_layer_goes_through_jit_loops_and_donation_in_place():
    def scan_and_loop(layer, tokens):
        def step(carry, _=None):
            layer, i = carry
            token = jnp.asarray(tokens)[i]
            return (pp.write_kv(layer, token, -token, i[None]), i + 1), None

        carry, _ = jax.lax.scan(step, (layer, jnp.int32(0)), length=4)
        return jax.lax.while_loop(lambda x: x[1] < 8, lambda x: step(x)[0], carry)[0]

    run = jax.jit(scan_and_loop, donate_argnums=0)
    layer = jax.tree.map(np.zeros_like, random_layer("int8"))
    tokens = np.random.default_rng(0).standard_normal((8, 1, H, D)).astype(np.float32)
    donated = jax.tree.map(jnp.array, layer)
    filled = run(donated, tokens)
    assert isinstance(filled, pp.LayerKV)
    assert jax.tree.structure(filled) == jax.tree.structure(layer)
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))
    slots = np.arange(8, dtype=np.int32)
    assert_same(filled, jitted_write(layer, tokens[:, 0], -tokens[:, 0], slots))

    [big] = jax.eval_shape(lambda: create(1, "int8", **BIG)).layers
    lowered = run.lower(big, jax.ShapeDtypeStruct((8, 1, 2, 64), jnp.float32))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < pool_bytes(big) // 100


def test_a_layer_is_checked_when_it_is_made_and_when_it_is_used():
    pages = np.zeros((4, 8, 2, 16), np.float32)
    layer = pp.LayerKV(pages, pages)
    assert layer.kv_layout == "NHD" and (layer.num_pages, layer.page_size) == (4, 8)
    assert (layer.num_kv_heads, layer.head_dim) == (2, 16)
    with pytest.raises(ValueError, match=r"page_size=3 must .*shape=\(4, 3, 2, 16\) is \[nu"):
        pp.LayerKV(pages[:, :3], pages[:, :3])
    listed = pp.LayerKV(pages.tolist(), pages.tolist())
    assert_same(pp.write_kv(listed, pages[0], pages[0], i32(*range(8))), layer)
    assert pp.LayerKV(pages, v_head_dim=8.0).v_head_dim == 8
    rebuilt = jax.tree.map(lambda x: x[:, :3], layer)  # may hold anything, such as shardings
    with pytest.raises(ValueError, match="page_size=3 must be a power of two"):
        pp.write_kv(rebuilt, *np.zeros((2, 1, 2, 16), np.float32), i32(0))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


ONE = zeros(5, 4, 6, 8)
BYTES = dict.fromkeys(("k_pages", "v_pages"), zeros(2, 4, 2, 3, dtype=np.int8))
SCALES = zeros(2, 4, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(k_pages=zeros(4, 2, 3)), r"k_pages.shape=\(4, 2, 3\) must be \[num_kv_heads, "),
        (dict(v_pages=zeros(2, 4, 4, 3)), r"v_pages float32\[2, 4, 4, 3\] must have one dtype"),
        (dict(v_pages=zeros(2, 4, 2, 3, dtype=np.float16)), r"32\[.*float16\[2, 4, 2, 3\] must"),
        (dict.fromkeys(BYTES, zeros(2, 4, 2, 3, dtype=np.int16)), "k_pages.dtype=int16 must be"),
        (dict(k=zeros(5, 2, 3, dtype=np.int32)), r"^k must be floating, got int32"),
        (dict(k=zeros(5, 3, 3)), r"num_kv_heads=2, head_dim=3\].*\(5, 3, 3\)"),
        (dict(k=zeros(5, 6)), r"k and v must be .* got \(5, 6\)"),
        (dict(v=zeros(4, 2, 3)), r"k and v must be .* and \(4, 2, 3\)"),
        (dict(slots=i32(0, 1)), r"slots must be int32\[5\], got int32\[2\]"),
        (dict(k_pages=None), "^k_pages=None must be an array"),
        (dict(v_pages="pages"), "^v_pages='pages' must be an array"),
        (dict(k=None), "^k=None must be an array"),
        (dict(v=np.array(["a"])), "^v must be an array of numbers, got a ndarray of <U1"),
        (dict(v=jnp.float32), "^v must be an array of numbers, got a _S.* of float32"),
        (dict(slots=jax.random.key(0)), "^slots must be an array of numbers, got .* of key<"),
        (dict(slots=None), "^slots=None must be an array"),
        (BYTES, "pages of int8 need k_scales and v_scales"),
        (BYTES | dict(k_scales=SCALES), "pages of int8 need v_scales"),
        (BYTES | dict(k_scales=SCALES, v_scales=SCALES[..., 0]), r"v_scales must be .*\[2, 4\]$"),
        (BYTES | dict(k_scales=SCALES, v_scales=np.float32(1)), r"v_scales must be .*32\[\]$"),
        (BYTES | dict(k_scales=np.float32(1), v_scales=SCALES), r"k_scales must be .*32\[\]$"),
        (BYTES | dict(v_scales=SCALES), "pages of int8 need k_scales"),
        (BYTES | dict(k_scales=SCALES[:1], v_scales=SCALES), r"k_scales must be .*\[1, 4, 2\]"),
        *(
            (BYTES | dict(k_scales=SCALES, v_scales=np.ones((2, 4, 2), x)), f"v_scales .* got {x}")
            for x in ("float16", "float64")
        ),
        (BYTES | dict(v_pages=zeros(2, 4, 2, 3, dtype=jnp.float8_e4m3fn)), "must have one dtype"),
        (BYTES | dict(k_scales="ab", v_scales=SCALES), "k_scales='ab' must be an array"),
        (dict(v_scales=SCALES), "k_scales and v_scales must be None with pages of float32"),
        (dict(k_scales=SCALES), "k_scales and v_scales must be None with pages of float32"),
        (dict(k_pages=ONE, v_pages=ONE, kv_layout="NH2D"), "v_pages must be None with kv_layout="),
        (dict(k_pages=ONE, v_pages=None, kv_layout="NHXD"), "kv_layout='NHXD' must be one of .*'N"),
        (dict(kv_layout=["NHD"]), r"kv_layout=\['NHD'\] must be one of"),
        (dict(k_pages=ONE, v_pages=None, kv_layout="NHD"), "v_pages=None must be an array"),
        *(
            (dict(k_pages=zeros(*shape), v_pages=None, kv_layout=kv_layout), message)
            for kv_layout, shape, message in (
                ("2NHD", (5, 8, 4, 32), r"must be \[num_pages, 2, page_size, num_kv_heads, head_d"),
                ("2NHD", (5, 3, 8, 2, 32), r"k_pages.shape=\(5, 3, 8, 2, 32\) must be"),
                ("NH2D", (5, 8, 3, 32), r"\[num_pages, page_size, 2 \* num_kv_heads, head_dim\]"),
            )
        ),
    ],
)
def test_write_kv_refuses(changes, message):
    pages, tokens = zeros(2, 4, 2, 3), zeros(5, 2, 3)
    call = dict(k=tokens, v=tokens, slots=i32(0, 1, 2, 3, 4))
    layer = dict(k_pages=pages, v_pages=pages, kv_layout="HPND")
    for name, value in changes.items():
        (call if name in call else layer)[name] = value
    with pytest.raises(ValueError, match=message):
        pp.write_kv(pp.LayerKV(**layer), **call)


def test_write_kv_takes_a_layer_only_and_copy_pages_a_pool_with_copies_of_int32():
    layer, tokens = random_layer("float32"), zeros(1, H, D)
    for other in (pp.KVPool(layers=(layer,)), None, layer.k_pages):
        message = f"^layer must be a LayerKV, got {type(other).__name__}"
        with pytest.raises(ValueError, match=message):
            pp.write_kv(other, tokens, tokens, i32(0))
    assert_same(jitted_write(layer, tokens[:0], tokens[:0], i32()), layer)
    pool = pp.KVPool(layers=(random_layer("float32"),))
    good = pp.PageCopies(src_pages=i32(0), dst_pages=i32(1))
    for name in ("src_pages", "dst_pages"):
        for pages, rule in ((None, "=None must be an array"), ([0.0], " must be int32")):
            with pytest.raises(ValueError, match=f"^copies.{name}{rule}"):
                pp.copy_pages(pool, replace(good, **{name: pages}))
    with pytest.raises(ValueError, match=r"dst_pages must be int32\[1\], got int32\[2\]"):
        pp.copy_pages(pool, replace(good, dst_pages=i32(0, 1)))
    with pytest.raises(ValueError, match="pool must be a KVPool, got LayerKV"):
        pp.copy_pages(pool.layers[0], good)
    with pytest.raises(ValueError, match="copies must be a PageCopies, got tuple"):
        pp.copy_pages(pool, ([0], [1]))
    with pytest.raises(ValueError, match="layer must be a LayerKV, got ndarray"):
        pp.copy_pages(pp.KVPool(layers=(zeros(2),)), good)


IN_PLACE = [*((x, "int8") for x in LAYOUTS), ("HPND", "float32"), ("NHD", "float16")]


@pytest.mark.parametrize(
    ("kv_layout", "stored"),
    [*IN_PLACE, *slow(x for x in itertools.product(LAYOUTS, STORED) if x not in IN_PLACE)],
)
def test_donated_pools_are_written_and_copied_in_place(kv_layout, stored):
    widened = ["float8_e4m3fn", *(["bfloat16"] if jax.__version_info__ < (0, 12) else [])]
    if jax.default_backend() == "cpu" and STORED[stored]["dtype"] in widened:
        pytest.skip("this XLA CPU compiler widens such scatters and their operands")
    pool = jax.eval_shape(lambda: create(**options_of(stored, 1), kv_layout=kv_layout, **BIG))
    tokens = jax.ShapeDtypeStruct((8, 2, 64), jnp.float32)
    assert_written_and_copied_in_place(pool, tokens, tokens)
