"""The signatures that other JAX projects call attention with, over the attention of this library.

Each module serves one caller, and imports it only in the functions that need it.
"""

from pallas_paged.interop.mla import get_mla_kv_cache_shape, mla_ragged_paged_attention
from pallas_paged.interop.rpa import get_kv_cache_shape, ragged_paged_attention

__all__ = [
    "get_kv_cache_shape",
    "get_mla_kv_cache_shape",
    "mla_ragged_paged_attention",
    "ragged_paged_attention",
]
