"""The JSON body of a request, and its fields."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from models.server.errors import APIError, bad_request

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

    def end(self) -> None:
        """Raise an APIError if a field is left."""
        for name in self._values:
            raise bad_request(f"unknown field {self._path}{name:.100}", f"{self._path}{name:.100}")


async def read_fields(request: Request, max_bytes: int) -> Fields:
    """Return the fields of a request's JSON object.

    Raises:
        APIError: the body is too large, too slow, or not a JSON object.
        ClientDisconnect: the client has left.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another site can make a browser send other types without asking this server.
    if content_type != "application/json":
        raise APIError(415, "the header Content-Type must be application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise APIError(
            408,
            f"the body did not arrive in {BODY_SECONDS:.0f} s",
            headers={"connection": "close"},
        ) from None
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise bad_request("the body must be a JSON object")
    return Fields(values)


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = APIError(413, f"the body has more than {max_bytes} bytes")
    most = max_bytes + MAX_DISCARDED_BYTES
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > (max_bytes if "expect" in request.headers else most):
        raise too_large
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            break
        if size <= max_bytes:
            body += chunk
    if size > max_bytes:
        raise too_large
    return bytes(body)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
