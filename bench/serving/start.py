"""Start an engine with an empty compilation cache and with a full one: when is it ready?

Run `python -m bench.serving.start --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.measuring import cli, timing
from bench.measuring.report import number, table
from bench.serving.compilations import Compilations
from bench.serving.models import SHAPES, add_shape, random_model
from models.decoder import engine_model
from pallas_paged.engine import Engine, EngineConfig, SamplingParams

_NUM_FUNCTIONS = 8


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in this process; return the seconds of each part."""
    shape = SHAPES[args.shape]
    parts = {"imports": time.time() - args.started} if args.started else {}
    last = time.perf_counter()

    def note(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        parts[part], last = now - last, now

    jax.block_until_ready(jnp.zeros(1))
    note("device")
    decoder = random_model(shape)
    model, weights = engine_model(decoder)
    jax.block_until_ready(weights)
    note("weights")
    config = EngineConfig(
        num_pages=int(args.kv_gib * 2**30) // shape.token_bytes() // args.page_size,
        page_size=args.page_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        implementation=args.implementation,
    )
    engine = Engine(model, weights, config)
    note("engine")
    with Compilations() as compiled:
        # Of nano-vllm's workload.
        done = engine.start_warmup([SamplingParams(temperature=0.6)])
        note("warm-up")
        ready_s, num_first_steps = sum(parts.values()), engine.stats().compilations
        done.result()
    return {
        "ready_s": ready_s,
        "all_compiled_s": ready_s + time.perf_counter() - last,
        "parts_s": parts,
        "num_first_steps": num_first_steps,
        "compilations": compiled.count,
        "from_cache": compiled.num_cached,
        "functions": compiled.functions(),
        "num_steps_compiled": engine.stats().compilations,
        "pool_bytes": engine.stats().pool_bytes,
    }


def measure_starts(argv: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Measure in two processes: one that fills an empty compilation cache, one that has it."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        path = Path(folder, "result.json")
        for name in ("cold", "warm"):
            print(f"{name} start ...", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "bench.serving.start", *argv]
            command += ["--json", str(path), "--started", repr(time.time())]
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
            child = json.loads(path.read_text())
            results[name] = {"meta": child["meta"], **child["starts"]["here"]}
    return results


def markdown(run: dict[str, Any]) -> str:
    """Return the tables and the provenance of their numbers."""
    starts = run["starts"]
    rows = [["", *starts]]

    def add(head: str, key: Any, spec: str) -> None:
        rows.append([head, *(number(key(one), spec) for one in starts.values())])

    add("ready after s", lambda one: one["ready_s"], ".1f")
    for part in next(iter(starts.values()))["parts_s"]:
        add(f"- {part}", lambda one, part=part: one["parts_s"][part], ".1f")
    is_split = all("all_compiled_s" in one for one in starts.values())  # not before 2026-11-28
    if is_split:
        add("all compiled after s", lambda one: one["all_compiled_s"], ".1f")
    add("programs compiled", lambda one: one["compilations"], "d")
    add("- from the cache", lambda one: one["from_cache"], "d")
    add("- steps of the engine", lambda one: one["num_steps_compiled"], "d")
    if is_split:
        add("- of these when ready", lambda one: one["num_first_steps"], "d")
    blocks = [f"`{run['shape']}`:\n\n{table(rows)}"]
    for name, one in starts.items():
        rows = [["function", "programs", "trace s", "lower s", "compile s"]]
        for found in one["functions"][:_NUM_FUNCTIONS]:
            seconds = (f"{found[f'{phase}_s']:.2f}" for phase in ("trace", "lower", "compile"))
            rows.append([found["name"], str(found["count"]), *seconds])
        blocks.append(f"Warm-up, {name}, seconds summed over threads:\n\n{table(rows)}")
    return timing.page(run["meta"], *blocks)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and return the raw numbers."""
    argv = sys.argv[1:] if argv is None else argv
    parser = cli.make_parser("bench.serving.start", __doc__)
    add_shape(parser, "qwen3-0.6b")
    add = parser.add_argument
    add("--kv-gib", type=float, default=40.0, help="memory for K/V")
    add("--page-size", type=cli.at_least(1), default=16)
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=4096)
    add("--max-model-len", type=int, default=4096)
    add("--here", action="store_true", help="one start, in this process, with JAX's own cache")
    add("--started", type=float, help=argparse.SUPPRESS)  # the time when the process was started
    args = parser.parse_args(argv)
    if int(args.kv_gib * 2**30) < SHAPES[args.shape].token_bytes() * args.max_model_len:
        parser.error(f"--kv-gib {args.kv_gib} is too little for {args.max_model_len} tokens")
    if args.here or args.started:
        starts = {"here": measure(args)}
        meta = timing.describe_run(parser.prog, argv)
    else:  # this process leaves the GPU alone
        starts = measure_starts(argv)
        meta = starts["cold"].pop("meta")
        meta["command"] = timing.command(parser.prog, argv)
        del starts["warm"]["meta"]
    run = {"meta": meta, "shape": args.shape, "starts": starts}
    cli.write_json(args.json, run)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
