"""Tests that lower many combinations of options for a GPU."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.marks import slow

CUSTOM_CALL = re.compile(r"custom_call @mosaic_gpu\w*\((.*?)\)")


def pairwise(**levels: Sequence) -> list[dict[str, Any]]:
    """A short list of rows such that any two levels of two factors are together in some row."""
    rng = np.random.default_rng(0)
    counts = [len(values) for values in levels.values()]
    missing = {  # [level, level] of every two factors
        (a, b): np.ones((counts[a], counts[b]), bool)
        for a, b in itertools.combinations(range(len(counts)), 2)
    }
    rows = []
    while any(pairs.any() for pairs in missing.values()):
        (a, b), pairs = max(missing.items(), key=lambda item: item[1].sum())
        candidates = rng.integers(0, counts, (1000, len(counts)))
        candidates[:, [a, b]] = rng.permutation(np.argwhere(pairs))[0]
        new = sum(x[candidates[:, i], candidates[:, j]] * 1 for (i, j), x in missing.items())
        best = candidates[np.argmax(new)]
        for (i, j), x in missing.items():
            x[best[i], best[j]] = False
        rows.append({name: xs[i] for i, (name, xs) in zip(best, levels.items(), strict=True)})
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
