"""The Mosaic kernel between two attentions of several rows: interpreted, and lowered for a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged import decoder_block
from pallas_paged.decoder_block import BlockWeights, Residual
from pallas_paged.kernels.mosaic.decoder_rows import between_attentions, new_counters
from pallas_paged.kernels.mosaic.row_items import Product
from pallas_paged.kernels.mosaic.rows_config import clusters_at_once, decoder_rows_config
from tests.support.block_weights import draw, shapes_of
from tests.support.devices import lower_for_cuda
from tests.support.marks import slow

# Of attended, the residual, hidden and out.
SMALL = (512, 512, 512, 128)
LLAMAS = [(2048, 2048, 8192, 3072), (4096, 4096, 14336, 6144), (3072, 3072, 8192, 0)]
QWEN = (2048, 1024, 3072, 4096)


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
    ("rows", "parts", "sizes", "num_x_stages"),
    [
        (16, 1, (512, 512, 256, 256), 4),
        *slow(
            [
                (128, 1, (256, 256, 256, 256), 3),
                (64, 1, (256, 384, 384, 192), 8),
                (40, 1, (256, 256, 256, 0), 2),
                (72, 1, (256, 256, 384, 0), 6),
                (144, 2, (256, 256, 256, 256), 3),
            ]
        ),
    ],
)
def test_it_is_the_steps_in_numpy(rows, parts, sizes, num_x_stages):
    shapes = shapes_of(*sizes)
    w = {name: draw(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    attended, x = draw(20, rows, sizes[0]), draw(21, rows, sizes[1])
    config = decoder_rows_config(
        **sizes_of(*sizes),
        num_rows=rows,
        num_clusters=1,
        cluster_size=1,
        num_x_stages=num_x_stages,
        num_parts=parts,
    )
    got = between_attentions(
        attended,
        x,
        new_counters(),
        **{"qkv": None} | w,
        eps=1e-5,
        config=config,
        interpret=True,
    )
    for a, b in zip(got[:2], oracle(attended, x, w), strict=True):
        assert (np.abs(np.asarray(a, np.float32) - b) < 0.02 * np.abs(b) + 0.05 * b.std()).all()


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        *((64, sizes) for sizes in LLAMAS),
        *((128, sizes) for sizes in (QWEN, *LLAMAS)),
        *((rows, QWEN) for rows in (80, 256)),
        (40, LLAMAS[1]),
        (8, SMALL),
    ],
)
def test_the_blocks_of_decoders_lower_for_a_gpu(rows, sizes):
    attended, size, *_ = sizes
    num_clusters, cluster_size = clusters_at_once(132, rows)
    config = decoder_rows_config(
        **sizes_of(*sizes), num_rows=rows, num_clusters=num_clusters, cluster_size=cluster_size
    )
    shapes = shapes_of(*sizes)
    weights = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shapes.items()}
    matrices = [jax.ShapeDtypeStruct((rows, n), jnp.bfloat16) for n in (attended, size)]

    def run(attended, x, counters, weights):
        weights = {"qkv": None} | weights
        return between_attentions(attended, x, counters, **weights, eps=1e-5, config=config)

    counters = jax.eval_shape(new_counters)
    text = lower_for_cuda(run, *matrices, counters, weights).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text and "stablehlo.transpose" not in text


@pytest.mark.slow
def test_two_parts_of_the_rows_are_the_same_as_one():
    shapes = shapes_of(256, 256, 256, 128)
    w = {name: draw(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    attended, x = draw(20, 32, 256), draw(21, 32, 256)

    def run(num_parts):
        config = decoder_rows_config(
            **sizes_of(256, 256, 256, 128),
            num_rows=32,
            num_clusters=num_parts,
            cluster_size=1,
            num_parts=num_parts,
        )
        kernel = functools.partial(between_attentions, eps=1e-5, config=config, interpret=True)
        return kernel(attended, x, new_counters(), **w)[:2]

    for a, b in zip(run(1), run(2), strict=True):
        np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (a, b)))


@pytest.mark.parametrize("sizes", [QWEN, *LLAMAS])
@pytest.mark.parametrize(("clusters", "cluster_size"), [(30, 4), (33, 4), (66, 2)])
def test_equal_tiles_and_parts_cover_all_features_and_each_is_owned_once(
    sizes, clusters, cluster_size
):
    config = decoder_rows_config(
        **sizes_of(*sizes), num_rows=64, num_clusters=clusters, cluster_size=cluster_size
    )
    for tiles in (config.o, config.down, config.qkv):
        owners = np.zeros(tiles.num_features, int)
        for cluster, rank in np.ndindex(config.num_clusters, cluster_size):
            product = Product(
                weight=np.empty((tiles.num_features, 1)),
                x=None,
                tiles=tiles,
                cluster=cluster,
                rank=rank,
                config=config,
            )
            own, count = product.own()
            start, count = int(own.start), int(count)
            assert 0 <= start <= tiles.num_features - own.size and count <= own.size
            owners[start : start + max(count, 0)] += 1
        assert (owners == 1).all()


def test_of_as_large_tiles_it_has_the_fewest_clusters():
    clusters = dict(num_rows=128, num_clusters=66, cluster_size=2)
    assert decoder_rows_config(**sizes_of(*LLAMAS[0]), **clusters).num_clusters == 64
    assert decoder_rows_config(**sizes_of(*QWEN), **clusters).num_clusters == 32  # of each part


@pytest.mark.parametrize(
    "change", [dict(size=320), dict(hidden_size=8200), dict(out_size=100), dict(attended_size=2000)]
)
def test_sizes_that_do_not_fit_have_no_config(change):
    sizes = sizes_of(2048, 2048, 8192, 3072) | change
    clusters = dict(num_clusters=29, cluster_size=4)
    assert decoder_rows_config(**sizes, num_rows=64, **clusters) is None


def test_clusters_fit_whatever_sms_the_processing_clusters_have():
    of_four, of_two = ([clusters_at_once(n, rows)[0] for n in (132, 114, 78)] for rows in (64, 72))
    assert (of_four, of_two) == ([29, 24, 15], [66, 57, 39])


@pytest.mark.parametrize(
    ("rows", "size", "kernels"),
    [
        (2, 1024, 1),
        (128, 1024, 1),
        (256, 1024, 1),
        (257, 1024, 0),
        (8, 512, 0),
        (2, 4096, 1),
        (128, 4096, 1),
        (129, 4096, 0),
    ],
)
def test_it_is_chosen_for_the_rows_of_each_size_for_which_it_is_faster(rows, size, kernels):
    sizes = next(x for x in (SMALL, QWEN, *LLAMAS) if x[1] == size)
    shapes = shapes_of(*sizes)
    w = BlockWeights(**{k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in shapes.items()})
    attended, x = (jax.ShapeDtypeStruct((rows, n), jnp.bfloat16) for n in sizes[:2])

    def run(attended, x, w):
        return decoder_block.between_attentions(attended, Residual(x=x), w, eps=1e-5)[1]

    text = lower_for_cuda(run, attended, x, w).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels
