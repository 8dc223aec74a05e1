"""Count compilations."""

from __future__ import annotations

from types import TracebackType

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Count the programs that XLA compiles inside a `with` block.

    Attributes:
        count: number of programs.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.count += event == _EVENT
