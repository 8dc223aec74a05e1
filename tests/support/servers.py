"""A server over a real socket, in a thread of the test process, with a small plain model."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jax

from models.text import Tokenizer, read_chat_template, save_byte_tokenizer
from pallas_paged.engine import AsyncEngine, Engine, EngineConfig
from pallas_paged.engine.device.program import modes_for
from pallas_paged.server.server import Server, listen
from pallas_paged.server.service import ServerConfig, Service
from tests.support.engine_calls import use_modes
from tests.support.plain_model import PlainModel, greedy_tokens

MODEL = PlainModel(vocab_size=256, num_layers=1, max_model_len=256)
_STEPS = dict(max_num_seqs=8, max_num_batched_tokens=64, num_scheduler_steps=4)
SIZES = EngineConfig(num_pages=64, page_size=16, **_STEPS)
CHAT_TEMPLATE = """\
{%- if tools %}[tools] {{ tools | tojson }}
{% endif -%}
{%- if documents %}[documents] {{ documents | tojson }}
{% endif -%}
{%- if style is defined %}[style] {{ style }}
{% endif -%}
{%- if reasoning_effort is defined %}[effort] {{ reasoning_effort }}
{% endif -%}
{%- for message in messages -%}
{%- if message.role == "tool" %}{{ raise_exception("no tools here") }}{% endif -%}
[{{ message.role }}] {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt %}[assistant] {% endif -%}
"""


def make_service(
    folder: Path,
    engine: Engine | None = None,
    *,
    has_texts: bool = True,
    defaults: dict[str, Any] | None = None,
    chat_defaults: dict[str, Any] | None = None,
    **config: Any,
) -> Service:
    """Make a service of an engine, or of a small one, with fields of its `ServerConfig`.

    Files of the tokenizer and the template go to a folder, which keeps those that it has.
    """
    engine = small_engine(folder if has_texts else None) if engine is None else engine
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return Service(
        AsyncEngine(engine),
        chat_template=read_chat_template(folder) if has_texts else None,
        config=ServerConfig(**{"served_model_name": "small", "drain_timeout": 30.0} | config),
        sampling_defaults=defaults,
        chat_defaults=chat_defaults,
    )


class RunningServer:
    """A server that runs from `with` to the end of the block; then every page must be free.

    It has a client for its url, and a service; options are those of `make_service`.
    """

    def __init__(self, folder: Path, engine: Engine | None = None, *, access_log=False, **options):
        self._engine = small_engine(folder) if engine is None else engine
        self.service = make_service(folder, self._engine, **options)
        self.server = Server(self.service, access_log=access_log)
        self.bound = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.bound.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=60, verify=False)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        wait_until(lambda: self.server.started or not self._thread.is_alive())
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.service.metrics.error is None:
            check_idle(self._engine)

    def stop(self) -> None:
        """Begin the shutdown."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.stop)

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine in the server's loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def metrics(self) -> dict[str, float]:
        """Return the values of the metrics, by name and labels but that of the model."""
        return metric_values(self.call(self.service.metrics.render()))

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits, and every page is free or only cached."""

        def is_idle() -> bool:
            values, admission = self.metrics(), self.service.admission
            names = ("num_requests_running", "num_requests_waiting", "num_used_pages")
            numbers = [admission.num_seqs, admission.num_requests]
            return not any([*numbers, *(values[name] for name in names)])

        wait_until(is_idle)

    @contextlib.contextmanager
    def connection(self, data: bytes) -> Iterator[socket.socket]:
        """Open a connection, and send these bytes."""
        with socket.create_connection(self.bound.getsockname(), timeout=30) as connection:
            connection.sendall(data)
            yield connection

    def exchange(self, data: bytes) -> bytes:
        """Send bytes over a connection that the server closes, and return all that comes back."""
        received = b""
        # It may have left some of the data unread.
        with self.connection(data) as connection, contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                received += piece
        return received

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self.server.serve(sockets=[self.bound])

        asyncio.run(serve())


def http_request(path: str, fields: Any = None, *headers: str) -> bytes:
    """Return the bytes of a POST request with JSON, or of a GET request."""
    body = b"" if fields is None else json.dumps(fields).encode()
    lines = [f"{'GET' if fields is None else 'POST'} {path} HTTP/1.1", "host: x", *headers]
    if fields is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


def metric_values(text: bytes) -> dict[str, float]:
    """Return the values of metrics in Prometheus' format, as `RunningServer.metrics`."""
    lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#"]
    return {_short(name): float(value) for name, value in lines}


def _short(name: str) -> str:
    """Return the name of a metric without the prefix and the name of the model."""
    name = re.sub(r'model_name="[^"]*",?', "", name.removeprefix("pallas_paged:"))
    return name.replace(",}", "}").removesuffix("{}")


@functools.cache
def small_params() -> dict[str, jax.Array]:
    return jax.device_put(MODEL.init(0))


def small_engine(folder: Path | None) -> Engine:
    """Make an engine whose tokenizer goes to a folder; None: without one.

    Its steps serve requests with any parameters, so that all tests share two programs.
    """
    if folder is not None and not (folder / "tokenizer.json").exists():
        save_byte_tokenizer(folder, max_length=MODEL.max_model_len)
    engine = Engine(MODEL, small_params(), SIZES, Tokenizer(folder) if folder is not None else None)
    use_modes(engine, [replace(modes_for(None)[-1], pooling=True)])
    return engine


@functools.cache
def expected_text(prompt: str, num_tokens: int) -> str:
    """Return the greedy continuation of a prompt, computed without a cache."""
    tokens = greedy_tokens(MODEL, small_params(), list(prompt.encode()), num_tokens)
    return bytes(tokens).decode(errors="replace")


def check_idle(engine: Engine) -> None:
    """Check that an engine which has shut down has no request and no page in use."""
    engine.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    table = engine.table
    assert int(table.num_free) + stats.num_cached_pages == stats.num_pages


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds; fail if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.01)
