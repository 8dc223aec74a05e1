"""`linear`: the product with a weight, with or without SwiGLU, on any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged import linear as module
from pallas_paged.kernels.mosaic import support
from pallas_paged.linear import linear
from tests.support.block_weights import draw
from tests.support.devices import implementations_here, mesh

KERNEL = "mosaic_gpu_interpret"
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
    x, weight = (
        draw(0, 3, 256, scale=2.0, dtype=jnp.float32),
        draw(1, 64, 2, 256, dtype=jnp.float32),
    )
    gate, up = (x @ weight[:, i].T for i in range(2))
    with jax.default_matmul_precision("highest"):  # no TF32
        got = jax.jit(linear)(x, weight)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)


@needs_mosaic
@pytest.mark.parametrize("kernel", [KERNEL, *({"mosaic_gpu"} & {*implementations_here()})])
def test_the_kernel_gives_what_xla_gives_and_its_gradients(kernel):
    x, weight = draw(0, 1, 1, 256), draw(1, 64, 2, 256)

    def loss(x, weight, implementation):
        out = linear(x, weight, implementation=implementation)
        assert out.shape == (1, 1, 64) and out.dtype == jnp.bfloat16
        return (out.astype(jnp.float32) ** 2).sum()

    gradients = jax.value_and_grad(loss, (0, 1))
    (got, got_grads), (want, want_grads) = (gradients(x, weight, name) for name in (kernel, "xla"))
    assert abs(got - want) < 0.03 * want
    assert all((a == b).all() for a, b in zip(got_grads, want_grads, strict=True))


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
    monkeypatch.setattr(module, "_kernel", lambda *_: "kernel")
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((num_rows, shape[-1]), shape)]
    chosen = []
    jax.eval_shape(lambda *arrays: chosen.append(linear(*arrays)), *shapes)
    assert (chosen == ["kernel"]) == is_kernel


def test_a_weight_cut_over_devices_is_not_gathered(monkeypatch):
    devices = mesh(2)
    monkeypatch.setattr(module, "_FASTER", {(128, 256, False)})
    weight = jax.device_put(draw(1, 128, 256), NamedSharding(devices, P("tensor")))
    x = jax.device_put(draw(0, 1, 256), NamedSharding(devices, P()))
    assert "all-gather" not in jax.jit(linear).lower(x, weight).compile().as_text()
    with pytest.raises(NotImplementedError, match="needs a weight on one device"):
        jax.jit(linear, static_argnames="implementation")(x, weight, implementation=KERNEL)


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
