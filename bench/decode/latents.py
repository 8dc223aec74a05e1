"""Shapes of multi-head latent attention, and their data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

import pallas_paged as pp
from bench.measuring.reference import reference_states
from bench.measuring.shapes import Case, Shape, normal, page_tables
from pallas_paged.pages.layout import KVLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentShape(Shape):
    """A call whose pages hold latents: V is the first `v_head_dim` elements of K."""

    num_kv_heads: int = 1
    head_dim: int = 576
    v_head_dim: int = 512

    def _bytes_of(self, lens: Iterable[int]) -> int:
        return super()._bytes_of(lens) // 2  # K alone

    @property
    def num_flops(self) -> int:
        """Operations of both products, over the (query, key) pairs that the mask lets through."""
        pairs = sum(int(self.keys_of(row).sum()) for row in range(len(self.seq_lens)))
        return 2 * self.num_q_heads * (self.head_dim + self.v_head_dim) * pairs


def _shape(num_seqs: int, length: int, num_q_heads: int, q_len: int, page_size: int) -> LatentShape:
    queries = f" {q_len} queries" * (q_len > 1)
    return LatentShape(
        name=f"{num_seqs}x{length}{queries} {num_q_heads}/1/576/{page_size}",
        seq_lens=(length,) * num_seqs,
        q_lens=(q_len,) * num_seqs,
        num_q_heads=num_q_heads,
        page_size=page_size,
    )


SHAPES = tuple(
    _shape(num_seqs, length, num_q_heads, q_len, page_size)
    for page_size in (64, 16)
    for num_seqs, length, num_q_heads, q_len in (
        (1, 8192, 16, 1),
        (8, 2048, 16, 1),
        (64, 4096, 16, 1),
        (128, 4096, 16, 1),
        (128, 4096, 32, 1),
        (128, 4096, 128, 1),
        (16, 32768, 16, 1),
        (128, 1024, 16, 1),
        (64, 4096, 16, 4),
    )
)
# Small enough for a CPU; runs only when named.
TINY = LatentShape(
    name="tiny",
    seq_lens=(5, 32, 17),
    q_lens=(2, 3, 1),
    num_q_heads=4,
    head_dim=24,
    v_head_dim=16,
    page_size=8,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentCase(Case):
    """The data of one shape: a `Case` whose pages are in the layout NHD, `[P, S, 1, D]`.

    Attributes:
        q: `bf16[T, Hq, v_head_dim]`, scaled already, as `q_pe` is.
        q_pe: `bf16[T, Hq, head_dim - v_head_dim]`.
    """

    q_pe: jax.Array

    def in_layout(self, kv_layout: KVLayout) -> tuple[jax.Array, jax.Array | None, dict]:
        """The latents, no V, and the arguments by name; there is no other layout."""
        return self.k_pages, None, self.scales | {"q_pe": self.q_pe}

    def reference(
        self, q: jax.Array, token: np.ndarray, tables: jax.Array, lens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Attention in f32 whose V is all of K; the caller takes the latent."""
        both = jnp.concatenate([q[token], self.q_pe[token]], axis=-1)
        out, lse = _attend(both, self.k_pages, tables, lens, self.scales.get("k_scales"))
        return out[..., : q.shape[2]], lse


@jax.jit
def _attend(
    q: jax.Array, pages: jax.Array, tables: jax.Array, lens: jax.Array, scales: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    heads = pages.transpose(2, 0, 1, 3)
    scales = None if scales is None else scales.transpose(2, 0, 1)
    return reference_states(q, heads, heads, tables, lens, k_scales=scales, v_scales=scales)


def make_latents(shape: LatentShape) -> LatentCase:
    """Make random normal data on the device; `write_kv` quantizes it to int8 and fp8 pages."""
    tables, num_pages = page_tables(shape)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    q = normal(keys[0], (sum(shape.q_lens), shape.num_q_heads, shape.head_dim))
    q *= jnp.bfloat16(shape.head_dim**-0.5)
    layer = _make_pages(
        keys[1], num_pages, shape.page_size, shape.head_dim, shape.v_head_dim, shape.kv_dtype
    )
    return LatentCase(
        shape=shape,
        q=q[..., : shape.v_head_dim],
        q_pe=q[..., shape.v_head_dim :],
        k_pages=layer.k_pages,
        v_pages=None,
        scales={} if layer.k_scales is None else {"k_scales": layer.k_scales},
        tables=tables,
        seq_lens=jnp.array(shape.seq_lens, jnp.int32),
        cu_q_lens=jnp.array(np.cumsum([0, *shape.q_lens]), jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _make_pages(
    key: jax.Array, num_pages: int, page_size: int, head_dim: int, v_head_dim: int, dtype: str
) -> pp.LayerKV:
    latents = normal(key, (num_pages, page_size, 1, head_dim))
    if dtype == "bfloat16":
        return pp.LayerKV(latents, v_head_dim=v_head_dim)
    pool = pp.create_kv_pool(
        num_layers=1,
        num_pages=num_pages,
        num_kv_heads=1,
        page_size=page_size,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
    )
    slots = jnp.arange(num_pages * page_size, dtype=jnp.int32)
    return pp.write_kv(pool.layers[0], latents.reshape(-1, 1, head_dim), None, slots)
