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
