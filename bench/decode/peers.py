"""The library and its peers for a decode call, each as a list of variants."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_paged as pp
from bench.measuring.measure import Variant
from bench.measuring.options import PLAIN, Options
from bench.measuring.shapes import Shape
from pallas_paged.pages.layout import KVLayout


def implementations(only: str | None) -> dict[str, str | None]:
    """Our implementations by the names of their results: None's choice and both, or only one."""
    if only:
        return {"ours": only}
    return {"ours": None, "triton": "triton", "mosaic": "mosaic_sm90"}


def ours(
    call: Callable[..., Any],
    implementation: str | None,
    options: Options = PLAIN,
    kv_layout: KVLayout = "NHD",
) -> list[Variant]:
    """An attention function of the library, called as a user calls it."""

    def attend(q, k_pages, v_pages, *args, **scales):
        return call(
            q,
            pp.LayerKV(k_pages, v_pages, **scales, kv_layout=kv_layout),
            *args,
            sm_scale=1.0,
            implementation=implementation,
            **options.arguments(q.shape[1]),
        )

    return [Variant(label=implementation or "default", attend=attend, kv_layout=kv_layout)]


def jax_op(shape: Shape) -> list[Variant]:
    """JAX's own paged attention with several splits and warps, without hopeless combinations.

    Raises:
        ImportError: if this JAX no longer has it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def attend(*args, k_scales=None, v_scales=None, **options):
        return paged_attention(*args, k_scales_pages=k_scales, v_scales_pages=v_scales, **options)

    splits = [
        s
        for s in (1, 4, 8, 16, 32, 64)
        if shape.pages_per_seq % s == 0
        and 128 <= len(shape.seq_lens) * shape.num_kv_heads * s <= 8192
    ]
    # The op's default of 8 pages suits pages of 16 tokens. Larger blocks exceed shared memory.
    block_tokens = 128 if shape.head_dim <= 128 else 64
    return [
        Variant(
            label=f"k_splits={k_splits} num_warps={num_warps}",
            attend=functools.partial(
                attend,
                k_splits=k_splits,
                num_warps=num_warps,
                pages_per_compute_block=max(1, block_tokens // shape.page_size),
                attn_logits_soft_cap=shape.options.soft_cap,
            ),
        )
        for k_splits in splits or [1]
        for num_warps in (4, 8)
    ]


def xla_gather() -> list[Variant]:
    """Gather pages to dense K/V, then call `jax.nn.dot_product_attention`."""

    def attend(q, k, v, block_table, seq_lens, *, implementation):
        def dense(pages):  # [Hkv, P, S, D] -> [B, N * S, Hkv, D]
            num_kv_heads, _, page_size, head_dim = pages.shape
            rows, blocks = block_table.shape
            gathered = pages[:, block_table].transpose(1, 2, 3, 0, 4)  # [B, N, S, Hkv, D]
            return gathered.reshape(rows, blocks * page_size, num_kv_heads, head_dim)

        out = jax.nn.dot_product_attention(
            q[:, None],
            dense(k),
            dense(v),
            scale=1.0,
            key_value_seq_lengths=seq_lens,
            implementation=implementation,
        )
        return out[:, 0]

    return [
        Variant(label=name, attend=functools.partial(attend, implementation=name))
        for name in ("xla", "cudnn")
    ]


def cudnn_paged() -> list[Variant]:
    """cuDNN's paged attention as JAX wraps it, over pages in its layouts.

    The wrapper requires as many pages as the table has entries, so every set of pages gets arrays
    of its own, made before the clock starts.

    Raises:
        ImportError: if this JAX has no such function.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    def prepare(k_pages, v_pages, block_table, seed, *, layout):
        num_entries = block_table.size
        order = np.random.default_rng(seed).permutation(num_entries).astype(np.int32)
        inverse = jnp.argsort(jnp.asarray(order))
        axes = (1, 2, 0, 3) if layout == "BTNH" else (1, 0, 2, 3)
        gather = jax.jit(lambda pages, table: pages[:, table.ravel()[inverse]].transpose(axes))
        table = jnp.asarray(order).reshape(block_table.shape)
        return gather(k_pages, block_table), gather(v_pages, block_table), table

    def attend(q, k, v, block_table, seq_lens, *, layout):
        axis = 1 if layout == "BTNH" else 2
        table = block_table[:, None, :, None]
        out = paged_attention(
            jnp.expand_dims(q, axis),
            k,
            v,
            jnp.ones_like(seq_lens),
            seq_lens,
            table,
            table,
            scale=1.0,
            mask_type=MaskType.PADDING,
            qkv_layout=layout,
        )
        return jnp.squeeze(out, axis)

    return [
        Variant(
            label=layout,
            attend=functools.partial(attend, layout=layout),
            prepare=functools.partial(prepare, layout=layout),
        )
        for layout in ("BTNH", "BNTH")
    ]
