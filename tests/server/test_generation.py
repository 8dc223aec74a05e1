"""The work of a request on streams that a test controls: its end, its time and its metrics."""

import asyncio
import gc
import weakref
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect

from pallas_paged.engine import CompletionOutput, EngineDeadError, RequestOutput, SamplingParams
from pallas_paged.server import generation
from pallas_paged.server.call import Prompt
from pallas_paged.server.fields import APIError
from pallas_paged.server.generation import Generation
from pallas_paged.server.metrics import Metrics
from pallas_paged.server.service import Admission, ServerConfig
from tests.support.event_loops import in_loop
from tests.support.servers import metric_values

ARRIVAL = 1000.0


def news(*completions, error=None):
    """An output; each completion has a number of tokens and a finish reason."""
    outputs = [
        CompletionOutput(index=i, text="", token_ids=[7] * count, finish_reason=reason)
        for i, (count, reason) in enumerate(completions)
    ]
    fields = dict(request_id="", prompt=None, prompt_token_ids=[1, 2, 3], prompt_logprobs=[None])
    finished = all(one.finish_reason for one in outputs)
    fields |= dict(outputs=outputs, finished=finished, num_cached_tokens=0, seed=0, error=error)
    return RequestOutput(**fields)


class Stream:
    """Hands out outputs, each after some seconds of the clock; "closed" waits for `close`."""

    def __init__(self, clock, outputs):
        times = dict(start_time=ARRIVAL + 1.5, first_token_time=ARRIVAL + 4)
        self.request = SimpleNamespace(
            arrival_time=ARRIVAL + 1, prompt_token_ids=[1, 2, 3], **times
        )
        self._clock, self._outputs, self.closed = clock, outputs, asyncio.Event()

    async def __aiter__(self):
        for seconds, output in self._outputs:
            if seconds in ("closed", "late"):
                await self.closed.wait()
                await asyncio.sleep(0.1 if seconds == "late" else 0)
            else:
                self._clock.now += seconds
            if isinstance(output, Exception):
                raise output
            yield output

    async def complete(self):
        return [output async for output in self][-1]

    def close(self):
        self.closed.set()


class Work:
    """A generation over streams with the given outputs; `prompts` are submitted one by one."""

    def __init__(self, monkeypatch, *streams, messages=(), request_timeout=600.0, **params):
        self.now, self.slept, self.submitted, self.cuts = ARRIVAL, [], [], asyncio.Event()
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(generation, "time", clock)
        self.streams = [s if isinstance(s, Exception) else Stream(self, s) for s in streams]
        config = ServerConfig(served_model_name="x", request_timeout=request_timeout)
        self.metrics = Metrics(self, config.served_model_name)
        self.service = SimpleNamespace(
            admission=Admission(100),
            metrics=self.metrics,
            config=config,
            engine=self,
            encode=self._encode,
            is_draining=False,
            max_model_len=8,
        )
        call = SimpleNamespace(
            encode=lambda: [Prompt(token_ids=[1] * (3 + i)) for i in range(len(streams))],
            num_characters=5,
            num_prompts=len(streams),
            params=SamplingParams(**params),
            pooling=None,
            priority=-2,
            arrival=ARRIVAL,
        )
        self._messages = iter(messages)
        http = SimpleNamespace(receive=self._receive, scope={"state": {"cut": self.cuts.set}})
        self.generation = Generation(self.service, call, http)

    async def _encode(self, function, num_characters):
        assert num_characters == 5
        return function()

    async def _receive(self):
        if (message := next(self._messages, None)) is None:
            await asyncio.Event().wait()
        await asyncio.sleep(0.03 if message == "http.disconnect" else 0)
        return {"type": message}

    def submit(self, token_ids, params, *, priority):
        assert priority == -2
        stream = self.streams[len(self.submitted)]
        self.submitted.append(len(token_ids))
        if isinstance(stream, Exception):
            raise stream
        return stream

    async def stats(self):
        raise RuntimeError("there is no engine")

    async def values(self):
        """Outcomes that are not zero, (count, sum) of histograms; nothing is admitted any more."""
        assert (self.service.admission.num_seqs, self.service.admission.num_requests) == (0, 0)
        values = metric_values(await self.metrics.render())
        sums = {k.removesuffix("_sum"): v for k, v in values.items() if k.endswith("_sum") and v}
        outcomes = {k.split('"')[1]: v for k, v in values.items() if "success_total" in k and v}
        return outcomes | {k: (values[k + "_count"], v) for k, v in sums.items()}


@in_loop
async def test_a_whole_answer_and_its_metrics(monkeypatch):
    slow = [("closed", None), (2.0, news((2, "stop"), (3, "length")))]
    fast = [(6.0, news((1, "stop"), (1, "stop")))]
    work = Work(monkeypatch, slow, fast, n=2)
    work.streams[1].request.first_token_time = None  # it has computed the prompt only
    asyncio.get_running_loop().call_later(0.02, work.streams[0].close)
    tasks, reference = asyncio.all_tasks(), weakref.ref(work.generation)
    results = await work.generation.complete()
    del work.generation
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    gc.collect()
    assert reference() is None  # no timer has it
    assert [len(prompt.token_ids) for prompt, _ in results] == work.submitted == [3, 4]
    assert [len(output.outputs[0].token_ids) for _, output in results] == [2, 1]
    assert results[0][0].logprobs == [None]
    assert await work.values() == {
        "length": 1,
        "time_to_first_token_seconds": (1, 4.0),
        "request_queue_time_seconds": (1, 0.5),
        "request_prompt_tokens": (1, 3),
        "e2e_request_latency_seconds": (2, 6.0 + 8.0),
        "request_generation_tokens": (2, 5 + 2),
    }


@pytest.mark.parametrize("num_others", [3, 7])
@in_loop
async def test_a_streamed_answer_its_metrics_and_its_pauses(monkeypatch, num_others):
    outputs = [(2.5, news((1, None))), (0.5, news((4, None), (4, None)))]
    outputs += [(1.0, news((0, "length"), (1, "stop")))]  # less than a token of each
    work = Work(monkeypatch, outputs, n=2)
    work.streams[0].request.start_time = None if num_others == 3 else ARRIVAL + 1.5
    emitted = []

    async def emit(index, prompt, output):
        assert index == 0 and prompt.logprobs == [None]
        assert work.service.admission.num_seqs == num_others + 2
        emitted.append(sum(len(one.token_ids) for one in output.outputs))

    async def sleep(seconds):
        work.slept.append(seconds)

    with monkeypatch.context() as patch, ExitStack() as others:
        patch.setattr(asyncio, "sleep", sleep)
        for _ in range(num_others):
            others.enter_context(work.service.admission.admit(1))
        await work.generation.deltas(emit)
    # 250 us for each request, but not less than 1 ms, and not after the last output.
    assert emitted == [1, 8, 1] and work.slept == ([2e-3] * 2 if num_others == 7 else [])
    queued = {"request_queue_time_seconds": (1, 0.5)}
    assert await work.values() == ({} if num_others == 3 else queued) | {
        "stop": 1,
        "time_to_first_token_seconds": (1, 2.5),
        "inter_token_latency_seconds": (2, 0.5 / 4 + 1.0),
        "request_prompt_tokens": (1, 3),
        "e2e_request_latency_seconds": (1, 4.0),
        "request_generation_tokens": (1, 10),
    }


ABORTED, LATE = ([(when, news((0, "abort")))] for when in ("closed", "late"))
LEAVES = ["http.request", "http.disconnect"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("outputs", "options", "error", "outcome"),
    [
        ([(1, news((0, "error"), error="NaN"))], {}, (500, "the model failed: NaN"), "error"),
        ([(1, replace(news((1, None)), restarted=True))], {}, (503, "the model has new"), "error"),
        ([(1, news((0, "abort")))], {}, (503, "the server is shutting down"), "error"),
        (ABORTED, {"request_timeout": 0}, (504, "the request took more than 0 s"), "timeout"),
        (ABORTED, {"messages": LEAVES}, None, "abort"),
        (LATE, {"request_timeout": 0, "messages": LEAVES}, (504, "the request took"), "timeout"),
        ([(1, EngineDeadError("dead", OSError()))], {}, (500, "the engine is dead; "), "error"),
        ([(1, KeyError())], {}, KeyError, "abort"),
    ],
)
@in_loop
async def test_ends_before_the_end(monkeypatch, stream, outputs, options, error, outcome):
    async def emit(*_):
        pass

    work = Work(monkeypatch, outputs, LATE if outputs is LATE else ABORTED, **options)
    one = work.generation
    expected = APIError if isinstance(error, tuple) else error or ClientDisconnect
    with pytest.raises(expected) as raised:
        await (one.deltas(emit) if stream else one.complete())
    if isinstance(error, tuple):
        assert raised.value.status == error[0] and str(raised.value).startswith(error[1])
        code = raised.value.body["error"]["code"]
        assert code == ("engine_dead" if "dead" in error[1] else code)
    assert (work.metrics.error is not None) == ("dead" in str(error))
    assert all(stream.closed.is_set() for stream in work.streams)
    assert {k: v for k, v in (await work.values()).items() if isinstance(v, float)} == {outcome: 1}


@pytest.mark.parametrize(
    ("error", "params", "expected"),
    [
        (ValueError("top_k=9 is bad"), {}, (400, "top_k=9 is bad", "top_k", None)),
        (ValueError("x"), {"max_tokens": 4}, (400, "x", None, None)),  # 4 + 4 tokens fit
        (ValueError("x"), {"max_tokens": 5}, (400, "x", None, "context_length_exceeded")),
        (EngineDeadError("", OSError()), {}, (500, "the engine is", None, "engine_dead")),
        (RuntimeError("x"), {}, (503, "the server is shutting down", None, "service_unavailable")),
    ],
)
@in_loop
async def test_a_refused_prompt_closes_those_before_it(monkeypatch, error, params, expected):
    work = Work(monkeypatch, ABORTED, error, **params)
    with pytest.raises(APIError) as raised:
        await work.generation.complete()
    found, (status, message, param, code) = raised.value, expected
    assert (found.status, found.body["error"]["param"]) == (status, param)
    assert str(found).startswith(message) and found.body["error"]["code"] == code
    assert work.streams[0].closed.is_set() or status == 500
    assert found.headers == ({"connection": "close"} if status == 503 else {})
    assert (work.metrics.error is error) == (status == 500)
    assert await work.values() == {}  # the engine did not take it
