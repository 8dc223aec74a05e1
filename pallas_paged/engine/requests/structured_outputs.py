"""What structured outputs ask for, as the source of a grammar."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_GRAMMAR_LENGTH = 1 << 17  # characters; the grammar is compiled while a request waits
# The compiler makes all text that a word forces at once, in 600 bytes of memory for each of it.
_MAX_FORCED = 1 << 16
_MAX_STEP = 100_000  # of multipleOf: one of a million takes it 15 s


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of a completion must match; exactly one field is given. Names are vLLM's.

    Values are stored hashable: `json` as a text, `choice` as a tuple.

    Attributes:
        json: a JSON schema, an object or its text. The answer is JSON without whitespace between
            its parts, as models might write whitespace without end.
        regex: a regular expression of Rust's syntax, for the complete text.
        choice: texts; the answer is one of them.
        grammar: a context-free grammar in the Lark syntax of llguidance, which begins at `start`.

    Raises:
        ValueError: a field has another type, or not one field is given. What a grammar says is
            checked when a request is submitted.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {given or 'nothing'}, must have one of "
                "json, regex, choice and grammar"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choice(self.choice))
        for name in ("regex", "grammar"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str):
                raise ValueError(f"structured_outputs {name}={value!r:.80} must be a text")
        length = sum(map(len, getattr(self, given[0])))
        if length > MAX_GRAMMAR_LENGTH:
            raise ValueError(
                f"structured_outputs {given[0]} has {length} characters, must have at most "
                f"{MAX_GRAMMAR_LENGTH}"
            )


def _schema_text(schema: object) -> str:
    """Return a JSON schema as text, without options for the compiler that it may have."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise ValueError("it is no object")
        return json.dumps({name: x for name, x in value.items() if name != "x-guidance"})
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"must be a JSON schema: {error}"
        # `repr` fails where the schema is too deep.
        raise ValueError(f"structured_outputs json={reprlib.repr(schema)} {rule}") from None


def _checked_choice(choice: object) -> tuple[str, ...]:
    if not isinstance(choice, list | tuple) or not choice:
        raise ValueError(f"structured_outputs choice={choice!r:.80} must be a list of texts")
    for text in choice:
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"structured_outputs choice has {text!r:.80}, must have texts that are not empty"
            )
    return tuple(choice)


class GrammarError(ValueError):
    """A grammar can't be compiled, or became too complex; the message is the compiler's."""


def held_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema with options for the compiler.

    Models might write whitespace without end, so there is none. Names with other escapes than these
    would pass for names that no pattern matches.
    """
    options: dict[str, Any] = {"whitespace_flexible": False}
    if '"patternProperties"' in json.dumps(schema):
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return {**schema, "x-guidance": options}


def grammar_source(params: StructuredOutputsParams, matcher: Any) -> str:
    """Return a grammar in llguidance's Lark syntax."""
    source = params.grammar or ""
    if params.json is not None:
        source = f"start: %json {json.dumps(held_schema(json.loads(str(params.json))))}"
    elif params.regex is not None:  # as Lark spells it
        grammars = json.loads(matcher.grammar_from_regex(params.regex))["grammars"]
        source = grammars[0]["lark_grammar"]
    elif params.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in params.choice)
        source = f"start: {' | '.join(texts)}"
    return _bounded(source)


_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_REPEAT = re.compile(r"[{~]\s*(\d{1,9})")
_MIN_LENGTH = re.compile(r'"minLength"\s*:\s*(\d{1,9})')
_STEP = re.compile(r'"multipleOf"\s*:\s*(\d{1,20}(?:\.\d{1,20})?(?:[eE][+-]?\d\d?)?)')


def _bounded(source: str) -> str:
    """Return a grammar that the compiler can bear, where its own limits do not see what it takes.

    Where repetitions in a word might force too much text, none is forced: steps draw it.

    Raises:
        GrammarError: the numbers of a schema must be multiples of too large a number.
    """
    text, step = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), source), 1
    for value in _STEP.findall(text):
        step = math.lcm(step, Fraction(value).numerator or 1)
        if step > _MAX_STEP:
            raise GrammarError(f"structured_outputs: multipleOf={value} is too large to be held")
    # Of strings, such as patterns, and of what is between them, which may repeat one.
    pieces = _STRING.split(text)
    repeats = [sum(math.log(int(x) or 1) for x in _REPEAT.findall(one)) for one in pieces]
    most = max(repeats[1::2], default=0.0) + sum(repeats[::2])
    lengths = [int(x) for x in _MIN_LENGTH.findall(text)]
    if max(math.exp(min(most, 99)), *lengths, 0) > _MAX_FORCED:
        source += '\n%llguidance {"no_forcing": true}'
    return source
