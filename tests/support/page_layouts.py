"""Pages in other layouts, by transposes in NumPy."""

from typing import Any

import numpy as np

LAYOUTS = ["HPND", "NHD", "HND", "2NHD", "NH2D"]
OTHERS = LAYOUTS[1:]
_ORDERS = {"HPND": (0, 1, 2), "HND": (1, 0, 2)}  # of heads, pages, tokens; else pages come first


def of_heads(x: Any, kv_layout: str) -> Any:
    """`x [num_kv_heads, num_pages, page_size, ...]` in the order of a layout of two arrays."""
    x = np.asarray(x)
    order = _ORDERS.get(kv_layout, (1, 2, 0))
    return x.transpose(*order, *range(3, x.ndim))


def in_layout(kv_layout: str, k_pages: Any, v_pages: Any) -> tuple[Any, Any]:
    """(k_pages, v_pages) of a layout, from pages `[num_kv_heads, num_pages, page_size, D]`."""
    k, v = of_heads(k_pages, kv_layout), of_heads(v_pages, kv_layout)
    if kv_layout == "2NHD":
        return np.stack([k, v], axis=1), None
    if kv_layout == "NH2D":
        return np.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[3]), None
    return k, v


def call_in_layout(kv_layout: str, arrays: tuple) -> dict[str, Any]:
    """The first arguments of an entry by name, in a layout; scales of tokens may be at the end.

    Args:
        arrays: q, k_pages, v_pages, block_tables, seq_lens, perhaps cu_q_lens, perhaps two scales.
    """
    q, k_pages, v_pages, tables, lens, *rest = arrays
    k_pages, v_pages = in_layout(kv_layout, k_pages, v_pages)
    call = dict(q=q, k_pages=k_pages, v_pages=v_pages, block_tables=tables, seq_lens=lens)
    if len(rest) % 2:
        call["cu_q_lens"] = rest.pop(0)
    for name, scale in zip(("k_scales", "v_scales"), rest, strict=False):
        call[name] = of_heads(scale, kv_layout) if np.ndim(scale) else scale
    return call


def layer_in_layout(kv_layout: str, layer: Any) -> dict[str, Any]:
    """The fields of a layer in `"HPND"`, in another layout."""
    k_pages, v_pages = in_layout(kv_layout, layer.k_pages, layer.v_pages)
    scales = {
        name: x if x is None or not x.ndim else of_heads(x, kv_layout)
        for name, x in (("k_scales", layer.k_scales), ("v_scales", layer.v_scales))
    }
    return dict(k_pages=k_pages, v_pages=v_pages, **scales)
