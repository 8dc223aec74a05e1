"""Operations of the Mosaic kernels, and what JAX's interpreter does in their place.

Only this module and the tile scheduler of the ragged kernel branch on `interpret`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LOG2_E, dot

# How the registers of a warpgroup hold a matrix of wgmma, its transpose, one value per row and one
# value per column.
WGMMA = plgpu.Layout.WGMMA
WGMMA_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
WGMMA_ROW = WGMMA.reduce(1)
WGMMA_COL = WGMMA.reduce(0)

State = tuple[jax.Array, jax.Array, jax.Array]  # of an online softmax, base 2: m, l, acc


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Partials:
    """Partial states of attention, each normalised: arrays, refs or types."""

    out: Any  # f32[..., D]
    lse: Any  # f32[...], base e


def interpreter(interpret: bool) -> Any:
    """Return the `interpret=` argument of a kernel call: interpreter parameters or False."""
    return getattr(plgpu, "InterpretGPUParams")() if interpret else False  # noqa: B009


def with_trees(body: Callable[..., None], *trees: Any) -> Callable[..., None]:
    """Return a kernel body that gives `body` its refs as trees like `trees`, then scratch refs.

    `trees` are operands and results in the order of the kernel. None in a tree is not an operand.
    """
    leaves, structure = jax.tree.flatten(trees)

    def flat_body(*refs: Any) -> None:
        body(*jax.tree.unflatten(structure, refs[: len(leaves)]), *refs[len(leaves) :])

    return flat_body


def shared_memory_bytes(types: Any, params: plgpu.CompilerParams) -> int:
    """Return the bytes of shared memory that a program with scratch of these types needs.

    The compiler aligns every buffer to 1 KB. It adds barriers of 8 bytes and a buffer for
    reductions across warps.
    """
    leaves = jax.tree.leaves(types)
    barriers = [x for x in leaves if isinstance(x, plgpu.Barrier)]
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in leaves if x not in barriers]
    sizes.append(8 * sum(int(np.prod(x.num_barriers)) for x in barriers))  # int or tuple
    sizes.append(params.reduction_scratch_bytes)
    return sum(pl.cdiv(size, 1024) * 1024 for size in sizes)


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """Return i32 indices along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def full(shape: tuple[int, ...], value: float, layout: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Return an array filled with one value."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def bcast(x: jax.Array, like: jax.Array, axis: int = 0) -> jax.Array:
    """Broadcast a vector along `axis` of a matrix to the shape of the matrix."""
    return lax.broadcast_in_dim(x, like.shape, (axis,))


def load(ref: Any, layout: Any) -> jax.Array:
    """Load a ref to device memory into registers."""
    load_from: Any = plgpu.load  # its signature differs between versions of JAX
    return load_from(ref, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Store to device memory, parts of a cache line included."""
    if hasattr(plgpu, "store"):  # since JAX 0.12, where `ref[...] =` takes whole cache lines only
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def wgmma(a: Any, b: Any, *, overlap: Callable[[], None] = lambda: None) -> jax.Array:
    """Return f32 `a @ b` of refs to shared memory; `overlap` runs before the wait for its end."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        overlap()
        return acc_ref[...]

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
            return acc + wgmma(a, b)
        acc = acc + dot(a, b[...])
        plgpu.commit_smem()  # otherwise the interpreter lets the next copy overtake this read
        return acc

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        overlap()

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def join_sinks(
    state: State,
    sinks: jax.Array,
    empty: jax.Array,
    scale: Callable[[jax.Array, jax.Array], jax.Array],
) -> State:
    """Return a state after sinks (logits, base e) joined its denominator, except where `empty`.

    `scale` returns acc times a factor of the shape of m and l.
    """
    m_i, l_i, acc = state
    m_new = jnp.where(empty, 0.0, jnp.maximum(m_i, sinks * LOG2_E))
    alpha = jnp.exp2(m_i - m_new)
    l_i = jnp.where(empty, 0.0, l_i * alpha + jnp.exp2(sinks * LOG2_E - m_new))
    return m_new, l_i, scale(acc, alpha)


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


def read_to_l2(ref: Any, *, interpret: bool) -> None:
    """Start to read a part of device memory into the L2 cache; nothing waits for its end."""
    if not interpret:
        plgpu.async_prefetch(ref)


def atomic_increment(counter: Any, old: Any) -> None:
    """Add 1 to `counter` i32[1] in device memory and store its old value to `old` i32[1], shared.

    A whole warpgroup calls this, and all of its threads see the old value afterwards. The
    interpreter can't run it.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def increment(_, counter, old):
        from jax.experimental.mosaic.gpu import utils

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


def wgmma_accumulate_all(
    acc: jax.Array, terms: Sequence[tuple[jax.Array, Any]], *, interpret: bool
) -> jax.Array:
    """Return `acc` and all products of arrays in registers and refs to shared memory."""
    if interpret:
        for a, b in terms:
            acc = wgmma_accumulate(acc, a, b, interpret=True)
        return acc

    def multiply(acc_ref):
        for a, b in terms:
            plgpu.wgmma(acc_ref, a, b)

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def wgmma_two(accs: Sequence[jax.Array], a: Any, b: Any, *, interpret: bool) -> list[jax.Array]:
    """Return two accumulators, each with the product of two refs to shared memory."""
    if interpret:
        return [wgmma_accumulate(*each, interpret=True) for each in zip(accs, a, b, strict=True)]

    def multiply(acc_refs):
        for acc_ref, *factors in zip(acc_refs, a, b, strict=True):
            plgpu.wgmma(acc_ref, *factors)

    return pl.run_state(multiply)([plgpu.ACC.init(acc) for acc in accs])


def store_first_row(ref: Any, row: jax.Array, layout: Any, *, interpret: bool) -> None:
    """Store a vector as the first row of a matrix of wgmma in shared memory, of 8 rows."""
    if interpret:
        ref[0, : row.shape[0]] = row
        return
    tile = 128 // row.dtype.itemsize  # columns of a swizzled tile of 8 rows
    from pallas_paged.kernels.mosaic.ring import wgmma_transforms

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(wgmma_transforms(row.dtype)), layout))
    def store(_, ref, row):
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith, llvm
        from jax.experimental.mosaic.gpu import utils

        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        base = utils.memref_ptr(ref)
        size = row.layout.vec_size
        utils.warpgroup_barrier()
        for i, register in enumerate(row.registers.flat):
            column = arith.muli(arith.addi(thread, utils.c(128 * i, i32)), utils.c(size, i32))
            # The first row of a tile: its swizzle moves nothing.
            tiles = arith.muli(arith.divui(column, utils.c(tile, i32)), utils.c(1024, i32))
            inside = arith.muli(
                arith.remui(column, utils.c(tile, i32)), utils.c(row.mlir_dtype.width // 8, i32)
            )
            at = utils.getelementptr(base, [arith.addi(tiles, inside)], i8)
            llvm.store(register, at)

    store(ref, row)
    plgpu.commit_smem()


def multiply_by_row(
    accs: Sequence[jax.Array], weights: Sequence[Any], rows: Sequence[Any], *, interpret: bool
) -> list[jax.Array]:
    """Return `acc + weight @ row` for each accumulator [64, 8], in its first column.

    wgmma wants 8 rows at least. It reads them in units of 8 elements, wherever its descriptor says
    that the next one is: here each row begins 8 elements after the one before. So a vector in
    shared memory is enough; the other columns are not of use and may hold anything.

    Args:
        weights: refs `[64, K]` to matrices of wgmma of 16-bit elements in shared memory.
        rows: refs `[K]` to vectors there, with 56 more elements behind each.
    """
    if interpret:
        return [
            acc.at[:, 0].add(weight[...].astype(jnp.float32) @ row[...].astype(jnp.float32))
            for acc, weight, row in zip(accs, weights, rows, strict=True)
        ]
    from pallas_paged.kernels.mosaic.ring import wgmma_transforms

    dtype = weights[0].dtype
    count, num_columns = len(accs), weights[0].shape[1]
    tile = 128 // dtype.itemsize
    result = plgpu.ShapeDtypeStruct(accs[0].shape, jnp.float32, layout=WGMMA)
    matrix = plgpu.RefType(wgmma_transforms(dtype))

    @plgpu.inline_mgpu(
        arg_types=([WGMMA] * count, [matrix] * count, [plgpu.RefType()] * count),
        return_type=[result] * count,
    )
    def multiply(_, accs, weights, rows):
        import numpy as np
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith, llvm, vector
        from jax.experimental import mosaic as _mosaic  # noqa: F401
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils

        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()

        def descriptor(ref, constant):
            address = llvm.ptrtoint(i64, utils.memref_ptr(ref))
            address = arith.shrui(arith.andi(address, utils.c(0x3FFFF, i64)), utils.c(4, i64))
            return arith.ori(address, utils.c(constant, i64))

        # Swizzled rows of 128 bytes, 8 rows of all tiles after the 8 before; and not swizzled.
        groups = num_columns // tile * 1024 >> 4
        of_weight = 1 << 62 | groups << 32 | 1 << 16
        of_row = 1 << 32 | 1 << 16
        args = []
        for acc in accs:
            for register in acc.registers.flat:
                args += [vector.extract(register, [], [i]) for i in range(2)]
        args += [descriptor(weight, of_weight) for weight in weights]
        args += [descriptor(row, of_row) for row in rows]
        n = 4 * count
        kind = {"bfloat16": "bf16", "float16": "f16"}[dtype.name]
        lines = ["{ .reg .b64 a, b;", "wgmma.fence.sync.aligned;"]
        for k in range(0, num_columns, 16):
            for i in range(count):
                numbers = ", ".join(f"${4 * i + j}" for j in range(4))
                step = k // tile * 64 + k % tile // 8
                lines += [
                    f"add.s64 a, ${2 * n + i}, {step};",
                    f"add.s64 b, ${2 * n + count + i}, {k // 8};",
                    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.{kind}.{kind}"
                    f" {{{numbers}}}, a, b, 1, 1, 1, 0, 0;",
                ]
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"]
        constraints = ["=f"] * n + [str(i) for i in range(n)] + ["l"] * (2 * count)
        out = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * n),
            args,
            "\n".join(lines),
            ",".join(constraints),
            has_side_effects=True,
        )
        values = [llvm.extractvalue(f32, out, [i]) for i in range(n)]
        results = []
        for i, acc in enumerate(accs):
            registers = np.empty(2, object)
            for half in range(2):
                pair = values[4 * i + 2 * half : 4 * i + 2 * half + 2]
                registers[half] = vector.from_elements(ir.VectorType.get((2,), f32), pair)
            results.append(
                mgpu.FragmentedArray(
                    _registers=registers.reshape(acc.registers.shape),
                    _layout=acc.layout,
                    _is_signed=None,
                )
            )
        return results

    return multiply(list(accs), list(weights), list(rows))


def rows_of_equal(x: jax.Array, size: int, *, interpret: bool) -> list[jax.Array]:
    """Return one row of a matrix of wgmma whose rows are all equal, in vectors of `size`."""
    starts = range(0, x.shape[1], size)
    if interpret:
        return [x[0, start : start + size] for start in starts]
    vector = plgpu.ShapeDtypeStruct((size,), x.dtype, layout=WGMMA_COL)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=[vector for _ in starts])
    def rows(_, x):
        from jax.experimental.mosaic import gpu as mgpu

        layout = WGMMA_COL.to_mgpu()
        # A thread has two values of each 8 columns in each of two rows.
        registers = x.registers.reshape(len(starts), size // 8, 2)[:, :, 0]
        return [
            mgpu.FragmentedArray(
                _registers=one.reshape(layout.registers_shape((size,))),
                _layout=layout,
                _is_signed=None,
            )
            for one in registers
        ]

    return rows(x)


BLANK = -1  # where a program has not yet posted anything: as f32 a NaN that `post` avoids


def post(board: Any, start: Any, values: jax.Array, *, interpret: bool) -> None:
    """Post 64 sums of wgmma, f32 with one value per row, on a board i32[W] in device memory.

    Other programs of the kernel read them with `wait_for_posts`.
    """
    # Arithmetic does not make the NaN that is a blank, but inputs may hold it.
    values = jnp.where(values == values, values, jnp.full_like(values, jnp.nan))
    where = board.at[pl.ds(start, values.shape[0])]
    if interpret:
        where[...] = lax.bitcast_convert_type(values, jnp.int32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA_ROW))
    def store(_, where, values):
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith, vector
        from jax.experimental.mosaic.gpu import utils

        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        warp, lane = (f(thread, utils.c(32, i32)) for f in (arith.divui, arith.remui))
        # A thread has rows `row` and `row + 8`, as do the three beside it.
        row = arith.addi(arith.muli(warp, utils.c(16, i32)), arith.divui(lane, utils.c(4, i32)))
        first, second = (vector.extract(x, [], [0]) for x in values.registers.flat)
        utils.inline_ptx(
            "{ .reg .pred p; .reg .b64 a; mad.wide.u32 a, $1, 4, $0; setp.eq.u32 p, $2, 0;"
            " @p st.relaxed.gpu.global.f32 [a], $3; @p st.relaxed.gpu.global.f32 [a+32], $4; }",
            utils.memref_ptr(where),
            row,
            arith.remui(lane, utils.c(4, i32)),
            first,
            second,
            has_side_effects=True,
        )

    store(where, values)


def wait_for_posts(
    board: Any, starts: Sequence[Any], layout: Any, size: int, *, interpret: bool
) -> list[jax.Array]:
    """Wait for posts on a board; return f32`[size]` from each start on.

    All are loaded again until there is no blank among them: an arrival needs no message of its own,
    and no order of memory operations but that of each element.

    Args:
        layout: `WG_STRIDED`, of the results.
    """
    wheres = [board.at[pl.ds(start, size)] for start in starts]
    if interpret:
        return [lax.bitcast_convert_type(where[...], jnp.float32) for where in wheres]
    vec_size = layout.to_mgpu().vec_size
    result = plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(wheres),), return_type=[result] * len(wheres)
    )
    def load(_, wheres):
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith, llvm, vector
        from jax.experimental import mosaic as _mosaic  # noqa: F401
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils

        i32, i64, f32 = (
            ir.IntegerType.get_signless(32),
            ir.IntegerType.get_signless(64),
            ir.F32Type.get(),
        )
        thread = arith.remui(utils.thread_idx(), utils.c(128, i32))
        offset = arith.extui(i64, arith.muli(thread, utils.c(4 * vec_size, i32)))
        bases = [
            arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(where)), offset) for where in wheres
        ]
        per_array = size // 128
        count = per_array * len(wheres)
        lines = ["{ .reg .pred p; again:"]
        for n in range(0, count, vec_size):
            base, at = count + n // per_array, n % per_array * 128 * 4
            names = ", ".join(f"${n + i}" for i in range(vec_size))
            lines.append(f"ld.relaxed.gpu.global.v{vec_size}.b32 {{{names}}}, [${base}+{at}];")
        lines.append(f"setp.eq.b32 p, $0, {BLANK};")
        lines += [f"setp.eq.or.b32 p, ${n}, {BLANK}, p;" for n in range(1, count)]
        lines.append("@p bra again; }")
        out = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * count),
            bases,
            "\n".join(lines),
            ",".join(["=f"] * count + ["l"] * len(bases)),
            has_side_effects=True,
        )
        values = [llvm.extractvalue(f32, out, [n]) for n in range(count)]
        kind = ir.VectorType.get((vec_size,), f32)
        vectors = [
            vector.from_elements(kind, values[n : n + vec_size]) for n in range(0, count, vec_size)
        ]
        arrays = np.array([None] * len(vectors), object)
        arrays[:] = vectors
        return [
            mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)
            for registers in arrays.reshape(len(wheres), -1)
        ]

    return load(wheres)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridBarrier:
    """Barriers of all programs of a kernel, each passed once by one warpgroup of a program.

    Every arrival adds 1 to a counter in device memory, which stays a multiple of all arrivals of a
    kernel between kernels: nothing resets it. Interpreted kernels have one program.
    """

    counter: Any  # i32[1]
    first: Any  # the count at the start of the kernel
    num_programs: int
    interpret: bool

    @classmethod
    def of(
        cls, counter: Any, *, num_programs: int, num_barriers: int, interpret: bool
    ) -> GridBarrier:
        """Return the barriers of this kernel. Called after the preceding kernel has ended."""
        if interpret and num_programs != 1:
            raise ValueError(f"{num_programs=} must be 1 if interpreted")
        # Programs ahead of this one may have arrived at the first barrier, none at the second.
        step = num_programs * num_barriers
        first = jnp.int32(0) if interpret else lax.div(counter[0], step) * step
        return cls(counter=counter, first=first, num_programs=num_programs, interpret=interpret)

    def pass_by(self, index: int) -> None:
        """Wait for all programs; what they wrote to device memory before can be read afterwards."""
        if self.interpret:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
        def arrive_and_wait(_, counter, target):
            from jax.experimental.mosaic.gpu import utils

            utils.warpgroup_barrier()
            with utils.when(utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)):
                utils.inline_ptx(
                    "{ .reg .pred early; .reg .s32 count;"
                    " red.release.gpu.global.add.s32 [$0], 1;"
                    " again: ld.acquire.gpu.global.s32 count, [$0]; sub.s32 count, count, $1;"
                    " setp.lt.s32 early, count, 0; @early bra again; }",
                    utils.memref_ptr(counter),
                    target.registers.item(),
                    has_side_effects=True,
                )
            utils.warpgroup_barrier()

        arrive_and_wait(self.counter, self.first + (index + 1) * self.num_programs)
