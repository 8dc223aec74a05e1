"""MaxText: what its `forward_serve_vllm` imports from tpu-inference, which serves TPUs only."""

from __future__ import annotations

import functools
import math
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_paged.interop import rpa

DATA_AXES = ("data", "attn_dp", "attn_dp_expert")  # of a mesh, over which rows are cut
HEAD_AXES = ("model", "expert", "tensor")  # over which heads are cut

_MODULE = "tpu_inference.layers.common.attention_interface"


def install() -> None:
    """Put a module in the place that MaxText imports `sharded_ragged_paged_attention` from."""
    names = _MODULE.split(".")
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        module: Any = sys.modules.setdefault(name, types.ModuleType(name))
        module.__path__ = getattr(module, "__path__", [])
        if count > 1:
            setattr(sys.modules[".".join(names[: count - 1])], names[count - 1], module)
    sys.modules[_MODULE].sharded_ragged_paged_attention = (  # type: ignore[attr-defined]
        sharded_ragged_paged_attention
    )


def sharded_ragged_paged_attention(
    mesh: Mesh,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None,
    sm_scale: float,
    attention_chunk_size: int | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    update_kv_cache: bool = True,
    use_causal_mask: bool = True,
    attn_logits_soft_cap: float | None = None,
    decode_query_size: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Write new K/V and attend on each device of a mesh, with its own rows and heads.

    Args:
        mesh: whose axes `DATA_AXES` cut tokens, rows and pages, and `HEAD_AXES` the heads; others
            cut nothing. Each part of the data has its own page numbers, offsets and distribution.
        q, k, v, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, attention_sink, sm_scale:
            as in `pallas_paged.interop.ragged_paged_attention`. Where there are more devices than
            KV heads, the cache has every head several times, and new tokens are repeated here.
        attention_chunk_size: `sliding_window` there.
        attn_logits_soft_cap: `soft_cap` there.
        q_scale, k_scale, v_scale, update_kv_cache, use_causal_mask, decode_query_size: as there.

    Returns:
        The output and the cache, cut like `q` and `kv_cache`.

    Raises:
        ValueError: KV heads and devices do not divide each other.
    """
    data, heads = (
        tuple(name for name in names if name in mesh.shape) for names in (DATA_AXES, HEAD_AXES)
    )
    num_parts, num_kv_heads = math.prod(mesh.shape[name] for name in heads), k.shape[1]
    if num_parts > num_kv_heads:
        if num_parts % num_kv_heads:
            raise ValueError(f"{num_parts} devices must be a multiple of {num_kv_heads=}")
        k, v = (jnp.repeat(x, num_parts // num_kv_heads, axis=1) for x in (k, v))
    tokens, cache = P(data, heads), P(data, None, heads)
    rows = (P(data),) * 4
    local: Any = functools.partial(
        rpa.ragged_paged_attention,
        sm_scale=sm_scale,
        sliding_window=attention_chunk_size,
        soft_cap=attn_logits_soft_cap,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        update_kv_cache=update_kv_cache,
        use_causal_mask=use_causal_mask,
        decode_query_size=decode_query_size,
    )
    arrays: tuple[Any, ...] = (q, k, v, kv_cache, kv_lens, page_indices, cu_q_lens, distribution)
    specs: tuple[Any, ...] = (tokens, tokens, tokens, cache, *rows)
    if attention_sink is not None:
        arrays, specs = (*arrays, attention_sink), (*specs, P(heads))
    return jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=(tokens, cache), check_vma=False
    )(*arrays)
