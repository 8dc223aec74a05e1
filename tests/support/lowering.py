"""Tests that lower many combinations of options for a GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.marks import slow

CUSTOM_CALL = re.compile(r"custom_call @mosaic_gpu\w*\((.*?)\)")


def pairs(row: dict[str, Any]) -> set[tuple]:
    """Every two settings of a row."""
    return set(itertools.combinations(row.items(), 2))


def pairwise(**levels: Sequence) -> list[dict[str, Any]]:
    """A short list of rows such that any two levels of two factors are together in some row."""
    rng = np.random.default_rng(0)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(levels, 2)
        for x, y in itertools.product(levels[a], levels[b])
    }
    rows = []
    while missing:
        wanted = dict(min(missing, key=repr))
        candidates = [
            {name: wanted.get(name, xs[rng.integers(len(xs))]) for name, xs in levels.items()}
            for _ in range(200)
        ]
        rows.append(max(candidates, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows


def few_with_every_level(rows: Sequence[dict[str, Any]]) -> list:
    """The rows for a test: a few that together have every level of every factor; slow ones."""
    missing, few = {level for row in rows for level in row.items()}, []
    while missing:
        few.append(max(rows, key=lambda row: len(missing & row.items())))
        missing -= few[-1].items()
    return [*few, *slow(row for row in rows if row not in few)]


def named(row: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in row.items() if value not in (None, False))


def options_of(row: dict[str, Any], num_q_heads: int) -> dict[str, Any]:
    per_head = np.ones(num_q_heads, np.float32)
    options = {name: row[name] for name in ("soft_cap", "sliding_window", "return_lse")}
    for name in ("alibi_slopes", "sinks"):
        options[name] = per_head if row[name] else None
    return options
