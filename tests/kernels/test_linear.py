"""`linear`: the product with a weight, with a norm, SwiGLU and a residual, on any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.linear import linear
from tests.support.devices import mesh

KERNEL = "mosaic_gpu_interpret"
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the Mosaic GPU kernels need JAX 0.11"
)


def draw(seed: int, *shape: int, scale: float = 1.0, dtype=jnp.bfloat16) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def test_without_a_gpu_it_is_the_dot_bit_for_bit():
    x, weight = draw(0, 2, 3, 256), draw(1, 64, 256)
    want = lax.dot_general(x, weight, (((2,), (1,)), ((), ())))
    assert (linear(x, weight) == want).all()
    logits = linear(x, weight, preferred_element_type=jnp.float32)
    assert logits.dtype == jnp.float32 and logits.shape == (2, 3, 64)


def test_swiglu_is_of_the_products_with_gate_and_up():
    x, weight = draw(0, 3, 256, dtype=jnp.float32), draw(1, 64, 2, 256, dtype=jnp.float32)
    gate, up = (linear(x, weight[:, i]) for i in range(2))
    np.testing.assert_allclose(linear(x, weight), jax.nn.silu(gate) * up, rtol=1e-5, atol=1e-4)


@needs_mosaic
@pytest.mark.parametrize("shape", [(2, 3, 1024), (11, 1024)])  # as it is, and padded
def test_the_kernel_gives_what_xla_gives(shape):
    x, weight = draw(0, *shape), draw(1, 64, 1024, scale=1 / 32)
    more = dict(norm=draw(2, 1024), residual=draw(3, *shape[:-1], 64))
    want = linear(x, weight, **more, implementation="xla").astype(jnp.float32)
    out = linear(x, weight, **more, implementation=KERNEL)
    assert out.shape == want.shape and out.dtype == jnp.bfloat16
    assert jnp.abs(out - want).max() < 0.03 * want.std()


@needs_mosaic
def test_gradients_of_the_kernel_are_those_of_xla():
    x, weight = draw(0, 2, 256), draw(1, 64, 256, scale=1 / 16)

    def loss(x, weight, implementation):
        return (linear(x, weight, implementation=implementation).astype(jnp.float32) ** 2).sum()

    got, want = (jax.grad(loss, (0, 1))(x, weight, name) for name in (KERNEL, "xla"))
    assert all((a == b).all() for a, b in zip(got, want, strict=True))


def test_a_weight_cut_over_devices_is_not_gathered():
    devices = mesh(2)
    weight = jax.device_put(draw(1, 128, 256), NamedSharding(devices, P("tensor")))
    x = jax.device_put(draw(0, 8, 256), NamedSharding(devices, P()))
    text = jax.jit(linear).lower(x, weight).compile().as_text()
    assert "all-gather" not in text
    with pytest.raises(NotImplementedError, match="needs a weight on one device"):
        jax.jit(linear, static_argnames="implementation")(x, weight, implementation=KERNEL)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (dict(weight=jnp.ones((64, 3, 256))), ValueError, "weight.shape"),
        (dict(norm=jnp.ones(255)), ValueError, "norm must be"),
        (dict(residual=jnp.ones((8, 63))), ValueError, "residual must be"),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' must be"),
        (dict(implementation=KERNEL), NotImplementedError, "needs bfloat16 or float16"),
        (dict(implementation="mosaic_gpu", x=draw(0, 65, 256)), NotImplementedError, "needs "),
    ],
)
def test_bad_arguments_are_named(change, error, match):
    arguments = dict(x=jnp.ones((8, 256)), weight=jnp.ones((64, 256))) | change
    with pytest.raises(error, match=match):
        linear(**arguments)
