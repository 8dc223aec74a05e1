"""Conversion of a block of int8 or fp8 K/V from pages in device memory to 16 bits, also there.

Each thread of a warpgroup asks for pieces of 16 bytes, then converts and stores half of each: two
threads load the same piece. In stored order (`ragged_operands`) the first 8 of 16 columns are the
first halves of the four words, and the last 8 are the second halves, so both store 16 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_paged.kernels.mosaic.pages import Pages
from pallas_paged.kernels.mosaic_sm80.emitter import CHUNK, WARPGROUP, Emitter
from pallas_paged.kernels.mosaic_sm90.ragged_operands import pair_ptx
from pallas_paged.pages.layout import K, V

_AT_ONCE = 8  # pieces that a thread asks for before it uses the first


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BlockConversion:
    """One block of K or V of one KV head of a row, as refs and scalars."""

    pages: Pages
    row: jax.Array
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
        pages = (self.pages.k, self.pages.v)[self.kv]
        scales = (self.pages.k_scales, self.pages.v_scales)[self.kv]
        table = self.pages.block_tables.at[self.row]
        if self.kv == V:
            k_scales = None
        given = (pages, table, scales, out, *(() if k_scales is None else (k_scales,)))
        scalars = self.kv_head, self.block, self.kv_len, self.first_key
        layout, scale_axes = self.pages.layout, self.pages.layout.scale_axes
        byte_strides = layout.strides(layout.axes, pages.shape)
        scale_strides = (
            layout.strides(scale_axes, scales.shape) if self.pages.scales_by_token else None
        )
        page_size, scaled, k_factor = self.pages.page_size, self.kv == V, self.k_factor
        (block_k, head_dim), dtype, kv_dtype = out.shape, out.dtype, pages.dtype
        kv_offset = self.kv * byte_strides.get("2", 0)
        refs = (plgpu.RefType(),) * len(given)

        @plgpu.inline_mgpu(arg_types=refs + (plgpu.Layout.WG_SPLAT,) * len(scalars))
        def convert(_, *args):
            m, f32 = Emitter(), ir.F32Type.get()
            pages, table, scales, out, *k_out = (utils.memref_ptr(x) for x in args[: len(given)])
            head, block, kv_len, first_key = map(m.scalar, args[len(given) :])
            thread, last = m.thread(), m.sub(kv_len, 1)

            def of_head(strides, offset=0):
                """Bytes or elements to a head, i64."""
                return m.add(m.mul(m.wide(head), strides["H"]), offset)

            def token_of(in_block):
                """A token of the block: one that may be read, and whether it is the token."""
                token = m.add(m.mul(block, block_k), in_block)
                readable = m.clip(token, first_key, last)
                return readable, arith.cmpi(arith.CmpIPredicate.eq, readable, token)

            def page_of(token):
                return m.ptx(
                    "{ .reg .b64 at; mad.wide.s32 at, $2, 4, $1; ld.global.nc.b32 $0, [at]; }",
                    table,
                    m.div(token, page_size),
                    reads=True,
                )

            def scale_of(token, page):
                load = functools.partial(utils.inline_ptx, result_types=f32, has_side_effects=True)
                if scale_strides is None:
                    return load("ld.global.nc.f32 $0, [$1];", scales)
                place = m.mul(m.rem(token, page_size), scale_strides["N"])
                return load(
                    "{ .reg .b64 at, x; cvt.u64.u32 x, $4; add.s64 x, x, $3;"
                    f" mul.wide.s32 at, $2, {scale_strides['P']}; add.s64 at, at, x;"
                    " shl.b64 at, at, 2; add.s64 at, at, $1; ld.global.nc.f32 $0, [at]; }",
                    scales,
                    page,
                    of_head(scale_strides),
                    place,
                )

            lanes = head_dim // 8
            lane, row = m.rem(thread, lanes), m.div(thread, lanes)
            column, shift = m.mul(m.div(lane, 2), CHUNK), m.mul(m.rem(lane, 2), 16)
            step = WARPGROUP // lanes
            at_once = min(_AT_ONCE, block_k // step)
            in_head = of_head(byte_strides, kv_offset)
            for start in range(0, block_k, step * at_once):
                rows = [m.add(row, start + i * step) for i in range(at_once)]
                tokens = [token_of(x) for x in rows]
                page_numbers = [page_of(token) for token, _ in tokens]
                words, factors = [], []
                for (token, _), page in zip(tokens, page_numbers, strict=True):
                    place = m.mul(m.rem(token, page_size), byte_strides["N"])
                    loaded = m.ptx(
                        f"{{ .reg .b64 at, x; mul.wide.s32 at, $5, {byte_strides['P']};"
                        " add.s64 at, at, $4; add.s64 at, at, $6; cvt.u64.u32 x, $7;"
                        " add.s64 at, at, x; ld.global.nc.v4.b32 {$0, $1, $2, $3}, [at]; }",
                        pages,
                        page,
                        in_head,
                        m.add(place, column),
                        results=4,
                        reads=True,
                    )
                    words.append(loaded)
                    factors.append([scale_of(token, page)] if scaled else [])
                for x, (_, exists), word, factor in zip(rows, tokens, words, factors, strict=True):
                    asm, pairs = pair_ptx(kv_dtype, 0, dtype, scaled=scaled), []
                    for w in word:
                        pair = m.ptx(asm, arith.shrui(w, shift), *factor)
                        pairs.append(arith.select(exists, pair, m.constant(0)))
                    m.effect(
                        "{ .reg .b64 at; cvt.u64.u32 at, $1; add.s64 at, at, $0;"
                        " st.global.v4.b32 [at], {$2, $3, $4, $5}; }",
                        out,
                        m.add(m.mul(x, 2 * head_dim), m.mul(lane, CHUNK)),
                        *pairs,
                    )
            for start in range(0, block_k, WARPGROUP) if k_out else ():
                # With 64 tokens, two threads store the same.
                in_block = m.add(m.rem(thread, min(block_k, WARPGROUP)), start)
                if block_k % WARPGROUP:
                    in_block = m.least(in_block, m.constant(block_k - 1))
                token, _ = token_of(in_block)
                m.effect(
                    "{ .reg .b64 at; mad.wide.s32 at, $1, 4, $0; st.global.f32 [at], $2; }",
                    k_out[0],
                    in_block,
                    arith.mulf(scale_of(token, page_of(token)), arith.constant(f32, k_factor)),
                )

        convert(*given, *scalars)

    def convert_interpreted(self, out: Any, k_scales: Any) -> None:
        """Convert by operations that the interpreter has; columns keep their order."""
        page_size, (block_k, _) = self.pages.page_size, out.shape

        @pl.loop(0, block_k)
        def convert(i):
            token = jnp.clip(self.block * block_k + i, self.first_key, self.kv_len - 1)
            page, place = (
                self.pages.block_tables[self.row, token // page_size],
                lax.rem(token, page_size),
            )
            scales = (self.pages.k_scales, self.pages.v_scales)[self.kv]
            if self.pages.scales_by_token:
                at = {"P": page, "N": place, "H": self.kv_head}
                scale = scales[tuple(at[axis] for axis in self.pages.layout.scale_axes)]
            else:
                scale = scales[0]
            box = self.pages.box(self.kv, page=page, tokens=pl.ds(place, 1), kv_head=self.kv_head)
            x = box[...].astype(jnp.float32) * (scale if self.kv == V else 1.0)
            x = jnp.where(token == self.block * block_k + i, x, 0.0)
            out[pl.ds(i, 1)] = x.astype(out.dtype)
            if self.kv == K and k_scales is not None:
                k_scales[i] = scale * self.k_factor
