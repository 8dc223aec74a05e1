"""The tools of a request, and the grammar of its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pallas_paged.engine import StructuredOutputsParams
from pallas_paged.engine.requests.structured_outputs import held_schema
from pallas_paged.server.answer_format import HERMES, AnswerFormat, Region
from pallas_paged.server.fields import Fields, bad_request

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools of a request.

    Attributes:
        values: for the chat template; None: there are none, or they must not be called.
        schemas: of the arguments, by name of the function.
        strict: names of the functions whose arguments are held to their schemas.
        forced: names; one of them must be called. Empty: the model chooses whether to call.
        is_parallel: whether an answer may have several calls.
    """

    values: list[Any] | None = None
    schemas: Mapping[str, Mapping[str, Any]]
    strict: frozenset[str] = frozenset()
    forced: tuple[str, ...] = ()
    is_parallel: bool = True

    def format(self, known: AnswerFormat | None) -> AnswerFormat | None:
        """Return how calls of an answer are written; None where they are text."""
        # Calls are forced of any model, also of one whose format is not known.
        return (known or HERMES) if self.forced else known if self.values else None

    def structure(
        self, known: AnswerFormat | None, reasoning: Region | None, *, is_thinking: bool
    ) -> StructuredOutputsParams | None:
        """Return what the answer must match, if anything.

        Args:
            known: how the model writes calls.
            reasoning: how it writes its reasoning.
            is_thinking: whether the prompt opens the reasoning.

        Raises:
            APIError: the schemas are too large.
        """
        calls = self.format(known)
        if calls is None or not (self.forced or self.strict):
            return None
        if self.forced:
            grammar = self._forced_calls(calls, reasoning, is_thinking=is_thinking)
        else:
            grammar = self._free_calls(calls)
        try:
            return StructuredOutputsParams(grammar=grammar)
        except ValueError as error:
            raise bad_request(f"tools: {error}", "tools") from None

    def _forced_calls(
        self, calls: AnswerFormat, reasoning: Region | None, *, is_thinking: bool
    ) -> str:
        begin, end, separator = calls.call
        schemas = {name: json.dumps(held_schema(self.schemas[name])) for name in self.forced}
        options = (
            f"{_literal(begin.replace('NAME', name))} %json {schema} {_literal(end)}"
            for name, schema in schemas.items()
        )
        several = self.is_parallel and separator is not None
        more = f"({_literal(separator or '')} call)*" if several else ""
        lines = [f"call: {' | '.join(options)}"]
        thought = ""
        if reasoning is not None:
            is_harmony = reasoning.kind == "header"
            opening = "<|channel|>analysis<|message|>" if is_harmony else reasoning.open
            close = "<|end|>" if is_harmony else reasoning.close[0]
            after = _literal("<|start|>assistant") if is_harmony else r"/\n{0,2}/"
            lines += [f"body[suffix={_literal(close)}]: /(.|\\n)*/", f"thought: body {after}"]
            thought = "thought" if is_thinking else f"({_literal(opening)} thought)?"
        return "\n".join([f"start: {thought} call {more}", *lines])

    def _free_calls(self, calls: AnswerFormat) -> str:
        """Return the grammar of any text, in which strict calls have arguments of their schemas."""
        try:
            from llguidance import StructTag
        except ImportError:
            raise bad_request(
                "strict tools need the package llguidance: pip install 'pallas-paged[structured]'",
                "tools",
            ) from None
        begin, end, _ = calls.call
        own = (x.open for x in calls.regions if not x.keeps_open and begin.startswith(x.open))
        trigger = next(own, begin.partition("NAME")[0])  # a marker that only calls have
        tags = [
            StructTag(
                trigger=trigger,
                begin=begin.replace("NAME", name),
                grammar=held_schema(schema) if name in self.strict else _ANY_ARGUMENTS,
                end=end,
            )
            for name, schema in self.schemas.items()
        ]
        return StructTag.to_grammar(tags, assume_special=False)


def take_tools(fields: Fields) -> Tools:
    """Take "tools", "tool_choice" and "parallel_tool_calls".

    Raises:
        APIError: one is not of OpenAI's form, or the choice is no tool.
    """
    values = fields.take("tools", list, default=[])
    choice = fields.take("tool_choice", str, dict)
    is_parallel = fields.take("parallel_tool_calls", bool, default=True)
    schemas, strict = {}, set()
    for index, value in enumerate(values):
        name, schema, is_strict = _function(value, f"tools[{index}]")
        if name in schemas:
            message = f"tools[{index}].function.name={name!r} is that of another tool"
            raise bad_request(message, f"tools[{index}].function.name")
        # Without `strict` a call that a grammar forces still has an object.
        schemas[name] = schema or _ANY_ARGUMENTS
        if is_strict:
            strict.add(name)
    forced: tuple[str, ...] = ()
    if choice not in (None, "auto", "none"):
        forced = _forced(choice, [*schemas])
    return Tools(
        values=None if choice == "none" else values or None,
        schemas=schemas,
        strict=frozenset(() if choice == "none" else strict),
        forced=forced,
        is_parallel=is_parallel and not isinstance(choice, dict),
    )


def _function(value: Any, place: str) -> tuple[str, dict[str, Any] | None, bool]:
    """Return name, schema and strictness of a tool."""
    if not isinstance(value, dict):
        raise bad_request(f"{place}={value!r:.50} must be an object", place)
    tool = Fields(dict(value), path=f"{place}.")
    if (kind := tool.take("type", str)) != "function":
        raise bad_request(f'{place}.type={kind!r:.50} must be "function"', f"{place}.type")
    function = Fields(dict(tool.take("function", dict, default={})), path=f"{place}.function.")
    tool.end()
    name = function.take("name", str, default="")
    if not _NAME.fullmatch(name):
        rule = "must have 1 to 64 letters, digits, _, . and -"
        raise bad_request(f"{place}.function.name={name!r:.80} {rule}", f"{place}.function.name")
    function.take("description", str)
    schema = function.take("parameters", dict)
    is_strict = function.take("strict", bool, default=False)
    function.end()
    return name, schema, is_strict


def _forced(choice: str | dict[str, Any], names: list[str]) -> tuple[str, ...]:
    """Return names; one of them must be called."""
    if isinstance(choice, str):
        if choice != "required":
            rule = 'must be "auto", "none", "required" or a function'
            raise bad_request(f"tool_choice={choice!r:.50} {rule}", "tool_choice")
        if not names:
            raise bad_request('tool_choice="required" needs tools', "tool_choice")
        return tuple(names)
    outer = Fields(dict(choice), path="tool_choice.")
    kind = outer.take("type", str)
    name = Fields(dict(outer.take("function", dict, default={}))).take("name", str)
    outer.end()
    if kind != "function" or name not in names:
        rule = 'must be {"type": "function", "function": {"name": one of tools}}'
        raise bad_request(f"tool_choice={choice!r:.80} {rule}", "tool_choice")
    return (name,)


def _literal(text: str) -> str:
    """Return a text as Lark spells it; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""
