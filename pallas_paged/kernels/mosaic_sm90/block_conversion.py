"""Conversion of a block of int8 or fp8 K/V from pages in device memory to 16 bits, also there.

Each thread of a warpgroup asks for pieces of 16 bytes, then converts and stores half of each: two
threads load the same piece. In stored order (`ragged_operands`) the first 8 of 16 columns are the
first halves of the four words, and the last 8 are the second halves, so both store 16 bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.mosaic_sm90.ragged_operands import pair_ptx
from pallas_paged.kernels.mosaic_sm90.ring import Pool, Scales
from pallas_paged.pages.layout import K, V

_THREADS = 128  # of a warpgroup
_AT_ONCE = 8  # pieces that a thread asks for before it uses the first


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockConversion:
    """One block of K or V of one KV head of a row, as refs and scalars."""

    pool: Pool
    scales: Scales
    block_table: Any  # i32[N], of the row
    kv: int
    kv_head: jax.Array
    block: jax.Array
    kv_len: jax.Array
    first_key: jax.Array
    k_factor: float
    interpret: bool

    def convert(self, out: Any, k_scales: Any) -> None:
        """Convert the block to `out` [block_k, D]; of K, its scales too, times `k_factor`."""
        if self.interpret:
            return self.convert_interpreted(out, k_scales)
        pages = (self.pool.k, self.pool.v)[self.kv]
        scales = (self.scales.k, self.scales.v)[self.kv]
        if self.kv == V:
            k_scales = None
        given = (pages, self.block_table, scales, out, *(() if k_scales is None else (k_scales,)))
        scalars = self.kv_head, self.block, self.kv_len, self.first_key
        layout, scale_axes = self.pool.layout, self.scales.layout.scale_axes
        byte_strides = layout.strides(layout.axes, pages.shape)
        scale_strides = layout.strides(scale_axes, scales.shape) if self.scales.of_tokens else None
        page_size, scaled, k_factor = self.pool.page_size, self.kv == V, self.k_factor
        (block_k, head_dim), dtype, kv_dtype = out.shape, out.dtype, pages.dtype
        kv_offset = self.kv * byte_strides.get("2", 0)
        ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT

        @plgpu.inline_mgpu(arg_types=(ref,) * len(given) + (scalar,) * len(scalars))
        def convert(_, *args):
            from jax.experimental.mosaic.gpu import utils
            from jaxlib.mlir import ir
            from jaxlib.mlir.dialects import arith

            i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
            f32 = ir.F32Type.get()

            def c(x):
                return arith.constant(i32, x)

            def ptx(text, *operands, results=()):
                return utils.inline_ptx(
                    text, *operands, result_types=results, has_side_effects=True
                )

            pages, table, scales, out, *k_out = (utils.memref_ptr(x) for x in args[: len(given)])
            head, block, kv_len, first_key = (x.registers.item() for x in args[len(given) :])
            thread = arith.remui(utils.thread_idx(), c(_THREADS))
            last = arith.subi(kv_len, c(1))

            def of_head(strides, offset=0):
                """Bytes or elements to a head, i64."""
                stride = arith.constant(i64, strides["H"])
                product = arith.muli(arith.extui(i64, head), stride)
                return arith.addi(product, arith.constant(i64, offset))

            def token_of(in_block):
                """A token of the block: one that may be read, and whether it is the token."""
                token = arith.addi(arith.muli(block, c(block_k)), in_block)
                readable = arith.minsi(arith.maxsi(token, first_key), last)
                return readable, arith.cmpi(arith.CmpIPredicate.eq, readable, token)

            def page_of(token):
                return ptx(
                    "{ .reg .b64 at; mad.wide.s32 at, $2, 4, $1; ld.global.nc.b32 $0, [at]; }",
                    table,
                    arith.divui(token, c(page_size)),
                    results=i32,
                )

            def scale_of(token, page):
                if scale_strides is None:
                    return ptx("ld.global.nc.f32 $0, [$1];", scales, results=f32)
                place = arith.muli(arith.remui(token, c(page_size)), c(scale_strides["N"]))
                return ptx(
                    "{ .reg .b64 at, x; cvt.u64.u32 x, $4; add.s64 x, x, $3;"
                    f" mul.wide.s32 at, $2, {scale_strides['P']}; add.s64 at, at, x;"
                    " shl.b64 at, at, 2; add.s64 at, at, $1; ld.global.nc.f32 $0, [at]; }",
                    scales,
                    page,
                    of_head(scale_strides),
                    place,
                    results=f32,
                )

            lanes = head_dim // 8
            lane, row = arith.remui(thread, c(lanes)), arith.divui(thread, c(lanes))
            column = arith.muli(arith.divui(lane, c(2)), c(16))
            shift = arith.muli(arith.remui(lane, c(2)), c(16))
            step = _THREADS // lanes
            at_once = min(_AT_ONCE, block_k // step)
            in_head = of_head(byte_strides, kv_offset)
            for start in range(0, block_k, step * at_once):
                rows = [arith.addi(row, c(start + i * step)) for i in range(at_once)]
                tokens = [token_of(x) for x in rows]
                page_numbers = [page_of(token) for token, _ in tokens]
                words, factors = [], []
                for (token, _), page in zip(tokens, page_numbers, strict=True):
                    place = arith.muli(arith.remui(token, c(page_size)), c(byte_strides["N"]))
                    loaded = ptx(
                        f"{{ .reg .b64 at, x; mul.wide.s32 at, $5, {byte_strides['P']};"
                        " add.s64 at, at, $4; add.s64 at, at, $6; cvt.u64.u32 x, $7;"
                        " add.s64 at, at, x; ld.global.nc.v4.b32 {$0, $1, $2, $3}, [at]; }",
                        pages,
                        page,
                        in_head,
                        arith.addi(place, column),
                        results=(i32,) * 4,
                    )
                    words.append(loaded)
                    factors.append([scale_of(token, page)] if scaled else [])
                for x, (_, exists), word, factor in zip(rows, tokens, words, factors, strict=True):
                    pairs = []
                    for w in word:
                        pair = utils.inline_ptx(
                            pair_ptx(kv_dtype, 0, dtype, scaled=scaled),
                            arith.shrui(w, shift),
                            *factor,
                            result_types=i32,
                        )
                        pairs.append(arith.select(exists, pair, c(0)))
                    at = arith.addi(arith.muli(x, c(2 * head_dim)), arith.muli(lane, c(16)))
                    ptx(
                        "{ .reg .b64 at; cvt.u64.u32 at, $1; add.s64 at, at, $0;"
                        " st.global.v4.b32 [at], {$2, $3, $4, $5}; }",
                        out,
                        at,
                        *pairs,
                    )
            for start in range(0, block_k, _THREADS) if k_out else ():
                # With 64 tokens, two threads store the same.
                in_block = arith.addi(arith.remui(thread, c(min(block_k, _THREADS))), c(start))
                if block_k % _THREADS:
                    in_block = arith.minsi(in_block, c(block_k - 1))
                token, _ = token_of(in_block)
                ptx(
                    "{ .reg .b64 at; mad.wide.s32 at, $1, 4, $0; st.global.f32 [at], $2; }",
                    k_out[0],
                    in_block,
                    arith.mulf(scale_of(token, page_of(token)), arith.constant(f32, k_factor)),
                )

        convert(*given, *scalars)

    def convert_interpreted(self, out: Any, k_scales: Any) -> None:
        """Convert by operations that the interpreter has; columns keep their order."""
        page_size, (block_k, _) = self.pool.page_size, out.shape

        @pl.loop(0, block_k)
        def convert(i):
            token = jnp.clip(self.block * block_k + i, self.first_key, self.kv_len - 1)
            page, place = self.block_table[token // page_size], lax.rem(token, page_size)
            scales = (self.scales.k, self.scales.v)[self.kv]
            if self.scales.of_tokens:
                at = {"P": page, "N": place, "H": self.kv_head}
                scale = scales[tuple(at[axis] for axis in self.scales.layout.scale_axes)]
            else:
                scale = scales[0]
            box = self.pool.box(self.kv, page=page, tokens=pl.ds(place, 1), kv_head=self.kv_head)
            x = box[...].astype(jnp.float32) * (scale if self.kv == V else 1.0)
            x = jnp.where(token == self.block * block_k + i, x, 0.0)
            out[pl.ds(i, 1)] = x.astype(out.dtype)
            if self.kv == K and k_scales is not None:
                k_scales[i] = scale * self.k_factor
