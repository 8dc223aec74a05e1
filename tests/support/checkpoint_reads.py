"""What of a checkpoint is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from models.decoder import stored_tensors


class _Part:
    def __init__(self, part: Any, name: str, shares: dict[str, list[float]]):
        self._part, self._note = part, shares.setdefault(name, []).append

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> np.ndarray:
        found = self._part[index]
        self._note(found.size / np.prod(self._part.get_shape()))
        return found


class _File:
    def __init__(self, file: Any, shares: dict[str, list[float]]):
        self._file, self._shares = file, shares

    def keys(self) -> Any:
        return self._file.keys()

    def get_slice(self, name: str) -> _Part:
        return _Part(self._file.get_slice(name), name, self._shares)

    def get_tensor(self, name: str) -> np.ndarray:
        self._shares.setdefault(name, []).append(1.0)
        return self._file.get_tensor(name)


@contextmanager
def recorded_reads() -> Iterator[dict[str, list[float]]]:
    """The shares of each tensor that are read, in order."""
    shares: dict[str, list[float]] = {}
    open_file = stored_tensors.safe_open

    @contextmanager
    def opened(*args: Any, **options: Any) -> Iterator[_File]:
        with open_file(*args, **options) as file:
            yield _File(file, shares)

    with mock.patch.object(stored_tensors, "safe_open", opened):
        yield shares
