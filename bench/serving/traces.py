"""Prompts and answers that repeat them, made of files of this repository.

Tokens are pieces of text as a byte-pair vocabulary begins with: a word or a number with the space
before it, signs, a new line with its indentation. A file ends after as many pieces as the answer
has. The traces of a run are those of its checkout: the files change, what is done to them does not.
"""

from __future__ import annotations

import itertools
import keyword
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

_ROOT = Path(__file__).parents[2]
_PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]+|\n *| ?[^\sA-Za-z0-9]+|[^\S\n]+")
_CHANGED = 8  # one line in as many gets a new one before it
RANDOM_TOKENS = 64  # different tokens of a random text, so few that a lookup finds most of them


class Trace(NamedTuple):
    """A prompt, and the text that a model says to it."""

    prompt: list[str]
    answer: list[str]


def traces_of(kind: str, num_traces: int, num_tokens: int) -> list[Trace]:
    """Return traces whose prompt and answer have about, and exactly, this number of tokens.

    Args:
        kind: of `KINDS`.
        num_traces: of different files, as long as there are enough of them.
        num_tokens: of an answer.
    """
    found = itertools.islice(KINDS[kind](num_tokens), num_traces)
    return [Trace(prompt, answer[:num_tokens]) for prompt, answer in found]


def token_ids(
    traces: Sequence[Trace], vocab_size: int, length: int
) -> tuple[list[list[int]], np.ndarray]:
    """Number the tokens; those of a trace stand for no other, so that each tells its trace.

    Returns:
        The prompts, and all tokens of each trace, `i32[traces, length]`, padded with its first.

    Raises:
        ValueError: a trace has more different tokens than its share of the vocabulary, or is longer
            than `length`.
    """
    share = vocab_size // len(traces)
    prompts, rows = [], []
    for index, trace in enumerate(traces):
        pieces = [*trace.prompt, *trace.answer]
        ids = {piece: index * share + i for i, piece in enumerate(dict.fromkeys(pieces))}
        if len(ids) > share:
            raise ValueError(
                f"a trace has {len(ids)} different tokens, which must be at most {share}, its "
                f"share of vocab_size={vocab_size}"
            )
        rows.append([ids[piece] for piece in pieces])
        prompts.append(rows[-1][: len(trace.prompt)])
    if (longest := max(map(len, rows))) > length:
        raise ValueError(f"a trace of {longest} tokens must have at most {length=}")
    return prompts, np.array([x + x[:1] * (length - len(x)) for x in rows], np.int32)


def _edits(num_tokens: int) -> Iterator[Trace]:
    """A module of the library; then the same with a name replaced, and new lines that log."""
    for file in _texts("pallas_paged/**/*.py", num_tokens):
        names = re.findall(r"\b[A-Za-z]\w{3,}\b", file)
        [(name, _), *_] = Counter(x for x in names if not keyword.iskeyword(x)).most_common(1)
        lines: list[str] = []
        for number, line in enumerate(file.split("\n"), 1):
            if line.strip() and number % _CHANGED == 0:
                indent = line[: len(line) - len(line.lstrip())]
                lines.append(f'{indent}log.debug("{number}: {line.split()[0]}")')
            lines.append(re.sub(rf"\b{name}\b", f"new_{name}", line))
        question = f"Rename {name} to new_{name}, and log.\n"
        # A file of few lines gets no new ones; its end fills the answer.
        yield Trace(_PIECE.findall(question + file), _PIECE.findall("\n".join(lines) + file))


def _quotes(num_tokens: int) -> Iterator[Trace]:
    """A page of the documentation; then words of its own in any order, quotes between them."""
    for index, text in enumerate(_texts("docs/**/*.md", num_tokens)):
        rng = random.Random(index)
        page = _PIECE.findall(text)
        words = sorted({x for x in page if x.strip().isalpha()})
        answer: list[str] = []
        while len(answer) < num_tokens:
            answer += rng.choices(words, k=rng.randint(8, 14))
            start = rng.randrange(max(1, len(page) - 40))
            answer += [":", ' "', *page[start : start + rng.randint(20, 40)], '".']
        yield Trace([*_PIECE.findall("Summarize with quotes.\n"), *page], answer)


def _random(num_tokens: int) -> Iterator[Trace]:
    """Nothing repeats, though a lookup finds most tokens: what drafts cost that are wrong."""
    for index in itertools.count():
        rng = random.Random(index)
        pieces = [str(rng.randrange(RANDOM_TOKENS)) for _ in range(num_tokens + 2 * RANDOM_TOKENS)]
        yield Trace(pieces[: 2 * RANDOM_TOKENS], pieces[2 * RANDOM_TOKENS :])


KINDS = {"edit": _edits, "quotes": _quotes, "random": _random}


def _texts(pattern: str, num_tokens: int) -> Iterator[str]:
    """Yield the first `num_tokens` pieces of the files that have them, again and again."""
    paths = sorted(_ROOT.glob(pattern))
    pieces = [_PIECE.findall(path.read_text(encoding="utf-8")) for path in paths]
    long = [x for x in pieces if len(x) >= num_tokens]
    return itertools.cycle("".join(x[:num_tokens]) for x in long)
