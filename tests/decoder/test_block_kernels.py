"""The Mosaic kernels between two attentions, of one row and of several: interpreted and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.decoder import between_attentions as entry
from pallas_paged.decoder.between_attentions import BlockWeights, Residual
from pallas_paged.decoder.kernels import batch, one_row
from pallas_paged.decoder.kernels.batch_config import clusters_at_once, decoder_batch_config
from pallas_paged.decoder.kernels.batch_refs import new_counters
from pallas_paged.decoder.kernels.batch_tiles import Product
from pallas_paged.decoder.kernels.one_row_mailbox import EMPTY
from pallas_paged.decoder.kernels.one_row_refs import new_mailboxes
from pallas_paged.kernels.mosaic_sm90.config import DecoderBlockConfig, decoder_block_config
from tests.support.block_weights import draw, shapes_of, weights_of
from tests.support.devices import lower_for_cuda
from tests.support.marks import slow

# Of attended, the residual, hidden and out.
SMALL = (512, 512, 512, 128)
LLAMAS = [(2048, 2048, 8192, 3072), (4096, 4096, 14336, 6144), (3072, 3072, 8192, 0)]
QWEN = (2048, 1024, 3072, 4096)
QWEN_14B, PHI_4 = (5120, 5120, 17408, 7168), (5120, 5120, 17920, 7680)
LAST_OF_QWEN = (2048, 1024, 3072, 0)
INTERPRETED = dict(eps=1e-5, interpret=True)
# The last one of each product is not full.
TILES = dict(o_tile=40, gate_up_tile=48, down_tile=24, qkv_tile=56)


def sizes_of(attended: int, size: int, hidden: int, out: int) -> dict[str, int]:
    return dict(size=size, attended_size=attended, hidden_size=hidden, out_size=out)


def operands(rows, sizes, dtype=jnp.bfloat16):
    """(attended, x, weights)"""
    w = weights_of(*sizes, dtype=dtype)
    attended, x = (draw(20 + i, rows, sizes[i], dtype=dtype) for i in range(2))
    return attended, x, {"qkv": None} | w


@jax.jit
def separate_steps(attended, x, w):
    """The results of XLA."""
    how = dict(eps=1e-5, implementation="xla")
    stream, out, _ = entry.between_attentions(attended, Residual(x=x), BlockWeights(**w), **how)
    return stream.x, out


def assert_near(actual, expected, *, rtol=0.02, stds=0.05):
    for a, b in zip(actual, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert (np.abs(a - b) < rtol * np.abs(b) + stds * b.std()).all()


def batch_config(rows, sizes, num_clusters=1, cluster_size=1, **more):
    clusters = dict(num_rows=rows, num_clusters=num_clusters, cluster_size=cluster_size)
    return decoder_batch_config(**sizes_of(*sizes), **clusters, **more)


@pytest.mark.parametrize(
    ("splits", "stages", "tiles", "dtype", "size", "hidden", "biases"),
    [
        ((2, 4), (3, 2), {}, jnp.bfloat16, 512, 1024, ()),
        ((2, 2), (3, 2), TILES, jnp.bfloat16, 832, 960, ("o", "qkv")),
        *slow(
            [
                ((4, 2), (2, 2), TILES, jnp.float16, 512, 1024, ()),
                ((1, 1), (6, 6), {}, jnp.bfloat16, 512, 1024, ()),
                ((2, 2), (3, 2), {}, jnp.bfloat16, 832, 960, ("o", "qkv")),
            ]
        ),
    ],
)
def test_one_row_equals_the_separate_steps(splits, stages, tiles, dtype, size, hidden, biases):
    sizes = 1024, size, hidden, 192
    attended, x, w = operands(1, sizes, dtype)
    w |= {f"{name}_bias": draw(9, len(w[name]), dtype=dtype) for name in biases}
    config = DecoderBlockConfig(
        num_programs=1,
        o_splits=splits[0],
        down_splits=splits[1],
        num_stages=stages[0],
        num_in_flight=stages[1],
        **tiles,
    )
    weights = BlockWeights(**w)
    mailboxes = new_mailboxes(config, weights)
    assert all((mailbox == EMPTY).all() for mailbox in mailboxes)
    run = partial(one_row.between_attentions, config=config, **INTERPRETED)
    *results, mailboxes = run(attended, x, mailboxes, weights)
    assert_near(results, separate_steps(attended, x, w), rtol=0, stds=0.03)
    # The next call has a clear mailbox, and clears that of this one.
    published = np.asarray(mailboxes[1] != EMPTY)
    assert (mailboxes[0] == EMPTY).all()
    assert published[: -sizes[0]].all() and not published[-sizes[0] :].any()


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
def test_rows_equal_the_separate_steps(rows, parts, sizes, num_x_stages):
    attended, x, w = operands(rows, sizes)
    config = batch_config(rows, sizes, num_x_stages=num_x_stages, num_parts=parts)
    run = partial(batch.between_attentions, config=config, **INTERPRETED)
    *results, _ = run(attended, x, new_counters(), BlockWeights(**w))
    assert_near(results, separate_steps(attended, x, w))


def test_one_row_has_the_splits_and_tiles_that_give_programs_equal_work():
    configs = [
        decoder_block_config(**sizes_of(*sizes), num_programs=132)
        for sizes in (*LLAMAS[:2], LAST_OF_QWEN)
    ]
    found = [(x.o_splits, x.down_splits, x.num_stages) for x in configs]
    assert found == [(4, 4, 6), (2, 2, 6), (4, 4, 6)]
    tiles = [(x.o_tile, x.gate_up_tile, x.down_tile, x.qkv_tile) for x in configs]
    assert tiles == [(64, 64, 64, 32), (64, 56, 64, 48), (32, 32, 32, 64)]


def test_one_row_has_as_many_splits_as_a_part_of_its_columns_fits_the_registers():
    def splits(hidden_size):
        sizes = dict(size=5120, attended_size=5120, hidden_size=hidden_size, out_size=7168)
        config = decoder_block_config(**sizes, num_programs=132)
        return config and config.down_splits

    assert [splits(x) for x in (8192, 17920, 20736, 32768)] == [1, 2, None, 8]


@pytest.mark.parametrize("sizes", [QWEN, *LLAMAS])
@pytest.mark.parametrize(("clusters", "cluster_size"), [(30, 4), (33, 4), (66, 2)])
def test_equal_tiles_cover_all_features_and_each_is_owned_once(sizes, clusters, cluster_size):
    config = batch_config(64, sizes, clusters, cluster_size)
    clusters, ranks = map(np.ravel, np.indices((config.num_clusters, cluster_size)))
    for tiles in (config.o, config.down, config.qkv):
        weight = np.empty((tiles.num_features, 1))

        def own(cluster, rank, tiles=tiles, weight=weight):
            where = dict(cluster=cluster, rank=rank)
            rows, count = Product(weight=weight, x=None, tiles=tiles, config=config, **where).own()
            return rows.start, count, rows.size

        starts, counts, sizes = map(np.asarray, jax.jit(jax.vmap(own))(clusters, ranks))
        assert (starts >= 0).all() and (starts <= tiles.num_features - sizes).all()
        assert (counts <= sizes).all()
        owners = np.zeros(tiles.num_features, int)
        for start, count in zip(starts, counts, strict=True):
            owners[start : start + max(count, 0)] += 1
        assert (owners == 1).all()


def test_the_fewest_clusters_are_used_that_allow_such_tiles():
    found = [batch_config(128, sizes, 66, 2).num_clusters for sizes in (LLAMAS[0], QWEN)]
    assert found == [64, 32]


BOTH = dict(hidden_size=8200), dict(out_size=100)


@pytest.mark.parametrize(
    ("rows", "change"),
    [
        *((1, x) for x in (*BOTH, dict(size=776), dict(attended_size=131072))),
        *((64, x) for x in (*BOTH, dict(size=320), dict(attended_size=2000))),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_have_no_config(rows, change):
    sizes = sizes_of(*LLAMAS[0]) | change
    if rows == 1:
        config = decoder_block_config(**sizes, num_programs=132)
    else:
        config = decoder_batch_config(**sizes, num_rows=rows, num_clusters=29, cluster_size=4)
    assert config is None


def test_clusters_fit_whatever_sms_the_processing_clusters_have():
    of_four, of_two = ([clusters_at_once(n, rows)[0] for n in (132, 114, 78)] for rows in (64, 72))
    assert (of_four, of_two) == ([29, 24, 15], [66, 57, 39])


@pytest.mark.parametrize(
    ("rows", "sizes", "kernels"),
    [
        *((1, sizes, 1) for sizes in (*LLAMAS[:2], LAST_OF_QWEN)),
        *((rows, QWEN, 1) for rows in (2, 80, 128, 256)),
        *((rows, sizes, 1) for rows in (64, 128) for sizes in LLAMAS),
        *((rows, LLAMAS[1], 1) for rows in (2, 40)),
        *[(1, PHI_4, 1), (64, QWEN_14B, 1), (64, PHI_4, 0), (16, QWEN_14B, 0)],
        *[(257, QWEN, 0), (129, LLAMAS[1], 0), (8, SMALL, 0)],
    ],
)
def test_blocks_lower_for_a_gpu_to_one_kernel_where_that_is_faster(rows, sizes, kernels):
    shapes = shapes_of(*sizes)
    w = BlockWeights(
        **{"qkv": None} | {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in shapes.items()}
    )
    attended, x = (jax.ShapeDtypeStruct((rows, n), jnp.bfloat16) for n in sizes[:2])

    def run(attended, x, w):
        how = dict(eps=1e-5, implementation="mosaic_sm90" if rows == 1 else None)
        return entry.between_attentions(attended, Residual(x=x), w, **how)[1]

    text = lower_for_cuda(run, attended, x, w).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels
    if kernels:
        assert ("stablehlo.pad" in text) == (rows == 2) and "stablehlo.transpose" not in text
