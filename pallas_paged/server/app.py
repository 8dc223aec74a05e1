"""The endpoints of the server, as an ASGI app; `/v1/embeddings` is here in full."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pallas_paged.engine import (
    AsyncEngine,
    CompletionOutput,
    EngineDeadError,
    PoolingParams,
    SamplingParams,
    Tokenizer,
)
from pallas_paged.engine.requests.request import normalized
from pallas_paged.server.call import Answer, Call, Prompt, encode_json, take_priority
from pallas_paged.server.chat_template import ChatTemplate
from pallas_paged.server.completions import (
    encoded,
    parse_chat,
    parse_completion,
    take_conversation,
    take_prompts,
)
from pallas_paged.server.fields import APIError, Fields, bad_request, error_of
from pallas_paged.server.generation import engine_dead, respond, shutting_down
from pallas_paged.server.metrics import HEALTH_SECONDS
from pallas_paged.server.page.pool import PoolView
from pallas_paged.server.responses import parse_response
from pallas_paged.server.service import ServerConfig, Service

Endpoint = Callable[[Request], Awaitable[Response]]
_PAGE = Path(__file__).parent / "page"
_PAGE_FILES = {"/": "index.html"} | {
    f"/{name}": name for name in ("page.css", "page.js", "pool.js", "api.js")
}
_ENCODINGS = ("float", "base64")  # of vectors
_OPEN_PATHS = ("/health", *_PAGE_FILES)  # need no API key
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def create_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | str | Callable[..., str] | None = None,
    *,
    config: ServerConfig | None = None,
    sampling_defaults: Mapping[str, Any] | None = None,
    chat_defaults: Mapping[str, Any] | None = None,
) -> Starlette:
    """Return an ASGI app with OpenAI's endpoints, which starts the engine and stops it at its end.

    Args:
        engine: of any model, not started.
        tokenizer: of the requests' texts; None: the engine's own. An engine without one serves
            token ids.
        chat_template: makes a prompt of a conversation: Jinja text, a function, or a
            `ChatTemplate`. None: there are no chats.
        config: name of the model, keys and limits; None: the defaults. `max_connections` and
            `drain_timeout` are for `serve`: an app does not see connections and signals.
        sampling_defaults: fields of `SamplingParams` that requests may leave out.
        chat_defaults: the same for chats; None: `sampling_defaults`. Their "stop" and
            "stop_token_ids" are added to those of a request.

    Raises:
        ValueError: an argument is not of its type or out of its range.
    """
    return app_of(
        Service(
            engine,
            tokenizer,
            chat_template,
            config=config,
            sampling_defaults=sampling_defaults,
            chat_defaults=chat_defaults,
        )
    )


def app_of(service: Service) -> Starlette:
    """Return the app of a service."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.engine:
            await service.metrics.refresh()
            yield

    async def answer(request: Request, error: Exception) -> Response:
        known = error_of(request, error)
        service.metrics.answered(known.status)
        return known.response()

    async def answer_nobody(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client has left; no bytes of it are sent

    endpoints, post = _Endpoints(service), ["POST"]
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", endpoints.completions(parse_chat), methods=post),
            Route("/v1/responses", endpoints.completions(parse_response), methods=post),
            Route("/v1/completions", endpoints.completions(parse_completion), methods=post),
            Route("/v1/embeddings", endpoints.completions(parse_embedding), methods=post),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.models),
            Route("/tokenize", endpoints.tokenize, methods=post),
            Route("/detokenize", endpoints.detokenize, methods=post),
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.metrics),
            Route("/pool", endpoints.pool),
            *(Route(path, endpoints.page) for path in _PAGE_FILES),
        ],
        middleware=[Middleware(_HeaderCheck, service=service)],
        exception_handlers={
            APIError: answer,
            ClientDisconnect: answer_nobody,
            HTTPException: answer,
            Exception: answer,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # to the host of a header, which anyone can write
    return app


class _HeaderCheck:
    """Refuses requests to another host, and those without a valid API key."""

    def __init__(self, app: ASGIApp, *, service: Service):
        self._app, self._service = app, service
        self._hosts = {host.lower() for host in service.config.allowed_hosts}
        self._digests = [_digest(key.encode()) for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        self._service.metrics.answered(error.status)
        await error.response()(scope, receive, send)

    def _error(self, scope: Scope) -> APIError | None:
        headers = Headers(scope=scope)
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if self._hosts and host not in self._hosts:
            return bad_request(
                f"the header Host has {host!r:.100}, which is no host of this server"
            )
        needs_key = self._digests and scope["path"] not in _OPEN_PATHS
        if not needs_key or self._is_valid(headers.get("authorization", "")):
            return None
        message = "the header Authorization must be 'Bearer KEY' with a valid API key"
        return APIError(401, message, headers={"www-authenticate": "Bearer"})

    def _is_valid(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        digest = _digest(key.strip().encode())
        # All are compared, each in constant time, so that the time says nothing about a key.
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class _Endpoints:
    def __init__(self, service: Service):
        self._service = service
        self._pool = PoolView(service.engine, service.engine.engine.config.page_size)
        self._model = {
            "id": service.config.served_model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "pallas_paged",
            "max_model_len": service.max_model_len,
            "has_chat_template": service.chat_template is not None,
            "has_tokenizer": service.has_tokenizer,
        }

    def completions(self, parse: Callable[[Fields, Service], Call]) -> Endpoint:
        """Return the endpoint of requests that are parsed so."""

        async def endpoint(request: Request) -> Response:
            call = parse(await self._service.read_fields(request), self._service)
            return await respond(self._service, call, request)

        return endpoint

    async def models(self, request: Request) -> Response:
        if (name := request.path_params.get("name")) is not None:
            self._service.check_model(name)
            return JSONResponse(self._model)
        return JSONResponse({"object": "list", "data": [self._model]})

    async def tokenize(self, request: Request) -> Response:
        service = self._service
        fields = await service.read_fields(request)
        service.take_model(fields)
        prompt = fields.take("prompt", str)
        adds = fields.take("add_special_tokens", bool, default=True)
        if prompt is None:
            conversation = take_conversation(fields, service)
            encode, size = partial(conversation.encode, service), conversation.num_characters
        else:
            encode = partial(service.encode_text, prompt, add_special_tokens=adds)
            size = len(prompt)
        fields.end()
        token_ids = await service.encode(encode, size)
        counts = {"count": len(token_ids), "max_model_len": service.max_model_len}
        return JSONResponse(counts | {"tokens": token_ids})

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        fields = await service.read_fields(request)
        service.take_model(fields)
        token_ids = fields.take("tokens", list)
        fields.end()
        if token_ids is None:
            raise bad_request("tokens must be a list of token ids", "tokens")

        def decode() -> str:
            service.check_token_ids(token_ids, "tokens")
            return service.tokenizer.decode(token_ids)

        return JSONResponse({"prompt": await service.encode(decode, len(token_ids))})

    async def health(self, _: Request) -> Response:
        await self._service.metrics.refresh(HEALTH_SECONDS)
        if self._service.metrics.error is not None:
            return JSONResponse({"status": "dead"}, 503)
        if self._service.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(await self._service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def pool(self, _: Request) -> Response:
        try:
            return Response(await self._pool.read(), media_type="application/json")
        except EngineDeadError as error:
            raise engine_dead(self._service, error) from None
        except RuntimeError:
            raise shutting_down() from None

    async def page(self, request: Request) -> Response:
        name = _PAGE_FILES[request.scope["path"]]
        return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)


def parse_embedding(fields: Fields, service: Service) -> Call:
    """Return the call of a request.

    Raises:
        APIError: a field is unknown, of another type, or out of its range.
    """
    service.take_model(fields)
    prompts = take_prompts(fields, "input")
    encoding = fields.take("encoding_format", str, default="float")
    if encoding not in _ENCODINGS:
        rule = f"must be one of {', '.join(_ENCODINGS)}"
        raise bad_request(f"encoding_format={encoding!r:.50} {rule}", "encoding_format")
    dimensions = fields.take("dimensions", int)
    if dimensions is not None and dimensions < 1:
        raise bad_request(f"{dimensions=} must be at least 1", "dimensions")
    fields.take("user")
    priority = take_priority(fields, allow_priority=service.config.allow_priority)
    fields.end()
    return Call(
        encode=lambda: [encoded(prompt, service, "input") for prompt in prompts],
        num_characters=sum(map(len, prompts)),
        num_prompts=len(prompts),
        params=SamplingParams(max_tokens=0),
        pooling=PoolingParams(pooling=service.config.pooling),
        priority=priority,
        answer=_EmbeddingAnswer(service, is_base64=encoding == "base64", dimensions=dimensions),
        stream=False,
        include_usage=False,
    )


class _EmbeddingAnswer(Answer):
    """Vectors of length 1; each is encoded by itself, so that other threads can go on."""

    kind = "list"

    def __init__(self, service: Service, *, is_base64: bool, dimensions: int | None):
        super().__init__(service.config.served_model_name)
        self._is_base64, self._dimensions = is_base64, dimensions

    def choice(self, index: int, prompt: Prompt, output: CompletionOutput) -> str:
        """Return the JSON of a vector."""
        assert prompt.embedding is not None
        vector = prompt.embedding.astype("<f4")
        if (most := self._dimensions) is not None:
            if most > len(vector):
                message = f"dimensions={most} is more than the {len(vector)} of the model"
                raise bad_request(message, "dimensions")
            vector = normalized(vector[:most]).astype("<f4")
        value: Any = vector.tolist()
        if self._is_base64:
            value = base64.b64encode(vector.tobytes()).decode()
        return encode_json({"object": "embedding", "index": index, "embedding": value})

    def body(self, choices: list[Any], usage: dict[str, Any]) -> str:
        """Return the JSON of the answer, given those of its vectors."""
        numbers = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        head = encode_json({"object": self.kind, "model": self.head["model"], "usage": numbers})
        return f'{head[:-1]},"data":[{",".join(choices)}]}}'

    def delta(self, index: int, prompt: Prompt, output: CompletionOutput, *, is_first: bool) -> Any:
        raise NotImplementedError("vectors are not streamed")
