"""Names and limits of a server."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_paged.checks import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Names and limits of a server.

    Attributes:
        model_name: of the model in requests and answers.
        api_keys: keys of which a request must have one; empty: requests need none.
        max_body_bytes: most bytes of a request's body.
        max_queue: most sequences that wait for a slot of the engine; more requests get status 429.
        max_connections: most open connections; more get status 503.
        request_timeout: most seconds that a request takes, its time in the queue included.
        drain_timeout: seconds that a shutdown waits for requests before it aborts them.

    Raises:
        ValueError: a value is out of its range.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_queue: int = 1024
    max_connections: int = 4096
    request_timeout: float = 600.0
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError(f"model_name={self.model_name!r} must not be empty")
        if not all(key and key.isascii() for key in self.api_keys):
            raise ValueError("an API key must be ASCII text that is not empty")
        for name, least in (("max_body_bytes", 1), ("max_queue", 0), ("max_connections", 1)):
            check_integer(name, getattr(self, name), least)
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            check_number(name, value)
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")
