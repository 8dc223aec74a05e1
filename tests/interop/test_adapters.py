"""Adapters whose packages pin another JAX, against float64 NumPy, on arrays as callers have."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.engine import EngineConfig
from pallas_paged.interop import levanter, sglang_jax, tokamax
from tests.support.attention_cases import Case
from tests.support.attention_oracle import attend, relative_error
from tests.support.engine_calls import MODEL, SIZES, NumberTokenizer, weights
from tests.support.oracle import Oracle
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
    results = jax.jit(partial(tokamax.ragged_paged_attention, **how))(**arrays)
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
    for name in ("kv_cache_fused", "page_indices", "kv_lens", "cu_kv_lens"):
        with pytest.raises(ValueError, match=f"{name}=None must be an array"):
            sglang_jax.ragged_paged_attention(**call | {name: None})


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

    @jax.jit
    def run():
        out = levanter.ragged_paged_attention(*call, **how)
        assert out.axes == axes
        return out.array.transpose().reshape(q.shape)

    found, owned = np.asarray(run()), sum(case.q_lens)
    assert relative_error(found[:owned], attend(*arrays, **how)[0][:owned]) < 1e-5


def test_levanter_writes_the_valid_tokens():
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((7, 4, 6, 8), np.float32)
    new_k, new_v = rng.standard_normal((2, 7, 3, 8), np.float32)
    at = np.int32([6, 0, 3, INVALID, -1, 1, 2])
    slots = np.int32([3, 0, 1, INVALID, -1, 4, -1])  # the last ones are not of their pages
    for count in (3, 7):
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


class Tokenizer(NumberTokenizer):
    """Texts begin with token 1, end with 7 and are padded with 0."""

    def bos_id(self):
        return 1

    def eos_id(self):
        return 7

    def pad_id(self):
        return 0

    def dedup_bos_ids(self, token_ids):
        return token_ids[1:] if token_ids[:2] == [1, 1] else token_ids


@pytest.fixture
def rollout(monkeypatch):
    """Tunix's rollout worker of a model with random weights."""
    nnx = pytest.importorskip("flax.nnx")
    stand_in(monkeypatch, "tunix.generate.tokenizer_adapter", TokenizerAdapter=Tokenizer)
    base = types.SimpleNamespace(BaseRollout=object, RolloutOutput=types.SimpleNamespace)
    base.RolloutConfig = types.SimpleNamespace
    stand_in(monkeypatch, "tunix.rl.rollout", base_rollout=base)
    name = "pallas_paged.interop.tunix"
    rollout = importlib.import_module(name).EngineRollout(
        rollout_actor=nnx.Dict(tree=nnx.Dict(jax.tree.map(nnx.Param, weights(seed=1)))),
        tokenizer=Tokenizer(),
        model=MODEL,
        params_of=lambda actor: {key: x[...] for key, x in actor.tree.items()},
        engine_config=EngineConfig(**SIZES),
    )
    yield rollout
    rollout.close()
    del sys.modules[name]


def rollout_config(**options):
    options = dict(temperature=0.0, top_p=None, top_k=None, eos_tokens=None, seed=None) | options
    lengths = dict(max_tokens_to_generate=10, max_prompt_length=6)
    return types.SimpleNamespace(**dict(return_logprobs=False) | lengths | options)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.cpu_budget(8)  # an engine of its own
def test_tunix_gets_completions_with_their_stop_token_and_scores_by_the_current_weights(rollout):
    texts, prompts = ["1 2 3", "30", "4 5 6 8 9 10"], [[1, 2, 3], [1, 30], [1, 4, 5, 6, 8, 9, 10]]
    stopped = 0
    for seed in (1, 2, 3):
        for name, x in weights(seed=seed).items():  # as a trainer does
            rollout.model().tree[name][...] = x
        oracle = Oracle(MODEL, weights(seed=seed))
        output = rollout.generate(texts, rollout_config())
        found = [x.tolist() for x in output.tokens]
        for prompt, tokens in zip(prompts, found, strict=True):
            wanted = oracle.continue_(prompt, 10)
            assert tokens == wanted[: wanted.index(7) + 1 if 7 in wanted else 10]
            stopped += len(tokens) < 10
        assert output.text == [Tokenizer().decode(tokens) for tokens in found]
        padded = [[0] * (7 - len(prompt)) + prompt for prompt in prompts]
        assert output.left_padded_prompt_tokens.tolist() == padded
        completions = np.zeros((3, 12), np.int32)
        for row, tokens in zip(completions, found, strict=True):
            row[: len(tokens)] = tokens
        scores = rollout.get_per_token_logps(np.int32(padded), completions)
        for row, prompt, tokens in zip(np.asarray(scores), prompts, found, strict=True):
            logprobs = oracle.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
            wanted = logprobs[np.arange(len(tokens)), tokens]
            np.testing.assert_allclose(row[: len(tokens)], wanted, atol=1e-4)
            assert not row[len(tokens) :].any()
    assert stopped


@pytest.mark.cpu_budget(5)  # an engine of its own
def test_tunix_gets_the_same_samples_of_a_seed_and_their_log_probabilities(rollout):
    config = rollout_config(temperature=1.0, seed=jax.random.key(3), return_logprobs=True)
    first, again = (rollout.generate(["2 3"] * 2, config) for _ in range(2))
    assert [x.tolist() for x in first.tokens] == [x.tolist() for x in again.tokens]
    assert first.tokens[0].tolist() != first.tokens[1].tolist()
    assert [len(x) for x in first.logprobs] == [len(x) for x in first.tokens]
