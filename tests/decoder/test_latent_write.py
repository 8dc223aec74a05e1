"""New latents: normed, rotated and written, against float64, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pallas_paged as pp
from tests.support import raw
from tests.support.attention_oracle import relative_error
from tests.support.devices import lower_for_cuda, mesh
from tests.support.marks import needs_triton
from tests.support.page_tables import jitted, write_kv
from tests.support.promotion import strict_promotion

RANK, ROPE, PAGES, PAGE_SIZE, TOKENS = 12, 8, 3, 4, 7
SLOTS = np.array([5, -1, 0, 11, 12, 3, 6], np.int32)  # two are no slots of the pool
EPS = 1e-3
KERNEL = "triton_interpret" if jax.default_backend() == "cpu" else "triton"
write = jitted(pp.rotate_and_write_latents, ["eps", "implementation", "interpret"])


def a_layer(dtype="float32", kv_layout="NHD", k_scales=None):
    """Pages of ones, so that what is not written shows."""
    sizes = dict(num_layers=1, num_pages=PAGES, num_kv_heads=1, page_size=PAGE_SIZE)
    sizes |= dict(head_dim=RANK + ROPE, v_head_dim=RANK, dtype=dtype, kv_layout=kv_layout)
    if k_scales is not None:
        return pp.create_kv_pool(**sizes, k_scales=k_scales).layers[0]
    pool = jax.eval_shape(lambda: pp.create_kv_pool(**sizes))
    return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), pool.layers[0])


def new_tokens(dtype=np.float32):
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((TOKENS, RANK + ROPE)).astype(dtype)
    angles = rng.uniform(0, 6, (TOKENS, 1, ROPE // 2))
    rotation = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    norm = (1 + rng.standard_normal(RANK) / 4).astype(dtype)
    return latents, dict(rotation=rotation, norm=norm, eps=EPS)


def expected_tokens(latents, rotation, norm, eps):
    """In float64, `[T, RANK + ROPE]`."""
    x = np.asarray(latents, np.float64)
    latent, first, second = np.split(x, [RANK, RANK + ROPE // 2], axis=1)
    latent = latent / np.sqrt(np.mean(latent**2, axis=1, keepdims=True) + eps)
    latent = latent * np.asarray(norm, np.float64)
    cos, sin = (np.asarray(y, np.float64)[:, 0] for y in rotation)
    return np.concatenate([latent, first * cos - second * sin, second * cos + first * sin], axis=1)


def slots_of(layer):
    """The tokens of a layer of any layout in float64, `[slots, RANK + ROPE]`, dequantized."""
    pages = np.asarray(layer.k_pages, np.float64).reshape(-1, RANK + ROPE)
    if layer.k_scales is None:
        return pages
    return pages * np.asarray(layer.k_scales, np.float64).reshape(-1, 1)


TOLERANCE = dict(float32=1e-6, bfloat16=1e-2, float16=1e-3, int8=1e-2, float8_e4m3fn=5e-2)


@pytest.mark.parametrize("implementation", ["xla", pytest.param(KERNEL, marks=needs_triton)])
@pytest.mark.parametrize(
    ("dtype", "kv_layout"),
    [*((dtype, "NHD") for dtype in TOLERANCE), ("float32", "HND"), ("int8", "HPND")],
)
def test_latents_are_normed_keys_rotated_and_both_written(dtype, kv_layout, implementation):
    latents, how = new_tokens(dtype if dtype in ("bfloat16", "float16") else np.float32)
    before = a_layer(dtype, kv_layout)
    layer = write(before, latents, SLOTS, **how, **raw.by(implementation))
    assert (layer.kv_layout, layer.v_head_dim, layer.v_pages) == (kv_layout, RANK, None)
    assert layer.k_pages.dtype == dtype
    inside = (SLOTS >= 0) & (SLOTS < PAGES * PAGE_SIZE)
    found, expected = slots_of(layer), expected_tokens(latents, **how)
    assert relative_error(found[SLOTS[inside]], expected[inside]) <= TOLERANCE[dtype]
    others = np.setdiff1d(np.arange(PAGES * PAGE_SIZE), SLOTS)
    np.testing.assert_array_equal(found[others], slots_of(before)[others])


@pytest.mark.parametrize("implementation", ["xla", pytest.param(KERNEL, marks=needs_triton)])
def test_pages_of_one_scale_keep_it(implementation):
    latents, how = new_tokens()
    before = a_layer("int8", k_scales=[0.05])
    layer = write(before, latents, SLOTS, **how, **raw.by(implementation))
    assert layer.k_scales.shape == () and layer.k_scales == np.float32(0.05)
    expected = expected_tokens(latents, **how)[0]
    np.testing.assert_allclose(slots_of(layer)[SLOTS[0]], expected, atol=0.026)


@pytest.mark.parametrize("implementation", ["xla", pytest.param(KERNEL, marks=needs_triton)])
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_without_norm_and_rotation_it_is_write_kv(dtype, implementation):
    latents, _ = new_tokens()
    # Tokens that are not finite, that are zero, and that a scale can't hold.
    latents[0, 3], latents[2, 13], latents[3], latents[5] = np.nan, np.inf, 0, 1e-40
    layer = write(a_layer(dtype), latents, SLOTS, **raw.by(implementation))
    wanted = write_kv(a_layer(dtype), latents[:, None], None, SLOTS)
    for found, expected in zip(*map(jax.tree.leaves, (layer, wanted)), strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))


@needs_triton
def test_gradients_of_the_kernel_are_those_of_the_steps():
    latents, how = new_tokens()

    def total(latents, norm, implementation):
        given = how | dict(norm=norm) | raw.by(implementation)
        return jnp.sum(pp.rotate_and_write_latents(a_layer(), latents, SLOTS, **given).k_pages ** 2)

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=2)
    with strict_promotion():  # the rule of the kernel is called behind the entry
        kernel, steps = (gradients(latents, how["norm"], name) for name in (KERNEL, "xla"))
    for x, y in zip(kernel, steps, strict=True):
        assert np.any(x)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert not np.any(kernel[0][1])  # its slot is none of the pool


@needs_triton
def test_each_device_writes_its_copy():
    latents, how = new_tokens()
    there, how = NamedSharding(mesh(2), PartitionSpec()), how | raw.by(KERNEL)
    before = jax.device_put(a_layer(), there)
    write = jax.jit(lambda x: pp.rotate_and_write_latents(x, latents, SLOTS, **how))
    layer = write(before)
    assert layer.k_pages.sharding.is_fully_replicated
    wanted = write(a_layer())
    np.testing.assert_allclose(layer.k_pages, wanted.k_pages, rtol=1e-5, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_the_kernel_for_cuda_writes_into_the_pages_it_is_given(dtype):
    latents, how = new_tokens(jnp.bfloat16)
    before = a_layer(dtype)

    def call(layer, latents, slots, rotation, norm):
        return pp.rotate_and_write_latents(layer, latents, slots, rotation=rotation, norm=norm)

    arrays = before, latents, SLOTS, how["rotation"], how["norm"]
    text = lower_for_cuda(call, *arrays, donate_argnums=0).as_text()
    (kernel,) = (line for line in text.splitlines() if "rotate_and_write_latents" in line)
    assert kernel.count("output_operand_alias<") == len(jax.tree.leaves(before))
    assert "scatter" not in text


@needs_triton
def test_no_tokens_write_nothing():
    latents, how = new_tokens()
    rotation = tuple(x[:0] for x in how["rotation"])
    layer = write(a_layer(), latents[:0], SLOTS[:0], rotation=rotation, **raw.by(KERNEL))
    np.testing.assert_array_equal(layer.k_pages, a_layer().k_pages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layer=pp.LayerKV(*jnp.zeros((2, 3, 4, 1, 20)))), "must be of latents, with v_head"),
        (
            dict(layer=pp.LayerKV(jnp.zeros((3, 4, 2, 20)), v_head_dim=12)),
            "v_head_dim=12 and num_kv_heads=2 must be of latents",
        ),
        (dict(latents=np.zeros((TOKENS, 19), np.float32)), r"must be \[T, head_dim=20\].*19"),
        (dict(latents=np.zeros((TOKENS, 20), np.int32)), "latents must be floating, got int32"),
        (dict(slots=np.zeros(TOKENS + 1, np.int32)), "slots"),
        (dict(norm=np.ones(20, np.float32)), r"norm must be \[v_head_dim=12\], got \(20,\)"),
        (dict(eps=-1.0), "eps=-1.0 must be at least 0"),
        (dict(implementation="mosaic_sm90"), "implementation='mosaic_sm90' must be None or one of"),
        (dict(rotation=(np.ones((TOKENS, 5), np.float32),) * 2), "R from 2 to head_dim=8"),
        (dict(rotation=np.ones(3)), r"rotation must be None or \(cos, sin\)"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, message):
    latents, how = new_tokens()
    arguments = dict(layer=a_layer(), latents=latents, slots=SLOTS) | how | change
    with pytest.raises(ValueError, match=message):
        pp.rotate_and_write_latents(**arguments)
