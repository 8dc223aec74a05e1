"""Operations of the Mosaic kernels, and their equivalents in JAX's interpreter.

Modules with their own PTX branch on `interpret` as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_paged.checks import pytree
from pallas_paged.kernels.logits import dot

# How the registers of a warpgroup hold a matrix of wgmma, its transpose, one value per row and one
# value per column.
WGMMA = plgpu.Layout.WGMMA
WGMMA_ROW = WGMMA.reduce(1)
WGMMA_COL = WGMMA.reduce(0)


@pytree
class Partials:
    """Partial states of attention, each normalised: arrays, refs or types."""

    out: Any  # f32[..., D]
    lse: Any  # f32[...], base e


def interpreter(interpret: bool) -> Any:
    """Return the `interpret=` argument of a kernel call: interpreter parameters or False."""
    return getattr(plgpu, "InterpretGPUParams")() if interpret else False  # noqa: B009


def run_kernel(
    body: Callable[..., None],
    inputs: Any,
    outputs: Any,
    scratch: Any = None,
    *,
    name: str,
    params: plgpu.CompilerParams,
    interpret: bool,
    **mesh: Any,
) -> Any:
    """Return the results of a kernel, arrays in a tree like `outputs`.

    Args:
        body: function of trees of refs: inputs, outputs and, where it has any, scratch.
        inputs: a tree of arrays, and of references that the kernel writes as well.
        outputs: a tree of types.
        scratch: a tree of types in shared memory, which all warpgroups of a program share.
        mesh: of `plgpu.Mesh`.
    """
    structure = jax.tree.structure((inputs, outputs))  # None in a tree is not an operand

    def flat_body(*refs: Any) -> None:
        run = functools.partial(body, *jax.tree.unflatten(structure, refs))
        if scratch is None:
            run()
        else:
            pl.run_scoped(run, scratch, collective_axes=mesh.get("thread_name", ()))

    results = pl.kernel(
        flat_body,
        out_type=tuple(jax.tree.leaves(outputs)),
        mesh=plgpu.Mesh(**mesh),
        compiler_params=params,
        name=name,
        interpret=interpreter(interpret),
    )(*jax.tree.leaves(inputs))
    return jax.tree.unflatten(jax.tree.structure(outputs), results)


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """Return i32 indices along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def full(shape: tuple[int, ...], value: float, layout: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Return an array filled with one value."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def bcast(x: jax.Array, like: jax.Array, axis: int = 0) -> jax.Array:
    """Broadcast a vector along `axis` of a matrix to the shape of the matrix."""
    return lax.broadcast_in_dim(x, like.shape, (axis,))


def swizzled_rows(dtype: Any, width: int) -> tuple[Any, ...]:
    """Return transforms of shared memory: tiles of 8 rows of `width` swizzled bytes."""
    tile = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    return tile, plgpu.SwizzleTransform(width)


def load(ref: Any, layout: Any) -> jax.Array:
    """Load a ref to device memory, or to plain rows in shared memory, into registers."""
    load_from: Any = plgpu.load  # its signature differs between versions of JAX
    return load_from(ref, layout=layout, optimized=False)


def load_shared(ref: Any, layout: Any) -> jax.Array:
    """Load a ref to shared memory into registers."""
    load_from: Any = plgpu.load
    return load_from(ref, layout=layout)


def difference(x: jax.Array, y: jax.Array, layout: Any, *, interpret: bool) -> jax.Array:
    """Return f32 `x - y` of arrays in a layout, not fused with a product that makes x.

    Large numbers need this where y is the maximum of x: fused, the result may be far from 0 there.
    """
    if interpret:
        return x - y

    @plgpu.inline_mgpu(
        arg_types=(layout, layout),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def subtract(_, x, y):
        registers = np.empty_like(x.registers)
        for place, register in np.ndenumerate(x.registers):
            registers[place] = arith.subf(register, y.registers[place])
        return of_registers(registers, x.layout)

    return subtract(x, y)


def store(ref: Any, value: jax.Array) -> None:
    """Store to device memory, parts of a cache line included."""
    if hasattr(plgpu, "store"):  # since JAX 0.12, where `ref[...] =` takes full cache lines only
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def wgmma_beside(a: Any, b: Any, overlap: Callable[[], Any]) -> tuple[jax.Array, Any]:
    """Return f32 `a @ b` of refs to shared memory, and the loads of `overlap` during it."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        beside = overlap()
        return acc_ref[...], beside

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def wgmma_accumulate(
    acc: jax.Array,
    a: Any,
    b: Any,
    *,
    overlap: Callable[[], None] = lambda: None,
    interpret: bool,
) -> jax.Array:
    """Return `acc + a @ b`, with `b` in shared memory and `a` there or in registers."""
    if interpret:  # it takes neither an accumulator that starts with a value nor registers as `a`
        overlap()
        if not isinstance(a, jax.Array):
            return acc + wgmma_beside(a, b, lambda: None)[0]
        acc = acc + dot(a, b[...])
        plgpu.commit_smem()  # otherwise the interpreter lets the next copy overtake this read
        return acc

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        overlap()

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def wgmma_many(
    accs: list[jax.Array],
    products: list[tuple[int, Any, Any]],
    *,
    interpret: bool,
) -> list[jax.Array]:
    """Return f32 accumulators after products were added to some of them.

    A product is an index in `accs`, and both operands in shared memory.
    """
    if interpret:
        accs = list(accs)
        for i, a, b in products:
            accs[i] = wgmma_accumulate(accs[i], a, b, interpret=True)
        return accs

    def multiply(refs):
        for i, a, b in products:
            plgpu.wgmma(refs[i], a, b)

    return list(pl.run_state(multiply)(tuple(plgpu.ACC.init(x) for x in accs)))


def of_registers(
    registers: Any, layout: Any, shape: tuple[int, ...] | None = None, *, is_signed: Any = None
) -> Any:
    """Return Mosaic's array of a thread's registers, inside of `plgpu.inline_mgpu`.

    Args:
        registers: MLIR values, in a NumPy array or in a list of vectors in order.
        layout: of Pallas or of Mosaic.
        shape: of the array, where `registers` are in order but not in the layout's own shape.
    """
    layout = layout.to_mgpu() if hasattr(layout, "to_mgpu") else layout
    if shape is not None:
        flat = np.empty(len(registers), dtype=object)
        flat[:] = list(registers)
        registers = flat.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def inline(emit: Callable[[Any], None], *, interpret: bool = False) -> None:
    """Run what `emit(utils)` emits by Mosaic's utilities; interpreted kernels leave it out."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def run(_):
        emit(utils)

    run()


def inline_ptx(code: str, *, interpret: bool = False) -> None:
    """Run PTX without operands for its effects; interpreted kernels leave it out."""
    inline(lambda utils: utils.inline_ptx(code, has_side_effects=True), interpret=interpret)


def wait_if(condition: Any, barrier: Any) -> None:
    """Wait at a barrier where a condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def free_stage(free: Any, sent: Any) -> jax.Array:
    """Return the stage of a ring for block number `sent`, once the block there has been used."""
    stage = lax.rem(sent, free.shape[0])
    wait_if(sent >= free.shape[0], free.at[stage])
    return stage


def drain(barriers: Any, sent: Any) -> None:
    """Wait for the last of `sent` blocks of a ring, one of each stage."""
    num_stages = barriers.shape[0]

    @pl.loop(jnp.maximum(sent - num_stages, 0), sent)
    def _(i):
        plgpu.barrier_wait(barriers.at[lax.rem(i, num_stages)])


def set_max_registers(n: int, *, action: Literal["increase", "decrease"], interpret: bool) -> None:
    """Set the number of registers that each thread of the warpgroup has from here on."""
    if not interpret:
        plgpu.set_max_registers(n, action=action)


def let_next_kernel_start(*, interpret: bool) -> None:
    """Allow the launch of the next kernel; it sees results of this one only after its own wait."""
    if not interpret:
        plgpu.griddepcontrol_launch_dependents()


def wait_for_previous_kernel(*, interpret: bool) -> None:
    """Wait for the preceding kernels to finish; before this call the kernel may overlap them."""
    if not interpret:
        plgpu.griddepcontrol_wait()


def atomic_increment(counter: Any, old: Any) -> None:
    """Add 1 to `counter` i32[1] in device memory and store its old value to `old` i32[1], shared.

    All threads of a warpgroup call this, and see the old value afterwards. The interpreter can't
    run it.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def increment(_, counter, old):
        # Threads may still read the value of the last call.
        utils.warpgroup_barrier()
        with utils.when(utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)):
            utils.inline_ptx(
                "{ .reg .u32 old; atom.relaxed.gpu.global.add.u32 old, [$0], 1;"
                " st.shared.u32 [$1], old; }",
                utils.memref_ptr(counter),
                utils.memref_ptr(old),
                has_side_effects=True,
            )
        utils.warpgroup_barrier()

    increment(counter, old)
