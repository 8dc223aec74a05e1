"""Time attention on pages of every layout, by both families of kernels.

Run `python -m bench.decode.layouts --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pallas_paged as pp
from bench.decode import peers
from bench.measuring import calls, cli, timing
from bench.measuring.measure import Variant, compare
from bench.measuring.shapes import Shape, make_case, uniform
from bench.prefill.shapes import TINY
from pallas_paged.pages.layout import KVLayout

LAYOUTS: tuple[KVLayout, ...] = get_args(KVLayout)
SHAPES = (
    uniform(64, 4096),
    uniform(256, 1024),
    uniform(64, 4096, page_size=64),
    uniform(4, 4096, q_len=4096, name="4x4096 prompts"),
    uniform(8, 8704, q_len=512, name="8x512 after 8192"),
)


def measure_layouts(
    shape: Shape,
    layouts: Sequence[KVLayout],
    implementations: Sequence[str | None],
    iterations: int,
) -> dict[KVLayout, dict[str, dict]]:
    """Return the results of a shape by layout and implementation."""
    case = make_case(shape)
    ragged = max(shape.q_lens) > 1
    call: Callable[..., Any] = pp.ragged_paged_attention if ragged else pp.paged_attention
    results = {}
    for kv_layout in layouts:  # one after another: each has a pool of its own
        finders: dict[str, Callable[[], list[Variant]]] = {
            name or "default": functools.partial(peers.ours, call, name, kv_layout=kv_layout)
            for name in implementations
        }
        results[kv_layout] = compare(case, finders, iterations)
    return results


def measure_shape(shape: Shape, args: argparse.Namespace) -> dict:
    """Measure one shape in each layout by each implementation."""
    families = [args.implementation] if args.implementation else ["triton", "mosaic_sm90"]
    results = measure_layouts(shape, args.layouts, families, args.iterations)
    return cli.describe(shape) | {"layouts": results}


def _by_name(shape: dict) -> dict:
    """The shape with all results by the names of layout and implementation."""
    found = {
        f"{kv_layout} {family}": result
        for kv_layout, results in shape["layouts"].items()
        for family, result in results.items()
    }
    return shape | {"results": found}


def progress(shape: dict, seconds: float) -> str:
    """Lines about the shape just measured."""
    named = _by_name(shape)
    return calls.progress({name: name for name in named["results"]}, named, seconds)


def markdown(run: dict) -> str:
    """Return a table for each implementation and the provenance of its numbers."""
    shapes = [_by_name(shape) for shape in run["shapes"]]
    families = dict.fromkeys(
        name.partition(" ")[2] for shape in shapes for name in shape["results"]
    )
    blocks = []
    for family in families:
        names = {f"{kv_layout} {family}": kv_layout for kv_layout in run["layouts"]}
        blocks.append(f"{family}:\n\n{calls.calls_table(shapes, names)}")
    return timing.page(run["meta"], *blocks)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_call_parser("bench.decode.layouts", __doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    args = parser.parse_args(argv)
    shapes = cli.select(parser, args.shapes, SHAPES, TINY)
    meta = timing.describe_run(parser.prog, argv)
    run: dict[str, Any] = {"meta": meta, "layouts": args.layouts, "shapes": []}
    measure = functools.partial(measure_shape, args=args)
    cli.measure_each(run["shapes"], shapes, measure, progress, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
