"""Which implementation runs a call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.kernels.call import IMPLEMENTATIONS, Call, Device, Kernel
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic.config import (
    MosaicDecodeConfig,
    MosaicRaggedConfig,
    prefer_mosaic,
)
from pallas_paged.kernels.triton.config import DecodeConfig, RaggedConfig


def paged_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
    *scales: jax.Array,
    options: LogitOptions,
    implementation: str | None,
    config: DecodeConfig | MosaicDecodeConfig | None,
) -> tuple[jax.Array, jax.Array]:
    """`(out, lse)` of `paged_attention` on checked arguments; one-byte pages have two scales."""
    call = _call("decode", q, k_pages, block_tables, config=config, with_lse=True)
    attend = find(call, implementation)
    with jax.enable_x64(False):  # the kernels count in i32 whatever the caller's integers are
        seq_lens = jnp.clip(seq_lens, 0, call.max_kv_len)
        return attend(
            q,
            k_pages,
            v_pages,
            block_tables,
            seq_lens,
            alibi_slopes,
            sinks,
            *scales,
            options=options,
        )


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    q_positions: jax.Array | None,
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    *scales: jax.Array,
    options: LogitOptions,
    implementation: str | None,
    config: RaggedConfig | MosaicRaggedConfig | None,
    with_lse: bool,
) -> tuple[jax.Array, Any]:
    """`(out, lse)` of the entry of this name on checked arguments.

    With `q_positions` i32`[T]` queries stand there instead, and all keys of their row are older.
    Without `with_lse` some implementations have None in place of `lse`.
    """
    call = _call("ragged", q, k_pages, block_tables, config=config, with_lse=with_lse)
    attend = find(call, implementation)
    with jax.enable_x64(False):
        return attend(
            q,
            k_pages,
            v_pages,
            block_tables,
            jnp.clip(seq_lens, 0, call.max_kv_len),
            rising_ends(cu_q_lens, q.shape[0]),
            q_positions,
            alibi_slopes,
            sinks,
            tree_mask,
            *scales,
            options=options,
        )


def rising_ends(ends: jax.Array, count: int) -> jax.Array:
    """`ends` i32`[n + 1]` as what cuts up `[0, count)`: from 0, rising, at most `count`."""
    return jnp.clip(lax.cummax(ends.at[0].set(0)), 0, count)


def _call(
    kernel: Kernel,
    q: jax.Array,
    k_pages: jax.Array,
    block_tables: jax.Array,
    *,
    config: Any,
    with_lse: bool,
) -> Call:
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    num_seqs, pages_per_seq = block_tables.shape
    return Call(
        kernel=kernel,
        device=Device.here(),
        dtype=q.dtype,
        kv_dtype=k_pages.dtype,
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_kv_len=pages_per_seq * page_size,
        with_lse=with_lse,
        config=config,
    )


def find(call: Call, implementation: str | None) -> Callable[..., Any]:
    """The function that does a call.

    Raises:
      ValueError: if there is no such implementation, or the config is of no type that it takes.
      NotImplementedError: if the implementation can't do the call; says why.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be None or one of {tuple(IMPLEMENTATIONS)}")
    _check_config(call, implementation)
    if implementation is None:
        implementation = best_implementation(call)
        _log(implementation, call.device.kind)
    chosen = IMPLEMENTATIONS[implementation]
    reason = chosen.why_not(call)
    if reason is not None:
        raise NotImplementedError(f"{implementation=} {reason}")
    return chosen.attend(call)


def _check_config(call: Call, implementation: str | None) -> None:
    config, kernel = call.config, call.kernel
    if config is None:
        return
    # Who has no configs of its own runs with anybody's: a model may be moved to a CPU as it is.
    named = [] if implementation is None else [IMPLEMENTATIONS[implementation]]
    takers = [x for x in named if x.configs] or IMPLEMENTATIONS.values()
    types = tuple(dict.fromkeys(x.configs[kernel] for x in takers if x.configs))
    if not isinstance(config, types):
        names = " or ".join(t.__name__ for t in types)
        place = "" if implementation is None else f" for {implementation=}"
        raise ValueError(f"{config=} must be a {names}{place}")


def best_implementation(call: Call) -> str:
    """What None means for a call: of what can do it on the device, the fastest."""
    if call.device.platform != "gpu":
        return "xla"
    if call.config is not None:  # which is for one of them
        mosaic = isinstance(call.config, MosaicDecodeConfig | MosaicRaggedConfig)
        return "mosaic_gpu" if mosaic else "triton"
    names = ["triton", "mosaic_gpu", "xla"]
    if prefer_mosaic(call.kernel, device_kind=call.device.kind, **call.sizes):
        names = ["mosaic_gpu", "triton", "xla"]
    return next(name for name in names if IMPLEMENTATIONS[name].why_not(call) is None)


@functools.cache  # so that it is logged once
def _log(implementation: str, device_kind: str) -> None:
    logging.getLogger("pallas_paged").info("implementation=%r on %s", implementation, device_kind)
