"""Operations of the kernels for Ampere and later, and their equivalents in JAX's interpreter.

The interpreter can't run inline PTX and `plgpu.mma`. Modules with their own PTX branch as well.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_paged.kernels.logits import dot
from pallas_paged.kernels.mosaic import ops as mosaic_ops
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK, Emitter, Tile, swizzle

_plgpu: Any = plgpu  # older versions of JAX lack some of its names
SCALAR = plgpu.Layout.WG_SPLAT(())

# Barriers are explicit: by default each access to shared memory would bring two.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MmaLayouts:
    """Layouts of the matrices of `acc += lhs @ rhs` by mma.sync on 16-bit elements."""

    # Warps along the rows, 16 rows each; `4 // m_warps` divide the columns, 8 each. JAX requires as
    # many as fit the rows.
    m_warps: int

    @property
    def lhs(self) -> Any:
        return _plgpu.Layout.MMA_LHS(jnp.bfloat16, m_warps=self.m_warps)

    @property
    def rhs(self) -> Any:
        return _plgpu.Layout.MMA_RHS(jnp.bfloat16, m_warps=self.m_warps)

    @property
    def acc(self) -> Any:
        return _plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=self.m_warps)

    @property
    def row(self) -> Any:
        """One value per row of the accumulators."""
        return self.acc.reduce(1)

    @property
    def col(self) -> Any:
        """One value per column of the accumulators."""
        return self.acc.reduce(0)


def mma(acc: jax.Array, a: jax.Array, b: jax.Array, *, interpret: bool) -> jax.Array:
    """Return f32 `acc + a @ b` of arrays in `MmaLayouts`."""
    return acc + dot(a, b) if interpret else _plgpu.mma(acc, a, b)


def barrier(*, interpret: bool) -> None:
    """Wait for all threads of the program, which then see one another's writes to shared memory."""
    mosaic_ops.inline(lambda utils: utils.warpgroup_barrier(), interpret=interpret)


def commit_copies(*, interpret: bool) -> None:
    """Make a group of the asynchronous copies that the threads started since the last one."""
    mosaic_ops.inline_ptx("cp.async.commit_group;", interpret=interpret)


def wait_for_copies(num_pending: int, *, interpret: bool) -> None:
    """Wait until at most the newest `num_pending` groups are on their way; then for all threads."""

    def wait(utils):
        utils.inline_ptx(f"cp.async.wait_group {num_pending};", has_side_effects=True)
        utils.warpgroup_barrier()

    mosaic_ops.inline(wait, interpret=interpret)


def transforms(columns: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """Return the layout of rows of `columns` elements in shared memory, without bank conflicts."""
    return mosaic_ops.swizzled_rows(dtype, swizzle(columns, dtype))


def swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Return the type of blocks `[..., rows, columns]` in swizzled shared memory."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1], dtype))


def scalars(*values: Any) -> tuple[jax.Array, ...]:
    """Return integers as arrays i32`[]`, as inlined code takes them."""
    return tuple(jnp.asarray(x, jnp.int32) for x in values)


def copy_rows(
    source: Any, to: Any, first: jax.Array, count: Any, *, plain: bool = False, interpret: bool
) -> None:
    """Start the copy of rows `[first, first + count)` of a matrix to shared memory.

    Rows of `to` from `count` on become 0, and so do columns past the matrix's. It is swizzled, or
    plain.
    """
    rows, columns = to.shape
    if interpret:
        _copy_rows_now(source, to, first, count)
        return
    row_bytes = source.shape[1] * jnp.dtype(source.dtype).itemsize
    tile = Tile(columns=columns, dtype=to.dtype, plain=plain)
    to_type = plgpu.RefType(() if plain else transforms(columns, to.dtype))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), to_type, (SCALAR,) * 2))
    def copy(_, source, to, scalars):
        m = Emitter()
        first, count = map(m.scalar, scalars)

        def copy_chunk(row, column, shared, _):
            at = m.add(m.mul(m.wide(m.add(first, row)), row_bytes), m.wide(column))
            real = m.both(m.less(row, count), m.less(column, row_bytes))
            m.copy(m.address(to, shared), m.address(source, at), size=CHUNK, real=real)

        m.for_each_chunk(tile, rows, copy_chunk)

    copy(source, to, scalars(first, count))


def _copy_rows_now(source: Any, to: Any, first: jax.Array, count: Any) -> None:
    rows, columns = to.shape
    num_rows, width = source.shape
    for row in range(rows):
        x = source[jnp.minimum(first + row, num_rows - 1)]
        to[row] = jnp.pad(jnp.where(row < count, x, 0), (0, columns - width))


def store_rows(
    ref: Any,
    value: jax.Array,
    count: Any,
    layout: Any,
    *,
    pitch: int | None = None,
    interpret: bool,
) -> None:
    """Store the first `count` rows of a matrix f32`[R, C]` of this layout to device memory.

    There a row begins `pitch` elements after the one before, or C.
    """
    if interpret:
        ref[...] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, (SCALAR,)))
    def store(_, ref, value, scalars):
        m = Emitter()
        (count,) = map(m.scalar, scalars)
        columns = pitch or value.shape[1]
        indices = value.layout.thread_idxs(value.shape)
        for index, register in zip(indices, value.registers.flat, strict=True):
            row, column = map(m.of_index, index)
            at = m.mul(m.wide(m.add(m.mul(row, columns), column)), 4)
            m.store(m.address(ref, at), register, where=m.less(row, count))

    store(ref, value, scalars(count))


def store_words(
    ref: Any,
    value: jax.Array,
    first: Any,
    count: Any,
    layout: Any,
    *,
    column: int = 0,
    interpret: bool,
) -> None:
    """Store the first `count` rows of a value to rows from `first` on of device memory.

    Args:
        ref: `[rows, columns]`, or `[rows]` of 32 bits.
        value: pairs of 16 bits `[R, C]`, or `[R]` of 32 bits; its elements go to `column` and those
            behind it.
        layout: of the value, with two or four neighbours of a row in a register.
    """
    if interpret:

        @pl.loop(0, count)
        def _(i):
            if value.ndim == 1:
                ref[first + i] = value[i]
            else:
                ref[first + i, pl.ds(column, value.shape[1])] = value[i]

        return
    size = jnp.dtype(ref.dtype).itemsize
    row_bytes = size * math.prod(ref.shape[1:])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, (SCALAR,) * 2))
    def store(_, ref, value, scalars):
        m = Emitter()
        first, count = map(m.scalar, scalars)
        start = m.address(ref, m.add(m.mul(m.wide(first), row_bytes), column * size))
        indices = value.layout.thread_idxs(value.shape)
        for index, register in zip(indices, value.registers.flat, strict=True):
            row, *columns = map(m.of_index, index)
            at = m.mul(row, row_bytes)
            for x in columns:
                at = m.add(at, m.mul(x, size))
            at = m.add(start, m.wide(at))
            for i, word in enumerate(m.vector_words(register)):
                m.store_device_word(m.add(at, 4 * i), word, where=m.less(row, count))

    store(ref, value, scalars(first, count))
