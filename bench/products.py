"""Measure matrix products of few rows, as of a decode step: how fast do they read weights?

Run `python -m bench.products`, or for a quick look `python -m bench.products --models 1B --rows 1`.
bench/README.md explains how calls are measured. The products of a run are one CUDA graph, one after
another, each with a weight of its own, which is cold.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import cli, timing
from bench.measure import reason
from bench.report import number, table
from pallas_paged.decoder.linear import linear
from pallas_paged.engine.step import GPU_OPTIONS

# N and K of the products of a layer, and of the logits. Those of gate and up are one, with SwiGLU.
MODELS = {
    "tiny": {"qkv": (192, 256), "gate, up": (128, 2, 256), "logits": (256, 256)},
    "1B": {
        "qkv": (3072, 2048),
        "o": (2048, 2048),
        "gate, up": (8192, 2, 2048),
        "down": (2048, 8192),
        "logits": (128256, 2048),
    },
    "8B": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate, up": (14336, 2, 4096),
        "down": (4096, 14336),
        "logits": (128256, 4096),
    },
}
IMPLEMENTATIONS = ("xla", "mosaic_sm90")
_BYTES_OF_A_RUN = 5 * 2**28  # more than the L2 cache holds
_MAX_ERROR = 1e-2  # relative, in L2; two roundings of bf16 are 4e-3
_OPTIONS = GPU_OPTIONS | {"xla_gpu_command_buffer_scheduling_mode": "LHS"}  # one after another


def draw(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Normal bf16 numbers over the root of the last axis."""
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5)
    return make(jax.random.key(seed, impl="rbg"))


def chain(implementation: Any, out_dtype: Any) -> Any:
    """A function of products that do not depend on one another, in order."""
    one = jax.jit(
        functools.partial(linear, implementation=implementation, preferred_element_type=out_dtype)
    )

    def run(xs: Sequence[jax.Array], weights: Sequence[jax.Array]) -> list[jax.Array]:
        return [one(x, weight) for x, weight in zip(xs, weights, strict=True)]

    gpu = jax.default_backend() == "gpu"
    return jax.jit(run, compiler_options=_OPTIONS if gpu else None)


def measure_product(
    name: str, shape: tuple[int, ...], num_rows: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Times of one product by each implementation, and how far they are from XLA's result."""
    num_bytes = 2 * int(np.prod(shape))
    count = int(np.clip(_BYTES_OF_A_RUN // num_bytes, 2, 16))
    weights = [draw(i, shape) for i in range(count)]
    xs = [draw(100 + i, (num_rows, shape[-1])) for i in range(count)]
    out_dtype = jnp.float32 if name == "logits" else None
    result: dict[str, Any] = {"product": name, "shape": shape, "rows": num_rows, "bytes": num_bytes}
    want = None
    for implementation in IMPLEMENTATIONS:
        try:
            run = chain(implementation, out_dtype)
            out = np.asarray(run(xs, weights)[-1], np.float32)
            want = out if want is None else want
            error = float(np.linalg.norm(out - want) / np.linalg.norm(want))
            if not error < _MAX_ERROR:
                raise ValueError(f"{implementation} is WRONG, with an error of {error:.2g}")
            times = timing.wall_times(run, (xs, weights), iterations=args.iterations)
            spread = timing.Spread.of([us / count for us in times])
            result[implementation] = {"us": dataclasses.asdict(spread), "error": error}
        except Exception as failure:
            result[implementation] = {"reason": reason(failure)}
    return result


def markdown(run: dict[str, Any], rate: float) -> str:
    """The table, and the provenance of its numbers."""
    head = ["model", "product", "rows", "limit us"]
    rows = [[*head, *itertools.chain(*((f"{name} us", "%") for name in IMPLEMENTATIONS))]]
    for one in run["results"]:
        limit = one["bytes"] / rate / 1e3
        cells = [one["model"], one["product"], str(one["rows"]), number(limit)]
        for name in IMPLEMENTATIONS:
            us = one[name].get("us", {}).get("median")
            cells += [number(us, ".2f"), number(us and 100 * limit / us, ".0f")]
        rows.append(cells)
    found = [one[name] for one in run["results"] for name in IMPLEMENTATIONS]
    reasons = dict.fromkeys(one["reason"] for one in found if "reason" in one)
    blocks = [table(rows), *(f"Missing numbers: {one}." for one in reasons)]
    return "\n\n".join([*blocks, timing.provenance(run["meta"])]) + "\n"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.products", description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["1B", "8B"], help="sizes of the weights")
    add("--rows", nargs="+", type=int, default=[1, 8, 64], help="rows of x")
    add("--rate", type=float, default=4370.0, help="GB/s at which the device reads memory")
    add("--iterations", type=int, default=10, help="timed runs of each")
    add("--json", type=Path, help="write all numbers here, after each product")
    add("--markdown", type=Path, help="write the table here too")
    parser.set_defaults(plot=None)
    args = parser.parse_args(argv)
    cli.require_at_least(parser, args, iterations=1)
    if min(args.rows) < 1 or args.rate <= 0:
        parser.error("--rows must be at least 1 and --rate more than 0")
    cli.check_outputs(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    run: dict[str, Any] = {"meta": timing.describe_run("bench.products", argv), "results": []}
    for model, num_rows in itertools.product(args.models, args.rows):
        for name, shape in MODELS[model].items():
            run["results"].append({"model": model} | measure_product(name, shape, num_rows, args))
            print(f"{model} {name}, {num_rows} rows: done", file=sys.stderr, flush=True)
            if args.json:
                cli.write_json(args.json, run)
    cli.publish(run, args, markdown(run, args.rate))
    return run


if __name__ == "__main__":
    main()
