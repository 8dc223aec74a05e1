"""The examples of README and docs run as they stand and print what stands below them."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_cases import TOLERANCE
from tests.support.attention_oracle import relative_error
from tests.support.plain_model import greedy_tokens

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:\n?```text\n(.*?)```\n)?", re.DOTALL)


def run_examples(text: str, names: dict, capsys) -> int:
    """Run the examples of a document in order; return how many had output to compare."""
    compared = 0
    for code, output in EXAMPLE.findall(text):
        exec(compile(code, "example", "exec", dont_inherit=True), names)
        printed = capsys.readouterr().out
        assert printed == output, code
        compared += bool(output)
    return compared


@pytest.fixture
def names(monkeypatch):
    """The namespace that all examples share; paths in them are relative to the checkout."""
    monkeypatch.chdir(ROOT)
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look their module up
    return vars(module)


def test_the_examples_print_what_stands_below_them(names, capsys):
    text, _, _ = README.partition("## Serving a model")
    assert run_examples(text, names, capsys) == 2
    pp.check_page_table(names["table"])
    check_attention_examples(names, capsys)
    pp.check_page_table(names["table"])


def test_the_serving_example_prints_what_stands_below_it(names, capsys):
    assert run_examples(README.partition("## Serving a model")[2], names, capsys) == 1
    assert names["engine"].idle


@pytest.mark.usefixtures("exact_products")
def test_the_engine_examples_serve_a_plain_model_and_train_the_demo_model(names, capsys):
    text = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    first, _, rest = text.partition("## A round of GRPO")
    assert run_examples(first, names, capsys) == 1
    model, params = names["model"], names["params"]
    for output in names["outputs"]:
        expected = greedy_tokens(model, params, output.prompt_token_ids, 8)
        assert output.outputs[0].token_ids == expected

    run_examples(rest, names, capsys)
    rollouts, lens = names["rollouts"], names["rollouts"].lens
    assert rollouts.mask.sum() == lens.sum() > 0
    by_engine = {"sampled": rollouts.logprobs, "scored": names["old_logprobs"]}
    by_loss = names["completion_logprobs"](names["old_params"], rollouts)
    for name, logprobs in by_engine.items():
        np.testing.assert_allclose(logprobs, by_loss, atol=1e-4, err_msg=name)
    new = names["completion_logprobs"](names["params"], rollouts)
    assert not np.allclose(new, by_loss, atol=1e-2)
    assert names["mean_rewards"][-1] > names["mean_rewards"][0] + 0.1
    assert names["train_step"]._cache_size() == 1

    assert names["engine"].idle
    names["engine"].check()
    assert names["text"].strip() and len(names["both"]) == 2
    check_async_example(names)


def check_async_example(names):
    """Check that clients of `AsyncEngine` got what the engine itself returns."""
    prompts = [*names["prompts"], "JULIET:\n"]
    outputs = names["engine"].generate(prompts, names["greedy"], progress=False)
    texts = [output.outputs[0].text for output in outputs]
    assert names["words"] == [text.split()[:5] for text in texts[:2]]
    assert names["text_of_thread"] == texts[2]
    expected = names["engine"].score([[1, 2, 3]], [[4, 5]])
    np.testing.assert_allclose(names["scores"], expected, atol=1e-4)
    names["engine"].check()


def test_the_example_of_a_chat_template_prints_what_stands_below_it(names, capsys):
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert run_examples(text, names, capsys) == 1


def test_the_plain_model_of_the_docs_is_that_of_the_tests():
    text = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    source = (ROOT / "tests" / "support" / "plain_model.py").read_text(encoding="utf-8")
    model, _, dense = (code.strip() for code, _ in EXAMPLE.findall(text)[:3])
    assert source.startswith(model + "\n") and "\n" + dense + "\n" in source


def check_attention_examples(names, capsys):
    """Run the examples of docs/attention.md, which continue README's, and check what they say."""
    q, cache, cu_q_lens = names["q"], names["cache"], names["cu_q_lens"]
    k, v, slots = (names[name] for name in ("k", "v", "slots"))
    newest = cu_q_lens[1:] - 1
    assert_close(names["out"][newest], pp.paged_attention(q[newest], *cache, sliding_window=64))
    run_examples((ROOT / "docs" / "attention.md").read_text(encoding="utf-8"), names, capsys)

    empty = jax.tree.map(jnp.zeros_like, names["layer"])
    exact = pp.write_kv(empty, k, v, slots)
    exact = pp.ragged_paged_attention(q, exact.k_pages, exact.v_pages, *cache[2:], cu_q_lens)
    assert relative_error(names["rounded"], exact) <= 0.02

    # The second guess does not see the first, which lies before it.
    verified, cu_tree_lens = names["verified"], names["cu_tree_lens"]
    first_guess = pp.paged_attention(q[1:12:3], *cache[:3], cache[3] - 1)
    assert_close(verified[1::3], first_guess)
    causal = pp.ragged_paged_attention(q[:12], *cache, cu_tree_lens)
    assert relative_error(verified[2::3], causal[2::3]) > 0.01

    shared = names["table"].block_tables
    assert names["ok"].all() and (shared[:3, :6] == shared[0, :6]).all()
    plain = pp.paged_attention(q[:4], *names["cache"])
    for name in ("cascaded", "invariant", "moved"):
        assert_close(names[name], plain)


def assert_close(actual, expected):
    assert relative_error(actual, expected) <= TOLERANCE["float32"]


def test_the_quick_start_is_two_commands_that_show_progress():
    section = README.split("## Quick start")[1].split("\n## ")[0]
    run, test = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert "-m models.generate --prompt" in run and "-m pytest" in test
    assert " -q" not in run + test


def test_the_readme_is_one_page():
    assert len(README.splitlines()) <= 150
