"""What Mosaic kernels do where JAX's GPU interpreter needs another way, and short names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import dot

MATRIX = plgpu.Layout.WGMMA
ROWS = MATRIX.reduce(1)
COLUMNS = MATRIX.reduce(0)


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """i32 indices along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def full(shape: tuple[int, ...], value: float, layout: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An array of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def load(ref: Any, layout: Any) -> jax.Array:
    """What a ref to device memory has, in registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def along(x: jax.Array, like: jax.Array, axis: int = 0) -> jax.Array:
    """A vector along `axis` of a matrix, the same for all of its other axis."""
    return lax.broadcast_in_dim(x, like.shape, (axis,))


def set_max_registers(n: int, *, action: Any, interpret: bool) -> None:
    """Registers of each thread of the warpgroup from here on."""
    if not interpret:
        plgpu.set_max_registers(n, action=action)


def accumulate(
    acc: jax.Array, a: jax.Array, b: Any, *, meanwhile: Callable[[], None], interpret: bool
) -> jax.Array:
    """`acc + a @ b`, with b in shared memory; `meanwhile` runs while the matrix unit is at it."""
    if interpret:  # which knows neither accumulators that start with a value nor `a` in registers
        meanwhile()
        return acc + dot(a, b[...])

    def add_product(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        meanwhile()

    return pl.run_state(add_product)(plgpu.ACC.init(acc))


def let_next_kernel_start(*, interpret: bool) -> None:
    """From here on the next kernel may be launched; it sees nothing of this one before it waits."""
    if not interpret:
        plgpu.griddepcontrol_launch_dependents()


def wait_for_previous_kernel(*, interpret: bool) -> None:
    """Until this a kernel may run while those before it still do."""
    if not interpret:
        plgpu.griddepcontrol_wait()


def take_ticket(counter: Any, ticket: Any) -> None:
    """Adds 1 to `counter` i32[1] in device memory; `ticket` i32[1], shared, gets what it was.

    For a whole warpgroup: all of its threads see the ticket afterwards.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def take(_, counter, ticket):
        from jax.experimental.mosaic.gpu import utils

        # The ticket that was there before may still be read.
        utils.warpgroup_barrier()
        with utils.when(utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)):
            utils.inline_ptx(
                "{ .reg .u32 old; atom.relaxed.gpu.global.add.u32 old, [$0], 1;"
                " st.shared.u32 [$1], old; }",
                utils.memref_ptr(counter),
                utils.memref_ptr(ticket),
                has_side_effects=True,
            )
        utils.warpgroup_barrier()

    take(counter, ticket)
