"""What of a checkpoint is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from models.decoder import tensor_file


class _Recorded:
    """An array in a file that notes which share of it is read."""

    def __init__(self, array: np.ndarray, shares: list[float]):
        self._array, self._shares = array, shares

    def __getitem__(self, index: Any) -> np.ndarray:
        found = self._array[index]
        self._shares.append(found.size / self._array.size)
        return found


@contextmanager
def recorded_reads() -> Iterator[dict[str, list[float]]]:
    """The shares of each tensor, or part of rows, that are read, in order."""
    shares: dict[str, list[float]] = {}
    mapped = tensor_file.mapped

    def recorded(tensor: tensor_file.Tensor) -> _Recorded:
        return _Recorded(mapped(tensor), shares.setdefault(tensor.name, []))

    with mock.patch.object(tensor_file, "mapped", recorded):
        yield shares
