"""The converter of the ragged kernel: a warpgroup that makes 16-bit K/V of int8 and fp8 pages.

It stands between the producer and the consumers, who then read a ring as they do without it:

    producer      bytes of pages            a ring of bytes, one block of K and one of V
    converter     element * scale           rounded once, to q's dtype
    consumers     q.k, softmax, p.v         the ring of 16-bit blocks

So every element is converted once for all query rows of a tile, and neither conversion nor scales
cost the consumers an instruction.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.kv_layout import PageLayout
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.config import MosaicRaggedConfig
from pallas_paged.kernels.mosaic.ragged_work import WorkDescriptor
from pallas_paged.kernels.mosaic.ring import Ring, drain

SCALE_LOGITS = True  # K's scales multiply the logits, and not the elements
NUM_STAGES = 1  # blocks of bytes of K and of V; the 16-bit blocks behind them are stages too
_ROWS = 64  # tokens that are converted at a time

# Four bytes of a row to a thread: loads of whole words, stores of two.
_LAYOUT = plgpu.Layout.WGMMA_8BIT
_ROW = _LAYOUT.reduce(1)


def byte_ring(config: MosaicRaggedConfig, *, head_dim: int, page_size: int, dtype: Any) -> Ring:
    """Return the types of the ring of bytes."""
    width = min(head_dim, 128)
    block = plgpu.SMEM(
        (NUM_STAGES, config.block_k, head_dim),
        dtype,
        transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width)),
    )
    num_copies = max(config.block_k // page_size, 1)
    full = plgpu.Barrier(num_arrivals=num_copies, num_barriers=NUM_STAGES)
    free = plgpu.Barrier(num_arrivals=1, num_barriers=NUM_STAGES)
    return Ring(k=block, v=block, k_full=full, v_full=full, k_free=free, v_free=free)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """Refs to the scales of K and of V, or the arrays: f32 of each token and head, or f32`[1]`."""

    k: Any
    v: Any
    layout: PageLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, arrays: Arrays) -> Scales | None:
        """Return the scales of a call; None without."""
        if arrays.k_scales is None or arrays.v_scales is None:
            return None
        k, v = (x if x.ndim else x.reshape(1) for x in (arrays.k_scales, arrays.v_scales))
        return cls(k=k, v=v, layout=arrays.layout)

    @property
    def of_tokens(self) -> bool:
        """Whether each token and head has its own."""
        return len(self.k.shape) > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converter:
    """Converts the blocks of a work item.

    Attributes:
        source: the ring of bytes.
        target: the ring of q's dtype, of which one arrival completes a block.
        k_scales: f32[num_stages, block_k] in shared memory: the scales of K in `target`. None where
            all tokens have one scale.
        block_tables: ref to i32`[B, N]`.
        page_size: tokens of a page.
        interpret: the kernel is interpreted.
    """

    source: Ring
    target: Ring
    k_scales: Any
    scales: Scales
    block_tables: Any
    page_size: int
    interpret: bool

    def convert(self, work: WorkDescriptor, kv_head: jax.Array, kv_iter: jax.Array) -> jax.Array:
        """Convert the blocks of a work item, and return `kv_iter` after them.

        Args:
            kv_iter: blocks that were converted before.
        """
        source, target = self.source, self.target
        num_stages, block_k, _ = target.k.shape

        def convert_block(block, scales):
            now = kv_iter + (block - work.lo)
            byte_stage, stage = lax.rem(now, NUM_STAGES), lax.rem(now, num_stages)
            # Loaded one block ahead, so that no conversion waits for them.
            next_scales = self.load_scales(work, kv_head, jnp.minimum(block + 1, work.hi - 1))
            for bytes_, blocks, full, free, scale, taken, done in (
                (
                    source.k,
                    target.k,
                    source.k_full,
                    source.k_free,
                    scales[0],
                    target.k_free,
                    target.k_full,
                ),
                (
                    source.v,
                    target.v,
                    source.v_full,
                    source.v_free,
                    scales[1],
                    target.v_free,
                    target.v_full,
                ),
            ):
                plgpu.barrier_wait(full.at[byte_stage])
                parts = [
                    plgpu.load(bytes_.at[byte_stage, pl.ds(i, _ROWS)], layout=_LAYOUT)
                    for i in range(0, block_k, _ROWS)
                ]
                plgpu.barrier_arrive(free.at[byte_stage])

                @pl.when(now >= num_stages)
                def _(taken=taken):
                    plgpu.barrier_wait(taken.at[stage])

                logits_scaled = blocks is target.k and SCALE_LOGITS
                if logits_scaled and self.scales.of_tokens:
                    for i, values in enumerate(scale):
                        self.k_scales[stage, pl.ds(i * _ROWS, _ROWS)] = values
                for i, part in enumerate(parts):
                    to = blocks.at[stage, pl.ds(i * _ROWS, _ROWS)]
                    to[...] = converted(
                        part,
                        None if logits_scaled else scale[i],
                        to.dtype,
                        interpret=self.interpret,
                    )
                if blocks is target.v:
                    self.zero_unreadable(work, block, stage)
                plgpu.commit_smem()
                plgpu.barrier_arrive(done.at[stage])
            return next_scales

        first = self.load_scales(work, kv_head, work.lo)
        lax.fori_loop(work.lo, work.hi, convert_block, first)
        return kv_iter + work.hi - work.lo

    def load_scales(
        self, work: WorkDescriptor, kv_head: jax.Array, block: jax.Array
    ) -> tuple[list[jax.Array], ...]:
        """Return the scales of K and of V of a block: f32 of each 64 tokens."""
        block_k = self.target.k.shape[1]
        firsts = range(0, block_k, _ROWS)
        if not self.scales.of_tokens:
            return tuple(
                [ops.full((_ROWS,), 1.0, _ROW) * ref[0] for _ in firsts]
                for ref in (self.scales.k, self.scales.v)
            )
        layout, shape = self.scales.layout, self.scales.k.shape
        strides = {axis: _product(shape[i + 1 :]) for i, axis in enumerate(layout.scale_axes)}
        scales = [], []
        for first in firsts:
            token = jnp.minimum(
                block * block_k + first + ops.iota((_ROWS,), 0, _ROW), work.kv_len - 1
            )
            entry = work.row * self.block_tables.shape[1] + token // self.page_size
            page = self.gather(self.block_tables, entry)
            place = page * strides["P"] + (token % self.page_size) * strides["N"]
            place += kv_head * strides["H"]
            for values, ref in zip(scales, (self.scales.k, self.scales.v), strict=True):
                values.append(self.gather(ref, place))
        return scales

    def gather(self, ref: Any, indices: jax.Array) -> jax.Array:
        """Return elements of a ref by flat index."""
        return ops.gather(ref, indices, _ROW, interpret=self.interpret)

    def zero_unreadable(self, work: WorkDescriptor, block: jax.Array, stage: jax.Array) -> None:
        """Zero V where the tile must not read it: it may be NaN, and 0 * NaN is NaN."""
        block_k = self.target.v.shape[1]
        for part in range(0, block_k, _ROWS):
            first = block * block_k + part

            @pl.when((first < work.first_key) | (first + _ROWS > work.kv_len))
            def _(part=part, first=first):
                v_ref = self.target.v.at[stage, pl.ds(part, _ROWS)]
                v = plgpu.load(v_ref, layout=_LAYOUT)
                keys = first + ops.iota(v.shape, 0, _LAYOUT)
                readable = (keys >= work.first_key) & (keys < work.kv_len)
                v_ref[...] = jnp.where(readable, v, jnp.zeros_like(v))

    def drain(self, kv_iter: jax.Array) -> None:
        """Wait until the consumers have used all blocks."""
        drain(self.target, kv_iter)


def converted(x: jax.Array, scales: jax.Array | None, dtype: Any, *, interpret: bool) -> jax.Array:
    """Return one-byte `x` `[64, D]` times `scales` f32`[64]` as `dtype`, rounded once.

    Every int8 and fp8 is a 16-bit float.
    """
    if x.dtype == jnp.int8 and not interpret:
        return _of_int8(x, scales, dtype)
    if x.dtype == jnp.int8:
        x = x.astype(jnp.float32)
    else:
        x = x.astype(jnp.float16)
    if scales is not None:
        x = x.astype(jnp.float32) * ops.bcast(scales, x)
    elif x.dtype != dtype:
        x = x.astype(jnp.float32)
    return x.astype(dtype)


# A byte, its sign flipped, is the end of a significand: 1024 + 128 + x in f16, 2 ** 23 + 128 + x in
# f32. In bf16, whose significand is too short, it is two numbers: 128 + the lower bits, and -128 or
# -256.
_PAIR_TO_F16 = """{ .reg .b32 t, c; mov.b32 c, 0x64806480; xor.b32 t, $1, 0x80808080;
prmt.b32 t, t, 0x64646464, %s; sub.rn.f16x2 $0, t, c; }"""
_PAIR_TO_BF16 = """{ .reg .b32 t, a, b; prmt.b32 t, $1, 0, %s; lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea;
lop3.b32 b, t, 0x00800080, 0xc300c300, 0xea; add.rn.bf16x2 $0, a, b; }"""
_SCALED_PAIR = """{ .reg .b32 t, x, y; .reg .f32 f, g; xor.b32 t, $1, 0x80808080;
prmt.b32 x, t, 0x4b000000, %s; prmt.b32 y, t, 0x4b000000, %s; mov.b32 f, x; mov.b32 g, y;
add.rn.f32 f, f, 0fCB000080; add.rn.f32 g, g, 0fCB000080; mul.rn.f32 f, f, $2; mul.rn.f32 g, g, $2;
cvt.rn.%s.f32 $0, g, f; }"""


def _of_int8(x: jax.Array, scales: jax.Array | None, dtype: Any) -> jax.Array:
    """Return `converted` of int8, by PTX: JAX takes twice the instructions."""

    def convert(_, x, *scales):
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils

        ir = utils.ir
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        half = utils.dtype_to_ir_type(jnp.dtype(dtype))
        pair_type = ir.VectorType.get((2,), half)
        words = x.registers.reshape(x.shape[1] // 16, 2)  # columns of 16, rows 0 to 7 and 8 to 15
        result = np.empty(words.shape, dtype=object)
        for (column, row), register in np.ndenumerate(words):
            word = utils.bitcast(register, i32)
            pairs = []
            for first in (0, 2):
                if scales:
                    scale = utils.bitcast(scales[0].registers.reshape(2)[row], i32)
                    args = word, utils.bitcast(scale, f32)
                    selectors = (f"0x744{first + i}" for i in range(2))
                    ptx = _SCALED_PAIR % (*selectors, "f16x2" if dtype == jnp.float16 else "bf16x2")
                elif dtype == jnp.float16:
                    args, ptx = (word,), _PAIR_TO_F16 % f"0x4{first + 1}4{first}"
                else:
                    args, ptx = (word,), _PAIR_TO_BF16 % f"0x4{first + 1}4{first}"
                pairs.append(
                    utils.bitcast(utils.inline_ptx(ptx, *args, result_types=i32), pair_type)
                )
            result[column, row] = utils.vector_concat(pairs)
        return mgpu.FragmentedArray(
            _registers=result.reshape(x.registers.shape), _layout=x.layout, _is_signed=None
        )

    given = (x,) if scales is None else (x, scales)
    return plgpu.inline_mgpu(
        arg_types=(_LAYOUT, _ROW)[: len(given)],
        return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, layout=_LAYOUT),
    )(convert)(*given)


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
