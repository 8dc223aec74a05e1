"""Paged attention for JAX on NVIDIA GPUs."""

from importlib.metadata import PackageNotFoundError, version

from pallas_paged.attention.cascade import cascade_attention, merge_attention_states
from pallas_paged.attention.entries import paged_attention, ragged_paged_attention
from pallas_paged.attention.kv_cache import PagedKVCache
from pallas_paged.attention.mla import mla_attention, mla_prefill
from pallas_paged.attention.options import AttentionOptions, Implementation, RaggedAttentionOptions
from pallas_paged.decoder.latent_write import rotate_and_write_latents
from pallas_paged.decoder.rotary_write import rotate_and_write_kv, split_qkv
from pallas_paged.kernels.mosaic_sm80.config import MosaicSm80DecodeConfig, MosaicSm80RaggedConfig
from pallas_paged.kernels.mosaic_sm90.config import MosaicSm90RaggedConfig
from pallas_paged.kernels.triton.config import DecodeConfig, RaggedConfig
from pallas_paged.pages.check import check_page_table
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.layout import KVLayout
from pallas_paged.pages.pool import KVPool, copy_pages, create_kv_pool, write_kv
from pallas_paged.pages.prefix_cache import PrefixCache, PrefixLease
from pallas_paged.pages.sharing import attach, release, retain
from pallas_paged.pages.table import (
    PageCopies,
    PageTable,
    create_page_table,
    extend,
    fork,
    free,
    free_before,
    slot_mapping,
    truncate,
)

__version__: str
"""Version of the installed package."""
try:
    __version__ = version("pallas-paged")
except PackageNotFoundError:  # a checkout on sys.path that is not installed
    __version__ = "0+unknown"

__all__ = [
    "AttentionOptions",
    "DecodeConfig",
    "Implementation",
    "KVLayout",
    "KVPool",
    "LayerKV",
    "MosaicSm80DecodeConfig",
    "MosaicSm80RaggedConfig",
    "MosaicSm90RaggedConfig",
    "PageCopies",
    "PageTable",
    "PagedKVCache",
    "PrefixCache",
    "PrefixLease",
    "RaggedAttentionOptions",
    "RaggedConfig",
    "__version__",
    "attach",
    "cascade_attention",
    "check_page_table",
    "copy_pages",
    "create_kv_pool",
    "create_page_table",
    "extend",
    "fork",
    "free",
    "free_before",
    "merge_attention_states",
    "mla_attention",
    "mla_prefill",
    "paged_attention",
    "ragged_paged_attention",
    "release",
    "retain",
    "rotate_and_write_kv",
    "rotate_and_write_latents",
    "slot_mapping",
    "split_qkv",
    "truncate",
    "write_kv",
]
