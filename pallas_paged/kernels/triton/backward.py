"""The gradients of queries, pages and slopes by the Triton kernels."""

from __future__ import annotations

import jax

from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.triton.backward_keys import keys_gradient
from pallas_paged.kernels.triton.backward_queries import queries_gradient
from pallas_paged.kernels.triton.config import keys_config, queries_config


def gradients(
    arrays: Arrays,
    d_out: jax.Array,  # [T, Hq, D]
    lse: jax.Array,  # f32[T, Hq] in base 2; inf where nothing is seen
    delta: jax.Array,  # f32[T, Hq]
    names: tuple[str, ...],
    *,
    options: LogitOptions,
    interpret: bool,
) -> dict[str, jax.Array]:
    """Return the gradients of the fields `names`, as `kernels.backward` wants them."""
    num_tokens, _, head_dim = arrays.q.shape
    sizes = dict(
        head_dim=head_dim,
        itemsize=arrays.q.dtype.itemsize,
        rows=-(-num_tokens * arrays.group // arrays.num_seqs),
    )
    by_head = (num_tokens, arrays.num_kv_heads, arrays.group)
    of_rows = d_out, lse.reshape(by_head), delta.reshape(by_head)
    found: dict[str, jax.Array] = {}
    if "q" in names or "alibi_slopes" in names:
        d_q, d_slopes = queries_gradient(
            arrays,
            *of_rows,
            options=options,
            config=queries_config(**sizes),
            interpret=interpret,
        )
        found |= {"q": d_q} if d_slopes is None else {"q": d_q, "alibi_slopes": d_slopes}
    if "k_pages" in names or "v_pages" in names:
        pages = keys_gradient(
            arrays,
            *of_rows,
            options=options,
            config=keys_config(**sizes),
            interpret=interpret,
        )
        found |= dict(zip(("k_pages", "v_pages"), pages, strict=False))
    return found
