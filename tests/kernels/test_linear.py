"""`linear`: the product with a weight, with or without SwiGLU, on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.decoder.kernels import linear as kernels
from pallas_paged.decoder.linear import linear
from pallas_paged.kernels.mosaic_sm90 import support
from tests.support.block_weights import draw
from tests.support.devices import implementations_here, lower_for_cuda, mesh

KERNEL = "mosaic_sm90_interpret"
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the Mosaic GPU kernels need JAX 0.11"
)


def test_without_a_gpu_it_is_the_dot_bit_for_bit():
    x, weight = draw(0, 2, 3, 256, scale=1.0), draw(1, 64, 256)
    want = lax.dot_general(x, weight, (((2,), (1,)), ((), ())))
    np.testing.assert_array_equal(np.float32(linear(x, weight)), np.float32(want))
    logits = linear(x, weight, preferred_element_type=jnp.float32)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, np.float32(x) @ np.float32(weight).T, rtol=1e-4, atol=1e-4)


def test_swiglu_is_of_the_products_with_gate_and_up():
    x = draw(0, 3, 256, scale=2.0, dtype=jnp.float32)
    weight = draw(1, 64, 2, 256, dtype=jnp.float32)
    gate, up = (x @ weight[:, i].T for i in range(2))
    with jax.default_matmul_precision("highest"):  # no TF32
        got = jax.jit(linear)(x, weight)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)


@needs_mosaic
@pytest.mark.parametrize("kernel", [KERNEL, *({"mosaic_sm90"} & {*implementations_here()})])
@pytest.mark.parametrize(
    ("shape", "dtype", "out_dtype", "tolerance"),
    [
        ((640, 2048), jnp.bfloat16, None, 0.016),  # the ring goes round, in every program
        ((128, 256), jnp.bfloat16, jnp.float32, 1e-5),
        ((64, 256), jnp.float16, None, 0.002),
        ((192, 2, 512), jnp.bfloat16, None, 0.05),
    ],
)
def test_the_kernel_gives_what_xla_gives_and_its_gradients(
    kernel, shape, dtype, out_dtype, tolerance
):
    x, weight = draw(0, 1, 1, shape[-1], dtype=dtype), draw(1, *shape, dtype=dtype)
    cotangent = draw(2, 1, 1, shape[0], dtype=out_dtype or dtype)

    @partial(jax.jit, static_argnames="implementation")
    def run(x, weight, implementation):
        how = dict(preferred_element_type=out_dtype, implementation=implementation)
        out, gradient = jax.vjp(lambda *arrays: linear(*arrays, **how), x, weight)
        return out, gradient(cotangent)

    (got, got_grads), (want, want_grads) = (run(x, weight, name) for name in (kernel, "xla"))
    assert got.shape == cotangent.shape and got.dtype == cotangent.dtype
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.abs(got - want).max() < tolerance * want.std()
    assert all((a == b).all() for a, b in zip(got_grads, want_grads, strict=True))


@needs_mosaic
@pytest.mark.parametrize(
    ("shape", "dtype"), [((128256, 2048), jnp.float32), ((8192, 2, 2048), jnp.bfloat16)]
)
def test_the_products_of_a_decoder_lower_for_a_gpu(shape, dtype):
    run = partial(kernels.linear, out_dtype=dtype, num_programs=132, interpret=False)
    shapes = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((1, shape[-1]), shape)]
    text = lower_for_cuda(run, *shapes).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize(
    ("num_rows", "shape", "is_kernel"),
    [
        (1, (128256, 2048), True),
        (1, (8192, 2, 2048), True),
        (2, (128256, 2048), False),
        (1, (128256, 4096), False),
        (1, (2048, 2048), False),
    ],
)
def test_the_kernel_runs_where_it_was_measured_to_be_faster(
    monkeypatch, any_jax, num_rows, shape, is_kernel
):
    monkeypatch.setattr(support, "why_not_device", lambda device: None)
    chosen = []

    def record(x, weight, *, out_dtype, **_):
        chosen.append("kernel")
        return jnp.zeros((1, weight.shape[0]), out_dtype)

    monkeypatch.setattr(kernels, "linear", record)
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((num_rows, shape[-1]), shape)]
    jax.eval_shape(linear, *shapes)
    assert bool(chosen) == is_kernel


def test_a_sharded_weight_is_not_gathered():
    devices = mesh(2)
    x, weight = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(devices, spec))
        for shape, spec in (((1, 2048), P()), ((8192, 2, 2048), P("tensor")))
    )
    assert "all-gather" not in jax.jit(linear).lower(x, weight).compile().as_text()
    with pytest.raises(NotImplementedError, match="needs a weight on one device"):
        jax.jit(partial(linear, implementation=KERNEL)).lower(x, weight)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (dict(weight=np.ones((64, 3, 256))), ValueError, "weight.shape"),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' must be"),
        (dict(x=np.ones((1, 256))), NotImplementedError, "needs bfloat16 or float16"),
        (dict(x=draw(0, 2, 256)), NotImplementedError, "needs one row, not 2"),
        (dict(weight=draw(0, 65, 256)), NotImplementedError, "multiples of 64 and 256"),
    ],
)
def test_bad_arguments_are_named(change, error, match):
    arguments = dict(x=draw(0, 1, 256), weight=draw(1, 64, 256), implementation=KERNEL) | change
    with pytest.raises(error, match=match):
        linear(**arguments)
