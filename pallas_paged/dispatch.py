"""Which implementation runs, with which config, for what device."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.kernels import xla
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.tuning import DecodeConfig, RaggedConfig, choose_config

IMPLEMENTATIONS = ("triton", "triton_interpret", "mosaic_gpu", "xla")
# Without a GPU to ask, a wave this small still makes shares that span and that split rows.
_INTERPRETED_SMS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What the choice of an implementation and of a config depends on."""

    platform: str
    kind: str
    num_sms: int


def device() -> Device:
    """The device that the trace is for."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        device = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
        if isinstance(device, str):
            device = jax.local_devices(backend=device)[0]
    # An abstract device calls it num_cores, a CUDA device core_count; others have neither.
    num_sms = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    return Device(
        platform=device.platform,
        kind=device.device_kind,
        num_sms=num_sms if device.platform == "gpu" and num_sms else _INTERPRETED_SMS,
    )


@functools.cache  # so that it logs once
def best_implementation(platform: str) -> str:
    """What None means on a platform."""
    implementation = "triton" if platform == "gpu" else "xla"
    logging.getLogger("pallas_paged").info("implementation=%r on %s", implementation, platform)
    return implementation


def paged_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
    *,
    options: LogitOptions,
    implementation: str | None,
    config: DecodeConfig | None,
) -> tuple[jax.Array, jax.Array]:
    """`(out, lse)` of `paged_attention` on checked arguments."""
    config = _config_or_best("decode", config, q, k_pages, block_tables)
    attend = _find("paged_decode", implementation, config)
    with jax.enable_x64(False):  # the kernels count in i32 whatever the caller's integers are
        seq_lens = jnp.clip(seq_lens, 0, block_tables.shape[1] * k_pages.shape[2])
        return attend(
            q, k_pages, v_pages, block_tables, seq_lens, alibi_slopes, sinks, options=options
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
    *,
    options: LogitOptions,
    implementation: str | None,
    config: RaggedConfig | None,
) -> tuple[jax.Array, jax.Array]:
    """`(out, lse)` of the entry of this name on checked arguments.

    With `q_positions` i32`[T]` queries stand there instead, and all keys of their row are older.
    """
    config = _config_or_best("ragged", config, q, k_pages, block_tables)
    attend = _find("ragged_paged_attention", implementation, config)
    with jax.enable_x64(False):
        seq_lens = jnp.clip(seq_lens, 0, block_tables.shape[1] * k_pages.shape[2])
        return attend(
            q,
            k_pages,
            v_pages,
            block_tables,
            seq_lens,
            rising_ends(cu_q_lens, q.shape[0]),
            q_positions,
            alibi_slopes,
            sinks,
            tree_mask,
            options=options,
        )


def rising_ends(ends: jax.Array, count: int) -> jax.Array:
    """`ends` i32`[n + 1]` as what cuts up `[0, count)`: from 0, rising, at most `count`."""
    return jnp.clip(lax.cummax(ends.at[0].set(0)), 0, count)


def _config_or_best(
    kernel: str, config: Any, q: jax.Array, k_pages: jax.Array, block_tables: jax.Array
) -> Any:
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads, _, page_size, _ = k_pages.shape
    num_seqs, pages_per_seq = block_tables.shape
    if config is not None:
        wanted = DecodeConfig if kernel == "decode" else RaggedConfig
        if not isinstance(config, wanted):
            raise ValueError(f"{config=} must be a {wanted.__name__}")
        return config
    sizes = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_kv_len": pages_per_seq * page_size,
        "num_seqs": num_seqs,
        "itemsize": k_pages.dtype.itemsize,
    }
    if kernel == "decode":
        sizes["page_size"] = page_size
    else:
        sizes["num_tokens"] = num_queries
    here = device()
    return choose_config(kernel, device_kind=here.kind, num_sms=here.num_sms, **sizes)


def _find(function: str, implementation: str | None, config: Any) -> Callable[..., Any]:
    """The implementation of `paged_decode` or `ragged_paged_attention` to call."""
    platform = device().platform
    if implementation is None:
        implementation = best_implementation(platform)
    if implementation == "xla":
        return getattr(xla, function)
    if implementation == "mosaic_gpu":
        raise NotImplementedError("implementation='mosaic_gpu': there are no such kernels yet")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be None or one of {IMPLEMENTATIONS}")
    if implementation == "triton" and platform != "gpu":
        raise NotImplementedError(
            f"implementation='triton' needs a GPU, but the device is a {platform}; "
            "'triton_interpret' runs the same kernels there"
        )
    try:
        from pallas_paged.kernels import triton_decode, triton_ragged
    except ImportError as e:
        raise NotImplementedError(
            f"{implementation=} needs the Triton lowering of Pallas, which this JAX "
            f"({jax.__version__}) lacks: {e}"
        ) from e
    module = triton_decode if function == "paged_decode" else triton_ragged
    interpret = implementation == "triton_interpret"
    return _without_gradient(
        functools.partial(getattr(module, function), config=config, interpret=interpret)
    )


def _without_gradient(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`attend`, with an error that says so if somebody differentiates it."""

    def call(*arrays, **options):
        function = jax.custom_vjp(functools.partial(attend, **options))

        def forward(*_):
            raise NotImplementedError(
                "the Triton kernels of attention have no gradient; implementation='xla' has one"
            )

        function.defvjp(forward, lambda *_: None)
        return function(*arrays)

    return call
