"""The Mosaic kernel between two attentions of several rows: interpreted, and lowered for a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.kernels.mosaic.decoder_rows import between_attentions, new_counters
from pallas_paged.kernels.mosaic.rows_config import (
    DecoderRowsConfig,
    ProductTiles,
    decoder_rows_config,
)
from tests.kernels.mosaic.test_decoder_block import draw, shapes_of
from tests.support.devices import lower_for_cuda

# Of attended, the residual, hidden and out.
LLAMAS = [(2048, 2048, 8192, 3072), (4096, 4096, 14336, 6144), (3072, 3072, 8192, 0)]


def tiles(tile: int, splits: int = 1) -> ProductTiles:
    return ProductTiles(tile=tile, splits=splits)


def sizes_of(attended: int, size: int, hidden: int, out: int) -> dict[str, int]:
    return dict(size=size, attended_size=attended, hidden_size=hidden, out_size=out)


def oracle(attended, x, w):
    """The steps in NumPy, in f32, rounded where the kernel rounds a result."""

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(np.float32)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * weight

    attended, x = (np.asarray(a, np.float32) for a in (attended, x))
    w = {name: np.asarray(weight, np.float32) for name, weight in w.items()}
    x = rounded(x + rounded(attended @ w["o"].T))
    normed = norm(x, w["mlp_norm"])
    gate, up = (rounded(normed @ w["gate_up"][:, i].T) for i in range(2))
    x = rounded(x + rounded(rounded(gate / (1 + np.exp(-gate)) * up) @ w["down"].T))
    normed = norm(x, w["out_norm"])
    return x, normed @ w["qkv"].T if "qkv" in w else normed


@pytest.mark.parametrize(
    ("rows", "sizes", "config"),
    [
        (
            16,
            (512, 512, 256, 256),
            dict(o=tiles(128, 2), gate_up=tiles(64), down=tiles(256, 2), qkv=tiles(128)),
        ),
        (
            64,
            (256, 384, 448, 384),
            dict(
                o=tiles(128, 2),
                gate_up=tiles(112),
                down=tiles(192, 1),
                qkv=tiles(192, 2),
                num_stages=2,
                num_x_stages=5,
                num_in_flight=1,
            ),
        ),
        (
            40,
            (256, 512, 256, 0),
            dict(
                o=tiles(64),
                gate_up=tiles(32),
                down=tiles(128, 2),
                qkv=tiles(64),
                num_chunks=2,
                num_in_flight=4,
            ),
        ),
    ],
)
def test_it_is_the_steps_in_numpy(rows, sizes, config):
    shapes = shapes_of(*sizes)
    if not sizes[-1]:
        del shapes["qkv"]
    w = {name: draw(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    attended, x = draw(20, rows, sizes[0]), draw(21, rows, sizes[1])
    got = between_attentions(
        attended,
        x,
        new_counters(),
        **{"qkv": None} | w,
        eps=1e-5,
        config=DecoderRowsConfig(num_programs=1, **config),
        interpret=True,
    )
    for a, b in zip(got[:2], oracle(attended, x, w), strict=True):
        assert (np.abs(np.asarray(a, np.float32) - b) < 0.02 * np.abs(b) + 0.05 * b.std()).all()


@pytest.mark.parametrize("sizes", LLAMAS)
@pytest.mark.parametrize("rows", [8, 40, 64])
def test_the_blocks_of_decoders_lower_for_a_gpu(sizes, rows):
    attended, size, _, out = sizes
    config = decoder_rows_config(num_rows=rows, **sizes_of(*sizes), num_programs=132)
    shapes = shapes_of(*sizes)
    if not out:
        del shapes["qkv"]
    weights = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shapes.items()}
    matrices = [jax.ShapeDtypeStruct((rows, n), jnp.bfloat16) for n in (attended, size)]

    def run(attended, x, counters, weights):
        weights = {"qkv": None} | weights
        return between_attentions(attended, x, counters, **weights, eps=1e-5, config=config)

    counters = jax.eval_shape(new_counters)
    text = lower_for_cuda(run, *matrices, counters, weights).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize("sizes", LLAMAS[:2])
def test_products_of_llamas_have_an_equal_part_for_nearly_all_programs(sizes):
    config = decoder_rows_config(num_rows=64, **sizes_of(*sizes), num_programs=132)
    features = sizes[1], sizes[2], sizes[1], sizes[3]
    for tile, num_features in zip(config.products, features, strict=True):
        assert 96 <= num_features // tile.tile * tile.splits <= config.num_programs <= 132


@pytest.mark.parametrize(
    "change", [dict(size=320), dict(hidden_size=8200), dict(out_size=100), dict(attended_size=2000)]
)
def test_sizes_that_do_not_fit_have_no_config(change):
    sizes = sizes_of(2048, 2048, 8192, 3072) | change
    assert decoder_rows_config(num_rows=64, **sizes, num_programs=132) is None


def test_a_ring_holds_the_activations_of_a_stage_of_weights():
    with pytest.raises(ValueError, match="num_x_stages=3 must be at least 4"):
        DecoderRowsConfig(
            num_programs=1,
            o=tiles(64),
            gate_up=tiles(64),
            down=tiles(256),
            qkv=tiles(128),
            num_x_stages=3,
        )
