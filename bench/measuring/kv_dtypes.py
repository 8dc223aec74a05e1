"""The dtypes of K/V that the benches compare: bf16, int8 and fp8."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from bench.measuring.shapes import Shape
from pallas_paged.engine.device.pool import KV_CACHE_DTYPES

ONE_BYTE = ("int8", "fp8")
NAMES = {"bf16": "bfloat16"} | {name: KV_CACHE_DTYPES[name] for name in ONE_BYTE}


def add_argument(parser: argparse.ArgumentParser, *default: str) -> None:
    """Add `--kv-dtypes`; without a default it is all."""
    text = f"dtypes of K and V; default: {' '.join(default) or 'all'}"
    names = [*default] or [*NAMES]
    parser.add_argument("--kv-dtypes", nargs="+", choices=NAMES, default=names, help=text)


def with_dtype(shape: Shape, name: str) -> Shape:
    """A bf16 shape with K/V of another dtype."""
    if name == "bf16":
        return shape
    return dataclasses.replace(shape, name=f"{shape.name} {name}", kv_dtype=NAMES[name])


def one_byte(shapes: Sequence[Shape], kv_dtypes: Sequence[str]) -> list[Shape]:
    """The shapes with int8 and fp8 K/V, as far as these are in `kv_dtypes`."""
    names = [name for name in ONE_BYTE if name in kv_dtypes]
    return [with_dtype(shape, name) for shape in shapes for name in names]
