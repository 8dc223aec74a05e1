"""The text of an answer, parted into content, reasoning and calls of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pallas_paged.engine.requests.detokenizer import overlap
from pallas_paged.server.answer_format import (
    CONTENT,
    FIRST_HEADER,
    HARMONY,
    HARMONY_ENDS,
    HEADER,
    AnswerFormat,
    Region,
)
from pallas_paged.server.calls import CallFinder, read_calls

_MOST_NAMED = 400  # characters in which that must be found while a call arrives
_HARMONY_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


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
        self._num_read = 0  # characters of the rest that a call which is not valid had taken
        self._function = ""  # that a header names
        self._finder: CallFinder | None = None  # of the calls in a region that is not complete
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
            was_read = at < self._num_read
            self._take(self._cut(at))
            self._cut(len(marker))
            if self._region.kind == "call" and not was_read and self._ends_in_string():
                self._take(marker)
                continue
            if self._region is not CONTENT:
                marker = self._close(marker)
            self._open(marker)
        held = 0 if is_last else max((overlap(self._rest, x) for x in self._markers()), default=0)
        self._take(self._cut(len(self._rest) - held))

    def _cut(self, size: int) -> str:
        """Return the beginning of the rest, without which it goes on."""
        text, self._rest = self._rest[:size], self._rest[size:]
        self._num_read = max(0, self._num_read - size)
        return text

    def _ends_in_string(self) -> bool:
        """Whether a region of calls ends within a string so far."""
        return (finder := self._find(None)) is not None and finder.is_in_string

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

    def _find(self, most: int | None) -> CallFinder | None:
        """Find calls in a region as far as it has come, as `CallFinder.of` with `most`."""
        if self._finder is None:
            self._finder = CallFinder.of(self._function, self._body, most)
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
            The marker. If the calls are not valid, the first that seemed to be in a string counts,
            and so does each in what is read again: an answer is read twice at most.
        """
        try:
            calls = read_calls(self._function, self._body, self._schemas)
        except (ValueError, RecursionError):
            found = [(at, x) for x in region.close if (at := self._body.find(x)) >= 0]
            if found:
                at, first = min(found)
                again = self._body[at + len(first) :] + marker
                self._rest, self._num_read = again + self._rest, len(again) + self._num_read
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
