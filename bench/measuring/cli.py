"""The command line that the benches share."""

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
    """A parser of the arguments of `python -m module`, with `--json`."""
    parser = argparse.ArgumentParser(prog=module, description=description)
    parser.add_argument("--json", type=output, help="write all numbers here, after each part")
    return parser


def make_call_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that the benches of calls take."""
    parser = make_parser(module, description)
    parser.add_argument(
        "--implementation",
        help="run only this one of ours; default: None's choice and, where compared, each",
    )
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose name has TEXT"
    )
    parser.add_argument("--iterations", type=at_least(1), default=20, help="timed runs of each")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """The type of arguments that are integers from `least` on."""

    def integer(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} must be at least {least}")
        return value

    return integer


def output(text: str) -> Path:
    """The type of arguments that name a file to write, checked before anything is measured."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}")
    return path


def select(
    parser: argparse.ArgumentParser, filters: Sequence[str], shapes: Sequence[Any], *tiny: Any
) -> list[Any]:
    """Shapes whose name has one of the filters; without filters all but the tiny ones.

    No such shape ends the program.
    """
    found = [x for x in (*shapes, *tiny) if any(text in x.name for text in filters)]
    if filters and not found:
        names = ", ".join(repr(x.name) for x in (*shapes, *tiny))
        parser.error(f"--shapes {' '.join(filters)} matches none of {names}")
    return found or list(shapes)


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
        results: a list within `run`, which has all numbers.
        shapes, measure: what to measure, and what returns its result.
        progress: returns the line about a result and the seconds that it took.
        run, args: all numbers, and the parsed arguments.
    """
    for shape in shapes:
        start = time.perf_counter()
        results.append(measure(shape))
        gc.collect()  # free this shape's pages before the next shape's are made
        line = progress(results[-1], time.perf_counter() - start)
        print(line, file=sys.stderr, flush=True)
        write_json(args.json, run)


def write_json(path: Path | None, run: dict[str, Any]) -> None:
    """Write all numbers of a run, if there is a path."""
    if path is not None:
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
