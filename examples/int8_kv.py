"""int8 K/V pages beside bf16 ones: run `python examples/int8_kv.py`.

The same random K/V are written to pages of f32, bf16 and int8, and the same queries attend to them.
int8 pages have an f32 scale for each token and head; `write` quantizes and `attend` reads them, so
the program is the same for all dtypes.

Prints for bf16 and int8 the bytes of a token of a layer, and how far the attention is from that of
f32 pages: the norm of the difference over that of the result.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallas_paged as pp

HQ, HKV, D = 8, 2, 128


@partial(jax.jit, donate_argnames="cache")
def write_and_attend(cache: pp.PagedKVCache, q, k, v, cu_q_lens):
    """Return attention [B, HQ, D] of the last token of each sequence, and the cache."""
    cache, ok = cache.extend(jnp.diff(cu_q_lens))
    cache = cache.write(0, k, v, cu_q_lens)
    return cache.attend(0, q), ok, cache


def main(length: int = 500) -> dict[str, tuple[float, float]]:
    lens = [length, length // 2, length // 4]
    cu_q_lens = np.cumsum([0, *lens], dtype=np.int32)
    page_size, blocks = 16, [-(-n // 16) for n in lens]
    shapes = (len(lens), HQ, D), (sum(lens), HKV, D), (sum(lens), HKV, D)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    results, found = {}, {}
    for dtype in "float32", "bfloat16", "int8":
        cache = pp.PagedKVCache.create(
            **dict(num_pages=sum(blocks), page_size=page_size, max_seqs=3, pages_per_seq=blocks[0]),
            **dict(num_layers=1, num_kv_heads=HKV, head_dim=D, dtype=dtype),
        )
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(cache.pool))
        of_model = "float32" if dtype == "float32" else "bfloat16"  # int8 is of the pages only
        inputs = (x.astype(of_model) for x in (q, k, v))
        out, ok, cache = write_and_attend(cache, *inputs, cu_q_lens)
        assert ok.all()
        results[dtype] = out = out.astype("float32")
        exact = results["float32"]
        error = jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)
        found[dtype] = num_bytes / (sum(blocks) * page_size), float(error)
    for dtype in "bfloat16", "int8":
        print("{}: {:.0f} bytes a token, error {:.2%}".format(dtype, *found[dtype]))
    assert found["int8"][0] < 0.52 * found["bfloat16"][0]
    assert found["bfloat16"][1] < 0.01 and found["int8"][1] < 0.02
    return found


if __name__ == "__main__":
    main()
