"""Small KV pools."""

import jax
import jax.numpy as jnp

import pallas_paged as pp

SIZES = dict(num_layers=2, num_pages=4, num_kv_heads=2, page_size=2, head_dim=3)


def make_pool(**sizes):
    return pp.create_kv_pool(**SIZES | dict(dtype="float32", kv_layout="HPND") | sizes)


def copies_of(src, dst):
    return pp.PageCopies(src_pages=jnp.asarray(src), dst_pages=jnp.asarray(dst))


def pool_bytes(pool):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))


def assert_written_and_copied_in_place(pool, k, v):
    """A step that writes tokens of these shapes and then copies pages works in a donated pool."""

    def step(pool, k, v, slots):
        layers = tuple(pp.write_kv(layer, k, v, slots) for layer in pool.layers)
        return pp.copy_pages(pp.KVPool(layers=layers), copies_of(slots, slots + 1))

    slots = jax.ShapeDtypeStruct((k.shape[0],), jnp.int32)
    memory = jax.jit(step, donate_argnums=0).lower(pool, k, v, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes(pool)
    assert memory.temp_size_in_bytes < pool_bytes(pool) // 100
