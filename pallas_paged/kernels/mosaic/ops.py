"""Operations of the Mosaic kernels, and where JAX's interpreter of them needs another way.

What is told apart by `interpret` is told apart here only, but for the tickets of `mosaic_ragged`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import dot

# How a warpgroup holds a matrix of the matrix unit, its transpose, and vectors along its axes.
MATRIX = plgpu.Layout.WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
ROWS = MATRIX.reduce(1)
COLUMNS = MATRIX.reduce(0)


def interpreter(interpret: bool) -> Any:
    """What `interpret` of a kernel is."""
    return getattr(plgpu, "InterpretGPUParams")() if interpret else False  # noqa: B009


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """i32 indices along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def full(shape: tuple[int, ...], value: float, layout: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An array of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def along(x: jax.Array, like: jax.Array, axis: int = 0) -> jax.Array:
    """A vector along `axis` of a matrix, the same for all of its other axis."""
    return lax.broadcast_in_dim(x, like.shape, (axis,))


def load(ref: Any, layout: Any) -> jax.Array:
    """What a ref to device memory has, in registers."""
    load_from: Any = plgpu.load  # whose signature has changed over time
    return load_from(ref, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Stores to device memory, also where that takes parts of its cache lines."""
    if hasattr(plgpu, "store"):  # since JAX 0.12, where `ref[...] =` takes whole lines only
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def product(a: Any, b: Any, *, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    """f32 `a @ b` of refs to shared memory; `meanwhile` runs while the matrix unit is at it."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        meanwhile()
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def add_product(
    acc: jax.Array,
    a: Any,
    b: Any,
    *,
    meanwhile: Callable[[], None] = lambda: None,
    interpret: bool,
) -> jax.Array:
    """`acc + a @ b`, b a ref to shared memory and a one too, or in registers."""
    if interpret:  # which knows neither accumulators that start with a value nor `a` in registers
        meanwhile()
        if not isinstance(a, jax.Array):
            return acc + product(a, b)
        acc = acc + dot(a, b[...])
        plgpu.commit_smem()  # or it takes this read for one that the next copy does not wait for
        return acc

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        meanwhile()

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def set_max_registers(n: int, *, action: Literal["increase", "decrease"], interpret: bool) -> None:
    """Registers of each thread of the warpgroup from here on."""
    if not interpret:
        plgpu.set_max_registers(n, action=action)


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

    For a whole warpgroup: all of its threads see the ticket afterwards. Not for the interpreter.
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
