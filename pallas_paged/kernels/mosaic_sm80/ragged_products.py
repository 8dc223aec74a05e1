"""Products of the ragged kernel on Tensor Cores by `mma.sync`, with operands in shared memory.

A warp holds 16 rows of every 64 of the result, in the registers of `Layout.WGMMA`. Fragments of the
operands are loaded where they are used, so few registers hold them, and a fragment of K or V serves
all rows of the warp:

    q.k   for 16 elements of D:  ldmatrix of q; for each 16 keys: ldmatrix of k, mma
    p.v   for 16 keys:           p is in registers; for each 16 elements of D: ldmatrix of v, mma

Rows in shared memory are 16 bytes longer than head_dim. Eight rows then start in different banks,
and no swizzle is needed: addresses are a constant away from one register.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from pallas_paged.kernels.logits import dot
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic_sm80.emitter import Emitter, IfOp, utils

_PAD_BYTES = 16


def padded(head_dim: int, dtype: Any) -> int:
    """Return the elements of a row in shared memory."""
    return head_dim + _PAD_BYTES // jnp.dtype(dtype).itemsize


def multiply_qk(q: Any, k: Any, *, head_dim: int, interpret: bool) -> jax.Array:
    """Return f32`[R, K]` q @ k.T of refs `[R, D + pad]` and `[K, D + pad]` to shared memory."""
    if interpret:
        return dot(q[...][:, :head_dim], k[...][:, :head_dim].T)
    num_rows, num_keys = q.shape[0], k.shape[0]
    result = plgpu.ShapeDtypeStruct((num_rows, num_keys), np.dtype("float32"), layout=ops.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=result)
    def multiply(_, q, k):
        warp = _Warp(q)
        sums = warp.zeros(num_rows, num_keys)
        q_base, k_base = warp.rows_of_lhs(q), warp.rows_of_keys(k)
        for d in range(0, head_dim, 16):
            lhs = [warp.load(q_base, row, d) for row in range(0, num_rows, 64)]
            for n in range(0, num_keys, 16):
                warp.multiply(sums, lhs, warp.load(k_base, n, d), n)
        return warp.array(sums)

    return multiply(q, k)


def multiply_pv(
    acc: jax.Array, alpha: jax.Array, p: jax.Array, v: Any, *, interpret: bool
) -> jax.Array:
    """Return f32`[R, D]` alpha * acc + p @ v, with v a ref `[K, D + pad]` to shared memory.

    A warp where all of alpha f32`[R]` is 1 leaves that product out.
    """
    head_dim, num_keys = acc.shape[1], p.shape[1]
    if interpret:
        return acc * alpha[:, None] + dot(p, v[...][:, :head_dim])
    result = plgpu.ShapeDtypeStruct(acc.shape, np.dtype("float32"), layout=ops.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(ops.WGMMA, ops.WGMMA_ROW, ops.WGMMA, plgpu.RefType()), return_type=result
    )
    def multiply(_, acc, alpha, p, v):
        warp = _Warp(v)
        sums = warp.scale_rows(warp.elements(acc), warp.row_elements(alpha))
        words = warp.emit.words(p)
        v_base = warp.rows_of_values(v)
        for n in range(0, num_keys, 16):
            # Two neighbours of 8 columns in an accumulator are 16 columns of a left operand.
            lhs = [[*tile[n // 8], *tile[n // 8 + 1]] for tile in words]
            for d in range(0, head_dim, 16):
                warp.multiply(sums, lhs, warp.load(v_base, n, d, transpose=True), d)
        return warp.array(sums)

    return multiply(acc, alpha, p, v)


def scale_changed_rows(acc: jax.Array, factors: jax.Array, *, interpret: bool) -> jax.Array:
    """Return f32`[R, D]` factors * acc; a warp where all of factors f32`[R]` are 1 does nothing."""
    if interpret:
        return acc * factors[:, None]
    result = plgpu.ShapeDtypeStruct(acc.shape, np.dtype("float32"), layout=ops.WGMMA)

    @plgpu.inline_mgpu(arg_types=(ops.WGMMA, ops.WGMMA_ROW), return_type=result)
    def scale(_, acc, factors):
        warp = _Warp()
        return warp.array(warp.scale_rows(warp.elements(acc), warp.row_elements(factors)))

    return scale(acc, factors)


class _Warp:
    """Emits the instructions of a warp; operands are 16-bit matrices like `ref` in shared memory.

    Registers are arrays of MLIR values: of an accumulator f32 `[rows / 64, columns / 8, 2, 2]`,
    a lane's rows `r` and `r + 8` and two columns.
    """

    def __init__(self, ref: Any = None):
        self.emit = Emitter()
        self._i32, self._f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        if ref is not None:
            matrix = ir.MemRefType(ref.type)
            self._dtype = str(matrix.element_type)
            self._pitch = 2 * matrix.shape[-1]

    def _address(self, ref: Any, row: Any, half: Any) -> Any:
        """Return the address of a row, or of its second 8 elements."""
        emit = self.emit
        return emit.address(ref, emit.add(emit.mul(row, self._pitch), emit.mul(half, 16)))

    def rows_of_lhs(self, ref: Any) -> Any:
        """Return the address from which a lane loads left operands of the rows of its warp."""
        emit = self.emit
        lane, warp = emit.rem(emit.thread(), 32), emit.div(emit.thread(), 32)
        row = emit.add(emit.mul(warp, 16), emit.rem(lane, 16))
        return self._address(ref, row, emit.div(lane, 16))

    def rows_of_keys(self, ref: Any) -> Any:
        """Return the address from which a lane loads right operands that are stored transposed."""
        emit = self.emit
        lane = emit.rem(emit.thread(), 32)
        row = emit.add(emit.rem(lane, 8), emit.mul(emit.div(lane, 16), 8))
        return self._address(ref, row, emit.rem(emit.div(lane, 8), 2))

    def rows_of_values(self, ref: Any) -> Any:
        """Return the address from which a lane loads and transposes right operands."""
        emit = self.emit
        lane = emit.rem(emit.thread(), 32)
        return self._address(ref, emit.rem(lane, 16), emit.div(lane, 16))

    def load(self, base: Any, row: int, column: int, *, transpose: bool = False) -> list[Any]:
        """Return the four registers of 16 x 16 elements."""
        offset = row * self._pitch + 2 * column
        kind = ".trans" if transpose else ""
        return list(
            utils.inline_ptx(
                f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];",
                base,
                result_types=[self._i32] * 4,
                has_side_effects=True,  # barriers and copies stay where they are
            )
        )

    def zeros(self, num_rows: int, num_columns: int) -> Any:
        """Return an accumulator."""
        zero = utils.c(0.0, self._f32)
        return np.full((num_rows // 64, num_columns // 8, 2, 2), zero, dtype=object)

    def multiply(self, sums: Any, lhs: list[Any], rhs: list[Any], column: int) -> None:
        """Add products of 16 columns to `sums`, for each of the left operands."""
        for half in range(2):
            for tile, fragment in enumerate(lhs):
                c = sums[tile, column // 8 + half]
                c.flat = utils.inline_ptx(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{self._dtype}.{self._dtype}.f32 "
                    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                    *fragment,
                    *rhs[2 * half : 2 * half + 2],
                    *c.flat,
                    result_types=[self._f32] * 4,
                )

    def elements(self, acc: Any) -> Any:
        """Return the f32 of an accumulator that is a `FragmentedArray`."""
        pairs = acc.registers.reshape(acc.shape[0] // 64, acc.shape[1] // 8, 2)
        found = np.empty((*pairs.shape, 2), dtype=object)
        for i in np.ndindex(found.shape):
            found[i] = vector.extract(pairs[i[:3]], dynamic_position=[], static_position=[i[3]])
        return found

    def row_elements(self, x: Any) -> Any:
        """Return the f32 `[rows / 64, 2]` of an array with one value a row."""
        values = [utils.bitcast(word, self._f32) for word in self.emit.row_words(x)]
        return np.array(values, dtype=object).reshape(-1, 2)

    def scale_rows(self, sums: Any, factors: Any) -> Any:
        """Return an accumulator times a factor a row; where the warp's are all 1, as it is."""
        emit, found = self.emit, self.emit.constant(0)
        for factor in factors.flat:
            found = emit.ptx(
                "{ .reg .pred p; setp.neu.f32 p, $1, 0f3F800000; selp.b32 $0, 1, $2, p; }",
                factor,
                found,
            )
        found = emit.ptx(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
            " selp.b32 $0, 1, 0, p; }",
            found,
            reads=True,
        )
        changed = IfOp(emit.at_least(found, 1), [self._f32] * sums.size, has_else=True)
        with ir.InsertionPoint(changed.then_block):
            scf.yield_([arith.mulf(sums[i], factors[i[0], i[2]]) for i in np.ndindex(sums.shape)])
        with ir.InsertionPoint(changed.else_block):
            scf.yield_(list(sums.flat))
        return np.array(list(changed.results), dtype=object).reshape(sums.shape)

    def array(self, sums: Any) -> Any:
        """Return an accumulator as a `FragmentedArray`."""
        pair = ir.VectorType.get((2,), self._f32)
        tiles, columns = sums.shape[:2]
        pairs = [vector.from_elements(pair, list(sums[i])) for i in np.ndindex(sums.shape[:3])]
        return ops.of_registers(pairs, ops.WGMMA, (tiles * 64, columns * 8))
