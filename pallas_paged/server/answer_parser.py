"""The text of an answer, parted into content, reasoning and calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from pallas_paged.server.tools import (
    CONTENT,
    FIRST_HEADER,
    HARMONY,
    HARMONY_ENDS,
    HEADER,
    AnswerFormat,
    Region,
)

_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_MOST_NAMED = 400  # characters in which that must be found while a call arrives
_XML_CALL = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_HARMONY_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
_ARGUMENTS = ("arguments", "parameters")
_STRUCTURE, _IN_STRING = re.compile(r'["{}\[\]:,]'), re.compile(r'["\\]')


class CallPiece(NamedTuple):
    """New text of a call.

    Attributes:
        number: of the call in its answer, from 0 on.
        name: of the tool, in the call's first piece; empty in others.
        arguments: the next piece of the text of a JSON object, as the model wrote it.
        is_last: whether the call is complete. A call without a last piece was cut off or invalid.
    """

    number: int
    name: str
    arguments: str
    is_last: bool


@dataclass
class Parts:
    """New parts of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class AnswerParser:
    """Parts an answer as its text arrives.

    What may be the beginning of a marker is held back until it is certain. Arguments in JSON come
    as they are written, those in tags when the call is complete. A call that is truncated or not
    valid stays content, also if pieces of it have come. A marker within a string of its JSON does
    not end a call. Whitespace beside a region is dropped; content before and after one is on two
    lines.
    """

    def __init__(
        self,
        calls: AnswerFormat | None,
        reasoning: Region | None,
        schemas: Mapping[str, Any] | None = None,
        *,
        is_thinking: bool = False,
    ):
        """Begin an answer.

        Args:
            calls: how the model writes calls; None: they are content.
            reasoning: of the model; None: it is content.
            schemas: of the tools' arguments by name, which say the types of untyped arguments.
            is_thinking: whether the prompt ends with what opens the reasoning.
        """
        regions = (*(calls.regions if calls else ()), *((reasoning,) if reasoning else ()))
        has_headers = HEADER in regions
        if has_headers:
            regions = HARMONY.regions
        self._openers = {region.open: region for region in regions}
        self._schemas = schemas or {}
        first = FIRST_HEADER if has_headers else CONTENT
        self._region = reasoning if is_thinking and reasoning else first
        self._rest, self._body, self._space = "", "", ""
        self._function = ""  # that a header names
        self._finder: _CallFinder | None = None  # of the calls in a region that is not complete
        self._num_sent: list[int] = []  # characters of the arguments of those calls
        self._num_calls = 0  # before the region
        self._has_begun = False  # whether anything but whitespace has come
        self._has_content, self._strips = False, is_thinking
        self._parts = Parts()

    def push(self, text: str, *, is_last: bool = False) -> Parts:
        """Take more text, and return the parts that have become certain."""
        self._rest += text
        self._scan(is_last=is_last)
        if is_last:
            self._end()
        elif self._region.kind == "call":
            self._send_begun()
        parts, self._parts = self._parts, Parts()
        return parts

    def _scan(self, *, is_last: bool) -> None:
        """Take the text that has come, but for what may be the beginning of a marker."""
        while (found := self._next_marker()) is not None:
            at, marker = found
            self._take(self._rest[:at])
            self._rest = self._rest[at + len(marker) :]
            if self._region.kind == "call" and (finder := self._find(None)) and finder.is_in_string:
                self._take(marker)
                continue
            if self._region is not CONTENT:
                marker = self._close(marker)
            self._open(marker)
        held = 0 if is_last else max((_overlap(self._rest, x) for x in self._markers()), default=0)
        end = len(self._rest) - held
        self._take(self._rest[:end])
        self._rest = self._rest[end:]

    def _markers(self) -> list[str]:
        if self._region is not CONTENT:
            return [*self._region.close]
        return [x for x, one in self._openers.items() if not (one.is_first and self._has_begun)]

    def _next_marker(self) -> tuple[int, str] | None:
        found = []
        for marker in self._markers():
            at = self._rest.find(marker)
            must_be_first = self._region is CONTENT and self._openers[marker].is_first
            if at >= 0 and not (must_be_first and self._rest[:at].strip()):
                found.append((at, -len(marker), marker))
        return (min(found)[0], min(found)[2]) if found else None

    def _open(self, marker: str) -> None:
        """Begin the region that a marker opens, if it does."""
        if (region := self._openers.get(marker)) is None:
            return
        self._region, self._has_begun = region, True
        self._body = region.open if region.keeps_open else ""
        self._function = ""
        if region.kind != "call":  # one that is not valid stays content, with the space before it
            self._space, self._strips = "", True

    def _close(self, marker: str) -> str:
        """End a region by its marker, or by one before it; return which."""
        region, self._region = self._region, CONTENT
        if region.kind == "header":
            self._follow_header()
        elif region.kind == "call":
            return self._read_call(region, marker)
        else:
            self._space, self._strips = "", True
        return marker

    def _follow_header(self) -> None:
        self._space, self._strips = "", True
        function = _HARMONY_FUNCTION.search(self._body)
        kind = "reasoning" if "analysis" in self._body else "content"
        self._region = Region("call" if function else kind, "", HARMONY_ENDS)
        self._function = function[1] if function else ""
        self._body = ""

    def _find(self, most: int | None) -> _CallFinder | None:
        """Find calls in a region as far as it has come, as `_CallFinder.of` with `most`."""
        if self._finder is None:
            self._finder = _CallFinder.of(self._function, self._body, most)
        if self._finder is not None:
            self._finder.read(self._body)
        return self._finder

    def _send_begun(self) -> None:
        """Send what has come of the arguments of calls in a region that is not complete."""
        if (finder := self._find(_MOST_NAMED)) is not None:
            for number, call in enumerate(finder.calls):
                if not call.name or call.start is None:
                    break  # those behind it wait too
                self._send(number, call.name, self._body, call.start, call.end)

    def _send(
        self, number: int, name: str, text: str, start: int, end: int | None, is_last: bool = False
    ) -> None:
        """Send what is new of the arguments of a call, which are the text from start to end."""
        is_first = number == len(self._num_sent)
        if is_first:
            self._num_sent.append(0)
        piece = text[start + self._num_sent[number] : end]
        self._num_sent[number] += len(piece)
        if piece or is_last:
            index = self._num_calls + number
            self._parts.calls.append(CallPiece(index, name if is_first else "", piece, is_last))

    def _read_call(self, region: Region, marker: str) -> str:
        """Read the calls of a region that a marker, or nothing, has ended.

        Returns:
            The marker. If the calls are not valid, the first that seemed to be in a string counts.
        """
        try:
            calls = _calls(self._function, self._body, self._schemas)
        except (ValueError, RecursionError):
            found = [(at, x) for x in region.close if (at := self._body.find(x)) >= 0]
            if found:
                at, first = min(found)
                self._rest = self._body[at + len(first) :] + marker + self._rest
                self._body, marker = self._body[:at], first
            before = "" if region.keeps_open else region.open
            self._emit("content", before + self._body + ("" if marker in self._openers else marker))
        else:
            for number, (name, arguments) in enumerate(calls):
                self._send(number, name, arguments, 0, None, is_last=True)
            self._space, self._strips = "", True
        self._num_calls += len(self._num_sent)
        self._body, self._finder, self._num_sent = "", None, []
        return marker

    def _take(self, text: str) -> None:
        if self._region.kind in ("call", "header"):
            self._body += text
        else:
            self._emit(self._region.kind, text)

    def _emit(self, kind: str, text: str) -> None:
        if self._strips and (text := text.lstrip()) and kind == "content" and self._has_content:
            text = "\n" + text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._strips, self._has_begun = False, True
            self._has_content = self._has_content or kind == "content"
            setattr(self._parts, kind, getattr(self._parts, kind) + shown)

    def _end(self) -> None:
        while self._region.kind == "call":
            self._open(self._close(""))
            self._scan(is_last=True)
        region = self._region
        if region is FIRST_HEADER and "<|channel|>" not in self._body:
            self._emit("content", self._body)  # an answer without channels, as of a grammar
        if region.kind != "reasoning":
            self._parts.content += self._space
        self._space = ""


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` with which `marker` begins."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


@dataclass
class _FoundCall:
    """A call in JSON: its name, where its arguments are, or their text if they are a string."""

    name: str | None = None
    start: int | None = None
    end: int | None = None
    quoted: str | None = None


class _CallFinder:
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
    def of(cls, function: str, body: str, most: int | None = None) -> _CallFinder | None:
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def _calls(function: str, body: str, schemas: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and arguments of a region's calls; raise a ValueError if one is not valid.

    Arguments are what `_CallFinder` finds, so that pieces of them may have been sent before.
    """
    text = body.strip()
    if text.startswith("<function=") and not function:
        if not (found := _XML_CALL.findall(text)):
            raise ValueError("the call has no end")
        return [_xml_call(name, inner, schemas) for name, inner in found]
    if (finder := _CallFinder.of(function, body)) is None:
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
