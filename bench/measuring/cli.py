"""The command line that the benches of calls share."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.measuring.shapes import Shape

_LINE = 200  # most characters of a line of JSON that could be several lines


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that the benches of calls take."""
    parser = argparse.ArgumentParser(prog=module, description=description)
    parser.add_argument(
        "--implementation",
        help="run only this one of ours; default: None's choice and, where compared, each",
    )
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose name has TEXT"
    )
    parser.add_argument("--iterations", type=int, default=20, help="timed runs of each")
    parser.add_argument("--json", type=Path, help="write all numbers here, after each shape")
    return parser


def check_arguments(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    select: Callable[[Sequence[str]], list[Any]],
    shapes: Sequence[Any],
) -> None:
    """End the program if an argument that `make_parser` added is wrong.

    Args:
        parser: from `make_parser`.
        args: arguments that it parsed.
        select: returns the shapes that the filters of `--shapes` select.
        shapes: all shapes, listed in the message if the filters select none.
    """
    require_at_least(parser, args, iterations=1)
    if not select(args.shapes):
        names = ", ".join(repr(s.name) for s in shapes)
        parser.error(f"--shapes {' '.join(args.shapes)} matches none of {names}")
    check_outputs(parser, args)


def require_at_least(
    parser: argparse.ArgumentParser, args: argparse.Namespace, **least: int
) -> None:
    """End the program if an argument is smaller than the number given under its name."""
    for name, low in least.items():
        if getattr(args, name) < low:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {getattr(args, name)} must be at least {low}")


def check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program before it measures if it can't write its outputs."""
    if args.json and not args.json.parent.is_dir():
        parser.error(f"{args.json}: there is no folder {args.json.parent}")


def measure_each(
    results: list[dict],
    shapes: Sequence[Any],
    measure: Callable[[Any], dict],
    progress: Callable[[dict, float], str],
    run: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Append the result of each shape to `results`, print a line, and rewrite the run's JSON.

    Args:
        results: a list within `run`.
        shapes: the shapes to measure.
        measure: returns the result of a shape.
        progress: returns the line about a result and the seconds that it took.
        run: all numbers.
        args: arguments that `make_parser`'s parser parsed.
    """
    for shape in shapes:
        start = time.perf_counter()
        results.append(measure(shape))
        gc.collect()  # free this shape's pages before the next shape's are made
        line = progress(results[-1], time.perf_counter() - start)
        print(line, file=sys.stderr, flush=True)
        if args.json:
            write_json(args.json, run)


def write_json(path: Path, run: dict[str, Any]) -> None:
    """Write all numbers of a run."""
    path.write_text(as_json(run))


def as_json(run: dict[str, Any] | list[Any]) -> str:
    """The run as JSON of short lines; floats have nine digits, more than a clock is worth."""
    return _lines(_rounded(run), "") + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _lines(value: Any, indent: str) -> str:
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= _LINE:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_lines(one, inner)}" for key, one in value.items()]
    else:
        parts = [_lines(one, inner) for one in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{last}"


def describe(shape: Shape) -> dict[str, Any]:
    """The fields of a result that describe its shape."""
    return {
        "name": shape.name,
        "kv_dtype": shape.kv_dtype,
        "num_seqs": len(shape.seq_lens),
        "num_tokens": sum(shape.seq_lens),
        "num_queries": sum(shape.q_lens),
        "num_bytes": shape.num_bytes,
        "num_flops": shape.num_flops,
        "num_sets": shape.num_sets,
        "num_calls": shape.num_calls,
    }
