"""Levanter's attention and its write of the cache: the same numbers by this library."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_cases import Case
from tests.support.attention_oracle import relative_error

attention = pytest.importorskip("levanter.layers.attention")

import haliax as hax  # noqa: E402
from levanter.layers import kv_cache  # noqa: E402

from pallas_paged.interop import levanter as ours  # noqa: E402

INVALID = 2_000_000
CASE = Case(seq_lens=(17, 5, 1, 30), q_lens=(1, 5, 1, 13), pages_per_seq=5, num_tokens=24)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention(dtype, soft_cap):
    q, k, v, table, lens, offsets = CASE.make(poison=False)
    pages = np.stack([k, v], 1).reshape(4, *k.shape[1:])
    table = np.where(np.arange(5) * 8 < lens[:, None], table, INVALID)
    table = np.pad(table, ((0, 2), (0, 0)), constant_values=-1).astype(np.int32)
    lens, offsets = (np.pad(x, (0, 2), constant_values=INVALID) for x in (lens, offsets))
    axes = ("position", "kv_head", "q_heads_per_group", "head_size")
    of_pages, pages = ("page", "slot", "kv_head", "head_size"), np.moveaxis(pages, 0, 2)
    arguments = (
        hax.named(jnp.asarray(q, dtype).reshape(len(q), 2, 2, -1), axes),
        hax.named(jnp.asarray(pages, dtype), of_pages),
        hax.named(jnp.asarray(lens), "seq"),
        hax.named(jnp.asarray(table), ("seq", "page")),
        hax.named(jnp.asarray(offsets), "seq"),
        jnp.int32(4),
    )
    options = dict(sm_scale=0.2, soft_cap=soft_cap)
    meant = attention.ragged_paged_attention(*arguments, **options)
    actual = ours.ragged_paged_attention(*arguments, **options)
    assert actual.axes == meant.axes and actual.dtype == meant.dtype
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert relative_error(actual.array, np.float64(meant.array)) < tolerance


def test_writing():
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((7, 4, 6, 8), np.float32)
    k, v = rng.standard_normal((2, 5, 3, 8), np.float32)
    at, slots = jnp.int32([6, 0, 3, INVALID, -1]), jnp.int32([3, 0, 1, INVALID, -1])
    arguments = at, slots, k, v, jnp.int32(3)
    actual = ours.kv_update_unified_prefix(jnp.asarray(pages), *arguments)
    meant = kv_cache.kv_update_unified_prefix(jnp.asarray(pages), *arguments)
    np.testing.assert_array_equal(actual, meant)


def test_install_replaces_both_functions(monkeypatch):
    for module, name in (
        (attention, "ragged_paged_attention"),
        (kv_cache, "kv_update_unified_prefix"),
    ):
        monkeypatch.setattr(module, name, None)
    ours.install()
    assert attention.ragged_paged_attention is ours.ragged_paged_attention
    assert kv_cache.kv_update_unified_prefix is ours.kv_update_unified_prefix
