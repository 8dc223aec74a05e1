"""Completions as the answer to an HTTP request: whole, or as server-sent events."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from models.server.call import Call, Prompt
from models.server.errors import APIError
from models.server.generation import Generation
from models.server.service import Service
from pallas_paged.engine import CompletionOutput, RequestOutput

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on at once
]
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


async def respond(service: Service, call: Call, request: Request) -> Response:
    """Return the answer to a request for completions.

    Raises:
        APIError: it was refused, or could not be served.
    """
    if call.stream:
        return EventStream(service, call)
    results = await Generation(service, call, request).whole()
    usage = _Usage()
    choices = []
    for index, (prompt, output) in enumerate(results):
        usage.add_prompt(output)
        for one in sorted(output.outputs, key=lambda one: one.index):
            usage.num_completion += len(one.token_ids)
            choices.append(call.answer.choice(_number(call, index, one), prompt, one))
    whole = call.answer.head | {"choices": choices, "usage": usage.json()}
    return Response(_encode(whole).encode(), media_type="application/json")


class EventStream(Response):
    """Completions as they grow, as server-sent events.

    The first event is sent with the first output. An error before it has its own status; a later
    one is an event.
    """

    def __init__(self, service: Service, call: Call):
        """Prepare; sending it does the work."""
        self.background = None
        self._service, self._call = service, call
        self._usage = _Usage()
        self._seen: set[int] = set()  # numbers of the choices that have begun
        self._has_started = False
        # An event is `head`, its choices, and `tail`.
        head = call.answer.head | {"object": call.answer.chunk_object}
        self._head = f'data: {_encode(head)[:-1]},"choices":['
        self._tail = "]" + (',"usage":null' if call.include_usage else "") + "}\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)

        async def emit(index: int, prompt: Prompt, output: RequestOutput) -> None:
            if events := self._events(index, prompt, output):
                await self._send(send, events)

        try:
            await Generation(self._service, self._call, request).deltas(emit)
        except APIError as error:
            if not self._has_started:
                raise
            self._service.metrics.answered(error.status)
            await self._send(send, f"data: {_encode(error.body)}\n\n")
        except ClientDisconnect:
            return
        else:
            if self._call.include_usage:
                usage = {"choices": [], "usage": self._usage.json()}
                chunk = {"object": self._call.answer.chunk_object}
                await self._send(
                    send, f"data: {_encode(self._call.answer.head | chunk | usage)}\n\n"
                )
        await self._send(send, "data: [DONE]\n\n", is_last=True)

    def _events(self, index: int, prompt: Prompt, output: RequestOutput) -> str:
        if output.finished:
            self._usage.add_prompt(output)
        events = []
        for one in output.outputs:
            number = _number(self._call, index, one)
            self._usage.num_completion += len(one.token_ids)
            delta = self._call.answer.delta(number, prompt, one, is_first=number not in self._seen)
            if delta is not None:
                self._seen.add(number)
                events += [self._head, _encode(delta), self._tail]
        return "".join(events)

    async def _send(self, send: Send, text: str, *, is_last: bool = False) -> None:
        if not self._has_started:
            self._has_started = True
            start = {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
            await send(start)
        await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})


class _Usage:
    """Numbers of tokens."""

    def __init__(self) -> None:
        self.num_completion = 0
        self._num_prompt = self._num_cached = 0

    def add_prompt(self, output: RequestOutput) -> None:
        self._num_prompt += len(output.prompt_token_ids)
        self._num_cached += output.num_cached_tokens

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self._num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


def _number(call: Call, index: int, output: CompletionOutput) -> int:
    """Return the number of a completion among all of the request."""
    return index * call.params.n + output.index
