"""Attention over several GPUs: run `python examples/several_gpus.py`.

The KV heads of the pages, and the heads of the weights, are sharded over a mesh of all devices (the
largest number that divides the heads). The page table is on each device. The decode step is plain
`jit`, the same as on one device: each device attends with its own heads, and the only exchange is
the sum after the output projection. One device is enough; a CPU shows four with

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/several_gpus.py

Prints the bytes of the pool on each device, and asserts that the results are those of one device.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from pallas_paged.pages.sharding import kv_pool_sharding

SEQS, LAYERS, HQ, HKV, D = 4, 2, 16, 8, 64
SIZE = 256


def init() -> dict[str, np.ndarray]:
    """Return random weights of attention alone, with an axis of heads."""
    rng, in_shape = np.random.default_rng(0), (LAYERS, SIZE, HKV, D)
    shapes = dict(q=(LAYERS, SIZE, HQ, D), k=in_shape, v=in_shape, out=(LAYERS, HQ, D, SIZE))
    drawn = {name: rng.standard_normal(shape) / SIZE**0.5 for name, shape in shapes.items()}
    return jax.tree.map(np.float32, drawn)


@partial(jax.jit, donate_argnames="cache")
def step(x, weights, cache: pp.PagedKVCache):
    """Return x [SEQS, SIZE] after all layers, and the cache with one more token a sequence."""
    cache, ok = cache.extend(jnp.ones(SEQS, jnp.int32))
    for layer in range(LAYERS):
        q, k, v = (jnp.einsum("be,ehd->bhd", x, weights[name][layer]) for name in "qkv")
        cache = cache.write(layer, k, v)
        attended = cache.attend(layer, q)
        x += jnp.einsum("bhd,hde->be", attended, weights["out"][layer])
    return x / jnp.linalg.norm(x, axis=1, keepdims=True) * SIZE**0.5, ok, cache


def decode(devices: list[jax.Device], num_steps: int) -> tuple[np.ndarray, int]:
    """Return x after some steps, and the bytes of the pool on the first device."""
    mesh = Mesh(np.array(devices), ("tensor",), axis_types=(AxisType.Auto,))
    sizes = dict(num_layers=LAYERS, num_pages=64, page_size=16, num_kv_heads=HKV, head_dim=D)
    cache = pp.PagedKVCache.create(
        **sizes, max_seqs=SEQS, pages_per_seq=16, dtype="float32", sharding=kv_pool_sharding(mesh)
    )
    by_head = P(None, None, "tensor")
    specs = dict(q=by_head, k=by_head, v=by_head, out=P(None, "tensor"))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    weights = jax.device_put(init(), shardings)
    x = np.float32(np.random.default_rng(1).standard_normal((SEQS, SIZE)))
    x = jax.device_put(x, NamedSharding(mesh, P()))
    for _ in range(num_steps):
        x, ok, cache = step(x, weights, cache)
        assert ok.all()
    pages = jax.tree.leaves(cache.pool)
    return np.asarray(x), sum(array.addressable_shards[0].data.nbytes for array in pages)


def main(num_steps: int = 20) -> tuple[int, int, int]:
    devices = jax.devices()
    number = max(n for n in range(1, HKV + 1) if HKV % n == 0 and n <= len(devices))
    with jax.default_matmul_precision("highest"):  # without TF32, which rounds shapes differently
        expected, on_one = decode(devices[:1], num_steps)
        found, on_each = decode(devices[:number], num_steps)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert on_each * number == on_one
    print(f"1 device: {on_one / 1e6:.2f} MB of pages")
    print(f"{number} devices: {on_each / 1e6:.2f} MB on each, and the same results")
    return number, on_one, on_each


if __name__ == "__main__":
    main()
