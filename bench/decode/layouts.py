"""Time attention on pages of every layout, by both families of kernels.

Run `python -m bench.decode.layouts --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pallas_paged as pp
from bench.decode import peers
from bench.measuring import cli, timing
from bench.measuring.measure import Variant, compare
from bench.measuring.report import kernel_us, number, ratio, reasons, table, time
from bench.measuring.shapes import Shape, make_case, select_shapes, uniform
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


def _times(shape: dict, family: str) -> dict[str, float | None]:
    return {name: kernel_us(results[family]) for name, results in shape["layouts"].items()}


def progress(shape: dict, seconds: float) -> str:
    """One line about the shape just measured."""
    lines = [f"{shape['name']}: took {seconds:.0f} s"]
    for family in next(iter(shape["layouts"].values())):
        found = _times(shape, family).items()
        lines.append(f"  {family} us: " + ", ".join(f"{k} {number(us)}" for k, us in found))
    for name, results in shape["layouts"].items():
        if text := reasons(results, {family: f"{name} {family}" for family in results}):
            lines.append(text.lstrip("\n"))
    return "\n".join(lines)


def markdown(run: dict) -> str:
    """Return the table and the provenance of its numbers."""
    rows = [["shape (Hq/Hkv/D/page)", "kernels", *run["layouts"]]]
    for shape in run["shapes"]:
        for family in next(iter(shape["layouts"].values())):
            times = _times(shape, family)
            first = next(iter(times.values()))
            row = [shape["name"], family]
            for name, us in times.items():
                text = time(shape["layouts"][name][family])
                row.append(f"{text} {number(ratio(us, first), '.3f')}" if us else text)
            rows.append(row)
    words = "Microseconds of kernels, median (p10 to p90), and times that of the first layout."
    return "\n\n".join([words, table(rows), timing.provenance(run["meta"])]) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    argv = sys.argv[1:] if argv is None else argv
    select = functools.partial(select_shapes, shapes=SHAPES, tiny=TINY)
    parser = cli.make_parser("bench.decode.layouts", __doc__)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    args = parser.parse_args(argv)
    cli.check_arguments(parser, args, select, (*SHAPES, TINY))
    meta = timing.describe_run("bench.decode.layouts", argv)
    run: dict[str, Any] = {"meta": meta, "layouts": args.layouts, "shapes": []}
    measure = functools.partial(measure_shape, args=args)
    cli.measure_each(run["shapes"], select(args.shapes), measure, progress, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
