"""The Mosaic kernel of products of one row: interpreted on a CPU, and lowered for a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.kernels.mosaic.linear import linear
from tests.support.block_weights import draw
from tests.support.devices import lower_for_cuda


def oracle(x, weight) -> np.ndarray:
    """The product in NumPy, in f32, rounded where separate operations round."""
    x, weight = np.asarray(x, np.float32), np.asarray(weight, np.float32)
    if weight.ndim == 2:
        return x @ weight.T
    gate, up = ((x @ weight[:, i].T).astype(jnp.bfloat16).astype(np.float32) for i in range(2))
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize(
    ("shape", "dtype", "out_dtype", "tolerance"),
    [
        ((320, 2048), jnp.bfloat16, jnp.bfloat16, 0.016),  # the ring goes round, in every program
        ((128, 256), jnp.bfloat16, jnp.float32, 1e-5),
        ((64, 256), jnp.float16, jnp.float16, 0.002),
        ((192, 2, 512), jnp.bfloat16, jnp.bfloat16, 0.05),
    ],
)
def test_the_product_is_that_of_numpy(shape, dtype, out_dtype, tolerance):
    x = draw(0, 1, shape[-1], dtype=dtype)
    weight = draw(1, *shape, dtype=dtype)
    out = linear(x, weight, out_dtype=out_dtype, num_programs=2, interpret=True)
    want = oracle(x, weight)
    assert out.shape == want.shape and out.dtype == out_dtype
    assert np.abs(np.asarray(out, np.float32) - want).max() < tolerance * want.std()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((128256, 2048), jnp.float32), ((8192, 2, 2048), jnp.bfloat16)]
)
def test_the_products_of_a_decoder_lower_for_a_gpu(shape, dtype):
    run = functools.partial(linear, out_dtype=dtype, num_programs=132, interpret=False)
    shapes = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((1, shape[-1]), shape)]
    text = lower_for_cuda(run, *shapes).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text and "stablehlo.transpose" not in text
