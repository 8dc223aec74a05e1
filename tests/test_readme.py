"""The README's examples run as they stand, and its quick start keeps its form."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import pallas_paged as pp
from tests.support.attention_cases import TOLERANCE
from tests.support.attention_oracle import relative_error

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_examples_run_in_one_go(capsys):
    names = {"__name__": "readme"}
    for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(example, "README.md", "exec"), names)
    assert capsys.readouterr().out == "[100 100 100 100] tokens; 228 of 256 pages are free\n"
    assert names["text"].strip() and len(names["both"]) == 2
    q, cache = names["q"], names["cache"]
    np.testing.assert_array_equal(names["positions"], [100, 100, 100, *range(100, 130)])
    assert (names["slots"] < names["pool"].k_pages[0][0, ..., 0].size).all()  # all are written
    newest = jnp.array([0, 1, 2, 32])
    decoded = pp.paged_attention(q[newest], *cache, sliding_window=64)
    assert_close(names["mixed"][newest], decoded)
    lens = cache[-1] - 1  # the second guess does not see the first, which lies before it
    first_guess = pp.paged_attention(q[1:12:3], *cache[:-1], lens)
    assert_close(names["verified"][1::3], first_guess)
    causal = pp.ragged_paged_attention(q[:12], *cache, names["threes"])
    assert relative_error(names["verified"][2::3], causal[2::3]) > 0.01
    assert_close(names["alone"], pp.paged_attention(q[:4], *cache))
    empty = jnp.zeros_like(cache[0])
    pages = pp.write_kv(empty, empty, names["k"], names["v"], names["slots"])
    exact = pp.ragged_paged_attention(q, *pages, *cache[2:], names["cu_q_lens"])
    assert relative_error(names["rounded"], exact) <= 0.02


def assert_close(actual, expected):
    assert relative_error(actual, expected) <= TOLERANCE["float32"]


def test_the_quick_start_is_two_commands():
    section = README.split("## Quick start")[1].split("\n## ")[0]
    run, test = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert "-m models.generate --prompt" in run and "-m pytest" in test
