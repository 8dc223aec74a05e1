"""The scales of int8 and fp8 K/V in the Mosaic decode kernel, on their way to shared memory.

The scales of the tokens of a page are 4 bytes each, and in most layouts not neighbours, so TMA
can't copy them. Each thread of the producer loads the scales of one token of the next block into
registers while the copies of K and V are on their way, and stores them when a stage is free.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.checks import pytree
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.mosaic_sm90.ring import page_to_read
from pallas_paged.pages.layout import PageLayout

_THREADS = 128  # of a warpgroup


@pytree
class Scales:
    """Refs to the scales of K and of V, or the arrays.

    Attributes:
        k, v: f32 in the order of `layout.scale_axes`, or f32`[1]` for all tokens.
    """

    k: Any
    v: Any
    layout: PageLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, arrays: Arrays) -> Scales | None:
        """Return the scales of a call, or None."""
        if arrays.k_scales is None or arrays.v_scales is None:
            return None
        k, v = (x if x.ndim else x.reshape(1) for x in (arrays.k_scales, arrays.v_scales))
        return cls(k=k, v=v, layout=arrays.layout)

    @property
    def of_tokens(self) -> bool:
        """Whether each token of a KV head has its own."""
        return self.k.shape != (1,)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScaleSender:
    """Sends the scales of the blocks of one sequence to shared memory.

    Attributes:
        scales: refs in device memory.
        stages: f32`[2, num_stages, block_k]` of K and of V, in shared memory.
        block_table: i32`[N]` of the sequence, a ref in device memory.
        kv_head: the KV head.
        first_page, last_page: as in `RowCopies`.
    """

    scales: Scales
    stages: Any
    block_table: Any
    kv_head: jax.Array
    first_page: jax.Array | None
    last_page: jax.Array
    interpret: bool

    def load(self, block: jax.Array) -> Any:
        """Start to load the scales of a block; return the argument of `store`."""
        if self.interpret:
            return block
        block_k = self.stages.shape[-1]
        layout = plgpu.Layout.WG_STRIDED((max(block_k, _THREADS),), 1)
        like = plgpu.ShapeDtypeStruct((max(block_k, _THREADS),), jnp.float32, layout=layout)
        axes = self.scales.layout.scale_axes
        shape = self.scales.k.shape
        stride = {axis: int(np.prod(shape[i + 1 :])) for i, axis in enumerate(axes)}
        page_bits = shape[axes.index("N")].bit_length() - 1
        scalars = [block, self.kv_head, self.last_page]
        if self.first_page is not None:
            scalars.append(self.first_page)
        scalar_types, ref = (plgpu.Layout.WG_SPLAT,) * len(scalars), plgpu.RefType()

        @plgpu.inline_mgpu(arg_types=(ref, ref, ref, *scalar_types), return_type=(like, like))
        def gather(_, k_scales, v_scales, table, block, kv_head, last_page, first_page=None):
            from jax.experimental.mosaic import gpu as mgpu
            from jax.experimental.mosaic.gpu import utils
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import arith

            i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

            def c(x):
                return arith.constant(i32, x)

            block, kv_head, last_page = (x.registers.item() for x in (block, kv_head, last_page))
            thread = arith.remui(utils.thread_idx(), c(_THREADS))
            found = []
            for first in range(0, block_k, _THREADS):
                token = arith.addi(thread, c(first))
                if block_k < _THREADS:  # two threads load the same
                    token = arith.remui(token, c(block_k))
                token = arith.addi(arith.muli(block, c(block_k)), token)
                place = arith.andi(token, c((1 << page_bits) - 1))
                page = arith.shrui(token, c(page_bits))
                if first_page is not None:
                    page = arith.maxsi(page, first_page.registers.item())
                page = arith.minsi(page, last_page)
                offset = arith.addi(
                    arith.muli(kv_head, c(stride["H"])), arith.muli(place, c(stride["N"]))
                )
                found.append(
                    utils.inline_ptx(
                        "{ .reg .b32 page; .reg .b64 entry, at, k, v;"
                        " mad.wide.s32 entry, $5, 4, $4; ld.global.nc.b32 page, [entry];"
                        f" mul.wide.s32 at, page, {4 * stride['P']};"
                        " mad.wide.s32 at, $6, 4, at; add.s64 k, $2, at; add.s64 v, $3, at;"
                        " ld.global.nc.f32 $0, [k]; ld.global.nc.f32 $1, [v]; }",
                        *(utils.memref_ptr(x) for x in (k_scales, v_scales, table)),
                        page,
                        offset,
                        result_types=(f32, f32),
                        has_side_effects=True,
                    )
                )
            return tuple(
                mgpu.FragmentedArray(
                    _registers=np.array([_vector(x[kv], f32) for x in found], dtype=object).reshape(
                        layout.to_mgpu().registers_shape(like.shape)
                    ),
                    _layout=layout.to_mgpu(),
                    _is_signed=None,
                )
                for kv in range(2)
            )

        return gather(self.scales.k, self.scales.v, self.block_table, *scalars)

    def store(self, loaded: Any, stage: jax.Array) -> None:
        """Store the scales of a block to a stage."""
        block_k = self.stages.shape[-1]
        if self.interpret:
            axes = self.scales.layout.scale_axes
            page_size = self.scales.k.shape[axes.index("N")]
            count = min(page_size, block_k)
            for i in range(0, block_k, count):
                first = loaded * block_k + i
                page = page_to_read(first // page_size, self.first_page, self.last_page)
                page = self.block_table[page]
                tokens = {"P": page, "N": _slice(first % page_size, count), "H": self.kv_head}
                at = tuple(tokens[axis] for axis in axes)
                for kv, scales in enumerate((self.scales.k, self.scales.v)):
                    self.stages[kv, stage, i : i + count] = scales[at]
            return
        layout = plgpu.Layout.WG_STRIDED((max(block_k, _THREADS),), 1)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), layout, layout),
        )
        def put(_, k_stage, v_stage, k, v):
            from jax.experimental.mosaic.gpu import utils
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import arith

            i32 = ir.IntegerType.get_signless(32)
            thread = arith.remui(utils.thread_idx(), arith.constant(i32, _THREADS))
            if block_k < _THREADS:
                thread = arith.remui(thread, arith.constant(i32, block_k))
            for to, x in ((k_stage, k), (v_stage, v)):
                for i, register in enumerate(x.registers.flat):
                    utils.inline_ptx(
                        f"{{ .reg .b32 at; mad.lo.u32 at, $1, 4, $0;"
                        f" st.shared.b32 [at + {4 * _THREADS * i}], $2; }}",
                        utils.memref_ptr(to),
                        thread,
                        utils.bitcast(register, i32),
                        has_side_effects=True,
                    )

        put(self.stages.at[0, stage], self.stages.at[1, stage], *loaded)


def _vector(x: Any, f32: Any) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    return vector.broadcast(ir.VectorType.get((1,), f32), x)


def _slice(start: jax.Array, size: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(start, size)
