"""The entries of attention over raw arrays, in the order of axes of JAX's op unless one is named.

Oracles and cases have arrays; a layer wraps them here. A name of an implementation may end in
"_interpret".
"""

from functools import wraps
from typing import Any

import pallas_paged as pp


def by(implementation: Any) -> dict[str, Any]:
    """The options that choose an implementation."""
    if not isinstance(implementation, str) or not implementation.endswith("_interpret"):
        return dict(implementation=implementation)
    return dict(implementation=implementation.removesuffix("_interpret"), interpret=True)


def _with_layer(entry: Any) -> Any:
    @wraps(entry, assigned=("__name__",))
    def attend(
        q: Any,
        k_pages: Any,
        v_pages: Any,
        *arrays: Any,
        k_scales: Any = None,
        v_scales: Any = None,
        kv_layout: Any = "HPND",
        **options: Any,
    ) -> Any:
        if "implementation" in options:
            options |= by(options["implementation"])
        if entry is not pp.mla_attention:
            layer = pp.LayerKV(k_pages, v_pages, k_scales, v_scales, kv_layout=kv_layout)
            return entry(q, layer, *arrays, **options)
        # q has all elements of K, and V, of which only the size is used, are its first.
        size = v_pages.shape[-1]
        layer = pp.LayerKV(k_pages, k_scales=k_scales, kv_layout=kv_layout, v_head_dim=size)
        return entry(q[..., :size], q[..., size:], layer, *arrays, **options)

    del attend.__wrapped__  # its signature is not that of the entry
    return attend


paged_attention = _with_layer(pp.paged_attention)
ragged_paged_attention = _with_layer(pp.ragged_paged_attention)
cascade_attention = _with_layer(pp.cascade_attention)
mla_attention = _with_layer(pp.mla_attention)
