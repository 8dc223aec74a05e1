"""Prompts into rows: pages are reserved for whole prompts, then their tokens go in chunk by chunk.

A chunk packs tokens of all prompts that have some left, so that many short prompts share a step
and a long one takes many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_paged as pp
from models.decoder import paged_attend
from models.generate_state import GenerateState, Status, append_tokens, run_layers
from models.sampling import RowSampling

_MIN_CHUNK = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """P prompts to start, each continued in S rows; rows out of range are padding.

    Attributes:
        lens: i32[P], tokens of each prompt.
        rows: i32[P, S], the empty rows that a prompt's samples get.
        keys: key[P, S]
        max_new_tokens: i32[P]
        stop_tokens: i32[P, n], padded with -1; n as in the state.
        sampling: leaves of shape [P]; None (also field by field) where the state has None.
    """

    lens: jax.Array
    rows: jax.Array
    keys: jax.Array
    max_new_tokens: jax.Array
    stop_tokens: jax.Array
    sampling: RowSampling | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """The next tokens of P prompts, one prompt after another.

    Attributes:
        tokens: i32[T], padded at the end with any valid token.
        cu_q_lens: i32[P + 1], rising from 0: where the tokens of each prompt begin and end.
        starts: i32[P], tokens of each prompt in earlier chunks.
        rows: i32[P, S], as `reserve` returned them; rows out of range are padding.
    """

    tokens: jax.Array
    cu_q_lens: jax.Array
    starts: jax.Array
    rows: jax.Array


@partial(jax.jit, donate_argnames="state")
def reserve(state: GenerateState, requests: Requests) -> tuple[GenerateState, jax.Array]:
    """Takes empty rows for prompts, and for each prompt the pages of all its tokens or none.

    Args:
        state: donated.
        requests: what to start, and where.

    Returns:
        The state, and rows i32[P, S], those of the requests that are PREFILLING now; the others are
        out of range. The status of an empty row that is not says why: OUT_OF_PAGES (ask again when
        pages are free) or TABLE_FULL; it holds nothing. A row that was not empty or is named twice
        has not changed, nor have those of a prompt whose first row is one or that has no tokens.

    Raises:
        ValueError: shapes do not fit the state.
    """
    _check_requests(state, requests)
    num_samples = requests.rows.shape[1]
    max_seqs, pages_per_seq = state.table.block_tables.shape
    claimed = _claimed(state, requests.rows) & (requests.lens >= 1)[:, None]
    claimed &= claimed[:, :1]  # without the first row there is nothing for the others to share
    rows = jnp.where(claimed, requests.rows, max_seqs)  # [P, S]
    asked = jnp.zeros(max_seqs, jnp.int32).at[rows[:, 0]].set(requests.lens, mode="drop")
    table, served = pp.extend(state.table, asked)
    started = served.at[rows[:, 0]].get(mode="fill", fill_value=False)  # [P]
    too_long = requests.lens > pages_per_seq * state.table.page_size
    failure = jnp.where(too_long, Status.TABLE_FULL, Status.OUT_OF_PAGES)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:  # [max_seqs, ...], [P * S, ...]
        return old.at[rows.reshape(-1)].set(new, mode="drop")

    def put_each(old: jax.Array, new: jax.Array) -> jax.Array:  # [max_seqs, ...], [P, ...]
        return put(old, jnp.repeat(new, num_samples, axis=0))

    state = replace(
        state,
        table=table,
        num_tokens=put(state.num_tokens, jnp.zeros(rows.size, jnp.int32)),
        status=put_each(state.status, jnp.where(started, Status.PREFILLING, failure)),
        keys=put(state.keys, requests.keys.reshape(-1)),
        max_new_tokens=put_each(state.max_new_tokens, requests.max_new_tokens),
        stop_tokens=put_each(state.stop_tokens, requests.stop_tokens),
        sampling=jax.tree.map(put_each, state.sampling, requests.sampling),
    )
    return state, jnp.where(started[:, None], rows, max_seqs)


@partial(jax.jit, static_argnames=("graphdef", "implementation"), donate_argnames="state")
def prefill(
    graphdef: nnx.GraphDef[Any],
    params: nnx.State,
    state: GenerateState,
    chunk: Chunk,
    *,
    implementation: str | None = None,
) -> GenerateState:
    """Runs a chunk through the model; samples the first tokens of the prompts that end in it.

    Compiles once for each shape of the chunk. The samples of a prompt share its full pages.

    Args:
        graphdef, params: `nnx.split(model)`.
        state: donated.
        chunk: tokens that follow on those of earlier chunks; prompts whose first row is not
            PREFILLING are left out.
        implementation: of `pallas_paged.ragged_paged_attention`.

    Returns:
        The state. A sample that found no page for its copy of the prompt's last one is
        OUT_OF_PAGES and holds nothing.

    Raises:
        ValueError: shapes do not fit one another.
    """
    _check_chunk(chunk)
    num_samples = chunk.rows.shape[1]
    table, max_seqs = state.table, state.table.max_seqs
    first = chunk.rows[:, 0]
    alive = state.status.at[first].get(mode="fill", fill_value=Status.EMPTY) == Status.PREFILLING
    first = jnp.where(alive, first, max_seqs)
    q_lens = jnp.diff(chunk.cu_q_lens)
    seq_lens = jnp.where(alive, chunk.starts + q_lens, 0)

    place = jnp.arange(chunk.tokens.size, dtype=jnp.int32)
    prompt = jnp.searchsorted(chunk.cu_q_lens[1:], place, side="right", method="compare_all")
    shift = chunk.starts - chunk.cu_q_lens[:-1]
    positions = place + shift.at[prompt].get(mode="fill", fill_value=0)
    attend = paged_attend(
        slots=pp.slot_mapping(
            table, first.at[prompt].get(mode="fill", fill_value=max_seqs), positions
        ),
        block_tables=table.block_tables.at[first].get(mode="clip"),
        seq_lens=seq_lens,
        cu_q_lens=chunk.cu_q_lens,
        implementation=implementation,
    )
    model = nnx.merge(graphdef, params)
    hidden, pool = run_layers(model, chunk.tokens, positions, attend, state.pool)
    logits = model.logits(hidden[jnp.maximum(chunk.cu_q_lens[1:] - 1, 0)])  # [P, V]

    ended = (
        alive & (q_lens > 0) & (seq_lens == table.seq_lens.at[first].get(mode="fill", fill_value=0))
    )
    rows = jnp.where(ended[:, None], chunk.rows, max_seqs)  # [P, S]
    ok = ended[:, None]
    if num_samples > 1:
        # What has no next token has nothing to share either. That the copies depend on logits also
        # makes XLA attend first: it would copy the pool to be free to do it later.
        good = jnp.isfinite(jnp.max(logits, axis=-1, keepdims=True))  # [P, 1]
        shared = jnp.where(good, rows, max_seqs)
        src, others = jnp.repeat(shared[:, 0], num_samples - 1), shared[:, 1:]
        table, copies, forked = pp.fork(table, src, others.reshape(-1))
        pool = pp.copy_pages(pool, copies)
        ok = jnp.concatenate([ok, forked.reshape(others.shape) | ~good], axis=1)  # [P, S]
    leaders = jnp.broadcast_to(jnp.arange(first.size)[:, None], rows.shape)
    leader = jnp.zeros(max_seqs, jnp.int32).at[rows].set(leaders, mode="drop")
    sampled = jnp.zeros(max_seqs, bool).at[rows].set(ok, mode="drop")
    status = state.status.at[rows].set(Status.OUT_OF_PAGES, mode="drop")
    state = replace(state, table=table, pool=pool, status=status)
    return append_tokens(state, sampled, logits[leader])


def pack(
    prompts: Sequence[Sequence[int]], rows: np.ndarray, *, size: int, max_prompts: int
) -> list[Chunk]:
    """Lays prompts end to end and cuts them, wherever that is, into chunks of one shape.

    Args:
        prompts: tokens of each, at least one.
        rows: i32[len(prompts), S], as `reserve` returned them.
        size: most tokens of a chunk.
        max_prompts: at least len(prompts). Like `size`, it is there for few shapes: with the same
            two, chunks differ in the number of tokens only, `size` or a power of two.

    Returns:
        The chunks, to be run in this order.
    """
    ends = np.cumsum([0, *map(len, prompts)])
    tokens, total = np.fromiter(chain.from_iterable(prompts), np.int32), int(ends[-1])
    length = min(bucket(max(total, _MIN_CHUNK)), size)
    cuts = [(start, min(start + length, total)) for start in range(0, total, length)]
    spans = [
        (int(np.searchsorted(ends, start, side="right")) - 1, int(np.searchsorted(ends, end)))
        for start, end in cuts
    ]
    width = min(max_prompts, length)
    chunks = []
    for (start, end), (first, last) in zip(cuts, spans, strict=True):
        missing = width - (last - first)
        begins = np.clip(ends[first : last + 1], start, end)
        packed = {
            "tokens": np.pad(tokens[start:end], (0, length - (end - start))),
            "cu_q_lens": np.pad(begins - start, (0, missing), mode="edge"),
            "starts": np.pad(begins[:-1] - ends[first:last], (0, missing)),
            "rows": np.pad(
                rows[first:last], ((0, missing), (0, 0)), constant_values=np.iinfo(np.int32).max
            ),
        }
        chunks.append(Chunk(**{name: jnp.asarray(x, jnp.int32) for name, x in packed.items()}))
    return chunks


def bucket(count: int) -> int:
    """The power of two that is not below count: few sizes, few compilations."""
    return 1 << (count - 1).bit_length()


def _claimed(state: GenerateState, rows: jax.Array) -> jax.Array:
    """bool[P, S]: rows that exist, hold nothing, wait for nothing, and are named here first."""
    max_seqs = state.status.size
    order = jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape)
    in_range = (rows >= 0) & (rows < max_seqs)
    places = jnp.where(in_range, rows, max_seqs)
    firsts = jnp.full(max_seqs, rows.size, jnp.int32).at[places].min(order, mode="drop")
    mine = firsts.at[places].get(mode="fill", fill_value=-1) == order
    empty = (state.table.seq_lens == 0) & (state.status != Status.PREFILLING)
    return in_range & mine & empty.at[places].get(mode="fill", fill_value=False)


def _check_requests(state: GenerateState, requests: Requests) -> None:
    num_prompts, num_samples = requests.rows.shape
    wanted = {
        "lens": (num_prompts,),
        "keys": (num_prompts, num_samples),
        "max_new_tokens": (num_prompts,),
        "stop_tokens": (num_prompts, state.stop_tokens.shape[1]),
    }
    for name, shape in wanted.items():
        given = getattr(requests, name).shape
        if given != shape:
            raise ValueError(f"requests.{name} has shape {given}, must be {shape}")
    ours, theirs = (
        [name for name, leaf in vars(given).items() if leaf is not None] if given else None
        for given in (state.sampling, requests.sampling)
    )
    if ours != theirs:
        raise ValueError(f"requests.sampling sets {theirs}, must set {ours} as state.sampling does")


def _check_chunk(chunk: Chunk) -> None:
    num_prompts = chunk.rows.shape[0]
    for name, size in {"cu_q_lens": num_prompts + 1, "starts": num_prompts}.items():
        given = getattr(chunk, name).shape
        if given != (size,):
            raise ValueError(f"chunk.{name} has shape {given}, must be {(size,)}")
