"""One process of several that read a checkpoint together: `python -m tests.support.load_process`.

Arguments: the port of process 0, the number of this process, the folder.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from models import checkpoint
from models.sharding import repeat_kv_heads


def main(port: str, process: str, folder: str) -> None:
    """Print the share of the elements that this process has read, if its parts are right."""
    jax.distributed.initialize(f"localhost:{port}", 2, int(process))
    read, sizes = checkpoint._Tensor.read, []

    def record(tensor, *index):
        part = read(tensor, *index)
        sizes.append(part.size)
        return part

    checkpoint._Tensor.read = record
    mesh = Mesh(np.array(jax.devices()), ("tensor",), axis_types=(AxisType.Auto,))
    decoder, _ = checkpoint.load_checkpoint(folder, mesh=mesh)
    share = sum(sizes)
    sizes.clear()
    whole, _ = checkpoint.load_checkpoint(folder)
    share /= sum(sizes)
    whole = repeat_kv_heads(whole, mesh.size)
    leaves = (jax.tree.leaves(nnx.state(each)) for each in (decoder, whole))
    for cut, expected in zip(*leaves, strict=True):
        assert len(cut.addressable_shards) == mesh.size // 2
        for shard in cut.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(expected)[shard.index])
    print(share)


if __name__ == "__main__":
    main(*sys.argv[1:])
