"""The text of an answer, parted into content, reasoning and calls of tools."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_XML_CALL = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_HARMONY_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class Region:
    """A part of an answer between markers.

    Attributes:
        kind: "content", "reasoning", "call", or "header", which says what follows it.
        open: marker before it.
        close: markers that end it. One that is also an `open` begins the next region. Without any
            of them it ends with the answer.
        is_first: whether only whitespace may come before it.
        keeps_open: whether `open` is a part of it.
    """

    kind: str
    open: str
    close: tuple[str, ...] = ()
    is_first: bool = False
    keeps_open: bool = False


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes.

    Attributes:
        regions: of an answer, what is outside of them is content.
        call: text before the arguments of a call, with NAME for the name; text after them; text
            between two calls, None where an answer has one. A grammar that forces calls has them.
    """

    regions: tuple[Region, ...]
    call: tuple[str, str, str | None]


_CONTENT = Region("content", "")
_HERMES = AnswerFormat(
    (Region("call", "<tool_call>", ("</tool_call>",)),),
    ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n"),
)
_MISTRAL = AnswerFormat(
    (Region("call", "[TOOL_CALLS]", ("[TOOL_CALLS]",)),),
    ('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]", ""),
)
_LLAMA = AnswerFormat(
    (
        Region("call", "<|python_tag|>"),
        Region("call", "{", is_first=True, keeps_open=True),
    ),
    ('{"name": "NAME", "parameters": ', "}", "; "),
)
_HEADER = Region("header", "<|channel|>", ("<|message|>",), keeps_open=True)
_HARMONY_ENDS = ("<|end|>", "<|start|>", "<|channel|>")
_HARMONY = AnswerFormat(
    (_HEADER, Region("header", "<|start|>", ("<|message|>",))),
    ("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", None),
)
_FIRST_HEADER = dataclasses.replace(_HEADER, open="")  # prompts end in <|start|>assistant
# Names are vLLM's. Qwen3-Coder has tags in place of JSON; the reader takes both.
TOOL_CALL_PARSERS = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA,
    "mistral": _MISTRAL,
    "openai": _HARMONY,
    "qwen3_coder": _HERMES,
}
_THINK = Region("reasoning", "<think>", ("</think>",), is_first=True)
REASONING_PARSERS = {
    "deepseek_r1": _THINK,
    "mistral": Region("reasoning", "[THINK]", ("[/THINK]",), is_first=True),
    "openai_gptoss": _HEADER,
    "qwen3": _THINK,
}
# What templates with these formats have in their text; the first that is found counts.
_TOOL_SIGNS = {
    "<|channel|>": "openai",
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    '{"name": function name, "parameters"': "llama3_json",
}
_REASONING_SIGNS = {"<|channel|>": "openai_gptoss", "[THINK]": "mistral", "</think>": "qwen3"}
PARSERS = {
    "tool_call_parser": ("auto", "none", *TOOL_CALL_PARSERS),
    "reasoning_parser": ("auto", "none", *REASONING_PARSERS),
}
# Special tokens with these names stay in the text of an answer, where parsers look for them.
MARKERS = frozenset(
    marker
    for region in (
        *(one for each in TOOL_CALL_PARSERS.values() for one in each.regions),
        *REASONING_PARSERS.values(),
    )
    for marker in (region.open, *region.close)
) | {"[ARGS]", "[CALL_ID]", "<|constrain|>", "<|end|>"}


def find_formats(
    template: str, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> tuple[AnswerFormat | None, Region | None]:
    """Return how a model writes calls of tools, and its reasoning; None: not known.

    Args:
        template: text of the chat template, in which "auto" looks for the markers.
        tool_call_parser, reasoning_parser: names of parsers, "auto" or "none".
    """

    def chosen(name: str, signs: Mapping[str, str]) -> str | None:
        found = (parser for sign, parser in signs.items() if sign in template)
        return next(found, None) if name == "auto" else name

    calls = TOOL_CALL_PARSERS.get(chosen(tool_call_parser, _TOOL_SIGNS) or "")
    if calls is _MISTRAL and "[ARGS]" in template:
        calls = dataclasses.replace(calls, call=("[TOOL_CALLS]NAME[ARGS]", "", ""))
    return calls, REASONING_PARSERS.get(chosen(reasoning_parser, _REASONING_SIGNS) or "")


class FunctionCall(NamedTuple):
    """A call of a tool: its name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass
class Parts:
    """New parts of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[FunctionCall] = field(default_factory=list)


class AnswerParser:
    """Parts an answer as its text arrives.

    What may be the beginning of a marker is held back until it is certain, and a call until it is
    complete. A call that is cut off or not valid stays content. Whitespace beside a region is
    dropped; content before and after one is on two lines.
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
        has_headers = _HEADER in regions
        if has_headers:
            regions = _HARMONY.regions
        self._openers = {region.open: region for region in regions}
        self._schemas = schemas or {}
        first = _FIRST_HEADER if has_headers else _CONTENT
        self._region = reasoning if is_thinking and reasoning else first
        self._rest, self._body, self._space = "", "", ""
        self._function = ""  # that a header names
        self._has_begun = False  # whether anything but whitespace has come
        self._has_content, self._strips = False, is_thinking
        self._parts = Parts()

    def push(self, text: str, *, is_last: bool = False) -> Parts:
        """Take more text, and return the parts that have become certain."""
        self._rest += text
        while (found := self._next_marker()) is not None:
            at, marker = found
            self._take(self._rest[:at])
            self._rest = self._rest[at + len(marker) :]
            if self._region is not _CONTENT:
                self._close(marker)
            if (opened := self._openers.get(marker)) is not None:
                self._open(opened)
        held = 0 if is_last else max((_overlap(self._rest, x) for x in self._markers()), default=0)
        end = len(self._rest) - held
        self._take(self._rest[:end])
        self._rest = self._rest[end:]
        if is_last:
            self._end()
        parts, self._parts = self._parts, Parts()
        return parts

    def _markers(self) -> list[str]:
        if self._region is not _CONTENT:
            return [*self._region.close]
        return [x for x, one in self._openers.items() if not (one.is_first and self._has_begun)]

    def _next_marker(self) -> tuple[int, str] | None:
        found = []
        for marker in self._markers():
            at = self._rest.find(marker)
            must_be_first = self._region is _CONTENT and self._openers[marker].is_first
            if at >= 0 and not (must_be_first and self._rest[:at].strip()):
                found.append((at, -len(marker), marker))
        return (min(found)[0], min(found)[2]) if found else None

    def _open(self, region: Region) -> None:
        self._region, self._has_begun = region, True
        self._body = region.open if region.keeps_open else ""
        self._function = ""
        if region.kind != "call":  # one that is not valid stays content, with the space before it
            self._space, self._strips = "", True

    def _close(self, marker: str) -> None:
        """End a region by its marker."""
        region, self._region = self._region, _CONTENT
        if region.kind == "header":
            self._follow_header()
        elif region.kind == "call":
            self._read_call(region, "" if marker in self._openers else marker)
        else:
            self._space, self._strips = "", True

    def _follow_header(self) -> None:
        self._space, self._strips = "", True
        function = _HARMONY_FUNCTION.search(self._body)
        kind = "reasoning" if "analysis" in self._body else "content"
        self._region = Region("call" if function else kind, "", _HARMONY_ENDS)
        self._function = function[1] if function else ""
        self._body = ""

    def _read_call(self, region: Region, marker: str) -> None:
        try:
            self._parts.calls += _calls(self._function, self._body, self._schemas)
            self._space, self._strips = "", True
        except (ValueError, RecursionError):
            before = "" if region.keeps_open else region.open
            self._emit("content", before + self._body + marker)
        self._body = ""

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
        region = self._region
        if region.kind == "call":
            self._read_call(region, "")
        elif region is _FIRST_HEADER and "<|channel|>" not in self._body:
            self._emit("content", self._body)  # an answer without channels, as of a grammar
        if region.kind != "reasoning":
            self._parts.content += self._space
        self._space = ""


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` with which `marker` begins."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def _calls(function: str, body: str, schemas: Mapping[str, Any]) -> list[FunctionCall]:
    """Return the calls of a region; raise a ValueError for one that is not complete."""
    body = body.strip()
    if function:
        return [_call(function, json.loads(body))]
    if body.startswith("<function="):
        if not (found := _XML_CALL.findall(body)):
            raise ValueError("the call has no end")
        return [_xml_call(name, inner, schemas) for name, inner in found]
    if (named := _NAMED.match(body)) is not None:
        return [_call(named[1], json.loads(body[named.end() :]))]
    values: list[Any] = []
    while body:
        value, end = _decoder.raw_decode(body)
        values += value if isinstance(value, list) else [value]
        body = body[end:].lstrip("; \n\t,")
    if not values or not all(
        isinstance(x, dict) and isinstance(x.get("name"), str) for x in values
    ):
        raise ValueError("a call must be an object with a name")
    return [_call(x["name"], x.get("arguments", x.get("parameters"))) for x in values]


def _call(name: str, arguments: Any) -> FunctionCall:
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return FunctionCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _xml_call(name: str, body: str, schemas: Mapping[str, Any]) -> FunctionCall:
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
    return _call(name, arguments)
