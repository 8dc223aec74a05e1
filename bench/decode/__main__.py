"""Time one decode step of `paged_attention` per shape, beside its peers and the GPU's read floor.

Run `python -m bench.decode --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pallas_paged as pp
from bench.decode import peers
from bench.decode import report as decode_report
from bench.measuring import calls, cli, kv_dtypes, timing
from bench.measuring.measure import Variant, compare, measure_floor
from bench.measuring.options import PLAIN, Options
from bench.measuring.shapes import (
    OPTION_PAIRS,
    SHAPES,
    TINY,
    TINY_PAIR,
    Shape,
    make_case,
)


def measure_shape(shape: Shape, args: argparse.Namespace, *, with_peers: bool) -> dict:
    """Measure one shape by all implementations."""
    finders: dict[str, Callable[[], list[Variant]]] = {
        name: functools.partial(peers.ours, pp.paged_attention, implementation, shape.options)
        for name, implementation in peers.implementations(args.implementation).items()
    }
    if with_peers and shape.options in (PLAIN, Options(soft_cap=shape.options.soft_cap)):
        finders["jax_op"] = functools.partial(peers.jax_op, shape)
    if with_peers and shape.options == PLAIN and shape.itemsize > 1:
        finders |= {"xla_gather": peers.xla_gather, "cudnn_paged": peers.cudnn_paged}
    results = compare(make_case(shape), finders, args.iterations)
    return cli.describe(shape) | {"results": results}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and return the raw numbers."""
    parser = cli.make_call_parser("bench.decode", __doc__)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--options",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure the cost of each option",
    )
    kv_dtypes.add_argument(parser)
    args = parser.parse_args(argv)
    bases = dict((*OPTION_PAIRS, TINY_PAIR))
    found = cli.select(parser, args.shapes, (*SHAPES, *dict(OPTION_PAIRS)), TINY, TINY_PAIR[0])
    shapes = [shape for shape in found if shape not in bases]
    floors = [measure_floor(args.iterations)]
    run: dict[str, Any] = {
        "meta": timing.describe_run(parser.prog, argv),
        "floors": floors,
        "shapes": [],
        "options": [],
        "one_byte": [],
    }

    def with_floor(shape: Shape) -> dict:
        if all(floor["num_bytes"] != shape.num_bytes for floor in floors[1:]):
            floors.append(measure_floor(args.iterations, shape))
        return measure_shape(shape, args, with_peers=args.peers)

    plain: dict[str, dict] = {}

    def with_base(shape: Shape) -> dict:
        base = bases[shape]
        plain.update({result["name"]: result for result in run["shapes"]})
        if base.name not in plain:
            plain[base.name] = measure_shape(base, args, with_peers=False)
        found = {"name": base.name, "results": plain[base.name]["results"]}
        return measure_shape(shape, args, with_peers=args.peers) | {"base": found}

    progress = functools.partial(calls.progress, decode_report.NAMES)
    if "bf16" in args.kv_dtypes:
        cli.measure_each(run["shapes"], shapes, with_floor, progress, run, args)
    one_byte = kv_dtypes.one_byte(shapes, args.kv_dtypes)
    cli.measure_each(run["one_byte"], one_byte, with_floor, progress, run, args)
    if "bf16" in args.kv_dtypes and args.options:
        with_options = [shape for shape in found if shape in bases]
        cli.measure_each(run["options"], with_options, with_base, progress, run, args)
    print(decode_report.markdown(run))
    return run


if __name__ == "__main__":
    main()
