"""The norm of one row as a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.decoder import rms_norm as entry
from pallas_paged.decoder.kernels.rms_norm import rms_norm
from tests.support.devices import lower_for_cuda


@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 40)])
def test_each_row_is_divided_by_its_root_mean_square(num_rows, size):
    rng = np.random.default_rng(0)
    x = 3 * rng.standard_normal((num_rows, size), np.float32)
    weight = rng.standard_normal(size, np.float32)
    interpret = jax.default_backend() != "gpu"
    got = rms_norm(jnp.asarray(x), jnp.asarray(weight), eps=0.5, interpret=interpret)
    want = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 0.5) * weight
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_one_row_is_one_kernel_for_cuda_and_has_a_gradient():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 1, 64), (64,))]
    kernels = [
        lower_for_cuda(function, *shapes).as_text().count("xla.gpu.triton")
        for function in (
            lambda x, w: entry.rms_norm(x, w, 1e-5),
            jax.grad(lambda x, w: entry.rms_norm(x, w, 1e-5).astype(jnp.float32).sum()),
            lambda x, w: entry.rms_norm(jnp.concatenate([x, x]), w, 1e-5),
        )
    ]
    assert kernels == [1, 0, 0]
