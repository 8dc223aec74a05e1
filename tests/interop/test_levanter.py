"""Levanter's attention and its engine: the same numbers and the same tokens on this library."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_cases import Case
from tests.support.attention_oracle import relative_error

attention = pytest.importorskip("levanter.layers.attention")

import haliax as hax  # noqa: E402
from levanter.inference.engine import (  # noqa: E402
    InferenceEngine,
    InferenceEngineConfig,
    Request,
)
from levanter.inference.jit_scheduler import SeqDecodingParams  # noqa: E402
from levanter.layers import kv_cache  # noqa: E402
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel  # noqa: E402

from pallas_paged.interop import levanter as ours  # noqa: E402

INVALID = 2_000_000
CASE = Case(seq_lens=(17, 5, 1, 30), q_lens=(1, 5, 1, 13), pages_per_seq=5, num_tokens=24)
PROMPTS = ([5, 2, 9, 4, 1, 7, 7], [3, 1], [8, 8, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])


@pytest.fixture
def theirs(monkeypatch):
    """Undoes `install` after the test, and drops the programs with it."""
    monkeypatch.setattr(attention, "ragged_paged_attention", attention.ragged_paged_attention)
    monkeypatch.setattr(kv_cache, "kv_update_unified_prefix", kv_cache.kv_update_unified_prefix)
    yield
    jax.clear_caches()


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


def completions(model):
    sizes = dict(max_seq_len=64, max_pages=64, max_seqs=4, page_size=8)
    limits = dict(max_queued_tokens=64, max_seqs_in_prefill=4)
    config = InferenceEngineConfig(**sizes, **limits, compute_dtype=jnp.float32)
    engine = InferenceEngine.from_model_with_config(model=model, tokenizer=None, config=config)
    requests = [
        Request(
            prompt_tokens=list(prompt),
            request_id=index,
            n_generations=1 + index % 2,
            decode_params=SeqDecodingParams(
                max_num_tokens=jnp.int32(len(prompt) + 16),
                stop_tokens=None,
                temperature=jnp.float32(0.8 * (index % 2)),
                top_p=jnp.float32(1),
                key=jax.random.PRNGKey(index),
            ),
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    return engine.generate(requests).tokens


def test_the_engine_generates_the_same_tokens(theirs):
    sizes = dict(max_seq_len=64, hidden_dim=64, intermediate_dim=128)
    config = LlamaConfig(**sizes, num_layers=2, num_heads=4, num_kv_heads=2)
    model = LlamaLMHeadModel.init(hax.Axis("vocab", 97), config, key=jax.random.key(0))
    model = jax.tree.map(lambda x: 4 * x if jnp.issubdtype(x.dtype, jnp.floating) else x, model)
    meant = completions(model)
    assert [len(x) for x in meant] == [16] * 4
    jax.clear_caches()
    ours.install()
    assert completions(model) == meant
