"""The Mosaic kernel that adds up over GPUs lowers for two and for eight, without any."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.decoder.kernels.all_reduce import all_reduce
from pallas_paged.decoder.kernels.peer_memory import memory_bytes
from pallas_paged.decoder.peers import Peers, row_linear_norm
from tests.support.devices import H200

CAPACITY = 1 << 20


def of(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def mesh_of(num_devices):
    kinds = (AxisType.Auto,)
    return AbstractMesh((num_devices,), ("tensor",), kinds, abstract_device=H200)


def lowered(mesh, run, *arrays) -> str:
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("num_devices", [2, 8])
@pytest.mark.parametrize(
    "arrays",
    [
        (of(1, 4096),),
        (of(64, 5120),),
        (of(3, 2, dtype=jnp.float32),),
        # The parts of a product, the residual and the weight of the norm.
        (of(8, 64, 5120, dtype=jnp.float32), of(64, 5120), of(5120)),
    ],
    ids=lambda arrays: "x".join(map(str, arrays[0].shape)),
)
def test_it_is_one_kernel_and_no_collective_or_sum_of_xla(arrays, num_devices):
    (x, *others), mesh = arrays, mesh_of(num_devices)

    def local(x, peers, memory, *others):
        return all_reduce(x[0], peers.reshape(-1), memory, *others, capacity=CAPACITY)

    specs = *[P("tensor")] * 3, *[P()] * len(others)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    peers = of(num_devices, 2 * num_devices + 2, dtype=jnp.int32)
    memory = of(num_devices, memory_bytes(num_devices, CAPACITY) // 4, dtype=jnp.int32)
    text = lowered(mesh, run, of(num_devices, *x.shape, dtype=x.dtype), peers, memory, *others)
    (call,) = re.findall(r"custom_call @mosaic_gpu.*", text)
    assert not others or call.endswith("(tensor<64x5120xbf16>, tensor<64x5120xbf16>)")
    assert not re.search(r"all_reduce\"|all_gather\"|collective_permute|stablehlo.reduce", text)


def test_memory_holds_two_sums_from_each_device_as_packets_and_as_words():
    one = memory_bytes(2, 8192) - memory_bytes(2, 0)
    assert one == 2 * 2 * 8192 * 3  # packets are twice as large as their data
    assert memory_bytes(8, 8192) - memory_bytes(8, 0) == 4 * one


def test_the_product_of_a_decode_step_leaves_its_parts_to_the_kernel():
    mesh = mesh_of(2)
    memory = of(2, memory_bytes(2, CAPACITY) // 4, dtype=jnp.int32)
    peers = Peers(addresses=of(2, 6, dtype=jnp.int32), memory=memory, mesh=mesh, capacity=CAPACITY)
    args = of(64, 4096), of(1024, 4096), of(64, 1024), of(1024)
    text = lowered(mesh, lambda peers, *args: row_linear_norm(*args, 1e-5, peers), peers, *args)
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1
    assert "tensor<4x64x1024xf32>" in text
    assert "stablehlo.reduce" not in text
