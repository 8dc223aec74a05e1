"""What is decoded: the list of shapes, their data, and the answer in f32."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_COLD_BYTES = 256 << 20  # several times the L2 of an H200
_MAX_BYTES = 4 << 30
_MIN_CALLS = 8
_ITEMSIZE = 2  # bf16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One decode call: who attends to how many tokens."""

    name: str
    seq_lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def num_bytes(self) -> int:
        """Bytes of the K and V that are attended to."""
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_dim * _ITEMSIZE

    @property
    def pages_per_seq(self) -> int:
        """Table width: a power of two, because JAX's own op must divide it."""
        longest = -(-max(self.seq_lens) // self.page_size)
        return 1 << (longest - 1).bit_length()

    @property
    def num_sets(self) -> int:
        """Disjoint sets of pages to rotate among, so that no call finds its K/V in the L2."""
        if 2 * self.num_bytes > _MAX_BYTES:
            return 1  # many times the L2 by itself
        return min(32, max(2, math.ceil(_COLD_BYTES / self.num_bytes)))

    @property
    def num_calls(self) -> int:
        """Calls per run, as if each were a layer of a model."""
        return self.num_sets * math.ceil(_MIN_CALLS / self.num_sets)


def _uniform(num_seqs: int, length: int, hq=32, hkv=8, head_dim=128, page_size=16) -> Shape:
    return Shape(
        name=f"{num_seqs}x{length} {hq}/{hkv}/{head_dim}/{page_size}",
        seq_lens=(length,) * num_seqs,
        num_q_heads=hq,
        num_kv_heads=hkv,
        head_dim=head_dim,
        page_size=page_size,
    )


def _ragged_lens() -> tuple[int, ...]:
    logs = np.random.default_rng(0).uniform(np.log(64), np.log(16384), 64)
    return tuple(int(n) for n in np.exp(logs))


SHAPES = (
    _uniform(1, 1024),
    _uniform(1, 8192),
    _uniform(1, 32768),
    _uniform(1, 131072),
    _uniform(8, 2048),
    _uniform(8, 8192),
    _uniform(16, 32768),
    _uniform(64, 1024),
    _uniform(64, 4096),
    _uniform(128, 2048),
    _uniform(256, 1024),
    _uniform(64, 4096, 32, 32),
    _uniform(64, 4096, 32, 1),
    _uniform(64, 4096, 64, 8),
    _uniform(64, 4096, 32, 8, 64),
    _uniform(64, 4096, 16, 8, 256),
    _uniform(64, 4096, 32, 8, 128, 64),
    Shape(name="64 ragged 32/8/128/16", seq_lens=_ragged_lens()),
)
# Small enough for a CPU; only runs when it is named.
TINY = Shape(
    name="tiny", seq_lens=(5, 32, 17), num_q_heads=4, num_kv_heads=2, head_dim=16, page_size=4
)


def select_shapes(filters: Sequence[str]) -> list[Shape]:
    """Shapes whose name contains one of the filters; all but the tiny one if there are none."""
    if not filters:
        return list(SHAPES)
    return [s for s in (*SHAPES, TINY) if any(f in s.name for f in filters)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The data of one shape: `num_sets` sets of pages, scattered at random over one pool."""

    shape: Shape
    q: jax.Array  # [B, Hq, D], scaled already
    k_pages: jax.Array  # [Hkv, P, S, D]
    v_pages: jax.Array
    tables: np.ndarray  # i32[num_sets, B, N]
    seq_lens: jax.Array  # i32[B]


def make_case(shape: Shape, *, seed: int = 0) -> Case:
    """Random normal bf16 data on the device, and a random permutation of all pages."""
    blocks = [-(-n // shape.page_size) for n in shape.seq_lens]
    num_pages = shape.num_sets * sum(blocks)
    pages = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
    # Unused entries name a page that exists: not every peer leaves them alone.
    tables = np.zeros((shape.num_sets, len(blocks), shape.pages_per_seq), np.int32)
    used = np.arange(shape.pages_per_seq) < np.array(blocks)[:, None]
    tables[:, used] = pages.reshape(shape.num_sets, -1)

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key, dims):
        return jax.random.normal(key, dims, jnp.bfloat16)

    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    pool_dims = (shape.num_kv_heads, num_pages, shape.page_size, shape.head_dim)
    q = normal(keys[0], (len(blocks), shape.num_q_heads, shape.head_dim))
    return Case(
        shape=shape,
        q=q * jnp.bfloat16(shape.head_dim**-0.5),
        k_pages=normal(keys[1], pool_dims),
        v_pages=normal(keys[2], pool_dims),
        tables=tables,
        seq_lens=jnp.array(shape.seq_lens, jnp.int32),
    )


@jax.jit
def reference(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, tables: jax.Array, seq_lens: jax.Array
) -> jax.Array:
    """Attention in f32 at the highest precision, row after row; q is scaled already."""
    einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    num_kv_heads, _, _, head_dim = k_pages.shape

    def row(args):
        q, table, length = args
        q = q.reshape(num_kv_heads, -1, head_dim).astype(jnp.float32)  # [Hkv, G, D]
        k = k_pages[:, table].reshape(num_kv_heads, -1, head_dim).astype(jnp.float32)
        v = v_pages[:, table].reshape(num_kv_heads, -1, head_dim).astype(jnp.float32)
        logits = einsum("hgd,htd->hgt", q, k)
        logits = jnp.where(jnp.arange(k.shape[1]) < length, logits, -jnp.inf)
        return einsum("hgt,htd->hgd", jax.nn.softmax(logits), v).reshape(-1, head_dim)

    return lax.map(row, (q, tables, seq_lens))
