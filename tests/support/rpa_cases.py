"""Calls of ragged paged attention "v3", and the caches that they are made on."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support.attention_oracle import attend, relative_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class RpaCase:
    """A batch of rows of these lengths, followed by dead rows and padding tokens full of NaN."""

    q_lens: tuple[int, ...] = (1, 5, 1, 13)
    kv_lens: tuple[int, ...] = (17, 5, 1, 30)
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 8
    dtype: str = "float32"
    kv_dtype: str | None = None
    dead_rows: int = 2
    padding: int = 4

    def make(self, seed: int = 0) -> dict[str, np.ndarray]:
        """The arrays of the call by name, with the cache `[P, N, 2 * Hkv, D]`."""
        rng = np.random.default_rng(seed)
        tokens = sum(self.q_lens)
        rows = len(self.q_lens)
        pages_per_seq = -(-max(self.kv_lens) // self.page_size) + 1
        num_pages = rows * pages_per_seq + 3
        table = rng.permutation(num_pages)[: rows * pages_per_seq].reshape(rows, -1)
        used = -(-np.array(self.kv_lens) // self.page_size)
        for row, count in enumerate(used):
            table[row, count:] = (-1, 2_000_000, num_pages)[row % 3]
        dead = np.full((self.dead_rows, pages_per_seq), table[0, 0])  # another row's page

        def normal(*shape: int) -> Any:
            x = rng.standard_normal(shape, np.float32)
            return x.astype(jnp.dtype(self.kv_dtype or self.dtype))

        heads = self.num_kv_heads, self.head_dim
        q = rng.standard_normal((tokens, self.num_q_heads, self.head_dim), np.float32)
        arrays: dict[str, Any] = dict(
            queries=q.astype(jnp.dtype(self.dtype)),
            keys=normal(tokens, *heads),
            values=normal(tokens, *heads),
        )
        for name, x in arrays.items():
            arrays[name] = np.pad(x, ((0, self.padding), (0, 0), (0, 0)))
            if arrays[name].dtype != np.int8:
                arrays[name][tokens:] = np.nan
        ends = np.cumsum(self.q_lens)
        return arrays | dict(
            kv_cache=normal(num_pages, self.page_size, 2 * self.num_kv_heads, self.head_dim),
            kv_lens=np.int32([*self.kv_lens, *[2_000_000] * self.dead_rows]),
            page_indices=np.int32([*table, *dead]).ravel(),
            cu_q_lens=np.int32([0, *ends, *[2_000_000] * self.dead_rows]),
            distribution=np.int32([0, 1, rows]),
        )


def expected(
    arrays: dict[str, np.ndarray],
    *,
    sm_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """What the oracle says of a call: float64 `(out, cache, lse)`, the new K/V in the cache."""
    queries, keys, values, cache = (np.array(x).astype(np.float64) for x in [*arrays.values()][:4])
    num_rows, page_size = arrays["distribution"][2], cache.shape[1]
    lens, offsets = arrays["kv_lens"][:num_rows], arrays["cu_q_lens"][: num_rows + 1]
    table = np.reshape(arrays["page_indices"], (len(arrays["kv_lens"]), -1))[:num_rows]
    for row in range(num_rows if update_kv_cache else 0):
        tokens = np.arange(offsets[row], offsets[row + 1])
        places = lens[row] - offsets[row + 1] + tokens
        at = table[row, places // page_size], places % page_size
        cache[*at, 0::2], cache[*at, 1::2] = keys[tokens], values[tokens]
    k_pages, v_pages = (np.moveaxis(cache[:, :, i::2], 2, 0) for i in (0, 1))
    call = queries, k_pages * k_scale, v_pages * v_scale, table, lens, offsets
    out, lse = attend(*call, sm_scale=sm_scale, causal=use_causal_mask, **options)
    return out, cache, lse


def assert_equal_results(actual: Any, meant: Any, tolerance: float) -> None:
    """Compares out and the cache, and lse if it is there; the cache must be equal."""
    out, cache, *lse = (np.asarray(x).astype(np.float64) for x in actual)
    np.testing.assert_array_equal(cache.reshape(meant[1].shape), meant[1])
    assert relative_error(out, meant[0]) < tolerance
    for x in lse:
        finite = np.isfinite(meant[2])
        np.testing.assert_array_equal(np.isfinite(x), finite)
        assert relative_error(x[finite], meant[2][finite]) < tolerance
