"""The examples of README and docs run as they stand and print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_paged as pp
from tests.support.attention_cases import TOLERANCE
from tests.support.attention_oracle import relative_error

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"```python\n(.*?)```\n(?:\n?```text\n(.*?)```\n)?", re.DOTALL)


def run_examples(text: str, names: dict, capsys) -> int:
    """Run the examples of a document in order; return how many had output to compare."""
    compared = 0
    for code, output in EXAMPLE.findall(text):
        exec(compile(code, "example", "exec"), names)
        printed = capsys.readouterr().out
        assert printed == output, code
        compared += bool(output)
    return compared


@pytest.fixture
def names(monkeypatch):
    """The namespace that all examples share; paths in them are relative to the checkout."""
    monkeypatch.chdir(ROOT)
    return {"__name__": "readme"}


def test_the_examples_print_what_stands_below_them(names, capsys):
    text, _, _ = README.partition("## Serving a model")
    assert run_examples(text, names, capsys) == 2
    pp.check_page_table(names["table"])
    check_attention_examples(names, capsys)
    pp.check_page_table(names["table"])


def test_the_serving_examples_print_what_stands_below_them(names, capsys):
    assert run_examples(README.partition("## Serving a model")[2], names, capsys) == 1
    run_examples((ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), names, capsys)
    assert names["engine"].idle
    assert names["text"].strip() and len(names["both"]) == 2


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
