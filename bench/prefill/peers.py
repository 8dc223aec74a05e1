"""The peers of `ragged_paged_attention`: attention over contiguous K/V."""

from __future__ import annotations

import functools
import warnings

import jax
import numpy as np

from bench.measuring.measure import Prepare, Variant
from bench.measuring.shapes import Shape

# (block_q, block_k, warps, stages) of JAX's Triton attention; the fastest right one counts.
_MHA_CONFIGS = ((64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2))


def contiguous(shape: Shape, *, repeat: bool) -> Prepare:
    """A function that copies the K/V of a set to arrays `[total tokens, Hkv, D]`, row after row.

    Args:
        shape: the lengths of the rows.
        repeat: repeat every KV head for each query head of its group.
    """
    group = shape.num_q_heads // shape.num_kv_heads if repeat else 1
    starts = np.cumsum([0, *shape.seq_lens[:-1]])
    row = np.repeat(np.arange(len(shape.seq_lens)), shape.seq_lens)
    token = np.arange(sum(shape.seq_lens)) - starts[row]
    block, offset = np.divmod(token, shape.page_size)

    @jax.jit
    def gather(pages, table):  # [Hkv, P, S, D]
        dense = pages[:, table[row, block], offset].swapaxes(0, 1)
        return dense.repeat(group, axis=1)

    def prepare(k_pages, v_pages, table, index):
        return gather(k_pages, table), gather(v_pages, table), table

    return prepare


def cudnn_dense(shape: Shape, implementation: str = "cudnn") -> list[Variant]:
    """`jax.nn.dot_product_attention` over contiguous K/V.

    Its causal mask is aligned to the first key. Where rows hold tokens older than their queries,
    it runs without a mask: all queries see all tokens, which is more work than ours and counted as
    such. Rows of different lengths go through the packed layout of the private function under it.

    Raises:
        NotImplementedError: if it lacks one of the shape's options.
    """
    options = shape.options
    if any((options.soft_cap, options.alibi, options.sinks)):
        raise NotImplementedError(f"this peer has no {options.name}")
    causal = shape.q_lens == shape.seq_lens
    if options.sliding_window and not causal:
        raise NotImplementedError("this peer has no window over older tokens")
    window = (options.sliding_window - 1, 0) if options.sliding_window else None
    num_seqs = len(shape.seq_lens)
    uniform = len({*shape.seq_lens}) == 1 == len({*shape.q_lens})

    def attend(q, k, v, block_table, seq_lens, cu_q_lens):
        out = jax.nn.dot_product_attention(
            *(x.reshape(num_seqs, -1, *x.shape[1:]) for x in (q, k, v)),
            scale=1.0,
            is_causal=causal,
            local_window_size=window,
            implementation=implementation,
        )
        return out.reshape(q.shape)

    def attend_packed(q, k, v, block_table, seq_lens, cu_q_lens):
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

        cu_seq_lens = np.cumsum([0, *shape.seq_lens], dtype=np.int32)
        return dot_product_attention(
            q[None],
            k[None],
            v[None],
            q_seqlen=np.array(shape.q_lens, np.int32)[None],
            kv_seqlen=np.array(shape.seq_lens, np.int32)[None],
            q_offsets=np.cumsum([0, *shape.q_lens], dtype=np.int32)[None],
            kv_offsets=cu_seq_lens[None],
            scale=1.0,
            mask_type=MaskType.PADDING_CAUSAL if causal else MaskType.PADDING,
        )[0]

    label = "uniform" if uniform else "packed"
    return [
        Variant(
            label=label if causal else f"{label}, not causal",
            attend=attend if uniform else attend_packed,
            prepare=contiguous(shape, repeat=False),
            sees_all=not causal,
        )
    ]


def jax_mha(shape: Shape) -> list[Variant]:
    """JAX's Triton attention, causal, over contiguous K/V with heads repeated to match q's.

    Raises:
        ImportError: if this JAX no longer has it.
        NotImplementedError: if it does not support the shape.
    """
    if shape.options.name:
        raise NotImplementedError(f"this peer has no {shape.options.name}")
    if shape.q_lens != shape.seq_lens or len({*shape.seq_lens}) > 1:
        raise NotImplementedError("only rows of one length, without older tokens")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    def attend(q, k, v, block_table, seq_lens, cu_q_lens, *, config):
        block_q, block_k, num_warps, num_stages = config
        rows = (x.reshape(len(shape.seq_lens), -1, *x.shape[1:]) for x in (q, k, v))
        out = mha(
            *rows,
            None,
            1.0,
            True,
            BlockSizes(block_q=block_q, block_k=block_k),
            num_warps=num_warps,
            num_stages=num_stages,
        )
        return out.reshape(q.shape)

    prepare = contiguous(shape, repeat=True)
    names = ("block_q", "block_k", "num_warps", "num_stages")
    return [
        Variant(
            label=" ".join(f"{name}={n}" for name, n in zip(names, config, strict=True)),
            attend=functools.partial(attend, config=config),
            prepare=prepare,
        )
        for config in _MHA_CONFIGS
    ]
