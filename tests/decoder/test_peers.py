"""Sums and gathers over the devices of a mesh: by JAX's collectives, or the kernel on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.decoder.peers import create_peers, embed, partial_products, row_linear
from pallas_paged.kernels.mosaic_sm90.config import reduce_parts
from tests.support.devices import mesh
from tests.support.marks import slow
from tests.support.placement import collectives
from tests.support.repeats import repeat

DEVICES = [2, *slow([4, 8])]


def draw(seed: int, *shape: int, dtype=jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def total(x, peers):
    return peers.run(lambda group, x: group.sum(x[0]), (P("tensor"),), x)


def assert_sum(found, parts):
    wanted, found = parts.astype(np.float64).sum(axis=0), np.asarray(found, np.float64)
    tolerance = 1e-5 if parts.dtype == np.float32 else 2e-2
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("num_devices", DEVICES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4096), (3, 4), (70, 256)])
def test_sums_are_the_same_on_every_device_and_in_every_call(num_devices, dtype, shape):
    peers, bits = create_peers(mesh(num_devices)), set()
    parts = draw(0, num_devices, *shape, dtype=dtype)
    run = jax.jit(total)
    for _ in range(5):
        for shard in run(jnp.asarray(parts), peers).addressable_shards:
            assert_sum(shard.data, parts)
            bits.add(np.asarray(shard.data).tobytes())
    assert len(bits) == 1


@pytest.mark.slow
def test_many_sums_in_a_loop_have_the_same_bits():
    peers, parts = create_peers(mesh(2)), draw(2, 2, 64, 2048, dtype=jnp.bfloat16)
    found, others = repeat(total, (parts, peers), 1000 if jax.default_backend() == "gpu" else 10)
    assert others == 0
    assert_sum(found, parts)


@pytest.mark.parametrize("num_devices", DEVICES)
def test_a_loop_of_sums_depends_on_all_earlier_ones(num_devices):
    peers = create_peers(mesh(num_devices))

    def local(group, n):
        def body(i, x):
            return group.sum(x) + group.index.astype(jnp.float32) + i

        return group.gather(jax.lax.fori_loop(0, n, body, jnp.ones((2, 4))))

    found = jax.jit(lambda n, peers: peers.run(local, (P(),), n))(jnp.int32(5), peers)
    x = np.ones(num_devices)
    for i in range(5):
        x = x.sum() + np.arange(num_devices) + i
    np.testing.assert_array_equal(found, np.broadcast_to(x[:, None, None], (num_devices, 2, 4)))


@pytest.mark.parametrize("num_devices", DEVICES)
def test_gather_keeps_nan_and_infinity_where_they_are(num_devices):
    peers = create_peers(mesh(num_devices))
    x = draw(1, num_devices, 2, 3)
    x[0, 0, 0], x[1, 1, 2], x[1, 0, 1] = np.nan, np.inf, -np.inf
    run = jax.jit(lambda x, peers: peers.run(lambda g, x: g.gather(x[0]), (P("tensor"),), x))
    np.testing.assert_array_equal(run(jnp.asarray(x), peers), x)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("num_devices", DEVICES)
def test_products_and_embeddings_of_sharded_weights_move_no_weight(num_devices):
    on = mesh(num_devices)
    peers = create_peers(on)
    x, weight, table = draw(2, 5, 64), draw(3, 24, 64), draw(4, 48, 16)
    token_ids = np.array([0, 47, 3, 24, 23], np.int32)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(on, P(*spec)))  # noqa: E731
    args = put(x, None, "tensor"), put(weight, None, "tensor"), put(table, "tensor"), peers

    @jax.jit
    def run(x, weight, table, peers):
        return row_linear(x, weight, peers), embed(token_ids, table, peers)

    product, rows = run(*args)
    np.testing.assert_allclose(product, x @ weight.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rows, table[token_ids])
    if jax.default_backend() == "cpu":
        assert all("all-reduce(" in line for line in collectives(run.lower(*args).compile()))


@pytest.mark.usefixtures("exact_products")
def test_products_on_one_device_need_no_sum_but_that_of_their_parts():
    x, weight = draw(2, 5, 64), draw(3, 24, 64)
    np.testing.assert_allclose(row_linear(x, weight, None), x @ weight.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(embed(np.array([1, 0]), weight, None), weight[[1, 0]])
    for parts in (1, 2, 8):
        found = partial_products(jnp.asarray(x), jnp.asarray(weight), parts)
        assert (found.shape, found.dtype) == ((parts, 5, 24), jnp.float32)
        np.testing.assert_allclose(np.asarray(found).sum(0), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_parts_of_products_have_columns_enough():
    assert reduce_parts(num_rows=64, num_columns=2048) == 4
    assert reduce_parts(num_rows=1, num_columns=7168) == 8
    assert reduce_parts(num_rows=64, num_columns=7168) == 4
    assert reduce_parts(num_rows=64, num_columns=1023) == 1
    assert reduce_parts(num_rows=65, num_columns=7168) == 1
