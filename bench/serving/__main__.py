"""Serves one trace of requests by the engine and by baselines, with the same memory for K/V.

Run `python -m bench.serving --help`; bench/README.md says what each number means.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bench import timing
from bench.cli import check_outputs, publish
from bench.kv_dtypes import ONE_BYTE
from bench.measure import reason
from bench.serving import report as serving_report
from bench.serving.batches import serve_in_batches
from bench.serving.compilations import Compilations
from bench.serving.engine import greedy, serve
from bench.serving.models import SHAPES, random_model
from bench.serving.requests import TraceRequest, describe_trace, make_trace
from bench.serving.static import StaticBatch
from bench.serving.step import measure_step
from bench.serving.transformers import run_transformers
from models.decoder import Decoder
from models.engine import Engine, EngineConfig

_GIB = 1 << 30


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.serving", description=__doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="1b", help="of the model, whose weights are random")
    add("--systems", nargs="*", choices=serving_report.NAMES, default=[*serving_report.NAMES])
    add("--kv-gib", type=float, help="memory for K/V of each system; default: by shape")
    add("--max-len", type=int, help="most tokens of prompt and output; default: by shape")
    add("--page-size", type=int, default=16)
    add("--max-seqs", type=int, default=256, help="rows of the engine")
    add("--token-budget", type=int, default=2048, help="tokens of a step of the engine")
    add("--implementation", help="of the engine's attention; default: the best for the platform")
    add("--kv-dtype", choices=ONE_BYTE, help="of the engine's K/V; default: that of the model")
    add("--requests", type=int, default=512)
    add("--rate", type=float, default=math.inf, help="arrivals per second; default: all at once")
    add("--prefix-share", type=float, default=0.5, help="share of requests with a system prompt")
    add("--prefix-len", type=int, help="tokens of a system prompt; default: max_len / 8")
    add("--prefixes", type=int, default=4, help="different system prompts")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=60.0, help="limit for each system")
    add("--transformers-requests", type=int, default=64, help="only the first so many for it")
    add("--decode-step", action="store_true", help="also the engine's decode step, by kernels")
    add("--step-steps", type=int, default=64, help="timed steps of that kind")
    add("--json", type=Path, help="write all numbers here, after each system")
    add("--markdown", type=Path, help="write the tables here too")
    add("--plot", type=Path, help="write the chart here, as PNG")
    return parser


def run_engine(
    model: Decoder,
    trace: Sequence[TraceRequest],
    options: argparse.Namespace,
    *,
    num_pages: int,
    prefix_caching: bool,
) -> dict[str, Any]:
    """The summary of a new engine's run."""
    config = EngineConfig(
        num_pages=num_pages,
        page_size=options.page_size,
        max_seqs=options.max_seqs,
        max_len=options.max_len,
        token_budget=options.token_budget,
        prefix_caching=prefix_caching,
        kv_dtype=options.kv_dtype,
        implementation=options.implementation,
    )
    start = time.perf_counter()
    engine = Engine(model, None, None, config)
    engine.warmup([greedy(1)])
    warmup_s = time.perf_counter() - start
    return serve(engine, trace, seconds=options.seconds).summarize() | {"warmup_s": warmup_s}


def run_static(
    model: Decoder, trace: Sequence[TraceRequest], options: argparse.Namespace, *, batch_size: int
) -> dict[str, Any]:
    """The summary of the run of static batches."""
    start = time.perf_counter()
    static = StaticBatch(model, batch_size=batch_size, max_len=options.max_len)
    static.warmup(trace)
    warmup_s = time.perf_counter() - start
    with Compilations() as compilations:
        record = serve_in_batches(
            trace,
            lambda batch: static.run(batch)[1],
            batch_size=batch_size,
            max_len=options.max_len,
            seconds=options.seconds,
        )
    return record.summarize() | {
        "warmup_s": warmup_s,
        "batch_size": batch_size,
        "kv_dtype": model.embed_tokens.weight[...].dtype.name,
        "attention": static.implementation,
        "compilations": compilations.count,
    }


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A summary, or why there is none."""
    try:
        return run()
    except Exception as error:  # the other systems go on; the table says what happened to this one
        return {"status": "failed", "reason": reason(error)}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments that can be used; a bad one ends the program."""
    parser = make_parser()
    options = parser.parse_args(argv)
    shape = SHAPES[options.shape]
    if options.kv_gib is None:
        options.kv_gib = shape.kv_gib
    if options.max_len is None:
        options.max_len = shape.max_len
    if options.prefix_len is None:
        options.prefix_len = options.max_len // 8
    if options.kv_gib * _GIB < options.max_len * shape.token_bytes():
        parser.error(f"--kv-gib {options.kv_gib} is too little for one row of {options.max_len}")
    for name, least in {"page_size": 1, "transformers_requests": 1, "step_steps": 1}.items():
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {getattr(options, name)} must be at least {least}")
    check_outputs(parser, options)
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints the tables and returns the raw numbers."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    shape = SHAPES[options.shape]
    budget = int(options.kv_gib * _GIB)
    num_tokens = budget // shape.token_bytes()
    batch_size = num_tokens // options.max_len
    num_pages = budget // shape.token_bytes(options.kv_dtype) // options.page_size
    try:
        trace = make_trace(
            options.requests,
            vocab_size=shape.config.vocab_size,
            max_len=options.max_len,
            rate=options.rate,
            prefix_share=options.prefix_share,
            prefix_len=options.prefix_len,
            num_prefixes=options.prefixes,
            seed=options.seed,
        )
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    run: dict[str, Any] = {
        "meta": None,  # to ask JAX for the device would take the GPU from the first system
        "shape": options.shape,
        "sizes": {
            "kv_gib": options.kv_gib,
            "capacity": num_tokens,
            "max_len": options.max_len,
            "num_pages": num_pages,
            "static_rows": batch_size,
        },
        "trace": describe_trace(trace),
        "systems": {},
        "decode_step": None,
    }

    def add(name: str, result: dict[str, Any]) -> None:
        run["systems"][name] = result
        print(serving_report.progress(name, result), file=sys.stderr, flush=True)
        write()

    def write() -> None:
        gc.collect()  # this system's memory, before that of the next
        if options.json:
            options.json.write_text(json.dumps(run, indent=1) + "\n")

    if "transformers" in options.systems:  # JAX has not touched the GPU yet
        result = run_transformers(
            shape.config,
            jnp.dtype(shape.dtype).name,
            trace[: options.transformers_requests],
            batch_size=batch_size,
            max_len=options.max_len,
            seconds=options.seconds,
        )
        add("transformers", result)
    run["meta"] = timing.describe_run("bench.serving", argv)
    model = random_model(shape)
    engine = functools.partial(run_engine, model, trace, options, num_pages=num_pages)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "engine": functools.partial(engine, prefix_caching=True),
        "engine_no_cache": functools.partial(engine, prefix_caching=False),
        "static": functools.partial(run_static, model, trace, options, batch_size=batch_size),
    }
    for name, run_one in runs.items():
        if name in options.systems:
            add(name, attempt(run_one))
    if options.decode_step:
        run["decode_step"] = measure_step(
            model,
            shape,
            num_seqs=shape.step_seqs,
            length=options.max_len,
            num_steps=options.step_steps,
            token_budget=options.token_budget,
            kv_dtype=options.kv_dtype,
            implementation=options.implementation,
        )
        write()
    publish(run, options, serving_report.markdown(run), serving_report.plot)
    return run


if __name__ == "__main__":
    main()
