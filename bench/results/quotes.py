"""Sentences of README and docs that quote results; names in braces are those of `store.values`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from bench.results.store import README_SHAPES, Store, values

_ROW = "**{{row{i}_ours:.1f}}** | {{row{i}_jax_op:.1f}} | {{row{i}_xla_gather:.1f}}"
_README_ROWS = [
    f"| {shape.rpartition('/')[0]} | {{row{i}_floor:.1f}} | {_ROW.format(i=i)}"
    f" | {{row{i}_cudnn_paged:.1f}} |"
    for i, shape in enumerate(README_SHAPES)
]
QUOTES: dict[str, list[str]] = {
    "README.md": [
        *_README_ROWS,
        "attention scales ({context_min:.2f} to {context_max:.2f} times on two), a decode step of"
        " 8B less ({step_8b_1:.2f} to {step_8b_64:.2f} times)",
    ],
    "docs/parallel.md": [
        "attention is {heads_min:.2f} to {heads_max:.2f} times as fast with its KV heads over the"
        " GPUs, and {context_min:.2f} to {context_max:.2f} times with the pages of each row over"
        " them. A decode step of 8B is {step_8b_1:.2f} (1 row) and {step_8b_64:.2f} times (64"
        " rows) as fast, serving 128 requests {serving_max:.2f} times",
    ],
    "docs/kernels.md": ["reach {prompts_min:.0f} to {prompts_max:.0f} TFLOP/s on an H200"],
    "docs/tuning.md": [
        "Mosaic has [{prompts_min:.0f} to {prompts_max:.0f} TFLOP/s](results.md#prompts)",
        "512 costs {fixed_512:.0f}%, 1024 {fixed_1024:.0f}%",
    ],
    "docs/server.md": ["a first token comes {http_more_ms:.0f} ms later"],
}
_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")


def renewed(store: Store, root: Path) -> dict[str, str]:
    """The files with the numbers of today, by name.

    Raises:
        ValueError: a file does not have a sentence.
    """
    found = values(store)
    files = {}
    for name, templates in QUOTES.items():
        text = (root / name).read_text()
        for template in templates:
            match = _find(template, text, name)
            fields = zip(_FIELD.finditer(template), match.groups(), strict=True)
            sentence, place = match[0], 0
            for i, (field, number) in enumerate(fields, 1):
                start = match.start(i) - match.start() + place
                new = format(found[field[1]], field[2] or "")
                sentence = sentence[:start] + new + sentence[start + len(number) :]
                place += len(new) - len(number)
            text = text[: match.start()] + sentence + text[match.end() :]
        files[name] = text
    return files


def quoted(name: str, text: str) -> Iterator[tuple[int, int]]:
    """Where the text of a file has quoted numbers: (start, end) of each sentence."""
    for template in QUOTES.get(name, ()):
        yield _find(template, text, name).span()


def _find(template: str, text: str, name: str) -> re.Match[str]:
    """The place of a sentence, whatever its numbers and the ends of its lines are."""
    parts = _FIELD.split(template)[::3]
    pattern = r"(\d[\d.]*)".join(r"\s+".join(map(re.escape, re.split(r"\s+", x))) for x in parts)
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{name} does not have the sentence {template!r}")
    return match
