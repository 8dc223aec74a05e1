"""The state of running sequences and the jitted steps on it: decode, resume, release.

All of it lives on the device, and the host looks only between two calls. Key, sampling values, stop
tokens and limit of every row are traced, and so is how it ended. Prompts come in by `prefill.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import pallas_paged as pp
from models.config import ModelConfig
from models.decoder import Attend, Decoder, paged_attend
from models.kv_cache import create_pool
from models.sampling import RowSampling, sample


class Status(enum.IntEnum):
    """What a row is doing, or why it ended."""

    EMPTY = 0
    RUNNING = 1
    STOPPED = 2  # sampled one of its stop tokens
    MAX_TOKENS = 3  # has its max_new_tokens
    OUT_OF_PAGES = 4  # no free page for its next token; nothing is lost, see `resume`
    TABLE_FULL = 5  # no room in its row of the block table
    BAD_LOGITS = 6  # the model gave NaN or infinite scores
    PREFILLING = 7  # is taken, and its prompt is not all in


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateState:
    """All rows of a running generation, the carry of the decode loop.

    The newest token of a row is in `last_tokens`; its K/V are written by the step that reads it, so
    a row holds one token fewer in its pages than its prompt and its generated tokens together. A
    row that is PREFILLING has the pages of its whole prompt, or shares them when it is in.

    Attributes:
        table: who owns which page.
        pool: K/V of all layers.
        tokens: i32[max_seqs, W], generated tokens of each row, without the stop token.
        num_tokens: i32[max_seqs], how many those are.
        last_tokens: i32[max_seqs], the input of the next step.
        status: i32[max_seqs], values of `Status`.
        keys: key[max_seqs]; a token is drawn with its row's key folded with the token's position.
        max_new_tokens: i32[max_seqs], limit of num_tokens (and W is one too).
        stop_tokens: i32[max_seqs, n], padded with -1.
        sampling: leaves of shape [max_seqs], or None: every row is greedy.
    """

    table: pp.PageTable
    pool: pp.KVPool
    tokens: jax.Array
    num_tokens: jax.Array
    last_tokens: jax.Array
    status: jax.Array
    keys: jax.Array
    max_new_tokens: jax.Array
    stop_tokens: jax.Array
    sampling: RowSampling | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Progress:
    """What the host wants to know of a state, in buffers that no later step is given to reuse."""

    tokens: jax.Array
    num_tokens: jax.Array
    status: jax.Array
    seq_lens: jax.Array
    num_free: jax.Array


def create_generate_state(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    max_seqs: int,
    pages_per_seq: int,
    max_new_tokens: int,
    num_stop_tokens: int = 0,
    sampling: RowSampling | None = None,
    dtype: DTypeLike = jnp.float32,
) -> GenerateState:
    """Makes a state of empty rows.

    Args:
        config: of the model that will fill the pool.
        num_pages, page_size: of the pool.
        max_seqs, pages_per_seq: rows, and pages that one row can hold.
        max_new_tokens: width W of the token buffer.
        num_stop_tokens: width n of the stop tokens.
        sampling: any values; says which filters requests will use.
        dtype: of the pool: of the model's parameters, int8 or float8_e4m3fn.

    Returns:
        GenerateState with every row EMPTY.

    Raises:
        ValueError: a size is out of range.
    """
    if max_new_tokens < 1 or num_stop_tokens < 0:
        raise ValueError(f"{max_new_tokens=} must be positive, {num_stop_tokens=} not negative")
    table = pp.create_page_table(
        num_pages=num_pages, page_size=page_size, max_seqs=max_seqs, pages_per_seq=pages_per_seq
    )
    return GenerateState(
        table=table,
        pool=create_pool(config, num_pages=num_pages, page_size=page_size, dtype=dtype),
        tokens=jnp.zeros((max_seqs, max_new_tokens), jnp.int32),
        num_tokens=jnp.zeros(max_seqs, jnp.int32),
        last_tokens=jnp.zeros(max_seqs, jnp.int32),
        status=jnp.full(max_seqs, Status.EMPTY, jnp.int32),
        keys=jax.random.split(jax.random.key(0), max_seqs),
        max_new_tokens=jnp.zeros(max_seqs, jnp.int32),
        stop_tokens=jnp.full((max_seqs, num_stop_tokens), -1, jnp.int32),
        sampling=jax.tree.map(lambda leaf: jnp.zeros(max_seqs, leaf.dtype), sampling),
    )


@partial(jax.jit, static_argnames=("graphdef", "implementation"), donate_argnames="state")
def decode(
    graphdef: nnx.GraphDef[Any],
    params: nnx.State,
    state: GenerateState,
    num_steps: jax.Array | int,
    *,
    implementation: str | None = None,
) -> GenerateState:
    """Advances every running row by up to num_steps tokens; ends early when no row is running.

    Args:
        graphdef, params: `nnx.split(model)`.
        state: donated.
        num_steps: i32[], traced.
        implementation: of `pallas_paged.paged_attention`.

    Returns:
        The state. A row that found no page is OUT_OF_PAGES and otherwise as it was.
    """
    model = nnx.merge(graphdef, params)
    max_seqs, pages_per_seq = state.table.block_tables.shape
    capacity = pages_per_seq * state.table.page_size
    all_rows = jnp.arange(max_seqs, dtype=jnp.int32)

    def step(state: GenerateState) -> GenerateState:
        running = state.status == Status.RUNNING
        asked = running.astype(jnp.int32)
        table, served = pp.extend(state.table, asked, max_new_tokens=1)
        stepped = running & served
        rows = jnp.where(stepped, all_rows, max_seqs)
        positions = jnp.maximum(table.seq_lens - 1, 0)
        attend = paged_attend(
            slots=pp.slot_mapping(table, rows, positions),
            block_tables=table.block_tables,
            seq_lens=jnp.where(stepped, table.seq_lens, 0),
            implementation=implementation,
        )
        hidden, pool = run_layers(model, state.last_tokens, positions, attend, state.pool)
        failure = jnp.where(
            state.table.seq_lens >= capacity, Status.TABLE_FULL, Status.OUT_OF_PAGES
        )
        state = replace(
            state,
            table=table,
            pool=pool,
            status=jnp.where(running & ~served, failure, state.status),
        )
        return append_tokens(state, stepped, model.logits(hidden))

    def unfinished(carry: tuple[jax.Array, GenerateState]) -> jax.Array:
        steps, state = carry
        return (steps < num_steps) & jnp.any(state.status == Status.RUNNING)

    start = (jnp.int32(0), state)
    return jax.lax.while_loop(unfinished, lambda c: (c[0] + 1, step(c[1])), start)[1]


@partial(jax.jit, donate_argnames="state")
def resume(state: GenerateState) -> GenerateState:
    """Lets rows that ran out of pages run again from where they stand (state is donated).

    A row that ran out before its prompt was in has nothing to resume: `reserve` it again.
    """
    waiting = (state.status == Status.OUT_OF_PAGES) & (state.table.seq_lens > 0)
    return replace(state, status=jnp.where(waiting, Status.RUNNING, state.status))


@partial(jax.jit, donate_argnames="state")
def release(state: GenerateState, rows: jax.Array) -> GenerateState:
    """Gives back the pages of rows, bool[max_seqs], and makes them EMPTY (state is donated)."""
    return replace(
        state,
        table=pp.free(state.table, rows),
        num_tokens=jnp.where(rows, 0, state.num_tokens),
        status=jnp.where(rows, Status.EMPTY, state.status),
    )


@jax.jit
def progress(state: GenerateState) -> Progress:
    """Copies out of a state what the host may read while the state itself is donated onwards."""
    seen = Progress(
        tokens=state.tokens,
        num_tokens=state.num_tokens,
        status=state.status,
        seq_lens=state.table.seq_lens,
        num_free=state.table.num_free,
    )
    # Without a copy jit hands the caller the state's own buffers, gone with the next donation.
    return jax.tree.map(jnp.copy, seen)


def append_tokens(state: GenerateState, sampled: jax.Array, logits: jax.Array) -> GenerateState:
    """Samples the next token of rows, and ends those that have all of theirs.

    Args:
        state: with the tokens in its table that the logits come from.
        sampled: bool[max_seqs], the rows that get a token; the others do not change.
        logits: f32[max_seqs, V]
    """
    keys = None
    if state.sampling is not None:  # by position: the same whatever else runs, in how many calls
        keys = jax.vmap(jax.random.fold_in)(state.keys, state.table.seq_lens)
    tokens = sample(logits, keys, state.sampling)
    max_seqs, width = state.tokens.shape
    limits = jnp.minimum(state.max_new_tokens, width)
    bad = tokens < 0
    stopped = jnp.any(tokens[:, None] == state.stop_tokens, axis=1) & ~bad
    kept = sampled & ~bad & ~stopped & (state.num_tokens < limits)
    columns = jnp.where(kept, state.num_tokens, width)
    num_tokens = state.num_tokens + kept
    status = jnp.where(num_tokens >= limits, Status.MAX_TOKENS, Status.RUNNING)
    status = jnp.where(stopped, Status.STOPPED, jnp.where(bad, Status.BAD_LOGITS, status))
    return replace(
        state,
        tokens=state.tokens.at[jnp.arange(max_seqs), columns].set(tokens, mode="drop"),
        num_tokens=num_tokens,
        last_tokens=jnp.where(sampled, tokens, state.last_tokens),
        status=jnp.where(sampled, status, state.status),
    )


def run_layers(
    model: Decoder, tokens: jax.Array, positions: jax.Array, attend: Attend, pool: pp.KVPool
) -> tuple[jax.Array, pp.KVPool]:
    """Hidden states of tokens i32[T], and the pool with their K/V."""
    hidden, layers = model(tokens, positions, attend, pool.layers)
    return hidden, pp.KVPool(layers=cast(tuple[pp.LayerKV, ...], layers))
