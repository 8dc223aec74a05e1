"""The write of fused projections: split, norms, rotation, quantization, pages in place."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support import raw
from tests.support.devices import lower_for_cuda
from tests.support.marks import needs_triton, slow
from tests.support.page_layouts import LAYOUTS, layer_in_layout
from tests.support.page_tables import jitted
from tests.support.quantized_cases import LARGEST

NUM_PAGES, PAGE_SIZE = 9, 4
# A kernel on this machine beside the steps one by one.
# XLA's GPU compiler leaves out the rounding between the norm and the rotation of q.
ON_CPU = jax.default_backend() == "cpu"
KERNEL = "triton_interpret" if ON_CPU else "triton"
write = jitted(pp.rotate_and_write_kv, ["eps", "implementation", "interpret"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a call; half of the tokens have no slot."""

    num_tokens: int = 10
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    rotary: int = 16
    norms: bool = False
    dtype: str = "float32"
    kv_dtype: str = "float32"
    one_scale: bool = False

    def make(self):
        rng = np.random.default_rng(0)
        shape = self.num_kv_heads, NUM_PAGES, PAGE_SIZE, self.head_dim
        names, pages = ("k_pages", "v_pages"), np.ones(shape, jnp.dtype(self.kv_dtype))
        layer = dict.fromkeys(names, pages)
        if self.one_scale:
            layer |= dict(k_scales=np.float32(0.02), v_scales=np.float32(0.03))
        elif self.kv_dtype in LARGEST:
            layer |= dict.fromkeys(("k_scales", "v_scales"), np.ones(shape[:3], np.float32))
        shape = (self.num_tokens, self.num_kv_heads, self.group + 2, self.head_dim)
        qkv = rng.standard_normal(shape).astype(np.float32)
        # V of some tokens are zero, or have elements that are not finite, tiny or huge; also K, but
        # for the comparison with NumPy in f64.
        first = -1 if self.kv_dtype == "float32" else -2
        for token, odd in enumerate([0, np.inf, -np.inf, np.nan, 1e-40, 3e38][: self.num_tokens]):
            qkv[token, 0, first:, : 4 if token else None] = odd
        num_slots = NUM_PAGES * PAGE_SIZE
        slots = rng.permutation(num_slots)[: self.num_tokens].astype(np.int32)
        slots[6::4], slots[7::4] = -1, num_slots
        options = {}
        if self.rotary:
            angles = rng.uniform(0, 7, (self.num_tokens, 1, self.rotary // 2))
            # Of 8 bits: products are then exact, and sums of them the same if they are fused.
            rotation = np.stack([np.cos(angles), np.sin(angles)]).astype(jnp.bfloat16)
            options["rotation"] = tuple(rotation.astype(np.float32))
        if self.norms:
            weights = 1 + rng.standard_normal((2, self.head_dim)) / 8
            q_norm, k_norm = weights.astype(jnp.dtype(self.dtype))
            options |= dict(q_norm=q_norm, k_norm=k_norm, eps=1e-3)
        with np.errstate(over="ignore"):
            return (
                pp.LayerKV(**layer, kv_layout="HPND"),
                qkv.astype(jnp.dtype(self.dtype)),
                slots,
            ), options


def expected_heads(qkv, rotation=None, q_norm=None, k_norm=None, eps=1e-6):
    """q, k and v in f64, token by token and head by head."""
    qkv = np.asarray(qkv, np.float64)
    q, k, v = qkv[:, :, :-2].reshape(len(qkv), -1, qkv.shape[-1]), qkv[:, :, -2], qkv[:, :, -1]

    def turn(x, norm):
        if norm is not None:
            mean = np.mean(x**2, axis=-1, keepdims=True)
            x = x / np.sqrt(mean + eps) * np.asarray(norm, np.float64)
        if rotation is None:
            return x
        cos, sin = rotation
        half = cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = first * cos - second * sin, second * cos + first * sin
        return np.concatenate([*turned, rest], axis=-1)

    return turn(q, q_norm), turn(k, k_norm), v


def same_bits(got, want):
    """Beside those of NaN, which depend on the order of operands."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.where(np.isnan(np.float32(x)), np.zeros_like(x) + 77, x) for x in (a, b))
        a, b = (np.ascontiguousarray(np.atleast_1d(x)) for x in (a, b))
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(norms=True, head_dim=20, rotary=8, group=1),
        *slow([Case(rotary=0), Case(norms=True, rotary=0, num_tokens=1), Case(num_kv_heads=1)]),
    ],
    ids=str,
)
def test_heads_are_normed_rotated_and_written(case):
    arguments, options = case.make()
    old, qkv, slots = arguments
    want_q, *new = expected_heads(qkv, **options)
    held = (slots >= 0) & (slots < NUM_PAGES * PAGE_SIZE)
    assert 0 < held.sum() < len(held) or case.num_tokens == 1
    for implementation in (KERNEL, "xla"):
        q, layer = write(*arguments, **raw.by(implementation), **options)
        np.testing.assert_allclose(q, want_q, rtol=1e-5, atol=1e-5)
        for name, tokens in zip(("k_pages", "v_pages"), new, strict=True):
            want = getattr(old, name).reshape(case.num_kv_heads, -1, case.head_dim).copy()
            want[:, slots[held]] = tokens[held].swapaxes(0, 1)
            got = getattr(layer, name).reshape(want.shape)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


BITS = [
    ("HPND", Case(dtype="bfloat16", kv_dtype="bfloat16", norms=ON_CPU)),
    ("NHD", Case(dtype="bfloat16", kv_dtype="int8", head_dim=80, rotary=80)),
    ("HND", Case(dtype="float16", kv_dtype="float8_e4m3fn", norms=ON_CPU, rotary=8)),
    ("2NHD", Case(dtype="bfloat16", kv_dtype="int8", one_scale=True)),
    ("NH2D", Case(dtype="float32", kv_dtype="float8_e4m3fn", rotary=0)),
]
MORE = [
    *(case for _, case in BITS),
    Case(dtype="float16", kv_dtype="float8_e4m3fn", one_scale=True, head_dim=20, rotary=8),
    Case(dtype="bfloat16", kv_dtype="float8_e4m3fn", one_scale=True, num_tokens=1),
    Case(dtype="float32", kv_dtype="bfloat16", group=8, rotary=0),
    Case(dtype="float16", kv_dtype="float32", rotary=0),
    Case(dtype="bfloat16", kv_dtype="bfloat16", num_tokens=33, group=5),
]


@pytest.mark.parametrize(
    ("kv_layout", "case"),
    [*BITS, *slow((x, case) for x in LAYOUTS for case in MORE if (x, case) not in BITS)],
    ids=str,
)
def test_the_kernel_has_the_bits_of_the_steps_one_by_one(kv_layout, case):
    (layer, *rest), options = case.make()
    want_q, want = write(layer, *rest, implementation="xla", **options)
    moved = pp.LayerKV(**layer_in_layout(kv_layout, layer), kv_layout=kv_layout)
    q, got = write(moved, *rest, **raw.by(KERNEL), **options)
    assert got.kv_layout == kv_layout
    same_bits(
        (q, got), (want_q, pp.LayerKV(**layer_in_layout(kv_layout, want), kv_layout=kv_layout))
    )
    assert not np.array_equal(want.k_pages, layer.k_pages)


def test_no_tokens_write_nothing():
    (layer, qkv, slots), _ = Case().make()
    q, written = write(layer, qkv[:0], slots[:0], **raw.by(KERNEL))
    assert q.shape == (0, 6, 16)
    same_bits(written, layer)


@pytest.mark.parametrize("kv_layout", ["NH2D", *slow(["HPND"])])
def test_gradients_are_those_of_the_steps_one_by_one(kv_layout):
    (layer, qkv, slots), options = Case(norms=True).make()
    qkv = np.random.default_rng(1).standard_normal(qkv.shape).astype(np.float32)
    layer = pp.LayerKV(**layer_in_layout(kv_layout, layer), kv_layout=kv_layout)

    def total(qkv, pages, rotation, q_norm, k_norm, implementation):
        new = dataclasses.replace(layer, k_pages=pages)
        how = dict(rotation=rotation, q_norm=q_norm, k_norm=k_norm, **raw.by(implementation))
        out = pp.rotate_and_write_kv(new, qkv, slots, **how)
        return sum(jnp.sum(jnp.sin(x) * (i + 1)) for i, x in enumerate(jax.tree.leaves(out)))

    options.pop("eps")
    at = (qkv, layer.k_pages, *options.values())
    gradients = jax.jit(jax.grad(total, argnums=range(5)), static_argnums=5)
    kernel, steps = (jax.device_get(gradients(*at, name)) for name in (KERNEL, "xla"))
    for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(steps), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert np.any(kernel[0]) and not np.all(kernel[1])  # pages that are written over


@needs_triton
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_the_kernel_for_cuda_writes_into_the_pages_it_is_given(kv_layout):
    kv_dtype = ["int8", "bfloat16", "float8_e4m3fn"][LAYOUTS.index(kv_layout) % 3]
    (layer, *rest), options = Case(dtype="bfloat16", kv_dtype=kv_dtype).make()
    layer = pp.LayerKV(**layer_in_layout(kv_layout, layer), kv_layout=kv_layout)

    def call(layer, qkv, slots, rotation):
        return pp.rotate_and_write_kv(layer, qkv, slots, rotation=rotation)

    arrays = layer, *rest, options["rotation"]
    text = lower_for_cuda(call, *arrays, donate_argnums=0).as_text()
    (kernel,) = (line for line in text.splitlines() if "rotate_and_write_kv" in line)
    assert kernel.count("output_operand_alias<") == len(jax.tree.leaves(layer))
    assert not re.search("scatter|transpose", text)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(qkv=ones(10, 5, 16)), r"qkv must be \[T, num_kv_heads, G \+ 2, head_dim\]"),
        (dict(qkv=ones(10, 2, 5, 8), rotation=None), "like the pages, got"),
        (dict(qkv=ones(10, 2, 2, 16)), "with G of 1 or more"),
        (dict(qkv=ones(10, 2, 5, 16, dtype=np.int32)), "qkv must be floating, got int32"),
        (dict(slots=np.zeros(9, np.int32)), r"slots must be int32\[10\]"),
        (dict(layer=None), "layer must be a LayerKV, got NoneType"),
        (dict(rotation=ones(10, 8)), r"rotation must be None or \(cos, sin\)"),
        (dict(rotation=(ones(10, 9),) * 2), "rotation cos must be float32"),
        (dict(rotation=(ones(10, 0),) * 2), "rotation cos must be float32"),
        (dict(rotation=(ones(10, 8), ones(10, 8, dtype=np.float16))), "rotation sin must be flo"),
        (dict(rotation=(ones(10, 8), ones(10, 4))), "two arrays of one shape"),
        (dict(q_norm=ones(8)), r"q_norm must be \[head_dim=16\], got \(8,\)"),
        (dict(k_norm=ones(16, dtype=np.int8)), "k_norm must be floating, got int8"),
        (dict(eps="1"), "eps='1' must be a number"),
        (dict(implementation="mosaic_sm90"), "implementation='mosaic_sm90' must be None or one of"),
        (dict(implementation=np.array(["xla"])), "implementation=.* must be None or one of"),
        (dict(interpret=True), "interpret=True needs a family of kernels, not implementation=None"),
        (dict(eps=-9.0), "eps=-9.0 must be at least 0"),
    ],
    ids=lambda x: None,
)
def test_bad_input_is_refused(change, message):
    (layer, qkv, slots), options = Case().make()
    call = dict(layer=layer, qkv=qkv, slots=slots) | options | change
    with pytest.raises(ValueError, match=message):
        pp.rotate_and_write_kv(**call)


def test_a_product_of_another_shape_is_not_split():
    for qkv in (np.zeros((5, 2, 2, 8), np.float32), np.zeros((4, 8), np.float32)):
        with pytest.raises(ValueError, match=r"qkv must be \[..., num_kv_heads, G \+ 2, head"):
            pp.split_qkv(qkv)
    with pytest.raises(ValueError, match="qkv must be floating, got int32"):
        pp.split_qkv(np.zeros((5, 2, 3, 8), np.int32))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(q_norm=ones(1)), r"q_norm must be \[head_dim=8\], got \(1,\)"),
        (dict(k_norm=ones(2, 8)), r"k_norm must be \[head_dim=8\], got \(2, 8\)"),
        (dict(q_norm="abc"), "q_norm='abc' must be an array"),
        (dict(rotation=ones(2, 1, 4)[0]), r"rotation must be None or \(cos, sin\)"),
        (dict(rotation=(ones(2, 4),) * 2), r"cos must be float32 \[2, 1, R / 2\].*\(2, 4\)"),
        (dict(rotation=(ones(3, 1, 4),) * 2), r"rotation cos must be .*got float32\(3, 1, 4\)"),
        (dict(rotation=(ones(2, 1, 5),) * 2), "R from 2 to head_dim=8, got .*5"),
        (dict(rotation=(ones(1, 4), ones(1, 1))), "two arrays of one shape"),
        (dict(eps=-1.0), "eps=-1.0 must be at least 0"),
    ],
)
def test_what_would_be_broadcast_to_the_heads_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        pp.split_qkv(ones(2, 2, 3, 8), **how)


def test_a_product_is_split_where_the_caller_forbids_promotion():
    how = dict(q_norm=ones(8), rotation=(ones(1, 4), ones(1, 4)))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        q, *_ = pp.split_qkv(ones(2, 2, 3, 8, dtype=jnp.bfloat16), **how)
    assert (q.shape, q.dtype) == ((2, 2, 8), jnp.bfloat16)


@pytest.mark.skipif(not ON_CPU, reason="the kernel runs here")
def test_the_kernel_without_a_gpu_is_refused_with_the_reason():
    arguments, options = Case().make()
    with pytest.raises(NotImplementedError, match="'triton' needs a GPU, but the platform is"):
        pp.rotate_and_write_kv(*arguments, **options, implementation="triton")
