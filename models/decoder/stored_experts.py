"""Experts of gpt-oss as its files have them: all of a layer in one tensor, or in MXFP4 blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from models.decoder.tensor_file import read_each

# What the four bits of an e2m1 mean: a sign, two bits of exponent, one of mantissa.
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
# The two numbers of each byte, as one item: looked up at twice the speed of one after the other.
_BYTES = np.arange(256)
_PAIRS = np.stack([_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]], axis=1).view(np.uint64)[:, 0]
BLOCK = 32  # numbers with one scale
_EXPONENT_BIAS = 127


def tensors_of_experts(
    name: str, leaf: str, shape: tuple[int, ...], *, mxfp4: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors that make a weight or a bias of all experts.

    Args:
        name: of the product, with its parents.
        leaf: "weight" or "bias".
        shape: of the parameter: of gate and up [X, F, 2, E] or [X, F, 2], of down [X, E, F] or
            [X, E].
        mxfp4: whether weights are MXFP4.
    """
    num_experts, *sizes = shape
    if leaf == "bias":
        yield f"{name}_bias", (num_experts, int(np.prod(sizes)))
        return
    rows, columns = int(np.prod(sizes[:-1])), sizes[-1]  # outputs and inputs
    if mxfp4:
        blocks = num_experts, rows, columns // BLOCK
        yield f"{name}_blocks", (*blocks, BLOCK // 2)
        yield f"{name}_scales", blocks
    else:
        yield name, (num_experts, columns, rows)


def read_stacked_experts(
    parts: Sequence[Any], index: Any, shape: tuple[int, ...], dtype: DTypeLike
) -> np.ndarray:
    """Read experts, the slice of `index` on their axis, of a parameter of this shape.

    The host holds the stored form of one expert for each thread that reads.
    """
    start, stop, _ = index[0].indices(shape[0])
    value = np.empty((stop - start, *shape[1:]), dtype)

    def read(place: int) -> None:
        expert = slice(start + place, start + place + 1)
        first, *scales = (part.read(expert)[0] for part in parts)
        if scales:
            first = from_mxfp4(first, scales[0])
        elif first.ndim == 2:
            first = first.T  # files have [in, out]
        value[place] = first.reshape(shape[1:])

    read_each(range(stop - start), read)
    return value


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return f32[..., 32 * B] of blocks u8[..., B, 16] and scales u8[..., B].

    A byte has two numbers, the first in its low half. A scale is an exponent of 2, with a bias.
    """
    numbers = _PAIRS[blocks].view(np.float32)
    numbers *= np.ldexp(np.float32(1), scales.astype(np.int32) - _EXPONENT_BIAS)[..., None]
    return numbers.reshape(*scales.shape[:-1], -1)
