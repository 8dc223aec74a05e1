"""The write of fused projections: split, norms, rotation, quantization, pages in place."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.rotary_write import split_qkv
from tests.support.devices import lower_for_cuda
from tests.support.kv_pools import make_pool
from tests.support.marks import needs_triton, slow
from tests.support.page_layouts import OTHERS, layer_in_layout
from tests.support.quantized_cases import LARGEST

NUM_PAGES, PAGE_SIZE = 9, 4
# A kernel on this machine beside the steps one by one.
# XLA's GPU compiler leaves out the rounding between the norm and the rotation of q.
ON_CPU = jax.default_backend() == "cpu"
KERNEL = "triton_interpret" if ON_CPU else "triton"
BOTH = pytest.mark.parametrize("implementation", [KERNEL, "xla"])


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
        """Return (layer, qkv, slots) and the options."""
        rng = np.random.default_rng(0)
        scales = dict(k_scales=[0.02], v_scales=[0.03]) if self.one_scale else {}
        pool = make_pool(
            1, NUM_PAGES, self.num_kv_heads, PAGE_SIZE, self.head_dim, self.kv_dtype, **scales
        )
        old = jax.tree.map(lambda x: x + 1 if x.ndim else x, pool.layers[0])
        shape = (self.num_tokens, self.num_kv_heads, self.group + 2, self.head_dim)
        qkv = jnp.asarray(rng.standard_normal(shape), self.dtype)
        num_slots = NUM_PAGES * PAGE_SIZE
        slots = rng.permutation(num_slots)[: self.num_tokens].astype(np.int32)
        slots[::4], slots[1::4] = -1, num_slots
        options = {}
        if self.rotary:
            angles = rng.uniform(0, 7, (self.num_tokens, 1, self.rotary // 2))
            # Of 8 bits: products are then exact, and sums of them the same if they are fused.
            options["rotation"] = tuple(
                jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)
                for x in (np.cos(angles), np.sin(angles))
            )
        if self.norms:
            weights = 1 + rng.standard_normal((2, self.head_dim)) / 8
            q_norm, k_norm = jnp.asarray(weights, self.dtype)
            options |= dict(q_norm=q_norm, k_norm=k_norm, eps=1e-3)
        return (old, qkv, slots), options


def write(arguments, options, implementation):
    return _write(*arguments, implementation=implementation, **options)


_write = jax.jit(pp.rotate_and_write_kv, static_argnames=("eps", "implementation"))


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
        angle = np.asarray(rotation[0]) + 1j * np.asarray(rotation[1])
        half = angle.shape[-1]
        turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * angle
        return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)

    return turn(q, q_norm), turn(k, k_norm), v


def same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.ascontiguousarray(np.atleast_1d(x)) for x in (a, b))
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@BOTH
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(norms=True, head_dim=20, rotary=8, group=1),
        *slow([Case(rotary=0), Case(norms=True, rotary=0, num_tokens=1), Case(num_kv_heads=1)]),
    ],
    ids=str,
)
def test_heads_are_normed_rotated_and_written(case, implementation):
    arguments, options = case.make()
    old, qkv, slots = arguments
    q, layer = write(arguments, options, implementation)
    want_q, *new = expected_heads(qkv, **options)
    np.testing.assert_allclose(q, want_q, rtol=1e-5, atol=1e-5)
    held = (slots >= 0) & (slots < NUM_PAGES * PAGE_SIZE)
    assert 0 < held.sum() < len(held) or case.num_tokens == 1
    for pages, before, tokens in zip(
        (layer.k_pages, layer.v_pages), (old.k_pages, old.v_pages), new, strict=True
    ):
        want = np.array(before).reshape(case.num_kv_heads, -1, case.head_dim)
        want[:, slots[held]] = tokens[held].swapaxes(0, 1)
        np.testing.assert_allclose(pages, want.reshape(pages.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="bfloat16", kv_dtype="bfloat16", norms=ON_CPU),
        Case(dtype="bfloat16", kv_dtype="int8", head_dim=80, rotary=80),
        Case(dtype="float16", kv_dtype="float8_e4m3fn", norms=ON_CPU, rotary=8),
        Case(dtype="bfloat16", kv_dtype="int8", one_scale=True),
        *slow(
            [
                Case(dtype="bfloat16", kv_dtype="float8_e4m3fn", one_scale=True, num_tokens=1),
                Case(dtype="float32", kv_dtype="bfloat16", group=8, rotary=0),
                Case(dtype="float16", kv_dtype="float32", rotary=0),
                Case(dtype="bfloat16", kv_dtype="bfloat16", num_tokens=33, group=5),
            ]
        ),
    ],
    ids=str,
)
def test_the_kernel_has_the_bits_of_the_steps_one_by_one(case):
    arguments, options = case.make()
    kernel, steps = (write(arguments, options, name) for name in (KERNEL, "xla"))
    same_bits(kernel, steps)
    q, k, v = split_qkv(arguments[1], **options)
    same_bits(steps, (q, pp.write_kv(arguments[0], k, v, arguments[2])))


@pytest.mark.parametrize(
    "case",
    [
        Case(norms=ON_CPU, dtype="bfloat16", kv_dtype="bfloat16"),
        Case(dtype="bfloat16", kv_dtype="int8"),
        Case(dtype="float16", kv_dtype="float8_e4m3fn", one_scale=True, head_dim=20, rotary=8),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_layout", OTHERS)
def test_the_pages_have_the_same_bits_in_any_layout(kv_layout, case):
    (layer, *rest), options = case.make()
    want_q, want = write((layer, *rest), options, KERNEL)
    moved = pp.LayerKV(**layer_in_layout(kv_layout, layer), kv_layout=kv_layout)
    moved = jax.tree.map(jnp.asarray, moved)
    q, got = write((moved, *rest), options, KERNEL)
    assert got.kv_layout == kv_layout
    want = pp.LayerKV(**layer_in_layout(kv_layout, want), kv_layout=kv_layout)
    same_bits((q, got), (want_q, want))


@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_tokens_that_are_zero_or_not_finite_are_quantized_as_write_kv_does(kv_dtype):
    (layer, qkv, slots), options = Case(kv_dtype=kv_dtype, rotary=0).make()
    slots = np.arange(len(slots), dtype=np.int32)
    odd = jnp.array([0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-40, 3e38])
    qkv = qkv.at[: odd.size, 0, -2:, 3].set(odd[:, None]).at[0].set(0.0)
    kernel, steps = (write((layer, qkv, slots), options, name) for name in (KERNEL, "xla"))
    for a, b in zip(jax.tree.leaves(kernel[1]), jax.tree.leaves(steps[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_no_tokens_write_nothing():
    (layer, qkv, slots), _ = Case().make()
    q, written = write((layer, qkv[:0], slots[:0]), {}, KERNEL)
    assert q.shape == (0, 6, 16)
    same_bits(written, layer)


def test_a_v_that_is_not_finite_is_not_rotated():
    (layer, qkv, slots), options = Case(rotary=8).make()
    qkv = qkv.at[:, :, -1].set(jnp.inf)
    slots = np.arange(len(slots), dtype=np.int32)
    _, written = write((layer, qkv, slots), options, KERNEL)
    assert np.isposinf(written.v_pages[:, :2]).all()
    assert np.isfinite(written.k_pages).all()


@pytest.mark.parametrize("kv_layout", ["HPND", "NH2D"])
def test_gradients_are_those_of_the_steps_one_by_one(kv_layout):
    (layer, qkv, slots), options = Case(norms=True).make()
    layer = pp.LayerKV(**layer_in_layout(kv_layout, layer), kv_layout=kv_layout)
    layer = jax.tree.map(jnp.asarray, layer)

    def total(implementation, qkv, pages, rotation, q_norm, k_norm):
        new = dataclasses.replace(layer, k_pages=pages)
        how = dict(rotation=rotation, q_norm=q_norm, k_norm=k_norm, implementation=implementation)
        out = pp.rotate_and_write_kv(new, qkv, slots, **how)
        return sum(jnp.sum(jnp.sin(x) * (i + 1)) for i, x in enumerate(jax.tree.leaves(out)))

    options.pop("eps")
    at = (qkv, layer.k_pages, *options.values())
    kernel, steps = (
        jax.jit(jax.grad(functools.partial(total, name), argnums=range(5)))(*at)
        for name in (KERNEL, "xla")
    )
    for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(steps), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert np.any(kernel[0]) and not np.all(kernel[1])  # pages that are written over


@needs_triton
@pytest.mark.parametrize(
    ("kv_dtype", "kv_layout"),
    [
        *itertools.product(["bfloat16", "int8", "float8_e4m3fn"], ["HPND"]),
        *itertools.product(["int8"], OTHERS),
    ],
)
def test_the_kernel_for_cuda_writes_into_the_pages_it_is_given(kv_dtype, kv_layout):
    (layer, qkv, slots), options = Case(dtype="bfloat16", kv_dtype=kv_dtype).make()
    layer = pp.LayerKV(**layer_in_layout(kv_layout, layer), kv_layout=kv_layout)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (layer, qkv, slots, options["rotation"])
    )

    def call(layer, qkv, slots, rotation):
        return pp.rotate_and_write_kv(layer, qkv, slots, rotation=rotation)

    text = lower_for_cuda(call, *shapes, donate_argnums=0).as_text()
    (kernel,) = (line for line in text.splitlines() if "rotate_and_write_kv" in line)
    assert kernel.count("output_operand_alias<") == len(jax.tree.leaves(layer))
    assert not re.search("scatter|transpose", text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(qkv=jnp.ones((10, 5, 16))), r"qkv must be \[T, num_kv_heads, G \+ 2, head_dim\]"),
        (dict(qkv=jnp.ones((10, 2, 5, 8)), rotation=None), "like the pages, got"),
        (dict(qkv=jnp.ones((10, 2, 2, 16))), "with G of 1 or more"),
        (dict(qkv=jnp.ones((10, 2, 5, 16), int)), "qkv must be floating, got int32"),
        (dict(slots=np.zeros(9, np.int32)), r"slots must be int32\[10\]"),
        (dict(layer=None), "layer must be a LayerKV, got NoneType"),
        (dict(rotation=jnp.ones((10, 8))), r"rotation must be None or \(cos, sin\)"),
        (dict(rotation=(jnp.ones((10, 9)),) * 2), "rotation cos must be float32"),
        (dict(rotation=(jnp.ones((10, 8)), jnp.ones((10, 4)))), "two arrays of one shape"),
        (dict(q_norm=jnp.ones(8)), r"q_norm must be \[head_dim=16\], got \(8,\)"),
        (dict(eps="1"), "eps='1' must be a number"),
        (dict(implementation="mosaic_gpu"), "implementation='mosaic_gpu' must be None or one of"),
    ],
    ids=lambda x: None,
)
def test_bad_input_is_refused(change, message):
    (layer, qkv, slots), options = Case().make()
    call = dict(layer=layer, qkv=qkv, slots=slots) | options | change
    with pytest.raises(ValueError, match=message):
        pp.rotate_and_write_kv(**call)


@pytest.mark.skipif(not ON_CPU, reason="the kernel runs here")
def test_the_kernel_without_a_gpu_is_refused_with_the_reason():
    arguments, options = Case().make()
    with pytest.raises(NotImplementedError, match="'triton' needs a GPU, but the device has the"):
        pp.rotate_and_write_kv(*arguments, **options, implementation="triton")
