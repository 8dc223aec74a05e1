"""Keywords of JAX's own paged attention, which has other names for some arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat, TypedDict

from jax.typing import ArrayLike


class JaxKeywords(TypedDict, total=False):
    """Keywords of `jax.experimental.pallas.ops.gpu.paged_attention` with other names here."""

    lengths: ArrayLike
    k_scales_pages: ArrayLike | None
    v_scales_pages: ArrayLike | None
    attn_logits_soft_cap: SupportsFloat | None


_OUR_NAMES = {
    "lengths": "seq_lens",
    "k_scales_pages": "k_scales",
    "v_scales_pages": "v_scales",
    "attn_logits_soft_cap": "soft_cap",
}


def with_jax_keywords(given: dict[str, Any], jax_keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with the arguments that came under the keywords of JAX's op."""
    for name, value in jax_keywords.items():
        if name not in _OUR_NAMES:
            raise TypeError(f"paged_attention() got an unexpected keyword argument {name!r}")
        ours = _OUR_NAMES[name]
        if given[ours] is not None:
            raise TypeError(f"paged_attention() got {ours} twice, the second time as {name}")
        given = given | {ours: value}
    return given
