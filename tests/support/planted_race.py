"""Mosaic kernels of two warpgroups with a race, or without it, for tests of race detectors."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic import ops

SIZE = 128


def _two_warpgroups(body, name: str, *barriers, interpret: bool):
    """A kernel `f32[SIZE] -> f32[SIZE]` of two warpgroups with shared memory of that size."""
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((SIZE,), jnp.float32),
        scratch_types=(plgpu.SMEM((SIZE,), jnp.float32), *barriers),
        grid=(1,),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
        kernel_name=name,
        interpret=ops.interpreter(interpret),
    )


def copy_by_two(x: jax.Array, *, ordered: bool) -> jax.Array:
    """Return `x` f32[SIZE], interpreted: one warpgroup writes it to shared memory, one reads it.

    Args:
        ordered: whether the reader waits for the writer; else there is a race.
    """

    def body(x_ref, out_ref, shared, written):
        writes = lax.axis_index("wg") == 0

        @pl.when(writes)
        def _write():
            shared[...] = ops.load(x_ref, plgpu.Layout.WG_STRIDED((SIZE,), vec_size=1))
            plgpu.barrier_arrive(written)

        @pl.when(jnp.logical_not(writes))
        def _read():
            if ordered:
                plgpu.barrier_wait(written)
            out_ref[...] = shared[...]

    return _two_warpgroups(body, "copy_by_two", plgpu.Barrier(), interpret=True)(x)


def add_by_two(x: jax.Array) -> jax.Array:
    """Return sums and products of `x` f32[SIZE] that two warpgroups write over each other.

    compute-sanitizer finds two writes, but not that `copy_by_two` reads before it writes.
    """

    def body(x_ref, out_ref, shared):
        wg = lax.axis_index("wg")
        for _ in range(8):

            @pl.when(wg == 0)
            def _add():
                shared[...] = shared[...] + x_ref[...]

            @pl.when(wg == 1)
            def _multiply():
                shared[...] = shared[...] * 2.0

        out_ref[...] = shared[...]

    return _two_warpgroups(body, "add_by_two", interpret=False)(x)
