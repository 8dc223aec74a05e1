"""Errors as OpenAI's JSON, each with its HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

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


def answer_api_error(_: Request, error: Exception) -> Response:
    """Answer an error that the client gets as it is."""
    assert isinstance(error, APIError)
    return error.response()


def answer_http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the router: an unknown path, or another method."""
    assert isinstance(error, HTTPException)
    what, methods = f"{request.method} {request.url.path}", (error.headers or {}).get("Allow")
    messages = {404: f"there is no {what}", 405: f"{what}: the method must be one of {methods}"}
    message = messages.get(error.status_code, error.detail)
    return APIError(error.status_code, message, headers=error.headers).response()


def answer_bug(_: Request, error: Exception) -> Response:
    """Answer an exception that should not have occurred; the server logs it."""
    return APIError(500, f"internal error: {type(error).__name__}").response()


def answer_nothing(_: Request, error: Exception) -> Response:
    """Return an answer for a client that has left; no bytes of it are sent."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)
