"""The command line that the benches of calls share."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.shapes import Shape


def make_parser(
    module: str, description: str | None, *, plots: bool = True
) -> argparse.ArgumentParser:
    """A parser of what all benches take, and `--plot` for those that draw."""
    parser = argparse.ArgumentParser(prog=module, description=description)
    parser.add_argument(
        "--implementation",
        help="the only one of ours; default: what None chooses and, where compared, each",
    )
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose name has TEXT"
    )
    parser.add_argument("--iterations", type=int, default=20, help="timed runs of each")
    parser.add_argument("--json", type=Path, help="write all numbers here, after each shape")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    if plots:
        parser.add_argument("--plot", type=Path, help="write the chart here, as PNG")
    else:
        parser.set_defaults(plot=None)
    return parser


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    select: Callable[[Sequence[str]], list[Any]],
    shapes: Sequence[Any],
) -> argparse.Namespace:
    """Arguments that can be used; a bad one ends the program.

    Args:
      parser: from `make_parser`.
      argv: arguments.
      select: the shapes that the filters of `--shapes` select.
      shapes: all of them, to be told if that selects none.
    """
    options = parser.parse_args(argv)
    if options.iterations < 1:
        parser.error(f"--iterations {options.iterations} must be at least 1")
    if not select(options.shapes):
        names = ", ".join(repr(s.name) for s in shapes)
        parser.error(f"--shapes {' '.join(options.shapes)} matches none of {names}")
    check_outputs(parser, options)
    return options


def check_outputs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program if what it would write at its end can't be written."""
    for path in (options.json, options.markdown, options.plot):
        if path and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed")


def measure_each(
    results: list[dict],
    shapes: Sequence[Any],
    measure: Callable[[Any], dict],
    tell: Callable[[dict, float], str],
    run: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Appends the result of each shape to `results`, tells it and writes the JSON of the run.

    Args:
      results: a list within `run`.
      shapes: what to measure.
      measure: a shape's result.
      tell: the line about a result that took so many seconds.
      run: all numbers.
      options: from `parse`.
    """
    for shape in shapes:
        start = time.perf_counter()
        results.append(measure(shape))
        gc.collect()  # this shape's pages, before those of the next
        line = tell(results[-1], time.perf_counter() - start)
        print(line, file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(run, indent=1) + "\n")


def publish(
    run: dict[str, Any],
    options: argparse.Namespace,
    table: str,
    plot: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Prints and writes the table, and draws the chart if one is asked for."""
    if options.markdown:
        options.markdown.write_text(table)
    print(table)
    if options.plot and plot:
        try:
            plot(run, options.plot)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from error


def describe(shape: Shape) -> dict[str, Any]:
    """What a result says of its shape."""
    return {
        "name": shape.name,
        "kv_dtype": shape.kv_dtype,
        "num_seqs": len(shape.seq_lens),
        "num_tokens": sum(shape.seq_lens),
        "num_queries": sum(shape.asked),
        "num_bytes": shape.num_bytes,
        "num_flops": shape.num_flops,
        "num_sets": shape.num_sets,
        "num_calls": shape.num_calls,
    }
