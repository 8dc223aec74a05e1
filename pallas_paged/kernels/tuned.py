"""Configs measured on devices, `tuned.json` beside this file; `bench/tune.py` writes them."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterator, Mapping
from typing import Any

KERNELS = ("decode", "ragged", "mosaic_decode", "mosaic_ragged")
# Static sizes of a call of which measurements stand for others up to the next power of two.
_ROUNDED = ("num_tokens", "num_seqs", "max_kv_len")


def bucket(key: Mapping[str, int]) -> dict[str, int]:
    """The key under which a call's config is kept.

    Args:
      key: num_q_heads, num_kv_heads, head_dim, itemsize, num_seqs, max_kv_len and, for decoding,
        page_size or, of ragged queries, num_tokens.
    """
    return {
        name: 1 << (size - 1).bit_length() if name in _ROUNDED else size
        for name, size in sorted(key.items())
    }


def lookup(kernel: str, device_kind: str, key: Mapping[str, int]) -> dict[str, int] | None:
    """The measured config of a call, None if nothing better than the heuristic is known.

    Args:
      kernel: one of `KERNELS`.
      device_kind: as JAX names the device.
      key: as in `bucket`.

    Returns:
      The fields of the kernel's config, with `programs_per_sm` in place of `num_programs`, so that
      it holds for any number of SMs: `num_programs = programs_per_sm * num_sms // num_kv_heads`,
      and in a "mosaic_ragged" config, which counts all programs, `programs_per_sm * num_sms`.
    """
    config = _configs().get((kernel, device_kind, *bucket(key).items()))
    return None if config is None else dict(config)


def microseconds(kernel: str, device_kind: str, key: Mapping[str, int]) -> float | None:
    """How long a call with the config of `lookup` took, None if there is none."""
    return _times().get((kernel, device_kind, *bucket(key).items()))


@functools.cache
def _configs() -> dict[tuple, dict[str, int]]:
    return {key: entry["config"] for key, entry in _entries()}


@functools.cache
def _times() -> dict[tuple, float]:
    return {key: entry["us"] for key, entry in _entries()}


def _entries() -> Iterator[tuple[tuple, dict[str, Any]]]:
    """Yields each measurement of the table and what to look it up by."""
    table: dict[str, dict[str, Any]] = json.loads(
        importlib.resources.files(__package__).joinpath("tuned.json").read_text()
    )
    for device_kind, found in table.items():
        for kernel in KERNELS:
            for entry in found.get(kernel, ()):
                yield (kernel, device_kind, *bucket(entry["key"]).items()), entry
