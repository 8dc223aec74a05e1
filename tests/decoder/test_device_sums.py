"""`between_attentions` with weights that devices share: kernels that add up over the devices."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.decoder.between_attentions import BlockWeights, Residual, between_attentions
from pallas_paged.decoder.kernels.peer_memory import memory_bytes
from pallas_paged.decoder.peers import Peers, create_peers
from tests.support.block_weights import draw, shapes_of, weights_of
from tests.support.devices import H200, mesh
from tests.support.marks import slow

SIZES = (2048, 4096, 4096, 1024)  # of attended, the residual, hidden and out
LLAMA_8B = (4096, 4096, 14336, 6144)
CAPACITY = 2 << 20


def of(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def lowered(num_devices, rows, sizes=LLAMA_8B, *, capacity=CAPACITY, o_bias=False, **how) -> str:
    """Two layers one after the other, for H200 GPUs."""
    on = AbstractMesh((num_devices,), ("tensor",), (AxisType.Auto,), abstract_device=H200)
    weights = {name: of(*shape) for name, shape in shapes_of(*sizes).items()}
    weights |= {"o_bias": of(sizes[1])} if o_bias else {}
    peers = Peers(
        addresses=of(num_devices, 2 * num_devices + 2, dtype=jnp.int32),
        memory=of(num_devices, memory_bytes(num_devices, capacity) // 4, dtype=jnp.int32),
        mesh=on,
        capacity=capacity,
    )

    @jax.jit
    def run(peers, attended, x, weights):
        residual = Residual(x=x)
        for _ in range(2):
            residual, out, _ = between_attentions(
                attended, residual, BlockWeights(**weights), eps=1e-5, peers=peers, **how
            )
        return residual.x, out

    with jax.sharding.use_abstract_mesh(on):
        traced = run.trace(peers, of(rows, sizes[0]), of(rows, sizes[1]), weights)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("num_devices", "rows"), [(2, 1), (2, 64), *slow([(4, 1), (2, 128), (4, 32)])]
)
def test_a_layer_is_one_kernel_without_a_collective(num_devices, rows):
    text = lowered(num_devices, rows)
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 2
    assert not re.search(r"all_reduce\"|all_gather\"|collective_permute|dot_general", text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(o_bias=True), "a bias of o"),
        (dict(num_devices=8, capacity=CAPACITY // 7 // 128 * 128, rows=128), "fits their memory"),
        (dict(rows=1, capacity=0), "fits their memory"),
        (dict(interpret=True), "devices"),
    ],
)
def test_refuses_by_name_what_kernels_do_not_add_up(change, reason):
    how = dict(num_devices=2, rows=1) | change
    with pytest.raises(NotImplementedError, match=reason):
        lowered(**how, implementation="mosaic_sm90")


@pytest.mark.parametrize("rows", [1, 5, 64, *slow([128])])
def test_devices_that_share_weights_have_the_results_of_one(rows):
    on = mesh(2)
    weights = BlockWeights(**weights_of(*SIZES))
    attended, x = (draw(20 + i, rows, SIZES[i]) for i in range(2))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(on, P(*spec)))  # noqa: E731
    shared = replace(
        jax.tree.map(put, weights),
        o=put(weights.o, None, "tensor"),
        down=put(weights.down, None, "tensor"),
        gate_up=put(weights.gate_up, "tensor"),
        qkv=put(weights.qkv, "tensor"),
    )

    @partial(jax.jit, static_argnames="num_layers")
    def run(attended, x, weights, peers, num_layers=1):
        def layer(_, carry):
            residual, out, _ = between_attentions(
                attended, carry[0], weights, eps=1e-5, peers=peers
            )
            return residual, out

        first = layer(0, (Residual(x=x), None))
        residual, out = jax.lax.fori_loop(1, num_layers, layer, first)
        return residual.x, out

    exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (attended, x, weights))
    wanted = run(*exact, None)
    given = put(attended, None, "tensor"), put(x), shared, create_peers(on)
    for a, b in zip(run(*given), wanted, strict=True):
        error = np.asarray(a, np.float32) - np.asarray(b)
        assert np.linalg.norm(error) < 0.01 * np.linalg.norm(b)
    bits = set()
    for _ in range(20 if jax.default_backend() == "gpu" else 2):
        stream, out = run(*given, num_layers=9)
        parts = {np.asarray(shard.data).tobytes() for shard in stream.addressable_shards}
        assert len(parts) == 1
        bits.add((*parts, np.asarray(out).tobytes()))
    assert len(bits) == 1
