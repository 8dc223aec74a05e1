"""The engine's state on the device and the jitted step over a packed batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import pallas_paged as pp
from models.batch import Array, Batch, Chunks, Draws
from models.config import ModelConfig
from models.decoder import Attend, LayerCache
from models.generate_state import run_layers
from models.kv_cache import create_pool
from models.sampling import sample, sample_key


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class EngineState:
    """All rows of an engine.

    Attributes:
        table: who owns which page.
        pool: K/V of all layers.
        last_tokens: i32[max_seqs], the newest token of each row, whose K/V are yet to be written.
        sound: bool[], whether every page and row asked for so far was there. The host asks for none
            that is not, so that False means a broken engine.
    """

    table: pp.PageTable
    pool: pp.KVPool
    last_tokens: jax.Array
    sound: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """What the host reads of a step, with D decoding rows, P chunks and N new tokens in all.

    Attributes:
        tokens: i32[D + P], the next token of each row; -1 if the model gave no numbers. That of a
            chunk that does not end its row's known tokens means nothing.
        slots: i32[N], where the new tokens' K/V are.
        sound: bool[], of the state. A row that found no page was left out of the step, unchanged.
        num_free: i32[], free pages after the step.
        logprobs: f32[D + P] of the tokens, or None.
        top_tokens, top_logprobs: i32 and f32 [D + P, num_ranked], the best tokens, or None.
    """

    tokens: jax.Array
    slots: jax.Array
    sound: jax.Array
    num_free: jax.Array
    logprobs: jax.Array | None
    top_tokens: jax.Array | None
    top_logprobs: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Changes:
    """What a page table is told between two steps.

    Attributes:
        retained, released: i32[P], pages, padded with num_pages.
        freed: bool[max_seqs], rows.
        rows: i32[A], empty ones that begin with full pages; padded with max_seqs.
        pages: i32[A, pages_per_seq], those pages, padded with num_pages.
    """

    retained: Array
    freed: Array
    released: Array
    rows: Array
    pages: Array


Step = Callable[[tuple[jax.Array, ...], EngineState, Batch], tuple[EngineState, Report]]


def create_engine_state(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    max_seqs: int,
    pages_per_seq: int,
    dtype: DTypeLike,
) -> EngineState:
    """Makes a state of empty rows; sizes as in `create_page_table` and `create_pool`."""
    return EngineState(
        table=pp.create_page_table(
            num_pages=num_pages,
            page_size=page_size,
            max_seqs=max_seqs,
            pages_per_seq=pages_per_seq,
        ),
        pool=create_pool(config, num_pages=num_pages, page_size=page_size, dtype=dtype),
        last_tokens=jnp.zeros(max_seqs, jnp.int32),
        sound=jnp.asarray(True),
    )


@cache
def make_step(
    graphdef: nnx.GraphDef[Any], structure: jax.tree_util.PyTreeDef, implementation: str | None
) -> Step:
    """The jitted step of a model; engines of the same model share it, and what it compiled.

    Args:
        graphdef: of the model.
        structure: of its parameters, whose leaves the step takes: to hash and flatten modules in
            every call would take longer than a small model's step.
        implementation: of the attention of `pallas_paged`.

    Returns:
        step(leaves, state, batch) -> (state, report). The state is donated.
    """

    def step(
        leaves: tuple[jax.Array, ...], state: EngineState, batch: Batch
    ) -> tuple[EngineState, Report]:
        table, max_seqs = state.table, state.table.max_seqs
        decode_rows, chunks = batch.decode_rows, batch.chunks
        asked = jnp.zeros(max_seqs, jnp.int32).at[decode_rows].set(1, mode="drop")
        width = 1
        if chunks is not None:
            width = chunks.tokens.size
            asked = asked.at[chunks.rows].set(jnp.diff(chunks.cu_q_lens), mode="drop")
        table, ok = pp.extend(table, asked, max_new_tokens=width)

        def served(rows: jax.Array) -> jax.Array:
            return jnp.where(ok.at[rows].get(mode="fill", fill_value=False), rows, max_seqs)

        decode_rows = served(decode_rows)
        positions = _seq_lens(table, decode_rows) - 1
        tokens = state.last_tokens.at[decode_rows].get(mode="fill", fill_value=0)
        token_rows, sampled_rows = decode_rows, decode_rows
        last = jnp.arange(decode_rows.size)
        if chunks is not None:
            chunks = replace(chunks, rows=served(chunks.rows))
            chunk_rows, chunk_positions = _places(chunks, table)
            tokens = jnp.concatenate([tokens, chunks.tokens])
            positions = jnp.concatenate([positions, chunk_positions])
            token_rows = jnp.concatenate([token_rows, chunk_rows])
            sampled_rows = jnp.concatenate([sampled_rows, chunks.rows])
            ends = jnp.maximum(chunks.cu_q_lens[1:] - 1, 0)
            last = jnp.concatenate([last, decode_rows.size + ends])
        slots = pp.slot_mapping(table, token_rows, positions)
        attend = _attend(table, slots, decode_rows, chunks, implementation)
        model = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
        hidden, pool = run_layers(model, tokens, jnp.maximum(positions, 0), attend, state.pool)
        logits = model.logits(hidden[last])  # [D + P, V]
        drawn = _draw(logits, batch.draws, _seq_lens(table, sampled_rows))
        last_tokens = state.last_tokens.at[sampled_rows].set(drawn, mode="drop")
        sound = state.sound & jnp.all(ok)
        report = Report(
            tokens=drawn,
            slots=slots,
            sound=jnp.copy(sound),  # buffers of their own: the state's are donated on
            num_free=jnp.copy(table.num_free),
            **_rank(logits, drawn, batch.num_ranked),
        )
        state = EngineState(table=table, pool=pool, last_tokens=last_tokens, sound=sound)
        return state, report

    options = None
    if jax.default_backend() == "gpu":
        # Kernels that do not wait for one another run side by side, such as the writes of K and of
        # V and the rotation of q: 3% of a decode step.
        options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    return jax.jit(step, donate_argnames="state", compiler_options=options)


@partial(jax.jit, donate_argnames=("table", "sound"))
def settle(
    table: pp.PageTable, sound: jax.Array, changes: Changes
) -> tuple[pp.PageTable, jax.Array]:
    """Retains pages, frees rows, releases pages and then lets rows attach some.

    Args:
        table, sound: of the state, donated.
        changes: what to do.
    """
    table, retained = pp.retain(table, changes.retained)
    table = pp.release(pp.free(table, changes.freed), changes.released)
    table, attached = pp.attach(table, changes.rows, changes.pages)
    retained |= changes.retained >= table.num_pages  # padding
    attached |= changes.rows >= table.max_seqs
    return table, sound & jnp.all(retained) & jnp.all(attached)


@partial(jax.jit, donate_argnames="state")
def fork(state: EngineState, src: jax.Array, dst: jax.Array) -> EngineState:
    """Fills empty rows dst i32[F] as rows src i32[F], padded with max_seqs (state donated)."""
    table, copies, ok = pp.fork(state.table, src, dst)
    sound = state.sound & jnp.all(ok | (src >= table.max_seqs))
    return replace(state, table=table, pool=pp.copy_pages(state.pool, copies), sound=sound)


@partial(jax.jit, donate_argnames="last_tokens")
def give(last_tokens: jax.Array, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Last tokens (donated) with others in rows i32[max_seqs], padded with max_seqs."""
    return last_tokens.at[rows].set(tokens, mode="drop")


def _seq_lens(table: pp.PageTable, rows: jax.Array) -> jax.Array:
    return table.seq_lens.at[rows].get(mode="fill", fill_value=0)


def _places(chunks: Chunks, table: pp.PageTable) -> tuple[jax.Array, jax.Array]:
    """Row and position of each token of the chunks; the row of padding is max_seqs."""
    place = jnp.arange(chunks.tokens.size, dtype=jnp.int32)
    chunk = jnp.searchsorted(chunks.cu_q_lens[1:], place, side="right", method="compare_all")
    ends = _seq_lens(table, chunks.rows) - chunks.cu_q_lens[1:]
    rows = chunks.rows.at[chunk].get(mode="fill", fill_value=table.max_seqs)
    return rows, place + ends.at[chunk].get(mode="fill", fill_value=0)


def _attend(
    table: pp.PageTable,
    slots: jax.Array,
    decode_rows: jax.Array,
    chunks: Chunks | None,
    implementation: str | None,
) -> Attend:
    """Writes all new K/V, then decodes rows and attends from chunks, each by its own kernel."""
    num_decodes = decode_rows.size

    def cache_of(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return table.block_tables.at[rows].get(mode="clip"), _seq_lens(table, rows)

    decoding = cache_of(decode_rows)
    prompts = None if chunks is None else (*cache_of(chunks.rows), chunks.cu_q_lens)

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerCache | None,
        *,
        sliding_window: int | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        assert isinstance(cache, pp.LayerKV)
        cache = pp.write_kv(cache, k, v, slots)
        pages = (cache.k_pages, cache.v_pages)
        options: Any = dict(
            k_scales=cache.k_scales,
            v_scales=cache.v_scales,
            sliding_window=sliding_window,
            implementation=implementation,
        )
        out = pp.paged_attention(q[:num_decodes], *pages, *decoding, **options)
        if prompts is not None:
            chunk_out = pp.ragged_paged_attention(q[num_decodes:], *pages, *prompts, **options)
            out = jnp.concatenate([out, chunk_out])
        return out, cache

    return attend


def _draw(logits: jax.Array, draws: Draws | None, seq_lens: jax.Array) -> jax.Array:
    """Next tokens i32[S]: greedy, or with the key that `generate` draws with too."""
    if draws is None:
        return sample(logits, None, None)

    def key(seeds: jax.Array, seq_len: jax.Array) -> jax.Array:
        seed, prompt, number = seeds
        return jax.random.fold_in(sample_key(jax.random.key(seed), prompt, number), seq_len)

    keys = jax.vmap(key, in_axes=(1, 0))(jnp.asarray(draws.seeds), seq_lens)
    return sample(logits, keys, draws.sampling)


def _rank(logits: jax.Array, tokens: jax.Array, num_ranked: int) -> dict[str, jax.Array | None]:
    """Log-probabilities of tokens, and the best num_ranked with theirs; none of it if negative."""
    if num_ranked < 0:
        return dict(logprobs=None, top_tokens=None, top_logprobs=None)
    logprobs = jax.nn.log_softmax(logits)  # [S, V]
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, num_ranked)
    return dict(logprobs=chosen, top_tokens=top_tokens, top_logprobs=top_logprobs)
