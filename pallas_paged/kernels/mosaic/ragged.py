"""Attention of ragged queries over paged K/V, a Pallas Mosaic GPU kernel for Hopper.

The queries of a sequence are cut into tiles of some tokens times the query heads of one KV head. A
program holds one tile at a time: a producer warpgroup streams the blocks of keys that the tile sees
through a ring in shared memory, and each consumer warpgroup attends 64 of the tile's rows to them:

    producer     k0 v0 k1 v1 k2 v2 ...                       (mosaic_ring)
    consumer 0   q.k0  softmax     p.v0 q.k1  softmax        rows  0 to  63
    consumer 1         q.k0  softmax     p.v0 q.k1  ...      rows 64 to 127

Consumers take turns at the matrix unit, so that one's softmax runs under the other's products. The
programs are as many as run at once; they take pieces of work in turn, longest first, and the
producer is already at the next piece while the consumers end one.

The rows of a tile lie head after head, in chunks of 8 tokens of one head. `ragged_plan` orders the
tiles and splits the keys of few or long ones; partial states go to slots that
`mosaic_tile_merge` unites.

FlashAttention-3 (Shah 2024), with the heads of a group packed into the tile and K/V from pages.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic.config import MosaicRaggedConfig
from pallas_paged.kernels.mosaic.ops import (
    ROWS,
    interpreter,
    let_next_kernel_start,
    set_max_registers,
    store,
    take_ticket,
)
from pallas_paged.kernels.mosaic.ragged_consumer import Turns, attend
from pallas_paged.kernels.mosaic.ragged_merge import merge_tiles
from pallas_paged.kernels.mosaic.ragged_tile import (
    CHUNK,
    WG_ROWS,
    Rows,
    TileShape,
    finish,
    per_head,
    store_tile,
    store_types,
)
from pallas_paged.kernels.mosaic.ragged_work import (
    RECORD,
    fields,
    records,
    tokens_of_rows,
    tree_words,
)
from pallas_paged.kernels.mosaic.ring import drain, matrix_transforms, ring_types, stream
from pallas_paged.kernels.ragged_plan import make_plan, make_tiles


def ragged_kernel(
    refs: dict[str, Any],
    *,
    options: LogitOptions,
    config: MosaicRaggedConfig,
    tile: TileShape,
    group: int,
    causal: bool,
    interpret: bool,
):
    wg = lax.axis_index("wg")
    num_head_blocks = refs["k_pages"].shape[0] * tile.num_blocks

    def find(item):
        """Piece, block of heads, and of that the KV head, first query head and number of them."""
        head_block = lax.rem(item, num_head_blocks)
        kv_head = lax.div(head_block, tile.num_blocks)
        first = lax.rem(head_block, tile.num_blocks) * tile.num_heads
        num_heads = jnp.minimum(group - first, tile.num_heads)
        piece_index = lax.div(item, num_head_blocks)
        return piece_index, head_block, kv_head, kv_head * group + first, num_heads

    @pl.when(wg == config.num_consumers)
    def _():
        set_max_registers(40, action="decrease", interpret=interpret)
        _produce(refs, find, config=config, tile=tile, interpret=interpret)
        let_next_kernel_start(interpret=interpret)

    @pl.when(wg < config.num_consumers)
    def _():
        set_max_registers(232, action="increase", interpret=interpret)

        def consume(state):
            r, item, step = state
            step = _consume(
                refs,
                wg,
                lax.rem(r, config.num_q_stages),
                find(item),
                tile,
                step,
                causal=causal,
                options=options,
                interpret=interpret,
            )
            return r + 1, _receive(refs, r + 1), step

        state = jnp.int32(0), _receive(refs, jnp.int32(0)), jnp.int32(0)
        lax.while_loop(lambda state: state[1] >= 0, consume, state)
        plgpu.wait_smem_to_gmem(0)


def _mail(refs):
    """i32[32] in shared memory: the item that is in each stage; then the last ticket."""
    return refs["piece_smem"].at[refs["piece_smem"].shape[0] - 1]


def _receive(refs, r):
    """Waits for the item of work that the producer sends next; -1 if there is none."""
    stage = lax.rem(r, refs["q_smem"].shape[0])
    plgpu.barrier_wait(refs["q_full"].at[stage])
    return _mail(refs)[stage]


def _produce(refs, find, *, config, tile, interpret):
    """Sends item after item of work, until none is left."""
    program, num_programs = lax.axis_index("program"), config.num_programs
    count = refs["count"][0]

    def stage_of(r):
        """The place of an item's queries, once it is free."""
        stage = lax.rem(r, config.num_q_stages)

        @pl.when(r >= config.num_q_stages)
        def _():
            plgpu.barrier_wait(refs["q_free"].at[stage])

        return stage

    def produce(state):
        r, item, step = state
        stage = stage_of(r)
        step = _send(refs, stage, item, find(item), tile, step)
        if interpret:  # which has no atomic addition
            return r + 1, item + num_programs, step
        ticket = _mail(refs).at[pl.ds(config.num_q_stages, 1)]
        take_ticket(refs["counter"], ticket)
        return r + 1, num_programs + ticket[0], step

    state = jnp.int32(0), program, jnp.int32(0)
    r, _, sent = lax.while_loop(lambda state: state[1] < count, produce, state)
    stage = stage_of(r)
    _mail(refs)[stage] = -1
    for _ in range(_num_q_copies(tile) + 1):
        plgpu.barrier_arrive(refs["q_full"].at[stage])
    drain(refs["ring"], sent)

    @pl.loop(jnp.maximum(r + 1 - config.num_q_stages, 0), r)
    def _(r):
        plgpu.barrier_wait(refs["q_free"].at[lax.rem(r, config.num_q_stages)])


def _num_q_copies(tile):
    return 1 + sum(len(tile.runs(h)) for h in range(tile.num_heads))


def _send(refs, stage, item, found, tile, step):
    """Sends an item of work: which piece it is, its queries, then the blocks of keys."""
    piece_index, _, kv_head, first_head, num_heads = found
    piece = fields(refs["pieces"], piece_index)
    full = refs["q_full"].at[stage]
    _mail(refs)[stage] = item
    plgpu.barrier_arrive(full)
    plgpu.copy_gmem_to_smem(refs["pieces"].at[piece_index], refs["piece_smem"].at[stage], full)
    for h in range(tile.num_heads):
        head = first_head + jnp.minimum(h, num_heads - 1)
        for first, num_rows in tile.runs(h):
            token = piece["q_start"] + piece["offset"] + first - h * tile.num_tokens
            plgpu.copy_gmem_to_smem(
                refs["q"].at[pl.ds(pl.multiple_of(token, CHUNK), num_rows), head],
                refs["q_smem"].at[stage, first // WG_ROWS, pl.ds(first % WG_ROWS, num_rows)],
                full,
            )
    return stream(
        refs["ring"],
        refs["k_pages"].at[kv_head],
        refs["v_pages"].at[kv_head],
        refs["block_tables"].at[piece["row"]],
        lo=piece["lo"],
        hi=piece["hi"],
        kv_len=jnp.maximum(piece["kv_len"], 1),
        step=step,
    )


def _consume(refs, wg, stage, found, tile, step, *, causal, options, interpret):
    """Attends the warpgroup's rows to the keys of an item and stores what comes of it."""
    piece_index, head_block, _, first_head, num_heads = found
    piece = fields(refs["piece_smem"], stage)
    rows = Rows(
        tile=tile,
        wg=wg,
        q_start=piece["q_start"],
        q_len=piece["q_len"],
        offset=piece["offset"],
        first_head=first_head,
        num_heads=num_heads,
    )

    def of_rows(name):
        ref = refs.get(name)
        return None if ref is None else ref.at[piece_index, wg]

    state = attend(
        refs["q_smem"].at[stage, wg],
        refs["ring"],
        piece,
        rows,
        step,
        turns=Turns(barrier=refs.get("turn")),
        alibi_slopes=refs.get("alibi_slopes"),
        row_positions=of_rows("row_positions"),
        tree_words=of_rows("tree_words"),
        causal=causal,
        options=options,
        interpret=interpret,
    )
    plgpu.barrier_arrive(refs["q_free"].at[stage])
    slot = piece["slot"]

    @pl.when(slot < 0)
    def _():
        sinks = per_head(refs["sinks"], rows, ROWS) if "sinks" in refs else None
        store_tile(refs, wg, rows, *finish(state, sinks))

    @pl.when(slot >= 0)
    def _():
        out, lse = finish(state, None)
        store(refs["outs"].at[head_block, slot, wg], out)
        store(refs["lses"].at[head_block, slot, wg], lse)

    return step + piece["hi"] - piece["lo"]


def ragged_paged_attention(
    q: jax.Array,  # [T, Hq, D]
    k_pages: jax.Array,  # [Hkv, P, S, D]
    v_pages: jax.Array,  # [Hkv, P, S, D]
    block_tables: jax.Array,  # i32[B, N]
    seq_lens: jax.Array,  # i32[B], each in [0, N * S]
    cu_q_lens: jax.Array,  # i32[B + 1], rising, within [0, T]
    q_positions: jax.Array | None,  # i32[T]
    alibi_slopes: jax.Array | None,  # f32[Hq]
    sinks: jax.Array | None,  # f32[Hq]
    tree_mask: jax.Array | None,  # bool[B, M, M]
    *,
    options: LogitOptions,
    config: MosaicRaggedConfig,
    with_lse: bool = True,
    interpret: bool = False,
):
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    num_seqs, pages_per_seq = block_tables.shape
    group = num_q_heads // num_kv_heads
    tile = TileShape.of(group, config.block_q)
    num_head_blocks = num_kv_heads * tile.num_blocks

    with jax.named_scope("ragged_plan"):
        tiles = make_tiles(
            seq_lens,
            cu_q_lens,
            q_positions,
            num_tokens=num_tokens,
            group=1,
            block_q=tile.num_tokens,
            align=CHUNK,
            block_k=config.block_k,
            options=options,
            has_tree=tree_mask is not None,
        )
        plan = make_plan(
            tiles,
            tile_tokens=tile.num_tokens,
            block_k=config.block_k,
            num_programs=max(config.num_programs // num_head_blocks, 1),
            fixed_split_size=config.fixed_split_size,
            max_kv_len=pages_per_seq * page_size,
            num_seqs=num_seqs,
            align=CHUNK,
        )
        count = jnp.sum(plan.pieces.q_len > 0, dtype=jnp.int32) * num_head_blocks
        pieces, merges = records(plan)
        absolute, within = tokens_of_rows(plan, tile, config.num_consumers, num_tokens)
        needs_positions = alibi_slopes is not None or options.sliding_window is not None
        row_positions = None
        if q_positions is not None and needs_positions:
            row_positions = q_positions[absolute]
        words = None if tree_mask is None else tree_words(tree_mask, plan, within)

    inputs = {
        "q": _whole_chunks(q),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_tables": block_tables,
        "pieces": pieces,
        "count": count.reshape(1),
        "row_positions": row_positions,
        "tree_words": words,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    inputs = {name: x for name, x in inputs.items() if x is not None}
    slots = (num_head_blocks, plan.num_slots, config.num_consumers, WG_ROWS)
    outputs = {
        "out": jax.ShapeDtypeStruct(q.shape, q.dtype),
        "outs": jax.ShapeDtypeStruct((*slots, head_dim), jnp.float32),
        "lses": jax.ShapeDtypeStruct(slots, jnp.float32),
    }
    if with_lse:
        outputs["lse"] = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    scratch = {
        "ring": ring_types(
            num_stages=config.num_stages,
            block_k=config.block_k,
            head_dim=head_dim,
            page_size=page_size,
            dtype=k_pages.dtype,
            num_consumers=config.num_consumers,
        ),
        "q_smem": plgpu.SMEM(
            (config.num_q_stages, config.num_consumers, WG_ROWS, head_dim),
            q.dtype,
            transforms=matrix_transforms(q.dtype),
        ),
        "piece_smem": plgpu.SMEM((config.num_q_stages + 1, RECORD), jnp.int32),
        "q_full": plgpu.Barrier(
            num_arrivals=1 + _num_q_copies(tile), num_barriers=config.num_q_stages
        ),
        "q_free": plgpu.Barrier(
            num_arrivals=config.num_consumers, num_barriers=config.num_q_stages
        ),
    }
    if config.num_consumers == 2:
        scratch["turn"] = plgpu.Barrier(num_arrivals=2)
    scratch |= store_types(
        num_warpgroups=config.num_consumers, head_dim=head_dim, dtype=q.dtype, with_lse=with_lse
    )

    names = (*inputs, "counter", *outputs)

    def body(*refs):
        def kernel(**scratch_refs):
            ragged_kernel(
                {**dict(zip(names, refs, strict=True)), **scratch_refs},
                options=options,
                config=config,
                tile=tile,
                group=group,
                causal=q_positions is None and tree_mask is None,
                interpret=interpret,
            )

        pl.run_scoped(kernel, collective_axes="wg", **scratch)

    results = pl.kernel(
        body,
        out_type=tuple(outputs.values()),
        mesh=plgpu.Mesh(
            grid=(config.num_programs,),
            grid_names=("program",),
            num_threads=config.num_consumers + 1,
            thread_name="wg",
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        name="ragged_paged_attention",
        interpret=interpreter(interpret),
    )(*inputs.values(), jax.new_ref(jnp.zeros(1, jnp.int32)))
    found = dict(zip(outputs, results, strict=True))
    return merge_tiles(
        found["out"],
        found.get("lse"),
        found["outs"],
        found["lses"],
        merges,
        sinks,
        tile=tile,
        group=group,
        interpret=interpret,
    )


def _whole_chunks(q: jax.Array) -> jax.Array:
    """q with as many tokens as TMA takes in tiles of 8."""
    return jnp.pad(q, ((0, -q.shape[0] % CHUNK), (0, 0), (0, 0)))
