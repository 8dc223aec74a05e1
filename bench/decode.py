"""Times `paged_attention` on one decode step per shape, beside its peers and the card's read floor.

Run `python -m bench.decode --help`; bench/README.md says what each number means.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import peers, report, timing
from bench.shapes import SHAPES, TINY, Case, Shape, make_case, reference, select_shapes

MAX_RELATIVE_ERROR = 1e-2


def relative_error(case: Case, outs: Sequence[jax.Array]) -> float:
    """Relative L2 error over a few rows of a run's first and last call."""
    lens = np.array(case.shape.seq_lens)
    rows = np.argsort(lens, kind="stable")[
        np.linspace(0, len(lens) - 1, min(4, len(lens)), dtype=int)
    ]
    errors = []
    for i in {0, len(outs) - 1}:
        q = case.q if i == 0 else outs[i - 1]
        table = jnp.asarray(case.tables[i % case.shape.num_sets][rows])
        want = reference(q[rows], case.k_pages, case.v_pages, table, case.seq_lens[rows])
        want, got = np.asarray(want, np.float64), np.asarray(outs[i][rows], np.float64)
        errors.append(np.linalg.norm(got - want) / np.linalg.norm(want))
    return float(np.max(errors))


def _steps(case: Case, variant: peers.Variant) -> tuple:
    """(k, v, block_table) of each call. Every call has a table array of its own: were two calls
    given the same one, XLA would do once what they have in common, such as a gather."""
    sets = []
    for i, table in enumerate(case.tables):
        one = (case.k_pages, case.v_pages, jnp.asarray(table))
        sets.append(variant.prepare(*one, i) if variant.prepare else one)
    calls = [sets[i % len(sets)] for i in range(case.shape.num_calls)]
    return tuple((k, v, jnp.array(table, copy=True)) for k, v, table in calls)


def _chain(attend: peers.Attend) -> Any:
    """Calls one after another, each one's output the next one's query: no two can overlap."""

    def run(q, steps, seq_lens):
        outs = []
        for k, v, block_table in steps:
            q = attend(q, k, v, block_table, seq_lens)
            outs.append(q)
        return outs

    return jax.jit(run)


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def measure(
    case: Case, variant: peers.Variant, compiled: Any, args: tuple, iterations: int
) -> dict:
    """One variant's result: its error, then its times per call if the error is small enough."""
    num_calls = case.shape.num_calls
    error = relative_error(case, compiled(*args))
    result: dict[str, Any] = {"variant": variant.label, "relative_l2": error}
    if not error <= MAX_RELATIVE_ERROR:
        return result | {"status": "wrong", "reason": f"{error=:.3g} > {MAX_RELATIVE_ERROR}"}
    wall = [us / num_calls for us in timing.wall_times(compiled, args, iterations=iterations)]
    result |= {"status": "ok", "wall_us": dataclasses.asdict(timing.Spread.of(wall))}
    try:
        runs = timing.kernel_times(compiled, args, iterations=iterations)
    except Exception as cause:
        return result | {"kernel_us": None, "reason": _reason(cause)}
    sums = [sum(us for _, us in run) / num_calls for run in runs]
    kernels: dict[str, float] = {}
    for name, us in (kernel for run in runs for kernel in run):
        kernels[name] = kernels.get(name, 0.0) + us / len(runs) / num_calls
    return result | {
        "kernel_us": dataclasses.asdict(timing.Spread.of(sums)),
        "kernels": {name: round(us, 3) for name, us in kernels.items()},
        "kernels_per_run": len(runs[0]),
    }


def best(results: Sequence[dict]) -> dict:
    """The fastest right variant, else one that was wrong, else one that failed."""
    right = [r for r in results if r["status"] == "ok"]
    if right:
        return min(right, key=lambda r: (r["kernel_us"] or r["wall_us"])["median"])
    return min(results, key=lambda r: r["status"] != "wrong")


def measure_all(case: Case, find: Callable[[], list[peers.Variant]], iterations: int) -> dict:
    """Result of an implementation's best variant; whatever it raises becomes its reason."""
    try:
        variants = find()
    except Exception as error:
        return {"status": "failed", "reason": _reason(error)}
    prepared: dict[Any, tuple] = {}
    lowered: list[Any] = []
    for variant in variants:
        try:
            if variant.prepare not in prepared:
                prepared[variant.prepare] = (case.q, _steps(case, variant), case.seq_lens)
            lowered.append(_chain(variant.attend).lower(*prepared[variant.prepare]))
        except Exception as error:
            lowered.append(error)
    results = []
    for variant, compiled in zip(variants, timing.compile_all(lowered), strict=True):
        try:
            if isinstance(compiled, Exception):
                raise compiled
            args = prepared[variant.prepare]
            results.append(measure(case, variant, compiled, args, iterations))
        except Exception as error:
            reason = _reason(error)
            results.append({"variant": variant.label, "status": "failed", "reason": reason})
    return best(results) | {"variants": results}


def measure_shape(shape: Shape, options: argparse.Namespace) -> dict:
    """Everything about one shape."""
    case = make_case(shape)
    finders: dict[str, Callable[[], list[peers.Variant]]] = {
        "ours": functools.partial(peers.ours, options.implementation)
    }
    if options.peers:
        finders["jax_op"] = functools.partial(
            peers.jax_op,
            num_seqs=len(shape.seq_lens),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            pages_per_seq=shape.pages_per_seq,
        )
        finders |= {"xla_gather": peers.xla_gather, "cudnn_paged": peers.cudnn_paged}
    results = {}
    for name, find in finders.items():
        results[name] = measure_all(case, find, options.iterations)
        gc.collect()  # the pages of one peer, before those of the next
    return {
        "name": shape.name,
        "num_seqs": len(shape.seq_lens),
        "num_tokens": sum(shape.seq_lens),
        "num_bytes": shape.num_bytes,
        "num_sets": shape.num_sets,
        "num_calls": shape.num_calls,
        "results": results,
    }


def measure_floor(num_bytes: int, *, num_sets: int, num_calls: int, iterations: int) -> dict:
    """What a kernel takes that only reads as many bytes, or why that can't be told."""
    try:
        floor = timing.floor_times(
            num_bytes, num_sets=num_sets, num_calls=num_calls, iterations=iterations
        )
    except Exception as error:
        return {"status": "failed", "num_bytes": num_bytes, "reason": _reason(error)}
    kernel_us = dataclasses.asdict(floor)
    return {"status": "ok", "num_bytes": num_bytes, "kernel_us": kernel_us}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.decode", description=__doc__)
    parser.add_argument("--implementation", help="of ours; default: the best for the platform")
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose name has TEXT"
    )
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--iterations", type=int, default=20, help="timed runs of each")
    parser.add_argument("--json", type=Path, help="write all numbers here, after each shape")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    parser.add_argument("--plot", type=Path, help="write the chart here, as PNG")
    options = parser.parse_args(argv)
    if options.iterations < 1:
        parser.error(f"--iterations {options.iterations} must be at least 1")
    if not select_shapes(options.shapes):
        names = ", ".join(repr(s.name) for s in (*SHAPES, TINY))
        parser.error(f"--shapes {' '.join(options.shapes)} matches none of {names}")
    for path in (options.json, options.markdown, options.plot):
        if path and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed")
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints the table and returns the raw numbers."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parse(argv)
    shapes: list[dict] = []
    # A large read, so that the ceiling does not depend on the shapes asked for.
    floors = [measure_floor(1 << 30, num_sets=2, num_calls=4, iterations=options.iterations)]
    run: dict[str, Any] = {
        "meta": timing.describe_run("bench.decode", argv),
        "floors": floors,
        "shapes": shapes,
    }
    for shape in select_shapes(options.shapes):
        start = time.perf_counter()
        if all(floor["num_bytes"] != shape.num_bytes for floor in floors[1:]):
            floors.append(
                measure_floor(
                    shape.num_bytes,
                    num_sets=shape.num_sets,
                    num_calls=shape.num_calls,
                    iterations=options.iterations,
                )
            )
        shapes.append(measure_shape(shape, options))
        run |= report.summarize(floors, shapes)
        seconds = time.perf_counter() - start
        print(report.progress(run, shapes[-1], seconds), file=sys.stderr, flush=True)
        gc.collect()
        if options.json:
            options.json.write_text(json.dumps(run, indent=1) + "\n")
    table = report.markdown(run)
    if options.markdown:
        options.markdown.write_text(table)
    print(table)
    if options.plot:
        try:
            report.plot(run, options.plot)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from error
    return run


if __name__ == "__main__":
    main()
