"""Operations of the kernels for Ampere and later, and what JAX's interpreter does in their place.

Only this module branches on `interpret`. The interpreter can't run inline PTX and `plgpu.mma`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_paged.kernels.logits import dot

WARPGROUP = 128  # threads of a program
CHUNK = 16  # bytes of one asynchronous copy
_plgpu: Any = plgpu  # older versions of JAX lack some of its names
SCALAR = plgpu.Layout.WG_SPLAT(())

# Barriers are explicit: by default each access to shared memory would bring two.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MmaLayouts:
    """How a warpgroup holds the matrices of `acc += lhs @ rhs` by mma.sync on 16-bit elements.

    Attributes:
        m_warps: warps along the rows, 16 rows each; `4 // m_warps` divide the columns, 8 each. JAX
            requires as many as fit the rows.
    """

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


def load(ref: Any, layout: Any) -> jax.Array:
    """Load swizzled shared memory, or a transposed view of it, by ldmatrix."""
    return _plgpu.load(ref, layout=layout)


def barrier(*, interpret: bool) -> None:
    """Wait for all threads of the program, which then see one another's writes to shared memory."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def sync(_):
        from jax.experimental.mosaic.gpu import utils

        utils.warpgroup_barrier()

    sync()


def commit_copies(*, interpret: bool) -> None:
    """Make a group of the asynchronous copies that the threads started since the last one."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def commit(_):
        from jax.experimental.mosaic.gpu import utils

        utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    commit()


def wait_for_copies(num_pending: int, *, interpret: bool) -> None:
    """Wait until at most the newest `num_pending` groups are on their way; then for all threads."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        from jax.experimental.mosaic.gpu import utils

        utils.inline_ptx(f"cp.async.wait_group {num_pending};", has_side_effects=True)
        utils.warpgroup_barrier()

    wait()


def swizzle(columns: int, dtype: DTypeLike) -> int:
    """Return the bytes of the widest swizzled rows that divide rows of so many elements.

    Raises:
        ValueError: none does.
    """
    size = columns * jnp.dtype(dtype).itemsize
    for width in (128, 64, 32):
        if size % width == 0:
            return width
    raise ValueError(f"{columns=} of {jnp.dtype(dtype).name} must be a multiple of 32 bytes")


def transforms(columns: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """Return how rows of so many elements lie in shared memory, without bank conflicts."""
    width = swizzle(columns, dtype)
    return (
        plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(width),
    )


def swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Return the type of blocks `[..., rows, columns]` in swizzled shared memory."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1], dtype))


def scalars(*values: Any) -> tuple[jax.Array, ...]:
    """Return integers as arrays i32`[]`, as inlined code takes them."""
    return tuple(jnp.asarray(x, jnp.int32) for x in values)


def strides(axes: str, ref: Any) -> dict[str, int]:
    """Return the bytes from one element to the next along each axis of a ref or array."""
    size, found = jnp.dtype(ref.dtype).itemsize, {}
    for letter, length in zip(reversed(axes), reversed(ref.shape), strict=True):
        found[letter] = size
        size *= length
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows in shared memory, of chunks of 16 bytes: swizzled in tiles of 8 rows, or plain.

    Attributes:
        columns: elements of a row.
        dtype: of the elements.
        plain: not swizzled.
    """

    columns: int
    dtype: Any
    plain: bool = False

    @property
    def row_bytes(self) -> int:
        return self.columns * jnp.dtype(self.dtype).itemsize

    @property
    def swizzle(self) -> int:
        return swizzle(self.columns, self.dtype)


class Emitter:
    """Integer arithmetic and asynchronous copies inside `plgpu.inline_mgpu`.

    Values are MLIR values or Python integers; those of 64 bits are offsets and addresses.
    """

    def __init__(self) -> None:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, scf

        self._ir: Any = ir
        self._arith: Any = arith
        self._llvm: Any = llvm
        self._scf: Any = scf
        self._utils: Any = utils
        self._i32 = ir.IntegerType.get_signless(32)
        self._i64 = ir.IntegerType.get_signless(64)

    def constant(self, value: int) -> Any:
        return self._utils.c(value, self._i32)

    def scalar(self, x: Any) -> Any:
        """Return the value of a scalar argument."""
        return x.registers.item()

    def thread(self) -> Any:
        """Return the index of the thread in its warpgroup."""
        return self._arith.remui(self._utils.thread_idx(), self.constant(WARPGROUP))

    def _same(self, x: Any, y: Any) -> tuple[Any, Any]:
        if isinstance(y, int):
            y = self._utils.c(y, x.type)
        return x, y

    def add(self, x: Any, y: Any) -> Any:
        return self._arith.addi(*self._same(x, y))

    def sub(self, x: Any, y: Any) -> Any:
        return self._arith.subi(*self._same(x, y))

    def mul(self, x: Any, y: Any) -> Any:
        return self._arith.muli(*self._same(x, y))

    def div(self, x: Any, y: int) -> Any:
        return self._arith.divui(*self._same(x, y))

    def rem(self, x: Any, y: int) -> Any:
        return self._arith.remui(*self._same(x, y))

    def xor(self, x: Any, y: Any) -> Any:
        return self._arith.xori(*self._same(x, y))

    def both(self, x: Any, y: Any) -> Any:
        return self._arith.andi(x, y)

    def less(self, x: Any, y: Any) -> Any:
        return self._arith.cmpi(self._arith.CmpIPredicate.slt, *self._same(x, y))

    def at_least(self, x: Any, y: Any) -> Any:
        return self._arith.cmpi(self._arith.CmpIPredicate.sge, *self._same(x, y))

    def least(self, x: Any, y: Any) -> Any:
        return self._arith.minsi(x, y)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        return self.least(self._arith.maxsi(x, low), high)

    def wide(self, x: Any) -> Any:
        """Return a value of 32 bits, which is not negative, with 64."""
        return self._arith.extui(self._i64, x)

    def address(self, ref: Any, offset: Any) -> Any:
        """Return the address `offset` bytes into a ref: 32 bits in shared memory, else 64."""
        pointer = self._utils.memref_ptr(ref)
        return self.add(self._llvm.ptrtoint(offset.type, pointer), offset)

    def load(self, address: Any) -> Any:
        """Return 32 bits in shared memory."""
        return self._utils.inline_ptx(
            "ld.shared.b32 $0, [$1];", address, result_types=self._i32, has_side_effects=True
        )

    def copy(self, to: Any, source: Any, *, size: int, real: Any = None) -> None:
        """Start a copy of `size` bytes to shared memory; those that are not `real` become 0."""
        cache = "cg" if size == CHUNK else "ca"  # past the L1 cache, which takes 16 bytes only
        instruction = f"cp.async.{cache}.shared.global [$0], [$1], {size}"
        if real is None:
            self._utils.inline_ptx(f"{instruction};", to, source, has_side_effects=True)
            return
        size_read = self._arith.select(real, self.constant(size), self.constant(0))
        self._utils.inline_ptx(f"{instruction}, $2;", to, source, size_read, has_side_effects=True)

    def of_index(self, x: Any) -> Any:
        """Return an index of MLIR's own type as 32 bits."""
        return self._arith.index_castui(self._i32, x)

    def store(self, address: Any, vector: Any, *, where: Any) -> None:
        """Store a vector of f32 to device memory."""
        from jaxlib.mlir.dialects import vector as dialect

        (length,) = self._ir.VectorType(vector.type).shape
        places = (self._ir.DenseI64ArrayAttr.get([i]) for i in range(length))
        values = [
            dialect.extract(vector, dynamic_position=[], static_position=place) for place in places
        ]
        names = ", ".join(f"${i + 1}" for i in range(length))
        self._utils.inline_ptx(
            f"st.global.v{length}.f32 [$0], {{{names}}};", address, *values, predicate=where
        )

    def when(self, x: Any, limit: int, body: Any) -> None:
        """Run `body` in threads where `x < limit`."""
        if limit >= WARPGROUP:
            body()
            return
        with self._ir.InsertionPoint(self._scf.IfOp(self.less(x, limit)).then_block):
            body()
            self._scf.yield_([])

    def either(self, condition: Any, then: Any, otherwise: Any) -> None:
        """Run `then` in threads where a condition holds, and `otherwise` in others."""
        if_else = self._scf.IfOp(condition, has_else=True)
        for block, body in ((if_else.then_block, then), (if_else.else_block, otherwise)):
            with self._ir.InsertionPoint(block):
                body()
                self._scf.yield_([])

    def for_each_chunk(
        self, tile: Tile, rows: int, body: Any, load: Any = lambda row: None
    ) -> None:
        """Run `body(row, byte of the row, byte of the block, load(row))` for this thread's chunks.

        All loads come first: none goes past a copy, which writes shared memory.
        """
        per_row = tile.row_bytes // CHUNK
        thread, places = self.thread(), []
        for start in range(0, rows * per_row, WARPGROUP):
            # Where a step takes whole rows, the column does not depend on the step.
            if WARPGROUP % per_row:
                index = self.add(thread, start)
                row, chunk = self.div(index, per_row), self.rem(index, per_row)
            else:
                row = self.add(self.div(thread, per_row), start // per_row)
                chunk = self.rem(thread, per_row)
            count = rows * per_row - start  # of threads that have a chunk
            known = row if count >= WARPGROUP else self.least(row, self.constant(rows - 1))
            places.append((count, row, chunk, load(known)))
        for count, row, chunk, loaded in places:

            def copy(row=row, chunk=chunk, loaded=loaded):
                body(row, self.mul(chunk, CHUNK), self.byte_of(tile, row, chunk), loaded)

            self.when(thread, count, copy)

    def byte_of(self, tile: Tile, row: Any, chunk: Any) -> Any:
        """Return where a chunk of a row lies in a block."""
        if tile.plain:
            return self.add(self.mul(row, tile.row_bytes), self.mul(chunk, CHUNK))
        width = tile.swizzle
        per_tile_row, in_tile = width // CHUNK, self.rem(row, 8)
        # Swizzling: the bits of the row, in pieces of 128 bytes, flip those of the chunk.
        flip = self.div(in_tile, 128 // width)
        place = self.xor(self.rem(chunk, per_tile_row), flip)
        tile_index = self.add(
            self.mul(self.div(row, 8), tile.row_bytes // width), self.div(chunk, per_tile_row)
        )
        at = self.add(self.mul(tile_index, 8 * width), self.mul(in_tile, width))
        return self.add(at, self.mul(place, CHUNK))


def copy_rows(
    source: Any, to: Any, first: jax.Array, count: Any, *, plain: bool = False, interpret: bool
) -> None:
    """Start the copy of rows `[first, first + count)` of a matrix to shared memory.

    Rows of `to` from `count` on become 0, and so do columns past those of the matrix.

    Args:
        plain: `to` is not swizzled.
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


def store_rows(ref: Any, value: jax.Array, count: Any, layout: Any, *, interpret: bool) -> None:
    """Store the first `count` rows of a matrix f32`[R, C]` of this layout to device memory."""
    if interpret:
        ref[...] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, (SCALAR,)))
    def store(_, ref, value, scalars):
        m = Emitter()
        (count,) = map(m.scalar, scalars)
        columns = value.shape[1]
        indices = value.layout.thread_idxs(value.shape)
        for index, register in zip(indices, value.registers.flat, strict=True):
            row, column = map(m.of_index, index)
            at = m.mul(m.wide(m.add(m.mul(row, columns), column)), 4)
            m.store(m.address(ref, at), register, where=m.less(row, count))

    store(ref, value, scalars(count))
