"""Times `paged_attention` on one decode step per shape, beside its peers and the card's read floor.

Run `python -m bench.decode --help`; bench/README.md says what each number means.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench import cli, decode_report, kv_dtypes, peers, timing
from bench.measure import Variant, compare, measure_floor
from bench.options import PLAIN, Options
from bench.shapes import (
    OPTION_PAIRS,
    SHAPES,
    TINY,
    TINY_PAIR,
    Shape,
    make_case,
    select_shapes,
)


def select_pairs(filters: Sequence[str]) -> list[tuple[Shape, Shape]]:
    """Shapes with options, by name, each with the plain one."""
    first = [shape for shape, _ in OPTION_PAIRS]
    chosen = {shape.name for shape in select_shapes(filters, first, TINY_PAIR[0])}
    return [pair for pair in (*OPTION_PAIRS, TINY_PAIR) if pair[0].name in chosen]


def measure_shape(shape: Shape, options: argparse.Namespace, *, peers_too: bool) -> dict:
    """Everything about one shape."""
    names = peers.implementations(options.implementation, shape)
    finders: dict[str, Callable[[], list[Variant]]] = {
        name: functools.partial(peers.ours, implementation, shape.options)
        for name, implementation in names.items()
        # The kind of a config chooses the implementation, so there None has no choice.
        if implementation or shape.options.fixed_split_size is None
    }
    if peers_too and shape.options in (PLAIN, Options(soft_cap=shape.options.soft_cap)):
        finders["jax_op"] = functools.partial(peers.jax_op, shape)
    if peers_too and shape.options == PLAIN and shape.itemsize > 1:
        finders |= {"xla_gather": peers.xla_gather, "cudnn_paged": peers.cudnn_paged}
    results = compare(make_case(shape), finders, options.iterations)
    return cli.describe(shape) | {"results": results}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints the tables and returns the raw numbers."""
    argv = sys.argv[1:] if argv is None else argv
    parser = cli.make_parser("bench.decode", __doc__)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--options",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also what each option costs",
    )
    kv_dtypes.add_argument(parser)
    options = cli.parse(
        parser,
        argv,
        lambda filters: select_shapes(filters) + select_pairs(filters),
        (*SHAPES, TINY, *(shape for shape, _ in OPTION_PAIRS), TINY_PAIR[0]),
    )
    # A large read, so that the ceiling does not depend on the shapes asked for.
    floors = [measure_floor(1 << 30, num_sets=2, num_calls=4, iterations=options.iterations)]
    run: dict[str, Any] = {
        "meta": timing.describe_run("bench.decode", argv),
        "floors": floors,
        "shapes": [],
        "options": [],
        "one_byte": [],
        **decode_report.summarize(floors, [], []),
    }

    def with_floor(shape: Shape) -> dict:
        if all(floor["num_bytes"] != shape.num_bytes for floor in floors[1:]):
            floors.append(
                measure_floor(
                    shape.num_bytes,
                    num_sets=shape.num_sets,
                    num_calls=shape.num_calls,
                    iterations=options.iterations,
                )
            )
        return measure_shape(shape, options, peers_too=options.peers)

    def tell(result: dict, seconds: float) -> str:
        run.update(decode_report.summarize(floors, run["shapes"], run["one_byte"]))
        return decode_report.progress(run, result, seconds)

    plain: dict[str, dict] = {}

    def with_base(pair: tuple[Shape, Shape]) -> dict:
        shape, base = pair
        plain.update({result["name"]: result for result in run["shapes"]})
        if base.name not in plain:
            plain[base.name] = measure_shape(base, options, peers_too=False)
        found = {"name": base.name, "results": plain[base.name]["results"]}
        return measure_shape(shape, options, peers_too=options.peers) | {"base": found}

    def one_byte(pair: tuple[Shape, str]) -> dict:
        shape, base = pair
        return with_floor(shape) | {"base": base}

    shapes = select_shapes(options.shapes)
    if "bf16" in options.kv_dtypes:
        cli.measure_each(run["shapes"], shapes, with_floor, tell, run, options)
    pairs = kv_dtypes.one_byte(shapes, options.kv_dtypes)
    cli.measure_each(run["one_byte"], pairs, one_byte, tell, run, options)
    if "bf16" in options.kv_dtypes and options.options:
        option_pairs = select_pairs(options.shapes)
        cli.measure_each(run["options"], option_pairs, with_base, tell, run, options)
    cli.publish(run, options, decode_report.markdown(run), decode_report.plot)
    return run


if __name__ == "__main__":
    main()
