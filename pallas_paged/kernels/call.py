"""One call of attention: its arrays and its static description.

A `Family` says for a `Call` whether its kernels can do it, and which function does it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
from jax import lax
from jax.typing import DTypeLike

from pallas_paged.checks import pytree
from pallas_paged.kernels.device import HOPPER_SHARED_MEMORY, Device
from pallas_paged.pages.layout import LAYOUTS, KVLayout, PageLayout

Kernel = Literal["decode", "ragged"]
Config = TypeVar("Config")


@pytree
class Arrays:
    """The arrays of a call, checked. The entries make them and the kernels read them, by name."""

    q: jax.Array  # `[B, Hq, D]`, one query a row, or ragged `[T, Hq, D]`
    # Of multi-head latent attention, more elements of the queries, `[.., Hq, R]`; else None. K are
    # the D + R elements of the pages then, and V the first D.
    q_pe: jax.Array | None = None
    k_pages: jax.Array  # with all axes of `layout`
    # The same, but V may have fewer elements than K; None where `k_pages` hold K and V.
    v_pages: jax.Array | None = None
    block_tables: jax.Array  # i32`[B, N]`
    seq_lens: jax.Array  # i32`[B]`, each in [0, N * S]
    # i32`[B + 1]`, rising, within [0, T]; of ragged calls only. Any, so that kernels need no check
    # for None.
    cu_q_lens: Any = None
    # i32`[T]`, or None where queries are the newest tokens of their row. With it all keys of a row
    # are older than its queries. Of ragged calls only.
    q_positions: jax.Array | None = None
    alibi_slopes: jax.Array | None = None  # f32`[Hq]`
    sinks: jax.Array | None = None  # f32`[Hq]`
    tree_mask: jax.Array | None = None  # bool`[B, M, M]`, of ragged calls only
    # Of int8 and fp8 pages, f32 in the order of `layout.scale_axes`, or f32`[]`; else None.
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None
    kv_layout: KVLayout = dataclasses.field(default="HPND", metadata={"static": True})

    @property
    def layout(self) -> PageLayout:
        return LAYOUTS[self.kv_layout]

    @property
    def kv_pages(self) -> tuple[jax.Array, jax.Array]:
        """The pages of K and of V; the same array twice where one holds both."""
        return self.k_pages, self.k_pages if self.v_pages is None else self.v_pages

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.layout.size(self.k_pages.shape, "H")

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def v_head_dim(self) -> int:
        """Elements of V and of the result: those of `q`, unless V have a head_dim of their own."""
        return self.head_dim if self.v_pages is None else self.layout.size(self.v_pages.shape, "D")

    @property
    def rope_dim(self) -> int:
        """Elements of `q_pe`; 0 without it."""
        return 0 if self.q_pe is None else self.q_pe.shape[2]

    @property
    def num_seqs(self) -> int:
        return self.block_tables.shape[0]

    @property
    def page_size(self) -> int:
        return self.layout.size(self.k_pages.shape, "N")

    @property
    def max_kv_len(self) -> int:
        """Tokens that a full row of the block table holds."""
        return self.block_tables.shape[1] * self.page_size


def result_shape(
    shape: tuple[int, ...], dtype: DTypeLike, *, varying: bool = True
) -> jax.ShapeDtypeStruct:
    """Return the type of a kernel's result: in `shard_map`, each device has its own.

    Without `varying` the type says that all have the same, see `varying_by_device`.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes if varying else ()
    kind = jax.sharding.ManualAxisType(varying=frozenset(axes))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def varying_by_device(x: jax.Array) -> jax.Array:
    """Return `x` with the type of an array that each device of a `shard_map` has of its own.

    Kernels with references need it: under `check_vma` those must be of arrays that are alike.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What heuristics know of a call: its sizes and its device.

    Rows are assumed to have `max_kv_len` tokens: a call with a wide table and short rows gets the
    config of long rows. The fields without a comment are as in `Call`.
    """

    num_seqs: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_kv_len: int
    itemsize: int  # bytes of an element of K and V
    num_tokens: int = 0  # of ragged calls, packed query tokens; else 0
    expected_seqs: int = 0  # of ragged calls, rows that the tokens are likely to be of; else 0
    page_size: int = 0  # of decode calls; else 0
    rope_dim: int = 0
    v_head_dim: int | None = None
    num_sms: int  # of the `Device`
    shared_memory: int = HOPPER_SHARED_MEMORY  # of the `Device`
    read_gbps: float = 0.0  # of the `Device`

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Static description of one attention call. Fields without a comment are as in `Arrays`."""

    kernel: Kernel
    device: Device  # the device that it is compiled for
    dtype: Any  # of the queries
    kv_dtype: Any  # of the pages
    num_tokens: int  # query tokens
    num_seqs: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_kv_len: int
    rope_dim: int = 0
    v_head_dim: int | None = None  # None also where it is `head_dim`
    with_lse: bool = True  # whether the caller wants the log-sum-exps
    interpret: bool = False  # whether kernels are interpreted, on any device
    config: Any = None  # given by the caller, or None
    fixed_split_size: int | None = None  # given by the caller, or None; the config is chosen for it
    # Given by the caller, rows that are likely to have queries; None: all.
    expected_seqs: int | None = None

    @classmethod
    def of(cls, kernel: Kernel, arrays: Arrays, **given: Any) -> Call:
        """Return the description of a call with these arrays."""
        return cls(
            kernel=kernel,
            dtype=arrays.q.dtype,
            kv_dtype=arrays.k_pages.dtype,
            num_tokens=arrays.q.shape[0],
            num_seqs=arrays.num_seqs,
            num_q_heads=arrays.num_q_heads,
            num_kv_heads=arrays.num_kv_heads,
            head_dim=arrays.head_dim,
            page_size=arrays.page_size,
            max_kv_len=arrays.max_kv_len,
            rope_dim=arrays.rope_dim,
            v_head_dim=None if arrays.v_head_dim == arrays.head_dim else arrays.v_head_dim,
            **given,
        )

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that choose an implementation and a config, as in `Sizes`.

        With `fixed_split_size` they are those of one typical batch: the bits of a row must not
        depend on the batch, and so neither may the kernel that computes it.
        """
        num_seqs, num_tokens, max_kv_len = self.num_seqs, self.num_tokens, self.max_kv_len
        expected_seqs = min(self.expected_seqs or num_seqs, num_seqs)
        if self.fixed_split_size is not None:
            num_seqs, num_tokens, max_kv_len = 64, 64 * 1024, 4096
            expected_seqs = num_seqs
        sizes = {
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_kv_len": max_kv_len,
            "num_seqs": num_seqs,
            "itemsize": self.kv_dtype.itemsize,
        }
        if self.v_head_dim is not None:
            sizes |= {"v_head_dim": self.v_head_dim}
        if self.kernel == "decode":
            return sizes | {"page_size": self.page_size}
        return sizes | {"num_tokens": num_tokens, "expected_seqs": expected_seqs}

    @property
    def for_heuristics(self) -> Sizes:
        """The arguments of heuristics."""
        device = self.device
        return Sizes(
            **self.sizes,
            rope_dim=self.rope_dim,
            num_sms=device.num_sms,
            shared_memory=device.shared_memory,
            read_gbps=device.read_gbps,
        )

    def choose_config(self, heuristics: dict[Kernel, Callable[[Sizes], Config]]) -> Config:
        """Return the config given by the caller, or what the family's heuristic chooses."""
        if self.config is not None:
            return self.config
        config: Any = heuristics[self.kernel](self.for_heuristics)
        if self.fixed_split_size is None:
            return config
        return dataclasses.replace(
            config,
            fixed_split_size=self.fixed_split_size,
            # A power of two that divides both, since fixed_split_size is a multiple of 64.
            block_k=math.gcd(config.block_k, self.fixed_split_size),
        )
