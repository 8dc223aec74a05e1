"""Serve a trace by the engine over HTTP: the server in this process, its clients in another."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from bench.serving.compilations import Compilations
from bench.serving.engine import numbers_of
from bench.serving.record import Record, Served
from bench.serving.requests import TraceRequest
from pallas_paged.engine import AsyncEngine, Engine
from pallas_paged.server.server import Server, listen, prepare_process
from pallas_paged.server.service import ServerConfig, Service


def serve_over_http(engine: Engine, trace: Sequence[TraceRequest], *, seconds: float) -> Record:
    """Serve a trace through streamed `/v1/completions`; times are the clients'.

    Args:
        engine: idle, warmed up and new, because its stats count from its start.
        trace: requests by arrival.
        seconds: limit of the run; unfinished requests are aborted.

    Raises:
        RuntimeError: if a request ends without all its tokens.
    """
    config = ServerConfig(
        served_model_name="bench",
        max_queue=len(trace),
        max_connections=len(trace) + 16,
        drain_timeout=5.0,
    )
    prepare_process()
    server = Server(Service(AsyncEngine(engine), config=config))
    bound = listen("127.0.0.1", 0)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[bound])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    with tempfile.TemporaryDirectory() as folder, Compilations() as compilations:
        file = Path(folder, "requests.json")
        file.write_text(json.dumps([_request(one) for one in trace]))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        bound.listen(len(trace))  # the clients may come before the thread has started
        thread.start()
        try:
            command = [sys.executable, "-m", "bench.serving.http_client"]
            client = subprocess.run(
                [*command, url, str(file), str(seconds)],
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[2],
                check=False,
            )
        finally:
            loops[0].call_soon_threadsafe(server.stop)
            thread.join()
    if client.returncode:
        raise RuntimeError("the client failed")
    result = json.loads(client.stdout)
    return Record(
        served=[Served(**one) for one in result["served"]],
        usage=[],
        wall=result["wall"],
        num_tokens=engine.stats().generated_tokens,
        capacity=engine.num_pages * engine.config.page_size,
        extra=numbers_of(engine, compilations),
    )


def _request(one: TraceRequest) -> dict[str, object]:
    body = {
        "prompt": one.prompt.tolist(),
        "max_tokens": one.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return {"arrival": one.arrival, "body": json.dumps(body)}
