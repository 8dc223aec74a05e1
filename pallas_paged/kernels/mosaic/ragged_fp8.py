"""Ragged attention of fp8 pages by fp8 products. Prototype."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.call import Arrays, result_shape
from pallas_paged.kernels.logits import LOG2_E, LogitOptions
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.config import MosaicRaggedConfig
from pallas_paged.kernels.mosaic.ragged import COMPILER_PARAMS, Program
from pallas_paged.kernels.mosaic.ragged_consumer import ScheduleBarrier
from pallas_paged.kernels.mosaic.ragged_converter import Converter, Scales
from pallas_paged.kernels.mosaic.ragged_merge import merge_ragged
from pallas_paged.kernels.mosaic.ragged_scratch import Inputs, q_arrivals
from pallas_paged.kernels.mosaic.ragged_tile import (
    CHUNK,
    WG_ROWS,
    Outputs,
    Rows,
    StoreBuffers,
    TileShape,
    empty_state,
    finish,
    store_rows,
)
from pallas_paged.kernels.mosaic.ragged_work import (
    DESCRIPTOR_WORDS,
    Mailbox,
    WorkDescriptor,
    plan_work,
    unpack,
)
from pallas_paged.kernels.mosaic.ring import Pool, Ring, wgmma_transforms

F8 = jnp.float8_e4m3fn
P_EXPONENT = 8  # weights are at most 2 ** 8
BYTE_STAGES, STAGES = 2, 2
_L8 = plgpu.Layout.WGMMA_8BIT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fp8Scratch:
    store: StoreBuffers
    mailbox: Mailbox
    q_free: Any
    q_full: Any
    q: Any  # f8[num_q_stages, num_consumers, 64, D]
    bytes: Ring  # K f8, V as i16[stages, block_k, D / 2]
    ring: Ring  # k: scales f32[stages, 3, block_k] or None; v: f8[stages, D, block_k]
    k_scales: Any
    turn: Any


def scratch_types(config, *, group, head_dim, page_size, dtype, with_lse, of_tokens) -> Fp8Scratch:
    n, nq = config.num_consumers, config.num_q_stages
    tile = TileShape.of(group, config.block_q)
    copies = max(config.block_k // page_size, 1)
    B = lambda a, s: plgpu.Barrier(num_arrivals=a, num_barriers=s)  # noqa: E731
    f8 = wgmma_transforms(F8)
    block_k = config.block_k
    return Fp8Scratch(
        store=StoreBuffers.types(
            num_warpgroups=n, head_dim=head_dim, dtype=dtype, with_lse=with_lse
        ),
        mailbox=Mailbox(buffer=plgpu.SMEM((nq + 1, DESCRIPTOR_WORDS), jnp.int32)),
        q_free=B(n + 1, nq),
        q_full=B(q_arrivals(tile), nq),
        q=plgpu.SMEM((nq, n, WG_ROWS, head_dim), F8, transforms=f8),
        bytes=Ring(
            k=plgpu.SMEM((BYTE_STAGES, block_k, head_dim), F8, transforms=f8),
            v=plgpu.SMEM(
                (BYTE_STAGES, block_k, head_dim // 2),
                jnp.int16,
                transforms=wgmma_transforms(jnp.int16),
            ),
            k_full=B(copies, BYTE_STAGES),
            v_full=B(copies, BYTE_STAGES),
            k_free=B(n, BYTE_STAGES),
            v_free=B(1, BYTE_STAGES),
        ),
        ring=Ring(
            k=plgpu.SMEM((STAGES, 3, block_k), jnp.float32),
            v=plgpu.SMEM((STAGES, head_dim, block_k), F8, transforms=f8),
            k_full=B(1, STAGES),
            v_full=B(1, STAGES),
            k_free=B(n, STAGES),
            v_free=B(n, STAGES),
        ),
        k_scales=None,
        turn=B(2, 1) if n == 2 else None,
    )


def split(x, interpret):
    """x int16 (D / 2, T) of V's bytes, transposed -> f8 of even d and of odd d, (D / 2, T) each."""
    if interpret:
        pairs = lax.bitcast_convert_type(x, F8)  # [.., 2]
        return pairs[..., 0], pairs[..., 1]
    kind = plgpu.ShapeDtypeStruct(x.shape, F8, layout=_L8)

    @plgpu.inline_mgpu(arg_types=(ops.WGMMA,), return_type=(kind, kind))
    def run(_, x):
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils

        ir = utils.ir
        i32 = ir.IntegerType.get_signless(32)
        v4 = ir.VectorType.get((4,), utils.dtype_to_ir_type(jnp.dtype(F8)))
        m, t = x.shape
        r = x.registers.reshape(m // 64, t // 16, 2, 2)
        outs = []
        for selector in ("0x6420", "0x7531"):
            out = np.empty((m // 64, t // 16, 2), dtype=object)
            for i in np.ndindex(out.shape):
                a, b = (utils.bitcast(r[i[0], i[1], j, i[2]], i32) for j in (0, 1))
                w = utils.inline_ptx(f"prmt.b32 $0, $1, $2, {selector};", a, b, result_types=i32)
                out[i] = utils.bitcast(w, v4)
            shape = _L8.to_mgpu().registers_shape((m, t))
            outs.append(
                mgpu.FragmentedArray(
                    _registers=out.reshape(shape), _layout=_L8.to_mgpu(), _is_signed=None
                )
            )
        return tuple(outs)

    return run(x)


def relabel(p, interpret):
    """P f8 (64, T) from WGMMA to WGMMA_8BIT: other token order, that of `split`."""
    if interpret:
        return p

    @plgpu.inline_mgpu(
        arg_types=(ops.WGMMA,), return_type=plgpu.ShapeDtypeStruct(p.shape, F8, layout=_L8)
    )
    def run(_, p):
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils

        m, t = p.shape
        r = p.registers.reshape(m // 64, t // 16, 2, 2)
        out = np.empty((m // 64, t // 16, 2), dtype=object)
        for i in np.ndindex(out.shape):
            out[i] = utils.vector_concat([r[i[0], i[1], 0, i[2]], r[i[0], i[1], 1, i[2]]])
        shape = _L8.to_mgpu().registers_shape((m, t))
        return mgpu.FragmentedArray(
            _registers=out.reshape(shape), _layout=_L8.to_mgpu(), _is_signed=None
        )

    return run(p)


def interleave(x, interpret):
    """f32 (64, D), columns even d | odd d, to columns in order."""
    if interpret:
        half = x.shape[1] // 2
        return jnp.stack([x[:, :half], x[:, half:]], axis=-1).reshape(x.shape)

    @plgpu.inline_mgpu(
        arg_types=(ops.WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_L8)
    )
    def run(_, x):
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils
        from jax._src.lib.mlir.dialects import vector

        m, d = x.shape
        r = x.registers.reshape(m // 64, 2, d // 16, 2)  # [m, even or odd, 8 columns, row half]
        out = np.empty((m // 64, d // 16, 2), dtype=object)
        f32 = utils.ir.F32Type.get()
        v1 = utils.ir.VectorType.get((1,), f32)
        for i in np.ndindex(out.shape):
            pick = lambda odd, k: vector.broadcast(  # noqa: E731
                v1,
                vector.extract(r[i[0], odd, i[1], i[2]], dynamic_position=[], static_position=[k]),
            )
            out[i] = utils.vector_concat([pick(0, 0), pick(1, 0), pick(0, 1), pick(1, 1)])
        shape = _L8.to_mgpu().registers_shape((m, d))
        return mgpu.FragmentedArray(
            _registers=out.reshape(shape), _layout=_L8.to_mgpu(), _is_signed=None
        )

    return run(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Program(Program):
    q_scales: Any  # f32[T, Hq]

    @property
    def q(self):
        return self.scratch.q

    @property
    def copied(self):
        return self.scratch.bytes

    def convert(self, stage, work_id, kv_iter):
        inputs, scratch = self.inputs, self.scratch
        loader = Converter(
            source=scratch.bytes,
            target=Ring(
                k=scratch.bytes.k, v=None, k_full=None, v_full=None, k_free=None, v_free=None
            ),
            k_scales=None,
            scales=inputs.scales,
            block_tables=inputs.block_tables,
            page_size=inputs.pool.page_size,
            interpret=self.interpret,
        )
        work = unpack(WorkDescriptor, scratch.mailbox.buffer, stage)
        kv_head = self.unpack(work_id).kv_head
        raw, ring = scratch.bytes, scratch.ring
        block_k = raw.v.shape[1]
        half = raw.v.shape[2]

        def one(block, scales):
            now = kv_iter + (block - work.lo)
            b, s = lax.rem(now, BYTE_STAGES), lax.rem(now, STAGES)
            scales, pages = scales
            next_scales = (
                loader.load_scales(work, kv_head, block + 1, pages),
                loader.load_pages(work, block + 2),
            )

            @pl.when(now >= STAGES)
            def _():
                plgpu.barrier_wait(ring.k_free.at[s])

            for i, (k, v) in enumerate(zip(*scales, strict=True)):
                v = jnp.maximum(v, 1e-30)
                ring.k[s, 0, pl.ds(i * 64, 64)] = k
                ring.k[s, 1, pl.ds(i * 64, 64)] = jnp.log(v) * LOG2_E
                ring.k[s, 2, pl.ds(i * 64, 64)] = 1.0 / v
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring.k_full.at[s])
            plgpu.barrier_wait(raw.v_full.at[b])
            for part in range(0, block_k, 64):
                first = block * block_k + part

                @pl.when((first < work.first_key) | (first + 64 > work.kv_len))
                def _(part=part, first=first):
                    ref = raw.v.at[b, pl.ds(part, 64)]
                    v = plgpu.load(ref, layout=ops.WGMMA)
                    keys = first + ops.iota(v.shape, 0, ops.WGMMA)
                    ok = (keys >= work.first_key) & (keys < work.kv_len)
                    ref[...] = jnp.where(ok, v, jnp.zeros_like(v))
                    plgpu.commit_smem()

            if self.interpret:
                x = raw.v[b].T
            else:
                x = plgpu.load(raw.v.at[b].T, layout=ops.WGMMA)
            even, odd = split(x, self.interpret)
            plgpu.barrier_arrive(raw.v_free.at[b])

            @pl.when(now >= STAGES)
            def _():
                plgpu.barrier_wait(ring.v_free.at[s])

            ring.v[s, pl.ds(0, half)] = even
            ring.v[s, pl.ds(half, half)] = odd
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring.v_full.at[s])
            return next_scales

        @pl.when(work.lo < work.hi)
        def _():
            first = loader.load_scales(work, kv_head, work.lo, loader.load_pages(work, work.lo))
            lax.fori_loop(work.lo, work.hi, one, (first, loader.load_pages(work, work.lo + 1)))

        plgpu.barrier_arrive(scratch.q_free.at[stage])
        return kv_iter + work.hi - work.lo

    def consume(self, wg, stage, work_id, kv_iter):
        inputs, outputs, scratch = self.inputs, self.outputs, self.scratch
        work_tile = self.unpack(work_id)
        work = unpack(WorkDescriptor, scratch.mailbox.buffer, stage)
        rows = Rows(
            tile=self.tile,
            wg=wg,
            q_start=work.q_start,
            q_len=work.q_len,
            offset=work.offset,
            first_head=work_tile.first_head,
            num_heads=work_tile.num_heads,
        )
        state = self.attend(scratch.q.at[stage, wg], work, rows, kv_iter)
        plgpu.barrier_arrive(scratch.q_free.at[stage])

        @pl.when(work.partial < 0)
        def _():
            sinks = None if inputs.sinks is None else rows.per_head(inputs.sinks)
            out, lse = finish(state, sinks)
            store_rows(outputs, scratch.store, wg, rows, interleave(out, self.interpret), lse)

        @pl.when(work.partial >= 0)
        def _():
            out, lse = finish(state, None)
            index = (work_tile.head_tile, work.partial, wg)
            ops.store(outputs.partials.out.at[index], interleave(out, self.interpret))
            ops.store(outputs.partials.lse.at[index], lse)

        return kv_iter + work.hi - work.lo

    def attend(self, q_smem, work, rows, kv_iter):
        raw, ring = self.scratch.bytes, self.scratch.ring
        schedule = ScheduleBarrier(barrier=self.scratch.turn)
        _, block_k, head_dim = raw.k.shape
        lo, hi, kv_len = work.lo, work.hi, work.kv_len
        before = kv_len - work.q_len
        head, token = rows.tile.place(rows.wg * WG_ROWS + ops.iota((WG_ROWS,), 0, ops.WGMMA_ROW))
        positions = before + rows.offset + token
        last_seen = jnp.minimum(positions, kv_len - 1)
        if not self.causal:
            last_seen = jnp.maximum(last_seen, kv_len - 1)
        T, num_heads = self.q_scales.shape
        place = jnp.clip(rows.q_start + rows.offset + token, 0, T - 1) * num_heads
        place += rows.first_head + jnp.minimum(head, rows.num_heads - 1)
        factor = ops.gather(self.q_scales, place, ops.WGMMA_ROW, interpret=self.interpret)
        factor = factor * (self.options.sm_scale * LOG2_E)

        def attend_block(masked, block, state):
            m_i, l_i, acc = state
            now = kv_iter + (block - lo)
            b, s_ = lax.rem(now, BYTE_STAGES), lax.rem(now, STAGES)
            s = ops.wgmma(q_smem, raw.k.at[b].transpose((1, 0)), overlap=schedule.sync)
            plgpu.barrier_arrive(raw.k_free.at[b])
            plgpu.barrier_wait(ring.k_full.at[s_])
            load = lambda i: ops.bcast(  # noqa: E731
                plgpu.load(ring.k.at[s_, i], layout=ops.WGMMA_COL), s, axis=1
            )
            s = s * load(0) * ops.bcast(factor, s) + load(1)
            if masked:
                keys = block * block_k + ops.iota((WG_ROWS, block_k), 1, ops.WGMMA)
                seen = keys <= ops.bcast(last_seen, keys)
                if self.options.sliding_window is not None:
                    seen &= keys >= ops.bcast(self.options.first_key(positions), keys)
                s = jnp.where(seen, s, -jnp.inf)
            m_new = jnp.maximum(m_i, s.max(axis=1))
            m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
            alpha = jnp.exp2(m_i - m_safe)
            p = jnp.exp2(s - ops.bcast(m_safe - P_EXPONENT, s))
            l_new = l_i * alpha + (p * load(2)).sum(axis=1)
            plgpu.barrier_arrive(ring.k_free.at[s_])
            acc = acc * ops.bcast(alpha, acc)
            p8 = relabel(p.astype(F8), self.interpret)
            acc, l_new, m_new, p8 = lax.optimization_barrier((acc, l_new, m_new, p8))
            schedule.arrive()
            plgpu.barrier_wait(ring.v_full.at[s_])
            schedule.wait()

            def wait_for_next_k():
                @pl.when(block + 1 < hi)
                def _():
                    plgpu.barrier_wait(raw.k_full.at[lax.rem(now + 1, BYTE_STAGES)])

            vt = ring.v.at[s_].transpose((1, 0))
            acc = ops.wgmma_accumulate(
                acc, p8, vt, overlap=wait_for_next_k, interpret=self.interpret
            )
            plgpu.barrier_arrive(ring.v_free.at[s_])
            return m_new, l_new, acc

        @pl.when(lo < hi)
        def _():
            plgpu.barrier_wait(raw.k_full.at[lax.rem(kv_iter, BYTE_STAGES)])

        import functools

        pl.when(rows.wg == 1)(schedule.sync)
        full, masked = functools.partial(attend_block, False), functools.partial(attend_block, True)
        state = empty_state(head_dim)
        if self.options.sliding_window is not None:
            state = lax.fori_loop(lo, work.full_lo, masked, state)
        state = lax.fori_loop(work.full_lo, work.full_hi, full, state)
        state = lax.fori_loop(work.full_hi, hi, masked, state)
        pl.when(rows.wg == 0)(schedule.sync)
        m_i, l_i, acc = state
        return m_i - P_EXPONENT, l_i, acc


def ragged_paged_attention(
    arrays: Arrays,
    *,
    options: LogitOptions,
    config: MosaicRaggedConfig,
    with_lse=True,
    interpret=False,
):
    tile = TileShape.of(arrays.group, config.block_q)
    work, merges, num_partials = plan_work(
        arrays, options=options, config=config, tile=tile, interpret=interpret
    )
    q32 = arrays.q.astype(jnp.float32)
    q_scales = jnp.maximum(jnp.abs(q32).max(axis=-1), 1e-30) / 448.0
    q = (q32 / q_scales[..., None]).astype(F8)
    k, v = arrays.kv_pages
    v = lax.bitcast_convert_type(v.reshape(*v.shape[:-1], -1, 2), jnp.int16)
    scales = Scales.of(arrays)
    inputs = Inputs(
        q=jnp.pad(q, ((0, -q.shape[0] % CHUNK), (0, 0), (0, 0))),
        pool=Pool(k=k, v=v, layout=arrays.layout),
        block_tables=arrays.block_tables,
        work=work,
        alibi_slopes=None,
        sinks=arrays.sinks,
        scales=scales,
        counter=jax.new_ref(jnp.zeros(1, jnp.int32)),
    )
    head_tiles = arrays.num_kv_heads * tile.num_head_tiles
    shape = (head_tiles, num_partials, config.num_consumers, WG_ROWS)
    outputs = Outputs(
        out=result_shape(arrays.q.shape, arrays.q.dtype, varying=False),
        partials=ops.Partials(
            out=result_shape((*shape, arrays.head_dim), jnp.float32),
            lse=result_shape(shape, jnp.float32),
        ),
        lse=result_shape(arrays.q.shape[:2], jnp.float32, varying=False) if with_lse else None,
    )
    scratch = scratch_types(
        config,
        group=arrays.group,
        head_dim=arrays.head_dim,
        page_size=arrays.page_size,
        dtype=arrays.q.dtype,
        with_lse=with_lse,
        of_tokens=scales.of_tokens,
    )

    def body(inputs, q_scales, outputs):
        def run(scratch):
            Fp8Program(
                inputs=inputs,
                outputs=outputs,
                scratch=scratch,
                options=options,
                config=config,
                tile=tile,
                causal=options.causal,
                interpret=interpret,
                q_scales=q_scales,
            ).run()

        pl.run_scoped(run, scratch, collective_axes="wg")

    results = pl.kernel(
        ops.with_trees(body, inputs, q_scales, outputs),
        out_type=tuple(jax.tree.leaves(outputs)),
        mesh=plgpu.Mesh(
            grid=(config.num_programs,),
            grid_names=("program",),
            num_threads=config.num_consumers + 2,
            thread_name="wg",
        ),
        compiler_params=COMPILER_PARAMS,
        name="ragged_paged_attention_fp8",
        interpret=ops.interpreter(interpret),
    )(*jax.tree.leaves((inputs, q_scales)))
    outputs = jax.tree.unflatten(jax.tree.structure(outputs), results)
    return merge_ragged(outputs, merges, arrays.sinks, tile=tile, interpret=interpret)
