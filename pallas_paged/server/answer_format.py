"""How models write calls of tools and reasoning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


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


CONTENT = Region("content", "")
HERMES = AnswerFormat(
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
HEADER = Region("header", "<|channel|>", ("<|message|>",), keeps_open=True)
HARMONY_ENDS = ("<|end|>", "<|start|>", "<|channel|>")
HARMONY = AnswerFormat(
    (HEADER, Region("header", "<|start|>", ("<|message|>",))),
    ("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", None),
)
FIRST_HEADER = dataclasses.replace(HEADER, open="")  # prompts end in <|start|>assistant
# Names are vLLM's. Qwen3-Coder has tags in place of JSON; the reader takes both.
TOOL_CALL_PARSERS = {
    "hermes": HERMES,
    "llama3_json": _LLAMA,
    "mistral": _MISTRAL,
    "openai": HARMONY,
    "qwen3_coder": HERMES,
}
_THINK = Region("reasoning", "<think>", ("</think>",), is_first=True)
REASONING_PARSERS = {
    "deepseek_r1": _THINK,
    "mistral": Region("reasoning", "[THINK]", ("[/THINK]",), is_first=True),
    "openai_gptoss": HEADER,
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
