"""The work of one HTTP request for completions, and its answer, in one piece or as events."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pallas_paged.engine import CompletionOutput, EngineDeadError, RequestOutput
from pallas_paged.engine.requests.request import RequestStream
from pallas_paged.server.call import Call, Prompt, encode_json, field_of, json_bytes
from pallas_paged.server.fields import APIError, bad_request
from pallas_paged.server.service import Service

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on at once
]
# Takes the number of a prompt, the prompt, and its next output.
Emit = Callable[[int, Prompt, RequestOutput], Awaitable[None]]
Consume = Callable[[int, Prompt, RequestStream], Coroutine[Any, Any, None]]
# The thread of the engine shares Python's interpreter with this one. So outputs wait until the work
# for them, some 40 us each, is a fraction of the time.
_SECONDS_PER_STREAM, _LEAST_PAUSE = 250e-6, 1e-3
GRACE_SECONDS = 5.0  # after its time a request can still send an error


class Generation:
    """The work of one HTTP request."""

    def __init__(self, service: Service, call: Call, http: Request):
        """Prepare; `complete` or `deltas` does the work, once."""
        self._service, self._call, self._http = service, call, http
        self._streams: list[RequestStream] = []
        self._ended: str | None = None  # why it ends before its completions do
        self._reason = "stop"  # of the completion that ended last

    async def complete(self) -> list[tuple[Prompt, RequestOutput]]:
        """Generate to the end, and return the prompts with their outputs; errors as of `deltas`."""
        results: dict[int, tuple[Prompt, RequestOutput]] = {}

        async def consume(index: int, prompt: Prompt, stream: RequestStream) -> None:
            output = await stream.complete()
            self._check(output)
            request = stream.request
            if request.first_token_time is not None:
                since_arrival = request.arrival_time - self._call.arrival
                seconds = request.first_token_time - request.arrival_time
                self._service.metrics.first_output(since_arrival + seconds, request)
            self._count_end(output, sum(len(one.token_ids) for one in output.outputs))
            prompt.logprobs, prompt.embedding = output.prompt_logprobs, output.embedding
            results[index] = prompt, output

        await self._run(consume)
        return [results[index] for index in range(len(results))]

    async def deltas(self, emit: Emit) -> None:
        """Generate to the end, and emit each output as it comes.

        Raises:
            APIError: the request was refused, or could not be served.
            ClientDisconnect: the client has left.
        """
        service, arrival = self._service, self._call.arrival
        metrics = service.metrics

        async def consume(index: int, prompt: Prompt, stream: RequestStream) -> None:
            before, num_tokens = None, 0
            async for output in stream:
                now = time.perf_counter()
                self._check(output)
                num_new = sum(len(one.token_ids) for one in output.outputs)
                if before is None:
                    metrics.first_output(now - arrival, stream.request)
                    prompt.logprobs = output.prompt_logprobs
                else:
                    metrics.next_output(now - before, num_new / self._call.params.num_seqs)
                before, num_tokens = now, num_tokens + num_new
                await emit(index, prompt, output)
                pause = _SECONDS_PER_STREAM * service.admission.num_requests
                if output.finished:
                    self._count_end(output, num_tokens)
                elif pause > _LEAST_PAUSE:
                    await asyncio.sleep(pause)

        await self._run(consume)

    async def _run(self, consume: Consume) -> None:
        service, call = self._service, self._call
        if service.is_draining:
            raise shutting_down()
        with service.admission.admit(call.num_prompts * call.params.num_seqs):
            prompts = await service.encode(call.encode, call.num_characters)
            await self._compile(prompts)
            self._submit(prompts)
            try:
                await self._watch(consume, prompts)
            except EngineDeadError as error:
                service.metrics.finished("error")
                raise engine_dead(self._service, error) from None
            except APIError:
                service.metrics.finished("timeout" if self._ended == "timeout" else "error")
                raise
            except BaseException:
                service.metrics.finished("abort")
                raise
            service.metrics.finished(self._reason)

    async def _compile(self, prompts: Sequence[Prompt]) -> None:
        """Compile the grammar of the request in a thread, where others need not wait for it."""
        engine, of_tools = self._service.engine, prompts[0].structured_outputs
        structure = of_tools or self._call.params.structured_outputs
        if structure is None:
            return
        try:
            await asyncio.to_thread(engine.compile_grammar, structure)
        except ValueError as error:
            name = "tools" if of_tools else field_of(str(error))
            raise bad_request(str(error), name) from None

    def _submit(self, prompts: Sequence[Prompt]) -> None:
        call = self._call
        try:
            for prompt in prompts:
                params = call.params
                if (structure := prompt.structured_outputs) is not None:
                    params = dataclasses.replace(params, structured_outputs=structure)
                stream = self._service.engine.submit(
                    prompt.token_ids, call.pooling or params, priority=call.priority
                )
                self._streams.append(stream)
        except ValueError as error:
            self._close()
            longest = max(len(prompt.token_ids) for prompt in prompts)
            is_too_long = longest + (call.params.max_tokens or 1) > self._service.max_model_len
            code = "context_length_exceeded" if is_too_long else None
            raise APIError(400, str(error), param=field_of(str(error)), code=code) from None
        except EngineDeadError as error:
            raise engine_dead(self._service, error) from None
        except RuntimeError:
            self._close()
            raise shutting_down() from None

    async def _watch(self, consume: Consume, prompts: Sequence[Prompt]) -> None:
        """Consume all streams; end them early when the client leaves or the time is up."""
        loop, tasks = asyncio.get_running_loop(), [asyncio.create_task(self._wait_until_left())]
        seconds = self._service.config.request_timeout - (time.perf_counter() - self._call.arrival)
        timer = loop.call_later(seconds, self._end, "timeout")
        # A client that does not read holds up the consumers.
        cut = self._http.scope["state"].get("cut", self._close)
        cutter = loop.call_later(seconds + GRACE_SECONDS, cut)
        try:
            consumers = [
                consume(index, prompt, stream)
                for index, (prompt, stream) in enumerate(zip(prompts, self._streams, strict=True))
            ]
            if len(consumers) == 1:
                await consumers[0]
            else:
                tasks += map(asyncio.create_task, consumers)
                await asyncio.gather(*tasks[1:])
        finally:
            timer.cancel()
            cutter.cancel()
            for task in tasks:
                task.cancel()
            self._close()

    async def _wait_until_left(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass
        self._end("left")

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._close()

    def _close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _count_end(self, output: RequestOutput, num_tokens: int) -> None:
        self._reason = str(output.outputs[-1].finish_reason)
        seconds = time.perf_counter() - self._call.arrival
        self._service.metrics.last_output(seconds, num_tokens)

    def _check(self, output: RequestOutput) -> None:
        """Raise an error for completions that have not ended by themselves, or begin again."""
        if output.restarted:  # what a stream has sent can't be taken back
            raise APIError(503, "the model has new weights: send the request again")
        reasons = {one.finish_reason for one in output.outputs}
        if "error" in reasons:
            raise APIError(500, f"the model failed: {output.error}")
        if "abort" not in reasons:
            return
        if self._ended == "left":
            raise ClientDisconnect
        if self._ended == "timeout":
            seconds = self._service.config.request_timeout
            raise APIError(504, f"the request took more than {seconds:g} s")
        raise shutting_down()


def engine_dead(service: Service, error: EngineDeadError) -> APIError:
    """Note that the engine is dead, and return what a client gets."""
    service.metrics.error = error
    return APIError(500, "the engine is dead; restart the server", code="engine_dead")


def shutting_down() -> APIError:
    """Return what a client gets while the server shuts down."""
    return APIError(503, "the server is shutting down", headers={"connection": "close"})


async def respond(service: Service, call: Call, request: Request) -> Response:
    """Return the answer to a request for completions.

    Raises:
        APIError: it was refused, or could not be served.
    """
    if call.stream:
        return EventStream(service, call)
    results = await Generation(service, call, request).complete()
    count = _Count(call)

    def body() -> bytes:
        choices = [
            call.answer.choice(number, prompt, one)
            for index, (prompt, output) in enumerate(results)
            for number, one in count.each(index, output)
        ]
        return json_bytes(call.answer.body(choices, count.usage()))

    # A thousand vectors are millions of numbers, for which other requests need not wait.
    content = body() if call.pooling is None else await asyncio.to_thread(body)
    return Response(content, media_type="application/json")


class EventStream(Response):
    """Completions as they grow, as server-sent events.

    The first event is sent with the first output. An error before it has its own status; a later
    one is an event.
    """

    def __init__(self, service: Service, call: Call):
        """Prepare; sending it does the work."""
        self._service, self._call = service, call
        self._count = _Count(call)
        self._seen: set[int] = set()  # numbers of the choices that have begun
        self._has_started = False

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
            await self._send(send, f"data: {encode_json(error.body)}\n\n")
        except ClientDisconnect:
            return
        else:
            include_usage = self._call.include_usage
            usage = self._count.usage()
            if last := self._call.answer.last_event(usage, include_usage=include_usage):
                await self._send(send, last)
        await self._send(send, "data: [DONE]\n\n", is_last=True)

    def _events(self, index: int, prompt: Prompt, output: RequestOutput) -> str:
        events, answer = [], self._call.answer
        for number, one in self._count.each(index, output):
            delta = answer.delta(number, prompt, one, is_first=number not in self._seen)
            if delta is not None:
                self._seen.add(number)
                events.append(answer.event(delta, include_usage=self._call.include_usage))
        return "".join(events)

    async def _send(self, send: Send, text: str, *, is_last: bool = False) -> None:
        if not self._has_started:
            self._has_started = True
            start = {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
            await send(start)
        body = json_bytes(text)
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


class _Count:
    """Numbers the completions of a request, and counts its tokens."""

    def __init__(self, call: Call):
        self._per_prompt = call.params.n
        self._num_prompt = self._num_cached = self._num_completion = 0

    def each(self, index: int, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        """Yield the completions of a prompt, each with its number among all of the request."""
        if output.finished:
            self._num_prompt += len(output.prompt_token_ids)
            self._num_cached += output.num_cached_tokens
        for one in sorted(output.outputs, key=lambda one: one.index):
            self._num_completion += len(one.token_ids)
            yield index * self._per_prompt + one.index, one

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_completion,
            "total_tokens": self._num_prompt + self._num_completion,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }
