"""The Mosaic kernel that adds up over GPUs lowers for two and for eight, without any."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

from pallas_paged.kernels.mosaic.all_reduce import all_reduce, memory_bytes
from pallas_paged.peers import Peers, row_linear_norm
from tests.support.devices import H200

CAPACITY = 1 << 20


def lowered(dtype, shape, num_devices, *others) -> str:
    """The text of a program that adds up on each device; `others` are whole on every device."""
    kinds = (AxisType.Auto,)
    mesh = AbstractMesh((num_devices,), ("tensor",), kinds, abstract_device=H200)

    def local(x, peers, memory, *others):
        return all_reduce(x[0], peers.reshape(-1), memory, *others, capacity=CAPACITY)

    cut, whole = P("tensor"), (P(),) * len(others)
    specs = (cut,) * 3 + whole
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    shapes = (
        jax.ShapeDtypeStruct((num_devices, *shape), dtype),
        jax.ShapeDtypeStruct((num_devices, 2 * num_devices + 2), jnp.int32),
        jax.ShapeDtypeStruct((num_devices, memory_bytes(num_devices, CAPACITY) // 4), jnp.int32),
        *others,
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("num_devices", [2, 8])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(jnp.bfloat16, (1, 4096)), (jnp.bfloat16, (64, 5120)), (jnp.float32, (3, 2))],
)
def test_it_is_one_kernel_and_no_collective_of_xla(dtype, shape, num_devices):
    text = lowered(dtype, shape, num_devices)
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1
    assert not re.search(r"all_reduce\"|all_gather\"|collective_permute", text)


@pytest.mark.parametrize("num_devices", [2, 8])
def test_the_parts_of_a_product_are_added_up_in_the_kernel(num_devices):
    residual = jax.ShapeDtypeStruct((64, 5120), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((5120,), jnp.bfloat16)
    text = lowered(jnp.float32, (8, 64, 5120), num_devices, residual, weight)
    (call,) = re.findall(r"custom_call @mosaic_gpu.*", text)
    assert call.endswith("(tensor<64x5120xbf16>, tensor<64x5120xbf16>)")
    assert "stablehlo.reduce" not in text


def test_memory_holds_the_packets_of_two_calls_from_each_device():
    one = memory_bytes(2, 8192) - memory_bytes(2, 0)
    assert one == 2 * 2 * 8192 * 2  # packets are twice as large as their data
    assert memory_bytes(8, 8192) - memory_bytes(8, 0) == 4 * one


def test_the_product_of_a_decode_step_leaves_its_parts_to_the_kernel():
    mesh = AbstractMesh((2,), ("tensor",), (AxisType.Auto,), abstract_device=H200)

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    peers = Peers(
        addresses=shape(2, 6, dtype=jnp.int32),
        memory=shape(2, memory_bytes(2, CAPACITY) // 4, dtype=jnp.int32),
        mesh=mesh,
        capacity=CAPACITY,
    )
    args = shape(64, 4096), shape(1024, 4096), shape(64, 1024), shape(1024)
    with jax.sharding.use_abstract_mesh(mesh):
        run = jax.jit(lambda peers, *args: row_linear_norm(*args, 1e-5, peers))
        text = run.trace(peers, *args).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1
    assert "tensor<4x64x1024xf32>" in text
    assert "stablehlo.reduce" not in text
