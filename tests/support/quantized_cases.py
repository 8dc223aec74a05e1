"""Calls of attention on int8 and fp8 pages quantized by NumPy, and their dequantized values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from tests.support.attention_cases import Case

LARGEST = {"int8": 127, "float8_e4m3fn": 448}


def quantize(x: np.ndarray, dtype: str, axis: int | None = -1) -> tuple[np.ndarray, np.ndarray]:
    """Elements and float32 scales of float64 `[..., D]`; one scale for all if axis is None."""
    scales = np.float32(np.abs(x).max(axis=axis) / LARGEST[dtype])
    scaled = x / np.where(scales > 0, scales, 1.0)[..., None]
    scaled = np.clip(scaled, -LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        scaled = np.rint(scaled)
    return scaled.astype(jnp.dtype(dtype)), scales


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A case with pages of `kv_dtype`; the dtype of `case` is that of the queries only.

    V is `v_size` times as large as K. With `per_tensor` all tokens have one scale.
    """

    case: Case
    kv_dtype: str
    per_tensor: bool = False
    v_size: float = 100.0

    def __str__(self) -> str:
        return f"{self.case}-{self.kv_dtype}{'-per_tensor' * self.per_tensor}"

    def on(self, implementation: str) -> Quantized:
        """As `Case.on`."""
        return replace(self, case=self.case.on(implementation))

    def make(self, **how) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Returns the arrays of a call, scales at the end, and the same call dequantized.

        Slots that no row owns hold random bytes, and NaN and infinities as scales.
        """
        arrays = replace(self.case, dtype="float32").make(**how)
        owned = arrays[1]
        if not how.get("poison", True):
            owned = replace(self.case, dtype="float32").make(**how | {"poison": True})[1]
        owned = np.isfinite(owned).all(axis=-1)  # [Hkv, P, S]
        junk = np.random.default_rng(9)
        pages, scales, meant = [], [], []
        for x, size in zip(arrays[1:3], (1.0, self.v_size), strict=True):
            x = np.where(owned[..., None], x.astype(np.float64) * size, 0.0)
            axis = None if self.per_tensor else -1
            elements, scale = quantize(x, self.kv_dtype, axis)
            values = elements.astype(np.float64) * scale[..., None]
            meant.append(np.where(owned[..., None], values, np.nan))
            if how.get("poison", True):
                any_byte = junk.integers(0, 256, x.shape, np.uint8).view(elements.dtype)
                elements = np.where(owned[..., None], elements, any_byte)
                if not self.per_tensor:
                    bad = junk.choice(np.float32([np.nan, np.inf, -np.inf]), scale.shape)
                    scale = np.where(owned, scale, bad)
            pages.append(elements)
            scales.append(scale)
        q, rest = arrays[0].astype(jnp.dtype(self.case.dtype)), arrays[3:]
        return (q, *pages, *rest, *scales), (q, *meant, *rest)
