"""The Mosaic kernel of matrix products of few rows: interpreted on a CPU, and lowered for a GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.kernels.mosaic.linear import linear
from pallas_paged.kernels.mosaic.linear_config import LinearConfig, blocks_ahead, linear_config
from tests.support.devices import lower_for_cuda

CONFIG = LinearConfig(tile_n=64, block_k=64, num_stages=2, num_splits=1, num_programs=2)
SWIGLU = LinearConfig(tile_n=128, block_k=64, num_stages=3, num_splits=1, num_programs=2)
EPS = 1e-5
# Of a product, in units of the spread of its results: one rounding of bf16, or two.
ONE_ROUNDING, TWO_ROUNDINGS = 0.016, 0.03


def draw(seed: int, *shape: int, scale: float = 1.0, dtype=jnp.bfloat16) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def rounded(x: np.ndarray, dtype=jnp.bfloat16) -> np.ndarray:
    return x.astype(dtype).astype(np.float32)


def oracle(x, weight, norm=None, residual=None) -> np.ndarray:
    """The product in NumPy, in f32, rounded where separate operations round."""
    dtype = x.dtype
    x, weight = np.asarray(x, np.float32), np.asarray(weight, np.float32)
    if norm is not None:
        scale = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS)
        x = rounded(x * scale * np.asarray(norm, np.float32), dtype)
    if weight.ndim == 3:
        gate, up = (rounded(x @ weight[:, i].T, dtype) for i in range(2))
        out = gate / (1 + np.exp(-gate)) * up
    else:
        out = x @ weight.T
    if residual is not None:
        out = rounded(out, dtype) + np.asarray(residual, np.float32)
    return out


def check(x, weight, *, norm=None, residual=None, out_dtype=None, config=CONFIG, tolerance):
    run = functools.partial(
        linear, eps=EPS, out_dtype=out_dtype or x.dtype, config=config, interpret=True
    )
    out = run(x, weight, norm_weight=norm, residual=residual)
    want = oracle(x, weight, norm, residual)
    assert out.shape == want.shape and out.dtype == (out_dtype or x.dtype)
    assert np.abs(np.asarray(out, np.float32) - want).max() < tolerance * want.std()


@pytest.mark.parametrize("num_rows", [1, 5, 8, 24])
def test_a_product_of_few_rows_is_that_of_numpy(num_rows):
    # 3 tiles for 2 programs, 4 blocks of columns for 2 stages.
    check(draw(0, num_rows, 256), draw(1, 192, 256, scale=1 / 16), tolerance=ONE_ROUNDING)


def test_logits_are_not_rounded():
    x, weight = draw(0, 2, 128), draw(1, 64, 128, scale=1 / 11)
    check(x, weight, out_dtype=jnp.float32, tolerance=1e-5)


def test_float16():
    x = draw(0, 8, 128, dtype=jnp.float16)
    check(x, draw(1, 64, 128, scale=1 / 11, dtype=jnp.float16), tolerance=0.002)


def test_swiglu_takes_pairs_of_gate_and_up():
    x, weight = draw(0, 3, 256), draw(1, 192, 2, 256, scale=1 / 16)
    check(x, weight, config=SWIGLU, tolerance=TWO_ROUNDINGS)


def test_a_residual_is_added_to_each_tile():
    residual = draw(2, 5, 192)
    x, weight = draw(0, 5, 256), draw(1, 192, 256, scale=1 / 16)
    check(x, weight, residual=residual, tolerance=ONE_ROUNDING)


def test_x_is_normed_with_its_weight():
    x, weight = draw(0, 3, 1024, scale=5.0), draw(1, 128, 1024, scale=1 / 32)
    config = LinearConfig(tile_n=64, block_k=512, num_stages=2, num_splits=1, num_programs=1)
    check(x, weight, norm=draw(2, 1024), config=config, tolerance=TWO_ROUNDINGS)


def test_what_lies_past_the_rows_of_x_does_not_matter():
    x, weight = draw(0, 3, 128), draw(1, 64, 128)
    run = functools.partial(linear, weight=weight, out_dtype=x.dtype, config=CONFIG, interpret=True)
    nans = jnp.full((5, 128), jnp.nan, x.dtype)
    assert (run(x) == run(jnp.concatenate([x, nans]))[:3]).all()


SHAPES = {  # N and K of a Llama of 1B and of 8B
    "qkv": (3072, 2048),
    "o": (2048, 2048),
    "down": (2048, 8192),
    "head": (128256, 2048),
    "qkv 8B": (6144, 4096),
    "down 8B": (4096, 14336),
}


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_a_decoder_lowers_for_a_gpu(name, num_rows):
    out_size, in_size = SHAPES[name]
    dtype = jnp.float32 if name == "head" else jnp.bfloat16
    config = linear_config(
        num_rows=num_rows,
        out_size=out_size,
        in_size=in_size,
        swiglu=False,
        normed=False,
        out_itemsize=jnp.dtype(dtype).itemsize,
        num_sms=132,
    )
    run = functools.partial(linear, out_dtype=dtype, config=config, interpret=False)
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((num_rows, in_size), (out_size, in_size))
    ]
    text = lower_for_cuda(run, *shapes).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_fused_layer_lowers_for_a_gpu(num_rows):
    config = linear_config(
        num_rows=num_rows,
        out_size=8192,
        in_size=2048,
        swiglu=True,
        normed=True,
        out_itemsize=2,
        num_sms=132,
    )

    config = dataclasses.replace(config, prefetch=blocks_ahead(num_rows=1, sizes=[(2048, 8192)]))

    def run(x, weight, norm, later):
        how = dict(out_dtype=x.dtype, config=config, interpret=False)
        return linear(x, weight, norm_weight=norm, prefetch=[later], **how)

    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16)
        for s in ((num_rows, 2048), (8192, 2, 2048), (2048,), (2048, 8192))
    ]
    assert lower_for_cuda(run, *shapes).as_text().count("custom_call @mosaic_gpu") == 1


def test_weights_are_read_ahead_in_order_until_a_budget_is_spent():
    sizes = [(2048, 2048), (16384, 2048)]
    first, second = blocks_ahead(num_rows=1, sizes=sizes)
    assert first == 2048 * 2048 * 2 // 2**15  # all of it
    assert 0 < second < 16384 * 2048 * 2 // 2**15
    assert blocks_ahead(num_rows=64, sizes=sizes) == (0, 0)
    assert blocks_ahead(num_rows=1, sizes=[(2048, 2000)]) == (0,)
