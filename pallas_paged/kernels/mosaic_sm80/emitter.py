"""The instructions of a thread: integer arithmetic, loads, stores and asynchronous copies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as gpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxlib.mlir.dialects import vector as dialect

from pallas_paged.kernels.mosaic import ops

# Typed so because JAX 0.10 lacks some of them.
utils: Any = gpu_utils
IfOp: Any = scf.IfOp

WARPGROUP = 128  # threads of a program
_FEW_LOADS = 4  # of a thread before copies, where registers are few
CHUNK = 16  # bytes of one asynchronous copy
# The layout of an array with one value a thread.
THREADS = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


def swizzle(columns: int, dtype: DTypeLike) -> int:
    """Return the bytes of the widest swizzled rows that divide rows of `columns` elements.

    Raises:
        ValueError: none does.
    """
    size = columns * jnp.dtype(dtype).itemsize
    for width in (128, 64, 32):
        if size % width == 0:
            return width
    raise ValueError(f"{columns=} of {jnp.dtype(dtype).name} must be a multiple of 32 bytes")


def elements_of(vector: Any) -> list[Any]:
    """Return the elements of an MLIR vector."""
    places = (ir.DenseI64ArrayAttr.get([i]) for i in range(ir.VectorType(vector.type).shape[0]))
    return [dialect.extract(vector, dynamic_position=[], static_position=at) for at in places]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows in shared memory, of chunks of 16 bytes: swizzled in tiles of 8 rows, or plain."""

    columns: int  # elements of a row
    dtype: Any  # of the elements
    plain: bool = False  # not swizzled
    # The bytes of swizzled rows; None for the widest that divide a row.
    swizzle_bytes: int | None = None
    # The threads divide parts of the rows that are powers of 2 chunks, and load few values at once,
    # for kernels with few registers left.
    in_parts: bool = False

    @property
    def row_bytes(self) -> int:
        return self.columns * jnp.dtype(self.dtype).itemsize

    @property
    def swizzle(self) -> int:
        return self.swizzle_bytes or swizzle(self.columns, self.dtype)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """First chunks and widths in chunks of the parts of a row."""
        first, rest, parts = 0, self.row_bytes // CHUNK, []
        while rest:
            width = min(1 << (rest.bit_length() - 1), WARPGROUP) if self.in_parts else rest
            parts.append((first, width))
            first, rest = first + width, rest - width
        return parts


def _operation(build: Callable[..., Any]) -> Any:
    """Return the method that builds an operation on a value and another, or a Python integer."""

    def method(_: Any, x: Any, y: Any) -> Any:
        return build(x, utils.c(y, x.type) if isinstance(y, int) else y)

    return method


class Emitter:
    """Instructions of a thread, inside `plgpu.inline_mgpu`.

    Values are MLIR values or Python integers; 64-bit values are offsets and addresses. Arguments
    `offset` are constants of an instruction.
    """

    def __init__(self) -> None:
        self._i32 = ir.IntegerType.get_signless(32)
        self._i64 = ir.IntegerType.get_signless(64)

    add, sub, mul = map(_operation, (arith.addi, arith.subi, arith.muli))
    div, rem, xor = map(_operation, (arith.divui, arith.remui, arith.xori))
    less = _operation(functools.partial(arith.cmpi, arith.CmpIPredicate.slt))
    at_least = _operation(functools.partial(arith.cmpi, arith.CmpIPredicate.sge))

    def constant(self, value: int) -> Any:
        return utils.c(value, self._i32)

    def scalar(self, x: Any) -> Any:
        """Return the value of a scalar argument."""
        return x.registers.item()

    def thread(self) -> Any:
        """Return the index of the thread in its warpgroup."""
        return arith.remui(utils.thread_idx(), self.constant(WARPGROUP))

    def both(self, x: Any, y: Any) -> Any:
        return arith.andi(x, y)

    def least(self, x: Any, y: Any) -> Any:
        return arith.minsi(x, y)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        return self.least(arith.maxsi(x, low), high)

    def wide(self, x: Any) -> Any:
        """Return a value of 32 bits, which is not negative, with 64."""
        return arith.extui(self._i64, x)

    def address(self, ref: Any, offset: Any) -> Any:
        """Return the address `offset` bytes into a ref: 32 bits in shared memory, else 64."""
        pointer = utils.memref_ptr(ref)
        return self.add(llvm.ptrtoint(offset.type, pointer), offset)

    def copy(self, to: Any, source: Any, *, size: int, real: Any = None) -> None:
        """Start a copy of `size` bytes to shared memory; without `real` they become 0."""
        cache = "cg" if size == CHUNK else "ca"  # past the L1 cache, which takes 16 bytes only
        instruction = f"cp.async.{cache}.shared.global [$0], [$1], {size}"
        if real is None:
            utils.inline_ptx(f"{instruction};", to, source, has_side_effects=True)
            return
        size_read = arith.select(real, self.constant(size), self.constant(0))
        utils.inline_ptx(f"{instruction}, $2;", to, source, size_read, has_side_effects=True)

    def of_index(self, x: Any) -> Any:
        """Return an index of MLIR's own type as 32 bits."""
        return arith.index_castui(self._i32, x)

    def store(self, address: Any, vector: Any, *, where: Any) -> None:
        """Store a vector of f32 to device memory."""
        values = elements_of(vector)
        names = ", ".join(f"${i + 1}" for i in range(len(values)))
        utils.inline_ptx(
            f"st.global.v{len(values)}.f32 [$0], {{{names}}};", address, *values, predicate=where
        )

    def when(self, x: Any, limit: int, body: Any) -> None:
        """Run `body` in threads where `x < limit`."""
        if limit >= WARPGROUP:
            body()
        else:
            self.run_if(self.less(x, limit), body)

    def either(self, condition: Any, then: Any, otherwise: Any) -> None:
        """Run `then` in threads where a condition holds, and `otherwise` in others."""
        if_else = IfOp(condition, has_else=True)
        for block, body in ((if_else.then_block, then), (if_else.else_block, otherwise)):
            with ir.InsertionPoint(block):
                body()
                scf.yield_([])

    def for_each_chunk(
        self, tile: Tile, rows: int, body: Any, load: Any = lambda row: None
    ) -> None:
        """Run `body(row, byte of the row, byte of the block, load(row))` for this thread's chunks.

        Loads come first: none goes past a copy, which writes shared memory.
        """
        thread = self.thread()
        steps = [
            (first, width, start)
            for first, width in tile.parts
            for start in range(0, rows * width, WARPGROUP)
        ]
        loads = _FEW_LOADS if tile.in_parts else len(steps)
        for i in range(0, len(steps), loads):
            places = []
            for first, width, start in steps[i : i + loads]:
                # Where a step takes full rows, the column does not depend on the step.
                if WARPGROUP % width:
                    index = self.add(thread, start)
                    row, chunk = self.div(index, width), self.rem(index, width)
                else:
                    row = self.add(self.div(thread, width), start // width)
                    chunk = self.rem(thread, width)
                if first:
                    chunk = self.add(chunk, first)
                count = rows * width - start  # of threads that have a chunk
                known = row if count >= WARPGROUP else self.least(row, self.constant(rows - 1))
                places.append((count, row, chunk, load(known)))
            for count, row, chunk, loaded in places:

                def copy(row=row, chunk=chunk, loaded=loaded):
                    body(row, self.mul(chunk, CHUNK), self.byte_of(tile, row, chunk), loaded)

                self.when(thread, count, copy)

    def byte_of(self, tile: Tile, row: Any, chunk: Any) -> Any:
        """Return the place of a chunk of a row in a block."""
        if tile.plain:
            return self.add(self.mul(row, tile.row_bytes), self.mul(chunk, CHUNK))
        width = tile.swizzle
        per_tile_row, in_tile = width // CHUNK, self.rem(row, 8)
        # Swizzling: in pieces of 128 bytes, bits of the row flip bits of the chunk.
        flip = self.div(in_tile, 128 // width)
        place = self.xor(self.rem(chunk, per_tile_row), flip)
        tile_index = self.add(
            self.mul(self.div(row, 8), tile.row_bytes // width), self.div(chunk, per_tile_row)
        )
        at = self.add(self.mul(tile_index, 8 * width), self.mul(in_tile, width))
        return self.add(at, self.mul(place, CHUNK))

    def ptx(self, code: str, *args: Any, results: int = 1, reads: bool = False) -> Any:
        """Return the words that `code` computes; one that `reads` memory stays in its place."""
        return utils.inline_ptx(
            code,
            *args,
            result_types=[self._i32] * results if results > 1 else self._i32,
            has_side_effects=reads,
        )

    def effect(self, code: str, *args: Any) -> None:
        """Run `code` for its effects."""
        utils.inline_ptx(code, *args, has_side_effects=True)

    def run_if(self, condition: Any, body: Callable[[], None]) -> None:
        """Run `body` in threads where the condition holds."""
        with ir.InsertionPoint(IfOp(condition).then_block):
            body()
            scf.yield_([])

    def place_in_accumulator(self) -> tuple[Any, Any]:
        """Return the thread's first row and first column in an array with the layout `WGMMA`."""
        lane, warp = self.rem(self.thread(), 32), self.div(self.thread(), 32)
        row = self.add(self.mul(warp, 16), self.div(lane, 4))
        return row, self.mul(self.rem(lane, 4), 2)

    def words(self, x: Any) -> Any:
        """Return the pairs of 16-bit elements of an array in `WGMMA`, `[rows / 64, K / 8, 2]`.

        The last axis are the thread's rows `r` and `r + 8`.
        """
        words = [utils.bitcast(pair, self._i32) for pair in x.registers.flat]
        return np.array(words, dtype=object).reshape(x.shape[0] // 64, x.shape[1] // 8, 2)

    def row_words(self, x: Any) -> list[Any]:
        """Return the f32 of an array with one value a row, of rows `r` and `r + 8` of every 64."""
        return [utils.bitcast(value, self._i32) for value in x.registers.flat]

    def load_word(self, address: Any, *, offset: int = 0) -> Any:
        """Return 32 bits of shared memory."""
        return self.ptx(f"ld.shared.b32 $0, [$1+{offset}];", address, reads=True)

    def load_chunk(self, address: Any, *, offset: int = 0) -> list[Any]:
        """Return the four words of 16 bytes of shared memory."""
        code = f"ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{offset}];"
        return list(self.ptx(code, address, results=4, reads=True))

    def store_word(self, address: Any, word: Any, *, offset: int = 0) -> None:
        """Store 32 bits to shared memory."""
        self.effect(f"st.shared.b32 [$0+{offset}], $1;", address, word)

    def store_chunk(self, address: Any, words: list[Any], *, offset: int = 0) -> None:
        """Store 16 bytes to shared memory."""
        self.effect(f"st.shared.v4.b32 [$0+{offset}], {{$1,$2,$3,$4}};", address, *words)

    def copy_chunk(self, to: Any, source: Any, index: Any, unit: int, *, offset: int) -> None:
        """Start the copy of 16 bytes that are `index * unit` bytes after `source`."""
        self.effect(
            f"{{ .reg .b64 a; mad.wide.u32 a, $2, {unit}, $1;"
            f" cp.async.cg.shared.global [$0+{offset}], [a], 16; }}",
            to,
            source,
            index,
        )

    def store_device_word(self, address: Any, word: Any, *, where: Any = None) -> None:
        """Store 32 bits to device memory, in threads where a condition holds."""
        utils.inline_ptx("st.global.b32 [$0], $1;", address, word, predicate=where)

    def word(self, x: Any) -> Any:
        """Return a value or vector of 32 bits as a word."""
        return utils.bitcast(x, self._i32)

    def vector_words(self, x: Any) -> list[Any]:
        """Return the words of a value or vector of 32 or 64 bits."""
        if utils.bitwidth(x.type) == 32:
            return [self.word(x)]
        return elements_of(utils.bitcast(x, ir.VectorType.get((2,), self._i32)))

    def value(self, x: Any) -> Any:
        """Return the thread's word of an argument `[128]` of 32 bits with the layout `THREADS`."""
        return utils.bitcast(x.registers.item(), self._i32)

    def array(self, value: Any) -> Any:
        """Return an array i32`[128]` of the values of all threads."""
        pair = ir.VectorType.get((1,), self._i32)
        registers = [utils.bitcast(value, pair)]
        return ops.of_registers(registers, THREADS, (WARPGROUP,), is_signed=True)
