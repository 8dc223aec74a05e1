"""Attention of one call of the engine, as its model calls it for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_paged.attention.entries import paged_attention, ragged_paged_attention
from pallas_paged.attention.mla import mla_attention
from pallas_paged.checks import static_integer
from pallas_paged.decoder.latent_write import rotate_and_write_latents
from pallas_paged.decoder.peers import Peers, embed, row_linear, row_linear_norm
from pallas_paged.decoder.rotary_write import Rotation, rotate, rotate_and_write_kv
from pallas_paged.decoder.unmerged_attention import unmerged_attention, write_and_attend
from pallas_paged.engine.device.batch import ChunkBatch
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.pool import write_kv
from pallas_paged.pages.table import PageTable


class AttentionKernels(NamedTuple):
    """Which kernels attend, as in `AttentionOptions`."""

    implementation: str | None = None
    interpret: bool = False

    @property
    def writes(self) -> dict[str, Any]:
        """The options of `rotate_and_write_kv`: of the same family where it writes, or the best."""
        if self.implementation == "xla" or (self.implementation == "triton" and self.interpret):
            return self._asdict()
        return {}


# Tokens of an average chunk, a low guess. The tables are of all slots, and most have no chunk: for
# as many rows, attention would choose small tiles. Measured on an H200, 2026-11: 4096 tokens in 8
# or 36 chunks then take half the time, and 256 chunks of 16 tokens 17% more.
_EXPECTED_CHUNK = 64


class _Pages(NamedTuple):
    """What layers need of their page table.

    Attributes:
        num_pages: of the table.
        decoding: block tables and lengths of the decoding rows.
        prompts: of the chunks, and where their tokens begin and end; None without chunks.
        slot_mapping: `i32[T]`, slots of the new tokens.
        sliding_window: tokens whose pages are there, or None for all.
    """

    num_pages: int
    decoding: dict[str, Any]
    prompts: dict[str, Any] | None
    slot_mapping: jax.Array
    sliding_window: int | None


class PagedAttend:
    """Writes all new K/V, then decode rows and chunks attend, each by their own kernel.

    Where the pool holds each of the model's KV heads several times, so are they written. Meets the
    protocol `Attend`, which describes the calls.
    """

    def __init__(
        self,
        table: PageTable,
        slot_mapping: jax.Array,
        decode_rows: jax.Array,
        chunks: ChunkBatch | None,
        *,
        num_kv_heads: Sequence[int],
        kernels: AttentionKernels,
        peers: Peers | None = None,
        sliding_window: int | None = None,
        windows: tuple[PageTable, jax.Array, int] | None = None,
    ):
        """Gather what all layers share.

        Args:
            table: with pages for the new tokens.
            slot_mapping: `i32[T]`, slots of the new tokens.
            decode_rows: `i32[D]`, rows of the table with one new token each; D = 0 in a call that
                verifies drafts.
            chunks: whose tokens come before those of the rows, or None. Of drafts: the tokens of
                each row.
            num_kv_heads: of the model's kinds of layers.
            kernels: of the attention.
            peers: of the devices of a mesh.
            sliding_window: the largest window, if all layers have one: pages left of it may be
                free.
            windows: of layers with the number of pages of another table: that table, with the same
                rows and lengths and fewer pages, its slots of the new tokens, and the largest
                window of these layers: pages left of it may be free.
        """
        self._recorded: list[jax.Array] = []
        given = None if chunks is None else chunks.routed_experts
        self._routed_experts = None if given is None else given.astype(jnp.int32)
        self.ignores_experts = given is not None  # until the model has taken them
        self._rows, self._chunks = decode_rows, chunks
        self._pages = self._of_table(table, slot_mapping, sliding_window)
        self._window_pages = None if windows is None else self._of_table(*windows)
        if chunks is not None:
            self._places = decode_places(decode_rows, slot_mapping.size, table.max_seqs)
        self._num_kv_heads, self._kernels = num_kv_heads, kernels
        self.is_token = slot_mapping < table.num_pages * table.page_size
        self.peers = peers
        self.row_linear = partial(row_linear, peers=peers)
        self.row_linear_norm = partial(row_linear_norm, peers=peers)
        self.embed = partial(embed, peers=peers)
        self._seen: list[jax.Array] = []  # pages that a call has taken or returned

    @property
    def routed_experts(self) -> jax.Array | None:
        self.ignores_experts = False
        return self._routed_experts

    def record(self, experts: jax.Array) -> None:
        self._recorded.append(experts)

    @property
    def recorded(self) -> jax.Array | None:
        """The experts that layers have reported, `i32[T, L, k]`; None if none has."""
        return jnp.stack(self._recorded, axis=1) if self._recorded else None

    def _of_table(
        self, table: PageTable, slot_mapping: jax.Array, sliding_window: int | None
    ) -> _Pages:
        def cache_of(rows: jax.Array) -> dict[str, Any]:
            lens = table.seq_lens.at[rows].get(mode="fill", fill_value=0)
            return dict(block_tables=table.block_tables.at[rows].get(mode="clip"), seq_lens=lens)

        decoding, prompts = cache_of(self._rows), None
        if (chunks := self._chunks) is not None:
            prompts = cache_of(chunks.slots) | dict(cu_q_lens=chunks.cu_q_lens)
        return _Pages(table.num_pages, decoding, prompts, slot_mapping, sliding_window)

    def _begin(self, cache: LayerKV, options: dict[str, Any]) -> _Pages:
        """Return what the call of a layer needs, which the number of its pages says.

        Raises:
            ValueError: while tracing: a call has had these pages already; or they may be free left
                of a window, and the layer sees more.
        """
        traced = isinstance(cache.k_pages, jax.core.Tracer)
        if traced and any(cache.k_pages is pages for pages in self._seen):
            raise ValueError("the model must call `attend` once for each layer, with its own cache")
        self._seen.append(cache.k_pages)
        pages = self._pages
        if (windows := self._window_pages) is not None and cache.num_pages == windows.num_pages:
            pages = windows
        given, most = options.get("sliding_window"), pages.sliding_window
        if most is not None and (given is None or static_integer("sliding_window", given) > most):
            raise ValueError(
                f"sliding_window={given} of a layer must be at most {most}, as in the model's "
                "kv_cache_spec: pages left of that are freed"
            )
        return pages

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerKV, **options: Any
    ) -> tuple[jax.Array, LayerKV]:
        pages = self._begin(cache, options)
        repeats = self._repeats(cache, k.shape[1])
        if repeats > 1:
            k, v = jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1)
        return self._attend((q,), write_kv(cache, k, v, pages.slot_mapping), pages, options)

    def fused(
        self,
        qkv: jax.Array,
        cache: LayerKV,
        *,
        rotation: Rotation | None = None,
        q_norm: jax.Array | None = None,
        k_norm: jax.Array | None = None,
        eps: float = 1e-6,
        unmerged: bool = False,
        **options: Any,
    ) -> tuple[Any, LayerKV]:
        pages = self._begin(cache, options)
        how = pages.decoding | self._kernels._asdict() | options
        repeats = self._repeats(cache, qkv.shape[1])
        if repeats > 1:
            qkv = _repeated(qkv, repeats)
        # Partial states are of use where a call is one row of one device.
        unmerged &= self._chunks is None and self.peers is None and self._rows.size == 1
        if unmerged and q_norm is None and k_norm is None:
            slots = pages.slot_mapping
            found = write_and_attend(qkv, cache, slots=slots, rotation=rotation, **how)
            if found is not None:
                return found
        q, cache = rotate_and_write_kv(
            cache,
            qkv,
            pages.slot_mapping,
            rotation=rotation,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            **self._kernels.writes,
        )
        if unmerged:
            attention = unmerged_attention(q, cache, **how)
            if attention is not None:
                return attention, cache
        return self._attend((q,), cache, pages, options)

    def latent(
        self,
        q_nope: jax.Array,
        q_pe: jax.Array,
        latents: jax.Array,
        cache: LayerKV,
        *,
        rotation: tuple[jax.Array, jax.Array] | None = None,
        norm: jax.Array | None = None,
        eps: float = 1e-6,
        **options: Any,
    ) -> tuple[jax.Array, LayerKV]:
        pages = self._begin(cache, options)
        if rotation is not None:
            q_pe = rotate(q_pe, *rotation)
        how = dict(rotation=rotation, norm=norm, eps=eps) | self._kernels.writes
        cache = rotate_and_write_latents(cache, latents, pages.slot_mapping, **how)
        return self._attend((q_nope, q_pe), cache, pages, options)

    def _repeats(self, cache: LayerKV, num_kv_heads: int) -> int:
        """Return how often the pool has each head; the model may have repeated them itself."""
        return cache.num_kv_heads // num_kv_heads if num_kv_heads in self._num_kv_heads else 1

    def _attend(
        self,
        queries: tuple[jax.Array, ...],
        cache: LayerKV,
        pages: _Pages,
        options: dict[str, Any],
    ) -> tuple[jax.Array, LayerKV]:
        """Attend with q, or with `q_nope` and `q_pe` to latents."""
        self._seen.append(cache.k_pages)
        options |= self._kernels._asdict()
        of_rows: Any = paged_attention
        of_chunks: Any = ragged_paged_attention
        if cache.is_latent:
            of_rows = of_chunks = mla_attention
        num_tokens, num_decodes = len(queries[0]), self._rows.size
        if not num_decodes:
            assert pages.prompts is not None
            return of_chunks(*queries, cache, **pages.prompts, **options), cache
        last = (q[num_tokens - num_decodes :] for q in queries)
        out = of_rows(*last, cache, **pages.decoding, **options)
        if pages.prompts is not None:
            # To the chunks the other queries are padding. To cut those off, and to join the
            # outputs, would copy all of the chunks' tokens.
            expected = max(1, num_tokens // _EXPECTED_CHUNK)
            how = pages.prompts | dict(expected_seqs=expected)
            of_all = of_chunks(*queries, cache, **how, **options)
            out = of_all.at[self._places].set(out, mode="drop", unique_indices=True)
        return out, cache


def decode_places(rows: jax.Array, num_tokens: int, num_slots: int) -> jax.Array:
    """Return where among T tokens those of D decoding rows are, `i32[D]`; out of range for padding.

    They are the last D. Rows out of range are padding, and chunks may have tokens in their places.
    """
    places = num_tokens - rows.size + jnp.arange(rows.size, dtype=jnp.int32)
    return jnp.where(rows < num_slots, places, places + rows.size)


def _repeated(qkv: jax.Array, repeats: int) -> jax.Array:
    """Return `qkv [T, Hkv, G + 2, D]` as `[T, Hkv * repeats, G / repeats + 2, D]`.

    Each KV head stands there `repeats` times, with a part of its queries each time.
    """
    num_tokens, num_kv_heads, kinds, head_dim = qkv.shape
    if (kinds - 2) % repeats:
        raise ValueError(
            f"each KV head must have a multiple of {repeats} query heads to be on as many devices, "
            f"not {kinds - 2}"
        )
    heads = num_kv_heads * repeats
    q = qkv[:, :, :-2].reshape(num_tokens, heads, (kinds - 2) // repeats, head_dim)
    return jnp.concatenate([q, jnp.repeat(qkv[:, :, -2:], repeats, axis=1)], axis=2)
