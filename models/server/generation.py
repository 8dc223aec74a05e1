"""The work of one HTTP request: submit its prompts, hand out their outputs, end it in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request

from models.server.call import Call, Prompt, field_of
from models.server.errors import APIError
from models.server.service import Service
from pallas_paged.engine import EngineDeadError, RequestOutput
from pallas_paged.engine.requests.request import RequestStream

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
        """Prepare; `whole` or `deltas` does the work, once."""
        self._service, self._call, self._http = service, call, http
        self._streams: list[RequestStream] = []
        self._ended: str | None = None  # why it ends before its completions do
        self._reason = "stop"  # of the completion that ended last

    async def whole(self) -> list[tuple[Prompt, RequestOutput]]:
        """Generate to the end, and return the prompts with their outputs; errors as of `deltas`."""
        results: dict[int, tuple[Prompt, RequestOutput]] = {}

        async def consume(index: int, prompt: Prompt, stream: RequestStream) -> None:
            output = await stream.whole()
            self._check(output)
            request = stream.request
            if request.first_token_time is not None:
                since_arrival = request.arrival_time - self._call.arrival
                seconds = request.first_token_time - request.arrival_time
                self._service.metrics.first_output(since_arrival + seconds, request)
            self._count_end(output, sum(len(one.token_ids) for one in output.outputs))
            prompt.logprobs = output.prompt_logprobs
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
            raise _shutting_down()
        with service.admission.admit(call.num_prompts * call.params.num_seqs):
            prompts = await service.encode(call.encode, call.num_characters)
            self._submit(prompts)
            try:
                await self._watch(consume, prompts)
            except EngineDeadError as error:
                service.metrics.outcome("error")
                raise self._dead(error) from None
            except APIError:
                service.metrics.outcome("timeout" if self._ended == "timeout" else "error")
                raise
            except BaseException:
                service.metrics.outcome("abort")
                raise
            service.metrics.outcome(self._reason)

    def _submit(self, prompts: Sequence[Prompt]) -> None:
        call = self._call
        try:
            for prompt in prompts:
                stream = self._service.engine.submit(
                    prompt.token_ids, call.params, priority=call.priority
                )
                self._streams.append(stream)
        except ValueError as error:
            self._close()
            longest = max(len(prompt.token_ids) for prompt in prompts)
            is_too_long = longest + (call.params.max_tokens or 1) > self._service.max_model_len
            code = "context_length_exceeded" if is_too_long else None
            raise APIError(400, str(error), param=field_of(str(error)), code=code) from None
        except EngineDeadError as error:
            raise self._dead(error) from None
        except RuntimeError:
            self._close()
            raise _shutting_down() from None

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
        """Raise an error for completions that have not ended by themselves."""
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
        raise _shutting_down()

    def _dead(self, error: EngineDeadError) -> APIError:
        self._service.metrics.error = error
        return APIError(500, "the engine is dead; restart the server", code="engine_dead")


def _shutting_down() -> APIError:
    return APIError(503, "the server is shutting down", headers={"connection": "close"})
