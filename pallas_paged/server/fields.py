"""The JSON body of a request and its fields, and errors as OpenAI's JSON."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

BODY_SECONDS = 30.0  # in which a body must arrive
# Clients that send a body do not see an answer before its end, unless they expect one.
MAX_DISCARDED_BYTES = 64 << 20
_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}
_MAX_MESSAGE = 1000  # characters; a message may quote a value of the request
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout",
    505: "http_version_not_supported",
}


class APIError(Exception):
    """An error that the client gets.

    Attributes:
        status: HTTP status.
        body: JSON object `{"error": {"message", "type", "param", "code"}}`.
        headers: more headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
        text = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + " ..."
        text, param = _escaped(text), param and _escaped(param)
        error = {"message": text, "type": kind, "param": param, "code": code or _CODES.get(status)}
        self.body: dict[str, Any] = {"error": error}

    def response(self) -> JSONResponse:
        """Return the error as an answer."""
        return JSONResponse(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None) -> APIError:
    """Return the error of a request that can never be served."""
    return APIError(400, message, param=param)


def _escaped(text: str) -> str:
    """Return a text that UTF-8 has: JSON strings may have halves of surrogate pairs."""
    return text.encode(errors="backslashreplace").decode()


def error_of(request: Request, error: Exception) -> APIError:
    """Return what the client gets of an exception; the server logs one that should not occur."""
    if isinstance(error, APIError):
        return error
    if not isinstance(error, HTTPException):
        headers = {"connection": "close"}  # which uvicorn does after an exception
        return APIError(500, f"internal error: {type(error).__name__}", headers=headers)
    # Of the router: an unknown path, or another method.
    what, methods = f"{request.method} {request.url.path}", (error.headers or {}).get("Allow")
    messages = {404: f"there is no {what}", 405: f"{what}: the method must be one of {methods}"}
    message = messages.get(error.status_code, error.detail)
    return APIError(error.status_code, message, headers=error.headers)


class Bodies:
    """Counts the bytes of all bodies that are being read.

    Attributes:
        num_bytes: in memory now.
    """

    def __init__(self, max_bytes: int):
        """Hold up to `max_bytes` at a time."""
        self.num_bytes, self._max_bytes = 0, max_bytes

    def add(self, num_bytes: int) -> None:
        """Count more of them.

        Raises:
            APIError: they are too many.
        """
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            message = f"the bodies of all requests have more than {self._max_bytes} bytes"
            raise APIError(503, message, headers={"retry-after": "1", "connection": "close"})


class Fields:
    """Fields of a JSON object that are taken one by one; those that are left are unknown."""

    def __init__(self, values: dict[str, Any], *, path: str = ""):
        """Take over an object; `path` is the name of the field that has it."""
        self._values, self._path = values, path

    def take(self, name: str, *kinds: type, default: Any = None) -> Any:
        """Remove a field and return its value, or `default` where it is missing or null.

        Raises:
            APIError: it is of none of these kinds; without kinds any value is allowed.
        """
        value = self._values.pop(name, None)
        if value is None:
            return default
        # True and False are integers to Python, and 1 is also a number.
        kind = float if type(value) is int and float in kinds else type(value)
        if kinds and kind not in kinds:
            names = " or ".join(_KINDS[kind] for kind in kinds)
            raise bad_request(f"{self._path}{name} must be {names}", self._path + name)
        return value

    def refuse(self, name: str, *allowed: Any) -> None:
        """Remove a field that has no effect here, and refuse other values than these and null."""
        if (value := self._values.pop(name, None)) is not None and value not in allowed:
            raise bad_request(f"{self._path}{name} is not supported", self._path + name)

    def rest(self) -> dict[str, Any]:
        """Remove all fields that are left, and return them."""
        rest, self._values = self._values, {}
        return rest

    def end(self) -> None:
        """Raise an APIError if a field is left."""
        for name in self._values:
            raise bad_request(f"unknown field {self._path}{name:.100}", f"{self._path}{name:.100}")


async def read_fields(request: Request, max_bytes: int, bodies: Bodies) -> Fields:
    """Return the fields of a request's JSON object.

    Raises:
        APIError: the body is too large, too slow, or not a JSON object, or there are too many.
        ClientDisconnect: the client has left.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another site can make a browser send other types without asking this server.
    if content_type != "application/json":
        raise APIError(415, "the header Content-Type must be application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _read(request, max_bytes, bodies)
    except TimeoutError:
        raise APIError(
            408,
            f"the body did not arrive in {BODY_SECONDS:.0f} s",
            headers={"connection": "close"},
        ) from None
    try:
        # JSON is UTF-8; of bytes, json would guess the encoding.
        text = body.decode("utf-8-sig")
        values = json.loads(text, parse_constant=refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise bad_request("the body must be a JSON object")
    return Fields(values)


async def _read(request: Request, max_bytes: int, bodies: Bodies) -> bytes:
    too_large = APIError(413, f"the body has more than {max_bytes} bytes")
    most = max_bytes + MAX_DISCARDED_BYTES
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > (max_bytes if "expect" in request.headers else most):
        raise too_large
    body, size = bytearray(), 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                break
            if size <= max_bytes:
                body += chunk
                bodies.add(len(chunk))
    finally:
        bodies.num_bytes -= len(body)
    if size > max_bytes:
        raise too_large
    return bytes(body)


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else refuse_constant(text)


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and infinities, which Python's JSON has."""
    raise ValueError(f"{name} is not a JSON number")
