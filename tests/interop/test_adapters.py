"""Adapters whose packages pin another JAX, against float64 NumPy, on arrays as callers have."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.interop import levanter, sglang_jax, tokamax
from tests.support.attention_cases import Case
from tests.support.attention_oracle import attend, relative_error
from tests.support.rpa_cases import RpaCase, assert_equal_results, expected

RPA = RpaCase(padding=0, dead_rows=0)
SINKS = np.float32([0.5, -1.0, 2.0, 0.0])
INVALID = 2_000_000


def stand_in(monkeypatch, name: str, **attributes: Any) -> types.ModuleType:
    """A module in place of one of a package."""
    parts = name.split(".")
    for i in range(len(parts)):
        module = types.ModuleType(".".join(parts[: i + 1]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(attributes)
    return module


def test_tokamax_takes_the_defaults_of_its_keywords_and_no_other_value():
    arrays, options = RPA.make(), dict(sm_scale=0.3, sliding_window=9)
    defaults = dict(kv_layout="head_along_sublane", attention_scope="full", cp_group_size=None)
    how = options | defaults | dict(return_lse=True, cp_rank=None, q_scale=1.0, decode_query_size=2)
    results = tokamax.ragged_paged_attention(**arrays, **how)
    assert_equal_results(results, expected(arrays, **options), 2e-5)
    for name in ("kv_layout", "attention_scope", "cp_group_size", "cp_rank"):
        with pytest.raises(ValueError, match=f"{name}=2 must be|{name}='2' must be"):
            tokamax.ragged_paged_attention(**arrays, **{name: 2})


@pytest.mark.parametrize(
    ("scale", "given", "meant"),
    [
        (0.1, dict(sliding_window=0, soft_cap=0, attention_sink=SINKS), dict(sinks=SINKS)),
        (0.1, dict(sliding_window=9, causal=1), dict(sliding_window=9)),
        (jnp.float32(0.1), dict(soft_cap=2.0, causal=0), dict(soft_cap=2.0, use_causal_mask=False)),
    ],
    ids=["sinks", "window", "traced scale"],
)
def test_sglang_jax_has_the_pages_of_all_rows_in_one_list(scale, given, meant):
    arrays = RPA.make()
    counts = -(-arrays["kv_lens"] // RPA.page_size)
    rows = zip(arrays["page_indices"].reshape(len(counts), -1), counts, strict=True)
    call = arrays | dict(
        kv_cache_fused=arrays["kv_cache"],
        page_indices=np.pad(np.concatenate([row[:count] for row, count in rows]), (0, 7)),
        cu_kv_lens=np.int32([0, *np.cumsum(counts * RPA.page_size)]),
    )
    del call["kv_cache"]
    how = dict(sm_scale=scale, max_pages_per_seq=4, **given)
    results = jax.jit(lambda call: sglang_jax.ragged_paged_attention(**call, **how))(call)
    assert_equal_results(results, expected(arrays, sm_scale=0.1, **meant), 2e-5)
    for name in ("custom_mask", "xai_temperature_len"):
        with pytest.raises(NotImplementedError, match=name):
            sglang_jax.ragged_paged_attention(**call, **{name: 1})


@dataclasses.dataclass
class Named:
    """Haliax' NamedArray, as far as it is used."""

    array: Any
    axes: tuple[str, ...] = ()

    def rearrange(self, axes: tuple[str, ...]) -> Named:
        return Named(self.array.transpose([self.axes.index(name) for name in axes]), axes)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_levanter_has_invalid_rows_at_the_end_and_axes_in_any_order(soft_cap, monkeypatch):
    stand_in(monkeypatch, "haliax", named=Named)
    case = Case(seq_lens=(17, 5, 1, 30), q_lens=(1, 5, 1, 13), pages_per_seq=5, num_tokens=24)
    q, k, v, table, lens, offsets = arrays = case.make()
    pages = np.moveaxis(np.stack([k, v], 1).reshape(4, *k.shape[1:]), 0, 2)
    table = np.where(np.arange(5) * 8 < lens[:, None], table, INVALID).astype(np.int32)
    table = np.pad(table, ((0, 2), (0, 0)), constant_values=-1)
    rows = (np.pad(x, (0, 2), constant_values=INVALID) for x in (lens, offsets))
    axes = ("head_size", "q_heads_per_group", "kv_head", "position")
    queries = Named(jnp.asarray(q.reshape(len(q), 2, 2, -1).transpose()), axes)
    lens, offsets = map(Named, rows)
    how = dict(sm_scale=0.2, soft_cap=soft_cap)
    call = queries, Named(jnp.asarray(pages)), lens, Named(table), offsets, jnp.int32(4)
    out = levanter.ragged_paged_attention(*call, **how)
    assert out.axes == axes
    found, owned = np.asarray(out.array).transpose().reshape(q.shape), sum(case.q_lens)
    assert relative_error(found[:owned], attend(*arrays, **how)[0][:owned]) < 1e-5


def test_levanter_writes_the_valid_tokens():
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((7, 4, 6, 8), np.float32)
    new_k, new_v = rng.standard_normal((2, 5, 3, 8), np.float32)
    at, slots = np.int32([6, 0, 3, INVALID, -1]), np.int32([3, 0, 1, INVALID, -1])
    for count in (3, 5):
        call = pages, at, slots, new_k, new_v, jnp.int32(count)
        found = levanter.kv_update_unified_prefix(*map(jnp.asarray, call))
        meant = pages.copy()
        meant[at[:3], slots[:3], 0::2], meant[at[:3], slots[:3], 1::2] = new_k[:3], new_v[:3]
        np.testing.assert_array_equal(found, meant)


def test_install_replaces_the_functions_of_levanter_and_of_sglang_jax(monkeypatch):
    names = ("attention", "kv_cache")
    layers = stand_in(monkeypatch, "levanter.layers", **{x: types.ModuleType(x) for x in names})
    levanter.install()
    assert layers.attention.ragged_paged_attention is levanter.ragged_paged_attention
    assert layers.kv_cache.kv_update_unified_prefix is levanter.kv_update_unified_prefix
    backend = types.ModuleType("flashattention_backend")
    stand_in(monkeypatch, "sgl_jax.srt.layers.attention", flashattention_backend=backend)
    sglang_jax.install(max_pages_per_seq=4)
    installed = backend.ragged_paged_attention_v3
    assert installed.func is sglang_jax.ragged_paged_attention
    assert installed.keywords == dict(max_pages_per_seq=4)
