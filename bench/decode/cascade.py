"""Time `cascade_attention` on sequences that share a prefix, beside `paged_attention`.

Run `python -m bench.decode.cascade --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pallas_paged as pp
from bench.decode.peers import ours
from bench.measuring import calls, cli, timing
from bench.measuring.measure import Variant, compare, measure_floor
from bench.measuring.shapes import Shape, make_case

NAMES = {"cascade": "cascade_attention", "paged": "paged_attention", "floor": "read only"}


SHAPES = tuple(
    Shape(
        name=f"64x{own} after {prefix} shared 32/8/128/16",
        seq_lens=(prefix + own,) * 64,
        shared_prefix=prefix,
    )
    for prefix in (8192, 32768)
    for own in (128, 1024)
)
# Small enough for a CPU; runs only when named.
TINY = Shape(
    name="tiny",
    seq_lens=(9, 20, 13),
    shared_prefix=8,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    page_size=4,
)


def _paged_attention(q, layer, block_table, seq_lens, prefix_lens, cu_group_sizes, **options):
    """Read the prefix again for each sequence."""
    return pp.paged_attention(q, layer, block_table, seq_lens, **options)


def measure_shape(shape: Shape, args: argparse.Namespace) -> dict:
    """Measure one shape: both calls and the read floor."""
    case = make_case(shape)
    finders: dict[str, Callable[[], list[Variant]]] = {
        "cascade": functools.partial(ours, pp.cascade_attention, args.implementation),
        "paged": functools.partial(ours, _paged_attention, args.implementation),
    }
    results = compare(case, finders, args.iterations)
    del case  # free the pages before the floor takes its memory
    floor = measure_floor(args.iterations, shape)
    return cli.describe(shape) | {"floor": floor, "results": results}


def markdown(run: dict) -> str:
    """The table and the provenance of its numbers."""
    shapes = [
        shape | {"results": shape["results"] | {"floor": shape["floor"]}} for shape in run["shapes"]
    ]
    return calls.markdown({"": shapes}, NAMES, run["meta"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_call_parser("bench.decode.cascade", __doc__)
    args = parser.parse_args(argv)
    shapes = cli.select(parser, args.shapes, SHAPES, TINY)
    run: dict[str, Any] = {"meta": timing.describe_run(parser.prog, argv), "shapes": []}
    measure = functools.partial(measure_shape, args=args)
    progress = functools.partial(calls.progress, NAMES)
    cli.measure_each(run["shapes"], shapes, measure, progress, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
