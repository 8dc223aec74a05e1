"""Shapes of attention calls, those of `bench.decode`, and their data."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_paged as pp
from bench.measuring.options import PLAIN, Options
from bench.measuring.reference import reference_states
from pallas_paged.pages.layout import LAYOUTS, KVLayout

_COLD_BYTES = 256 << 20  # several times the L2 of an H200
_MAX_BYTES = 4 << 30
_MIN_CALLS = 8
_MAX_SETS = 64  # of int8 and fp8 K/V; half of it for bf16
_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Static description of one call.

    Attributes:
        name: name in tables and for `--shapes`.
        seq_lens: tokens of each row.
        q_lens: query tokens of each row, its newest tokens; default: one each.
        shared_prefix: oldest tokens of each row, in pages that all rows share.
        num_q_heads, num_kv_heads, head_dim, page_size: sizes of the arrays.
        options: options of the call.
        kv_dtype: dtype of the pages; int8 and fp8 pages have a scale for each token and head.
    """

    name: str
    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...] = ()
    shared_prefix: int = 0
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    options: Options = PLAIN
    kv_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_lens", self.q_lens or (1,) * len(self.seq_lens))

    @property
    def itemsize(self) -> int:
        """Bytes per element of K or V."""
        return jnp.dtype(self.kv_dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of K, V and their scales that are attended to; a shared prefix counts once."""
        window = self.options.sliding_window
        rows = zip(self.q_lens, self.seq_lens, strict=True)
        return self._bytes_of(min(n, q + window - 1) if window else n for q, n in rows)

    def _bytes_of(self, lens: Iterable[int]) -> int:
        tokens = self.shared_prefix + sum(n - self.shared_prefix for n in lens)
        scale = _SCALE_BYTES if self.itemsize == 1 else 0
        return 2 * tokens * self.num_kv_heads * (self.head_dim * self.itemsize + scale)

    @property
    def num_flops(self) -> int:
        """Operations of both products, over the (query, key) pairs that the masks let through."""
        pairs = sum(int(self.keys_of(row).sum()) for row in range(len(self.seq_lens)))
        return 4 * self.num_q_heads * self.head_dim * pairs

    def keys_of(self, row: int) -> np.ndarray:
        """`i64[q_len]`, the number of keys that each query of a row sees."""
        length, q_len = self.seq_lens[row], self.q_lens[row]
        keys = np.arange(length - q_len, length, dtype=np.int64) + 1
        window = self.options.sliding_window
        return np.minimum(keys, window) if window else keys

    def sample(self) -> list[tuple[int, int, int]]:
        """(token, row, length) of the first, middle and last query of four rows at most.

        The rows go from the shortest to the longest. The query sees the first `length` tokens.
        """
        lens, q_lens = self.seq_lens, self.q_lens
        order = np.argsort(lens, kind="stable")
        picks = np.linspace(0, len(order) - 1, min(4, len(order)), dtype=int)
        return [
            (sum(q_lens[:row]) + i, row, lens[row] - q_lens[row] + i + 1)
            for row in order[picks].tolist()
            for i in sorted({0, q_lens[row] // 2, q_lens[row] - 1})
        ]

    @property
    def pages_per_seq(self) -> int:
        """Width of the block table, a power of two because JAX's own op splits it evenly."""
        longest = -(-max(self.seq_lens) // self.page_size)
        return 1 << (longest - 1).bit_length()

    @property
    def num_sets(self) -> int:
        """Disjoint sets of pages for the calls to rotate among, so that K/V are never in the L2."""
        sets = min(_MAX_SETS // self.itemsize, max(2, math.ceil(_COLD_BYTES / self.num_bytes)))
        # One set that does not fit twice is many times the L2 by itself.
        return max(1, min(sets, _MAX_BYTES // self._bytes_of(self.seq_lens)))

    @property
    def num_calls(self) -> int:
        """Calls per run, like the layers of a model."""
        return self.num_sets * math.ceil(_MIN_CALLS / self.num_sets)


def uniform(
    num_seqs: int,
    length: int,
    *,
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    q_len: int = 1,
    name: str = "",
    options: Options = PLAIN,
) -> Shape:
    """A shape whose rows are all alike; `name` replaces `num_seqs x length` in its name."""
    sizes = f"{num_q_heads}/{num_kv_heads}/{head_dim}/{page_size}"
    words = (name or f"{num_seqs}x{length}", sizes, options.name)
    return Shape(
        name=" ".join(words).rstrip(),
        seq_lens=(length,) * num_seqs,
        q_lens=(q_len,) * num_seqs,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        options=options,
    )


def ragged_lens(longest: int) -> tuple[int, ...]:
    """64 lengths, log-uniform from 64 to `longest`."""
    logs = np.random.default_rng(0).uniform(np.log(64), np.log(longest), 64)
    return tuple(int(n) for n in np.exp(logs))


SHAPES = (
    uniform(1, 1024),
    uniform(1, 8192),
    uniform(1, 32768),
    uniform(1, 131072),
    uniform(8, 2048),
    uniform(8, 8192),
    uniform(16, 32768),
    uniform(64, 1024),
    uniform(64, 4096),
    uniform(128, 2048),
    uniform(256, 1024),
    uniform(64, 4096, num_kv_heads=32),
    uniform(64, 4096, num_kv_heads=1),
    uniform(64, 4096, num_q_heads=64),
    uniform(64, 4096, head_dim=64),
    uniform(64, 4096, num_q_heads=16, head_dim=256),
    uniform(64, 4096, page_size=64),
    Shape(name="64 ragged 32/8/128/16", seq_lens=ragged_lens(16384)),
)
# Small enough for a CPU; runs only when named.
TINY = Shape(
    name="tiny", seq_lens=(5, 32, 17), num_q_heads=4, num_kv_heads=2, head_dim=16, page_size=4
)
_WINDOW = Options(sliding_window=1024)
_TINY_OPTIONS = Options(soft_cap=50.0, sliding_window=7, alibi=True, sinks=True, return_lse=True)
# A shape with options, and the plain shape that it is compared with.
OPTION_PAIRS = (
    *(
        (uniform(64, 4096, options=options), uniform(64, 4096))
        for options in (
            Options(soft_cap=50.0),
            Options(alibi=True),
            Options(sinks=True),
            Options(return_lse=True),
            Options(fixed_split_size=512),
            Options(fixed_split_size=1024),
        )
    ),
    (uniform(64, 32768, options=_WINDOW), uniform(64, 1024)),
    (uniform(16, 32768, options=_WINDOW), uniform(16, 1024)),
)
TINY_PAIR = (dataclasses.replace(TINY, name="tiny options", options=_TINY_OPTIONS), TINY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The data of one shape: `num_sets` sets of pages, scattered at random over one pool.

    Attributes:
        shape: the shape.
        q: `bf16[T, Hq, D]`, scaled already.
        k_pages, v_pages: `[Hkv, P, S, D]`; `v_pages` is None of latents.
        scales: `k_scales` and `v_scales` `f32[Hkv, P, S]` of int8 or fp8 pages, else empty.
        tables: `i32[num_sets, B, N]`.
        seq_lens: `i32[B]`.
        cu_q_lens: `i32[B + 1]`.
    """

    shape: Shape
    q: jax.Array
    k_pages: jax.Array
    v_pages: Any
    scales: dict[str, jax.Array]
    tables: np.ndarray
    seq_lens: jax.Array
    cu_q_lens: jax.Array

    @property
    def lens(self) -> tuple[jax.Array, ...]:
        """The arguments of a call after its block table.

        `seq_lens`; then `cu_q_lens` where rows have several queries, or `prefix_lens` `i32[1]` and
        `cu_group_sizes` `i32[2]` where rows share a prefix.
        """
        if self.shape.shared_prefix:
            ends = jnp.array([0, len(self.shape.seq_lens)], jnp.int32)
            return self.seq_lens, jnp.array([self.shape.shared_prefix], jnp.int32), ends
        return (self.seq_lens, self.cu_q_lens)[: 1 + (max(self.shape.q_lens) > 1)]

    def in_layout(self, kv_layout: KVLayout) -> tuple[jax.Array, jax.Array | None, dict]:
        """K, V and the scales with their axes in the order of a layout."""
        pages = _in_layout(kv_layout, self.k_pages, self.v_pages)
        return *pages, {name: _scales_in(kv_layout, x) for name, x in self.scales.items()}

    def reference(
        self, q: jax.Array, token: np.ndarray, tables: jax.Array, lens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`reference_states` of some tokens of q, whose rows have these tables and lengths."""
        pages = self.k_pages, self.v_pages
        return reference_states(
            q[token], *pages, tables, lens, **self.scales, options=self.shape.options
        )


def page_tables(shape: Shape) -> tuple[np.ndarray, int]:
    """Tables `i32[num_sets, B, N]` of a random permutation of all pages, and their number."""
    blocks = np.array([-(-n // shape.page_size) for n in shape.seq_lens])
    shared = shape.shared_prefix // shape.page_size
    num_pages = shape.num_sets * (shared + int((blocks - shared).sum()))
    pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    pages = pages.reshape(shape.num_sets, -1)
    # Unused entries name a page that exists, because some peers read it.
    tables = np.zeros((shape.num_sets, len(blocks), shape.pages_per_seq), np.int32)
    column = np.arange(shape.pages_per_seq)
    tables[:, :, :shared] = pages[:, None, :shared]
    tables[:, (column >= shared) & (column < blocks[:, None])] = pages[:, shared:]
    return tables, num_pages


def make_case(shape: Shape) -> Case:
    """Make random normal data on the device; `write_kv` quantizes it to int8 and fp8 pages."""
    tables, num_pages = page_tables(shape)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    q = normal(keys[0], (sum(shape.q_lens), shape.num_q_heads, shape.head_dim))
    dims = (shape.num_kv_heads, num_pages, shape.page_size, shape.head_dim)
    if shape.itemsize == 1:
        layer = _quantized(keys[1], keys[2], dims, shape.kv_dtype)
    else:
        layer = pp.LayerKV(normal(keys[1], dims), normal(keys[2], dims), kv_layout="HPND")
    scales = {"k_scales": layer.k_scales, "v_scales": layer.v_scales}
    return Case(
        shape=shape,
        q=q * jnp.bfloat16(shape.head_dim**-0.5),
        k_pages=layer.k_pages,
        v_pages=layer.v_pages,
        scales={name: x for name, x in scales.items() if x is not None},
        tables=tables,
        seq_lens=jnp.array(shape.seq_lens, jnp.int32),
        cu_q_lens=jnp.array(np.cumsum([0, *shape.q_lens]), jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=0)
def _in_layout(
    kv_layout: KVLayout, k_pages: jax.Array, v_pages: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    if kv_layout == "HPND":
        return k_pages, v_pages
    order = (1, 0, 2, 3) if kv_layout == "HND" else (1, 2, 0, 3)
    k, v = k_pages.transpose(order), v_pages.transpose(order)
    match kv_layout:
        case "2NHD":
            return jnp.stack([k, v], axis=1), None
        case "NH2D":
            return jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[3]), None
    return k, v


@functools.partial(jax.jit, static_argnums=0)
def _scales_in(kv_layout: KVLayout, scales: jax.Array) -> jax.Array:
    return scales.transpose(["HPN".index(axis) for axis in LAYOUTS[kv_layout].scale_axes])


@functools.partial(jax.jit, static_argnums=1)
def normal(key: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Random normal bf16 of this shape."""
    return jax.random.normal(key, dims, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("dims", "dtype"))
def _quantized(
    k_key: jax.Array, v_key: jax.Array, dims: tuple[int, int, int, int], dtype: str
) -> pp.LayerKV:
    """A layer with pages `[Hkv, P, S, D]` of `dtype`, filled by `write_kv`."""
    num_kv_heads, num_pages, page_size, head_dim = dims
    pool = pp.create_kv_pool(
        num_layers=1,
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
        kv_layout="HPND",
    )
    slots = jnp.arange(num_pages * page_size, dtype=jnp.int32)
    k, v = (normal(key, (len(slots), num_kv_heads, head_dim)) for key in (k_key, v_key))
    return pp.write_kv(pool.layers[0], k, v, slots)
