"""`/v1/responses`: answers to conversations as items, of requests that carry all of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
import secrets
from collections.abc import Iterator
from typing import Any

from pallas_paged.engine import CompletionOutput
from pallas_paged.server.answer_parser import CallPiece, Parts
from pallas_paged.server.call import Call, Prompt, encode_json
from pallas_paged.server.chat_template import checked_messages
from pallas_paged.server.completions import ParsedAnswer, parse_chat
from pallas_paged.server.fields import APIError, Fields, bad_request
from pallas_paged.server.service import Service
from pallas_paged.server.tools import Tools

# Fields of chats that are not passed on to one.
_NO_FIELDS = (
    *("messages", "max_tokens", "max_completion_tokens", "response_format", "n", "best_of"),
    *("logprobs", "return_token_ids"),
)
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
_TEXT_PARTS = ("input_text", "output_text", "text")


def parse_response(fields: Fields, service: Service) -> Call:
    """Return the call of a request.

    Raises:
        APIError: a field is unknown, of another type, or out of its range, or asks for something
            that the server keeps no state for.
    """
    for name in _NO_FIELDS:
        if fields.take(name) is not None:
            raise bad_request(f"unknown field {name}", name)
    for name in ("previous_response_id", "conversation", "prompt"):
        fields.refuse(name)  # the server keeps no answers
    fields.refuse("background", False)
    fields.refuse("truncation", "disabled")
    fields.refuse("top_logprobs", 0)
    for name in ("max_tool_calls", "context_management"):
        fields.refuse(name)
    fields.take("include", list)  # adds to items that this server does not make
    instructions = fields.take("instructions", str)
    messages = _messages(fields.take("input", str, list, default=""))
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    max_tokens = fields.take("max_output_tokens", int)
    text_fields = Fields(dict(fields.take("text", dict, default={})), path="text.")
    text_fields.take("verbosity", str)
    text = text_fields.take("format", dict)
    text_fields.end()
    reasoning = Fields(dict(fields.take("reasoning", dict, default={})), path="reasoning.")
    for name in ("summary", "generate_summary"):
        reasoning.take(name, str)  # the reasoning itself is in the answer
    effort = reasoning.take("effort", str)
    reasoning.end()
    tools, choice = fields.take("tools", list, default=[]), fields.take("tool_choice", str, dict)
    shown = {
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "text": {"format": text or {"type": "text"}},
        "reasoning": {"effort": effort, "summary": None},
        "tools": tools,
        "tool_choice": choice or "auto",
    }
    chat = fields.rest()
    shown |= {name: chat.get(name) for name in ("temperature", "top_p")}
    shown["metadata"] = chat.get("metadata") or {}
    shown["parallel_tool_calls"] = chat.get("parallel_tool_calls", True)
    chat |= {
        "messages": messages,
        "max_tokens": max_tokens,
        "response_format": _as_in_chats(text, "json_schema"),
        "tools": [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)],
        "tool_choice": _as_in_chats(choice, "function"),
        "reasoning_effort": effort,
    }
    try:
        call = parse_chat(Fields(chat), service)
    except APIError as error:
        raise _renamed(error) from None

    def encode() -> list[Prompt]:
        try:
            return call.encode()
        except APIError as error:
            raise _renamed(error) from None

    assert isinstance(call.answer, ParsedAnswer)
    has_format = call.params.structured_outputs is not None
    answer = _ResponseAnswer(service, call.answer.tools, shown, has_format=has_format)
    return dataclasses.replace(call, encode=encode, answer=answer)


def _renamed(error: APIError) -> APIError:
    """Return an error of a chat with the name that its field has here."""
    inner = error.body["error"]
    param, message = inner["param"] or "", inner["message"]
    for old, new in _NAMES.items():
        param, message = (re.sub(rf"^{old}(?!\w)", new, text) for text in (param, message))
    param = re.sub(r"^(tools\[\d+\]\.)function\.", r"\1", param)
    return APIError(error.status, message, param=param or None, code=inner["code"])


def _messages(items: str | list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat; what an answer was made of is one message."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}] if items else []
    messages: list[dict[str, Any]] = []
    is_open = False  # whether the last message is an answer that may have more items

    def answer() -> dict[str, Any]:
        if not is_open:
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for index, item in enumerate(items):
        place = f"input[{index}]"
        if not isinstance(item, dict):
            raise bad_request(f"{place}={item!r:.50} must be an object", place)
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") == "assistant":
            message = answer()
            content = _text(item.get("content"), f"{place}.content")
            message["content"] = (message["content"] or "") + content
        elif kind == "message":
            content = _text(item.get("content"), f"{place}.content")
            messages.append(_checked({"role": item.get("role"), "content": content}, place))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _checked({"role": "assistant", "tool_calls": [call]}, place)
            answer().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _text(item.get("output"), f"{place}.output")
            call_id = item.get("call_id")
            message = {"role": "tool", "tool_call_id": call_id, "content": content}
            messages.append(_checked(message, place))
        elif kind == "reasoning":
            parts = item.get("content") or []
            message = answer()
            text = _text(parts, f"{place}.content", ("reasoning_text",))
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        else:
            raise bad_request(f"{place}.type={kind!r:.50} is not supported", f"{place}.type")
        is_open = messages[-1]["role"] == "assistant"
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def _checked(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a message of an item; raise an APIError that names the item if it is not valid."""
    try:
        checked_messages([message])
    except ValueError as error:
        raise bad_request(str(error).replace("messages[0]", place, 1), "input") from None
    return message


def _text(content: Any, place: str, kinds: tuple[str, ...] = _TEXT_PARTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{place} must be a text or a list of text parts", place)
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in kinds
        if not (is_text and isinstance(part.get("text"), str)):
            raise bad_request(f"{place} must have parts of type {' or '.join(kinds)}", place)
    return "".join(part["text"] for part in content)


def _chat_tool(tool: Any, place: str) -> Any:
    if isinstance(tool, dict) and "function" in tool:
        raise bad_request(f"unknown field {place}.function", f"{place}.function")
    return _as_in_chats(tool, "function")


def _as_in_chats(value: Any, kind: str) -> Any:
    """Return an object of this type as chats have it: what is beside "type" is in an object.

    What is wrong with the value, the chat says.
    """
    if not isinstance(value, dict):
        return value
    if value.get("type") != kind:
        return dict(value)  # the chat takes its fields out of it
    return {"type": kind, kind: {name: x for name, x in value.items() if name != "type"}}


class _ResponseAnswer(ParsedAnswer):
    """One answer; its items are made as its text arrives, with the events that tell of them."""

    kind, id_prefix = "response", "resp"

    def __init__(self, service: Service, tools: Tools, shown: dict[str, Any], *, has_format: bool):
        super().__init__(service, tools, has_format=has_format)
        head = self.head
        self._response: dict[str, Any] = {
            "id": head["id"].replace("-", "_"),
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,  # whatever the request says
            "truncation": "disabled",
            **shown,
            "output": [],
            "usage": None,
        }
        self._numbers = itertools.count()  # of events
        self._open: dict[str, Any] | None = None  # the item whose text grows
        self._calls: dict[int, int] = {}  # by the number of a call, the index of its item
        self._output: list[dict[str, Any]] = self._response["output"]

    def choice(self, index: int, prompt: Prompt, output: CompletionOutput) -> Any:
        return self.delta(index, prompt, output, is_first=False)

    def delta(
        self, index: int, prompt: Prompt, output: CompletionOutput, *, is_first: bool
    ) -> list[dict[str, Any]]:
        """Return the new events."""
        events = []
        if is_first:
            for kind in ("created", "in_progress"):
                copy = {**self._response, "output": []}
                events.append(self._event(kind, response=copy))
        events += self._events(self.parts(index, prompt, output))
        if output.finish_reason is not None:
            events += [*self._close(), *self._cut_off()]
            is_cut = output.finish_reason == "length"
            self._response["status"] = "incomplete" if is_cut else "completed"
            if is_cut:
                self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return events

    def complete(self, choices: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
        self._response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},  # not counted by themselves
            "total_tokens": usage["total_tokens"],
        }
        return self._response

    def event(self, delta: list[dict[str, Any]], *, include_usage: bool) -> str:
        return "".join(self._text(event) for event in delta)

    def last_event(self, usage: dict[str, Any], *, include_usage: bool) -> str:
        response = self.complete([], usage)
        return self._text(self._event(str(response["status"]), response=response))

    def _text(self, event: dict[str, Any]) -> str:
        return f"event: {event['type']}\ndata: {encode_json(event)}\n\n"

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def _events(self, parts: Parts) -> list[dict[str, Any]]:
        events = []
        for kind, text in (("reasoning", parts.reasoning), ("message", parts.content)):
            if not text:
                continue
            if self._open is None or self._open["type"] != kind:
                events += [*self._close(), *self._begin(kind)]
            assert self._open is not None
            self._open["content"][0]["text"] += text
            events.append(self._text_event("delta", delta=text))
        for piece in parts.calls:
            events += self._call_events(piece)
        return events

    def _call_events(self, piece: CallPiece) -> Iterator[dict[str, Any]]:
        kind = "function_call_arguments"
        if piece.name:
            yield from self._close()
            item: dict[str, Any] = {"type": "function_call", "id": _id("fc")}
            item |= {"call_id": secrets.token_hex(5)[:9], "name": piece.name, "arguments": ""}
            item["status"] = "in_progress"
            self._calls[piece.number] = len(self._output)
            yield self._added(item)
            self._output.append(item)
        output_index = self._calls[piece.number]
        item = self._output[output_index]
        place = {"item_id": item["id"], "output_index": output_index}
        if piece.arguments:
            item["arguments"] += piece.arguments
            yield self._event(f"{kind}.delta", **place, delta=piece.arguments)
        if piece.is_last:
            arguments = item["arguments"]
            yield self._event(f"{kind}.done", **place, name=item["name"], arguments=arguments)
            item["status"] = "completed"
            yield self._done(item)

    def _cut_off(self) -> Iterator[dict[str, Any]]:
        """End the calls that are not complete."""
        for item in self._output:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"
                yield self._done(item)

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": _id("msg"), "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item |= {"id": _id("rs"), "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        added = self._added({**item, "content": []})
        self._output.append(item)
        self._open = item
        item["content"].append(part)
        return [added, self._event("content_part.added", **self._place(), part=dict(part))]

    def _close(self) -> list[dict[str, Any]]:
        if (item := self._open) is None:
            return []
        part = item["content"][0]
        text = self._text_event("done", text=part["text"])
        part_done = self._event("content_part.done", **self._place(), part=dict(part))
        item["status"], self._open = "completed", None
        return [text, part_done, self._done(item)]

    def _text_event(self, step: str, **fields: str) -> dict[str, Any]:
        assert self._open is not None
        kind = self._open["content"][0]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return self._event(f"{kind}.{step}", **self._place(), **fields, **logprobs)

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        return self._event("output_item.added", output_index=len(self._output), item=dict(item))

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        index = next(index for index, one in enumerate(self._output) if one is item)
        return self._event("output_item.done", output_index=index, item=dict(item))

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        index = len(self._output) - 1
        return {"item_id": self._open["id"], "output_index": index, "content_index": 0}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
