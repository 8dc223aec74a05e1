"""Calls of tools in the text of a region, also while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pallas_paged.server.fields import refuse_constant

_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_XML_CALL = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters")
_STRUCTURE, _IN_STRING = re.compile(r'["{}\[\]:,]'), re.compile(r'["\\]')


@dataclass
class _FoundCall:
    """A call in JSON: its name, where its arguments are, or their text if they are a string."""

    name: str | None = None
    start: int | None = None
    end: int | None = None
    quoted: str | None = None


class CallFinder:
    """Finds calls in JSON that arrives, and does not check that it is JSON.

    Attributes:
        name: of the call, if the JSON is its arguments; None: it is calls, or lists of calls.
        calls: so far; the arguments of the last may have no end yet.
    """

    def __init__(self, name: str | None = None, start: int = 0):
        """Read from an index on."""
        self.calls: list[_FoundCall] = []
        self.name, self._at = name, start
        self._open: list[str] = []  # brackets
        self._string: int | None = None  # where an open string begins
        self._key: str | None = None  # of the value that follows, in the object of a call

    @classmethod
    def of(cls, function: str, body: str, most: int | None = None) -> CallFinder | None:
        """Return one for the text of a region, as far as it has come; None if it has no JSON.

        Args:
            function: that the header of the region names, or "".
            body: the text.
            most: characters in which a name before the arguments is looked for; None: in all.
        """
        start = next((place for place, one in enumerate(body) if not one.isspace()), len(body))
        if function:
            return cls(function, start) if body.startswith("{", start) else None
        if body.startswith(("{", "["), start):
            return cls()
        named = _NAMED.match(body, start) if most is None or len(body) <= most else None
        return None if named is None else cls(named[1], named.end())

    def read(self, body: str) -> None:
        """Go on to the end of a text whose beginning has been read."""
        while True:
            found = (_STRUCTURE if self._string is None else _IN_STRING).search(body, self._at)
            if found is None:
                self._at = len(body)
                return
            if found[0] == "\\" and found.end() == len(body):
                self._at = found.start()  # what it escapes comes later
                return
            self._at = found.end() + (found[0] == "\\")
            if self._string is None:
                self._take(found[0], found.start())
            elif found[0] == '"':
                text, self._string = body[self._string : self._at], None
                if self._is_in_call:
                    self._take_string(text)

    @property
    def is_in_string(self) -> bool:
        """Whether the text read ends within a string, which may have the text of any marker."""
        return self._string is not None

    @property
    def _is_in_call(self) -> bool:
        """Whether the innermost brackets are those of a call."""
        return self.name is None and self._open in (["{"], ["[", "{"])

    def _take(self, mark: str, at: int) -> None:
        if mark == '"':
            self._string = at
        elif mark in "{[":
            if mark == "{":
                self._begin(at)
            self._open.append(mark)
        elif mark in "}]":
            if self._open:
                self._open.pop()
            is_back = not self._open if self.name is not None else self._is_in_call
            call = self.calls[-1] if self.calls else _FoundCall()
            if is_back and call.start is not None and call.end is None:
                call.end = at + 1
        elif mark == "," and self._is_in_call:
            self._key = None

    def _begin(self, at: int) -> None:
        """Take the beginning of an object."""
        if self.name is not None:
            if not self._open:
                self.calls.append(_FoundCall(self.name, at))
        elif self._is_in_call:
            call = self.calls[-1]
            if self._key in _ARGUMENTS and call.start is None and call.quoted is None:
                call.start = at
        elif self._open in ([], ["["]):
            self.calls.append(_FoundCall())
            self._key = None

    def _take_string(self, text: str) -> None:
        """Take a string of a call's own object: a key, or a value."""
        call = self.calls[-1]
        try:
            value = str(json.loads(text))
        except ValueError:
            return
        if self._key is None:
            self._key = value
        elif self._key == "name" and call.name is None:
            call.name = value
        elif self._key in _ARGUMENTS and call.start is None and call.quoted is None:
            call.quoted = value


_decoder = json.JSONDecoder(parse_constant=refuse_constant)


def read_calls(function: str, body: str, schemas: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and arguments of a region's calls; raise a ValueError if one is not valid.

    Arguments are what `CallFinder` finds, so that pieces of them may have been sent before.
    """
    text = body.strip()
    if text.startswith("<function=") and not function:
        if not (found := _XML_CALL.findall(text)):
            raise ValueError("the call has no end")
        return [_xml_call(name, inner, schemas) for name, inner in found]
    if (finder := CallFinder.of(function, body)) is None:
        raise ValueError("the call has no JSON")
    finder.read(body)
    if finder.name is not None:
        _decoder.decode(body[finder.calls[0].start :])  # with nothing behind the arguments
        text = ""
    while text:
        value, end = _decoder.raw_decode(text)
        if not all(isinstance(x, dict) for x in (value if isinstance(value, list) else [value])):
            raise ValueError("a call must be an object")
        text = text[end:].lstrip("; \n\t,")
    if not finder.calls:
        raise ValueError("there is no call")
    return [_call(one, body) for one in finder.calls]


def _call(found: _FoundCall, body: str) -> tuple[str, str]:
    arguments = found.quoted if found.start is None else body[found.start : found.end]
    if not found.name or arguments is None:
        raise ValueError("a call must have a name and arguments")
    if not isinstance(_decoder.decode(arguments), dict):
        raise ValueError("arguments must be an object")
    return found.name, arguments


def _xml_call(name: str, body: str, schemas: Mapping[str, Any]) -> tuple[str, str]:
    """Return a call with a tag for each argument; all but texts are JSON."""
    properties = (schemas.get(name) or {}).get("properties") or {}
    arguments = {}
    for key, text in _XML_PARAMETER.findall(body):
        schema = properties.get(key)
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        try:
            arguments[key] = text if is_text else json.loads(text)
        except ValueError:
            arguments[key] = text
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
