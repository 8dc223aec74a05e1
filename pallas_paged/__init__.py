"""Paged attention for JAX on NVIDIA GPUs."""

from pallas_paged.attention import (
    merge_attention_states,
    paged_attention,
    ragged_paged_attention,
)
from pallas_paged.cascade import cascade_attention
from pallas_paged.kernels.mosaic_tuning import MosaicDecodeConfig, MosaicRaggedConfig
from pallas_paged.kernels.tuning import DecodeConfig, RaggedConfig
from pallas_paged.kv_pool import KVPool, copy_pages, create_kv_pool, write_kv
from pallas_paged.page_table import (
    PageCopies,
    PageTable,
    check,
    create_page_table,
    extend,
    fork,
    free,
    slot_mapping,
    truncate,
)

__all__ = [
    "DecodeConfig",
    "KVPool",
    "MosaicDecodeConfig",
    "MosaicRaggedConfig",
    "PageCopies",
    "PageTable",
    "RaggedConfig",
    "cascade_attention",
    "check",
    "copy_pages",
    "create_kv_pool",
    "create_page_table",
    "extend",
    "fork",
    "free",
    "merge_attention_states",
    "paged_attention",
    "ragged_paged_attention",
    "slot_mapping",
    "truncate",
    "write_kv",
]
