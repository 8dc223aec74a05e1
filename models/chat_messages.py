"""Messages of a conversation, checked and in the form that chat templates expect."""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return a copy of the messages of a conversation, in the form that templates expect.

    A list of text parts becomes one text, arguments of tool calls in JSON become objects, and keys
    of null are left out, except "content".

    Args:
        messages: list of objects with "role" (one of `ROLES`) and "content" (a text or a list of
            `{"type": "text", "text": ...}`, or null beside "tool_calls"). Other keys are the
            template's.

    Raises:
        ValueError: a message is not of this form; it names the place, the value and the rule.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages={reprlib.repr(messages)} must be a list of messages, not empty")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place}={reprlib.repr(message)} must be an object")
    checked = {key: value for key, value in message.items() if value is not None}
    role = checked.get("role")
    if role not in ROLES:
        raise ValueError(f"{place}.role={reprlib.repr(role)} must be one of {', '.join(ROLES)}")
    if not checked.get("tool_calls", True):  # templates ask whether the key is there
        del checked["tool_calls"]
    if "tool_calls" in checked:
        calls = checked["tool_calls"]
        if not isinstance(calls, list):
            raise ValueError(f"{place}.tool_calls={reprlib.repr(calls)} must be a list")
        checked["tool_calls"] = [
            _checked_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    content = message.get("content")
    if isinstance(content, list):
        parts = enumerate(content)
        checked["content"] = "".join(_text_of(x, f"{place}.content[{i}]") for i, x in parts)
    elif content is None and "tool_calls" in checked:
        if "content" in message:
            checked["content"] = None
    elif not isinstance(content, str):
        raise ValueError(
            f"{place}.content={reprlib.repr(content)} must be a text or a list of text parts"
        )
    return checked


def _text_of(part: Any, place: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise ValueError(f"{place}={reprlib.repr(part)} must be a part of type 'text'")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{place}.text={reprlib.repr(part.get('text'))} must be a text")
    return part["text"]


def _checked_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place}={reprlib.repr(call)} must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as models write and OpenAI's API has them
        with contextlib.suppress(ValueError, RecursionError):  # refused below
            arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{place}: arguments={reprlib.repr(arguments)} must be a JSON object")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
