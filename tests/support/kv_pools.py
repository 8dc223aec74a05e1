"""Small KV pools."""

import jax
import jax.numpy as jnp

import pallas_paged as pp


def make_pool(
    num_layers=2,
    num_pages=4,
    num_kv_heads=2,
    page_size=2,
    head_dim=3,
    dtype=jnp.float32,
    kv_layout="HPND",
    **more,
):
    return pp.create_kv_pool(
        num_layers=num_layers,
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
        kv_layout=kv_layout,
        **more,
    )


def copies_of(src, dst):
    return pp.PageCopies(src_pages=jnp.asarray(src), dst_pages=jnp.asarray(dst))


def pool_bytes(pool):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
