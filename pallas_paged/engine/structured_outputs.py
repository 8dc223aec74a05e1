"""What the text of a completion must match, as a request says it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_GRAMMAR_LENGTH = 1 << 17  # characters; the grammar is compiled while a request waits


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
        raise ValueError(f"structured_outputs json={schema!r:.80} {rule}") from None


def _checked_choice(choice: object) -> tuple[str, ...]:
    if not isinstance(choice, list | tuple) or not choice:
        raise ValueError(f"structured_outputs choice={choice!r:.80} must be a list of texts")
    for text in choice:
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"structured_outputs choice has {text!r:.80}, must have texts that are not empty"
            )
    return tuple(choice)
