"""Time `ragged_paged_attention` on prompts, chunks and mixed batches, beside dense attention.

Run `python -m bench.prefill --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pallas_paged as pp
from bench.decode import peers
from bench.measuring import calls, cli, kv_dtypes, timing
from bench.measuring.measure import Variant, compare
from bench.measuring.shapes import Shape, make_case
from bench.prefill import peers as prefill_peers
from bench.prefill.shapes import ONE_BYTE, SHAPES, TINY

NAMES = calls.OURS | {"cudnn": "cuDNN dense", "mha": "JAX's Triton mha"}


def measure_shape(shape: Shape, args: argparse.Namespace) -> dict:
    """Measure one shape by all implementations."""
    call = pp.ragged_paged_attention
    finders: dict[str, Callable[[], list[Variant]]] = {
        name: functools.partial(peers.ours, call, implementation, shape.options)
        for name, implementation in peers.implementations(args.implementation).items()
    }
    if args.peers and shape.itemsize > 1:
        finders |= {
            "cudnn": functools.partial(prefill_peers.cudnn_dense, shape),
            "mha": functools.partial(prefill_peers.jax_mha, shape),
        }
    results = compare(make_case(shape), finders, args.iterations)
    return cli.describe(shape) | {"results": results}


def markdown(run: dict) -> str:
    """The tables, the provenance of their numbers and the summary."""
    parts = {"": run["shapes"], calls.ONE_BYTE_TITLE: run["one_byte"]}
    return calls.markdown(parts, NAMES, run["meta"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_call_parser("bench.prefill", __doc__)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    kv_dtypes.add_argument(parser)
    args = parser.parse_args(argv)
    shapes = cli.select(parser, args.shapes, SHAPES, TINY)
    meta = timing.describe_run(parser.prog, argv)
    run: dict[str, Any] = {"meta": meta, "shapes": [], "one_byte": []}
    measure = functools.partial(measure_shape, args=args)
    progress = functools.partial(calls.progress, NAMES)

    if "bf16" in args.kv_dtypes:
        cli.measure_each(run["shapes"], shapes, measure, progress, run, args)
    one_byte = kv_dtypes.one_byte([s for s in shapes if s in (*ONE_BYTE, TINY)], args.kv_dtypes)
    cli.measure_each(run["one_byte"], one_byte, measure, progress, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
