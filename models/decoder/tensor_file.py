"""Tensors of safetensors files, read in parts and on demand."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

_DTYPES = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16, "U8": np.uint8}
_NUM_THREADS = 8  # each holds one tensor
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A stored tensor, or some of its rows.

    Attributes:
        file, offset: where its bytes are.
        name, shape: its own.
        dtype: as the file names it.
    """

    file: Path
    offset: int
    name: str
    shape: tuple[int, ...]
    dtype: str

    def split(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return parts of this many rows each."""
        row_bytes = math.prod(self.shape[1:]) * np.dtype(_DTYPES[self.dtype]).itemsize
        return [
            replace(self, shape=(size, *self.shape[1:]), offset=self.offset + start * row_bytes)
            for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)
        ]

    def read(self, *index: slice) -> np.ndarray:
        """Return a part of the tensor."""
        # Copied: pages of a file that stays mapped would count as memory in use.
        return np.array(mapped(self)[index])

    def read_into(self, out: np.ndarray, *index: slice) -> None:
        """Read a part of the tensor into an array of its shape, rounded to the dtype of that."""
        out[...] = mapped(self)[index]


def read_each(
    items: Iterable[T], read: Callable[[T], R], *, num_threads: int = _NUM_THREADS
) -> list[R]:
    """Return what `read` returns of each, called in threads: one copies at a part of the speed."""
    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(read, items))


def mapped(tensor: Tensor) -> np.ndarray:
    """Return the array in its file."""
    dtype, shape = _DTYPES[tensor.dtype], tensor.shape
    return np.memmap(tensor.file, dtype, mode="r", offset=tensor.offset, shape=shape)


def tensors_in(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, by their names.

    Its header is parsed once, not for each tensor: a shard may have thousands of experts.

    Raises:
        SafetensorError: the file is damaged.
    """
    with safe_open(file, framework="numpy"):  # it checks the header
        pass
    start, entries = _header(file)
    return {
        name: Tensor(
            file=file,
            offset=start + entry["data_offsets"][0],
            name=name,
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
        )
        for name, entry in entries.items()
    }


def save_tensors(
    file: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a file in one move, so that an interrupted save keeps the previous one.

    Raises:
        OSError: the file can't be written; a full disk, for one.
    """
    partial = file.with_name(f"{file.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch()
    mode = partial.stat().st_mode  # follows the umask; safetensors makes files private
    try:
        save_file(dict(tensors), partial, metadata=dict(metadata))
    except SafetensorError as error:  # it raises no OSError
        raise OSError(f"{file}: {error}") from error
    partial.chmod(mode)
    os.replace(partial, file)


def first_cut(file: Path) -> str | None:
    """Return the first tensor whose bytes are not all in a file; None if its header is damaged."""
    try:
        start, entries = _header(file)
        ends = {name: start + entry["data_offsets"][1] for name, entry in entries.items()}
        cut = [name for name, end in ends.items() if end > file.stat().st_size]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return min(cut, key=ends.__getitem__, default=None)


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the tensors of a file begin, and what it says of each."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(size, file.stat().st_size)))
    header.pop("__metadata__", None)
    return 8 + size, header
