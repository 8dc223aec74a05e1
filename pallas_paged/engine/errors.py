"""The error of an engine whose state is lost."""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """A step failed and took the engine's state with it; the cause is what failed."""

    def __init__(self, what: str, cause: BaseException):
        super().__init__(f"{what}: {str(cause) or type(cause).__name__}")
        self.__cause__ = cause
