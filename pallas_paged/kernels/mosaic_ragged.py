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

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_paged.kernels.logits import LogitOptions, base2_logits
from pallas_paged.kernels.mosaic_ops import (
    MATRIX,
    ROWS,
    accumulate,
    along,
    full,
    iota,
    let_next_kernel_start,
    load,
    set_max_registers,
    take_ticket,
)
from pallas_paged.kernels.mosaic_ring import Ring, drain, matrix_transforms, ring_types, stream
from pallas_paged.kernels.mosaic_tile import (
    CHUNK,
    WG_ROWS,
    Rows,
    TileShape,
    finish,
    per_head,
    store,
    store_types,
)
from pallas_paged.kernels.mosaic_tile_merge import merge_tiles
from pallas_paged.kernels.ragged_plan import Plan, make_plan, make_tiles

_RECORD = 32  # i32 of a piece, as many as a copy to shared memory takes at least
_OF_ROWS = ("q_start", "q_len", "offset")
_FIELDS = (
    "row", "q_start", "q_len", "kv_len", "first_key", "offset", "lo", "hi", "full_lo", "full_hi",
    "slot",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicRaggedConfig:
    block_k: int
    num_consumers: int
    num_stages: int
    num_programs: int  # of the device, not per KV head
    split_size: int | None = None
    num_q_stages: int = 2

    @property
    def block_q(self) -> int:
        return self.num_consumers * WG_ROWS


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
                config=config,
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
    piece = {name: refs["pieces"][piece_index, i] for i, name in enumerate(_FIELDS)}
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


def _consume(refs, wg, stage, found, tile, step, *, causal, options, config, interpret):
    """Attends the warpgroup's rows of a piece to its keys and stores what comes of it."""
    piece_index, head_block, _, first_head, num_heads = found
    ring: Ring = refs["ring"]
    num_stages, block_k, head_dim = ring.k.shape
    dtype = ring.v.dtype
    q_smem = refs["q_smem"].at[stage, wg]

    def take_turns():
        if config.num_consumers == 2:
            plgpu.barrier_arrive(refs["turn"])
            plgpu.barrier_wait(refs["turn"])

    piece = {name: refs["piece_smem"][stage, i] for i, name in enumerate(_FIELDS)}
    lo, hi, kv_len = piece["lo"], piece["hi"], piece["kv_len"]
    before = kv_len - piece["q_len"]
    rows = Rows(
        tile=tile,
        wg=wg,
        q_start=piece["q_start"],
        q_len=piece["q_len"],
        offset=piece["offset"],
        first_head=first_head,
        num_heads=num_heads,
    )
    _, token = tile.place(wg * WG_ROWS + iota((WG_ROWS,), 0, ROWS))
    positions = before + piece["offset"] + token
    if "row_positions" in refs:
        positions = load(refs["row_positions"].at[piece_index, wg], ROWS)
    last_seen = jnp.minimum(positions, kv_len - 1)
    if not causal:
        last_seen = jnp.maximum(last_seen, kv_len - 1)

    slopes = per_head(refs["alibi_slopes"], rows, ROWS) if "alibi_slopes" in refs else None

    def visible(block, keys):
        """Which keys of a block each query sees."""
        seen = keys <= along(last_seen, keys)
        if "tree_words" in refs:
            words = refs["tree_words"].at[piece_index]
            seen &= _in_tree(words, wg, block * block_k, before, keys)
        if options.sliding_window is not None:
            seen &= keys >= along(options.first_key(positions), keys)
        return seen

    def zero_unreadable(block, slot):
        """Values of keys that the tile must not read, which may be NaN: 0 times NaN is NaN."""
        for part in range(0, block_k, WG_ROWS):
            first = block * block_k + part

            @pl.when((first < piece["first_key"]) | (first + WG_ROWS > kv_len))
            def _(part=part, first=first):
                v_ref = ring.v.at[slot, pl.ds(part, WG_ROWS)]
                v = plgpu.load(v_ref, layout=MATRIX)
                keys = first + iota(v.shape, 0, MATRIX)
                readable = (keys >= piece["first_key"]) & (keys < kv_len)
                v_ref[...] = jnp.where(readable, v, jnp.zeros_like(v))
                plgpu.commit_smem()

    def attend_block(masked, block, state):
        m_i, l_i, acc = state
        now = step + (block - lo)
        slot = lax.rem(now, num_stages)

        def q_dot_k(s_ref):
            plgpu.wgmma(s_ref, q_smem, ring.k.at[slot].transpose((1, 0)))
            take_turns()
            return s_ref[...]

        s = pl.run_scoped(q_dot_k, plgpu.ACC((WG_ROWS, block_k), jnp.float32))
        plgpu.barrier_arrive(ring.k_free.at[slot])
        keys = block * block_k + iota((WG_ROWS, block_k), 1, MATRIX)
        if slopes is None:
            s, factor = base2_logits(s, options, None, keys)
        else:
            s, factor = base2_logits(s, options, along(slopes, s), keys - along(positions, s))
        if masked:
            s = jnp.where(visible(block, keys), s, -jnp.inf)
        m_new = jnp.maximum(m_i, s.max(axis=1) * factor)
        m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new
        alpha = jnp.exp2(m_i - m_safe)
        p = jnp.exp2(s * factor - along(m_safe, s))
        l_new = l_i * alpha + p.sum(axis=1)
        acc = acc * along(alpha, acc)
        # The order that keeps the matrix unit busy: all of the softmax before its turn is passed.
        acc, l_new, m_new, p = lax.optimization_barrier((acc, l_new, m_new, p.astype(dtype)))
        if config.num_consumers == 2:
            plgpu.barrier_arrive(refs["turn"])
        plgpu.barrier_wait(ring.v_full.at[slot])
        if masked:
            zero_unreadable(block, slot)
        if config.num_consumers == 2:
            plgpu.barrier_wait(refs["turn"])

        def wait_for_next_k():
            @pl.when(block + 1 < hi)
            def _():
                plgpu.barrier_wait(ring.k_full.at[lax.rem(now + 1, num_stages)])

        acc = accumulate(acc, p, ring.v.at[slot], meanwhile=wait_for_next_k, interpret=interpret)
        plgpu.barrier_arrive(ring.v_free.at[slot])
        return m_new, l_new, acc

    @pl.when(lo < hi)
    def _():
        plgpu.barrier_wait(ring.k_full.at[lax.rem(step, num_stages)])

    pl.when(wg == 1)(take_turns)
    state = (
        full((WG_ROWS,), -jnp.inf, ROWS),
        full((WG_ROWS,), 0.0, ROWS),
        full((WG_ROWS, head_dim), 0.0, MATRIX),
    )
    attend_full = functools.partial(attend_block, False)
    attend_masked = functools.partial(attend_block, True)
    if options.sliding_window is not None:
        state = lax.fori_loop(lo, piece["full_lo"], attend_masked, state)
    state = lax.fori_loop(piece["full_lo"], piece["full_hi"], attend_full, state)
    state = lax.fori_loop(piece["full_hi"], hi, attend_masked, state)
    pl.when(wg == 0)(take_turns)
    plgpu.barrier_arrive(refs["q_free"].at[stage])

    slot = piece["slot"]

    @pl.when(slot < 0)
    def _():
        sinks = per_head(refs["sinks"], rows, ROWS) if "sinks" in refs else None
        store(refs, wg, rows, *finish(state, sinks))

    @pl.when(slot >= 0)
    def _():
        refs["outs"][head_block, slot, wg], refs["lses"][head_block, slot, wg] = finish(state, None)

    return step + (hi - lo)


def _in_tree(words_ref, wg, first_key, before, keys):
    """Which keys the bits of a tree mask let through; keys before the newest tokens all are."""
    newest = keys - before
    first_word = (first_key - before) >> 5
    bits = full(keys.shape, 0, MATRIX, jnp.int32)
    for i in range(keys.shape[1] // 32 + 1):
        # The words past a mask's end are 0, as the last one is.
        word = jnp.clip(first_word + i, 0, words_ref.shape[0] - 1)
        word = load(words_ref.at[word, wg], ROWS)
        bits = jnp.where(newest >> 5 == first_word + i, along(word, keys), bits)
    return (newest < 0) | ((bits >> (newest & 31)) & 1 == 1)


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
            num_programs=max(min(config.num_programs, 132) // num_head_blocks, 1),
            split_size=config.split_size,
            max_kv_len=pages_per_seq * page_size,
            num_seqs=num_seqs,
        )
        count = jnp.sum(plan.pieces.q_len > 0, dtype=jnp.int32) * num_head_blocks
        pieces, merges = _records(plan)
        absolute, within = _tokens_of_rows(plan, tile, config.num_consumers, num_tokens)
        needs_positions = alibi_slopes is not None or options.sliding_window is not None
        row_positions = None
        if q_positions is not None and needs_positions:
            row_positions = q_positions[absolute]
        tree_words = None if tree_mask is None else _tree_words(tree_mask, plan, within)

    inputs = {
        "q": _whole_chunks(q),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_tables": block_tables,
        "pieces": pieces,
        "count": count.reshape(1),
        "row_positions": row_positions,
        "tree_words": tree_words,
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
        "piece_smem": plgpu.SMEM((config.num_q_stages + 1, _RECORD), jnp.int32),
        "q_full": plgpu.Barrier(
            num_arrivals=1 + _num_q_copies(tile), num_barriers=config.num_q_stages
        ),
        "q_free": plgpu.Barrier(
            num_arrivals=config.num_consumers, num_barriers=config.num_q_stages
        ),
        "turn": plgpu.Barrier(num_arrivals=2),
    }
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
        interpret=plgpu.InterpretGPUParams() if interpret else False,
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


def _records(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The plan as the kernels read it: i32[num_pieces, 32] and i32[num_merges, 5]."""
    fields = [getattr(plan.pieces, name) for name in _FIELDS[:-1]]
    pieces = jnp.stack([*fields, plan.slot], axis=1)
    merges = pieces[plan.split_pieces][:, [_FIELDS.index(n) for n in ("slot", *_OF_ROWS)]]
    pieces = jnp.pad(pieces, ((0, 0), (0, _RECORD - len(_FIELDS))))
    return pieces, jnp.concatenate([plan.num_splits[:, None], merges], axis=1)


def _tokens_of_rows(
    plan: Plan, tile: TileShape, num_warpgroups: int, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The token of each row among all queries, and within its sequence: i32[pieces, wgs, 64]."""
    _, token = tile.place(jnp.arange(num_warpgroups * WG_ROWS).reshape(num_warpgroups, WG_ROWS))
    within = plan.pieces.offset[:, None, None] + token
    absolute = plan.pieces.q_start[:, None, None] + within
    return jnp.clip(absolute, 0, num_tokens - 1), within


def _tree_words(tree_mask: jax.Array, plan: Plan, token: jax.Array) -> jax.Array:
    """Each row's part of the tree mask as bits, the last word 0: i32[pieces, words, wgs, 64]."""
    size = tree_mask.shape[-1]
    num_words = -(-size // 32) + 1
    bits = jnp.pad(tree_mask, ((0, 0), (0, 0), (0, num_words * 32 - size)))
    bits = bits.reshape(*bits.shape[:2], num_words, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32)  # [B, M, words]
    known = (token >= 0) & (token < size)
    mine = words[plan.pieces.row[:, None, None], jnp.where(known, token, 0)]
    return jnp.moveaxis(jnp.where(known[..., None], mine, 0), -1, 1)


def _whole_chunks(q: jax.Array) -> jax.Array:
    """q with as many tokens as TMA takes in tiles of 8."""
    return jnp.pad(q, ((0, -q.shape[0] % CHUNK), (0, 0), (0, 0)))
