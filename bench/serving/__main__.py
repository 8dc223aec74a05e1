"""Serve one trace of requests by the engine and by baselines, with the same memory for K/V.

Run `python -m bench.serving --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from bench.measuring import cli, timing
from bench.measuring.kv_dtypes import ONE_BYTE
from bench.measuring.measure import attempt, failed
from bench.serving import report
from bench.serving.batches import serve_in_batches
from bench.serving.compilations import Compilations
from bench.serving.engine import serve
from bench.serving.models import SHAPES, add_shape, random_model
from bench.serving.requests import TraceRequest, describe_trace, make_trace, nano_vllm_trace
from bench.serving.static import StaticBatch
from bench.serving.transformers import run_transformers
from models.decoder import Decoder, engine_model
from pallas_paged.engine import Engine, EngineConfig

_GIB = 1 << 30
_NANO_SHORTEST, _NANO_LONGEST = 100, 1024  # tokens of prompts, and of outputs
# Defaults of the other arguments for each trace.
_TRACES: dict[str, dict[str, Any]] = {
    "sharegpt": dict(
        shape="1b", systems=[*report.NAMES][:-1], requests=512, max_num_batched_tokens=2048
    ),
    "nano": dict(
        shape="qwen3-0.6b",
        systems=["engine"],
        requests=256,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        kv_gib=40.0,
    ),
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = cli.make_parser("bench.serving", __doc__)
    add_shape(parser, None, "; default: by trace")
    add = parser.add_argument
    add("--trace", choices=_TRACES, default="sharegpt", help="nano: that of nano-vllm's bench")
    add("--systems", nargs="*", choices=report.NAMES, help="default: by trace")
    add("--http", action="store_true", help="also the engine behind models.server, over HTTP")
    add("--kv-gib", type=float, help="memory for K/V of each system; default: by shape")
    add("--max-model-len", type=int, help="most tokens of prompt and output; default: by shape")
    add("--page-size", type=cli.at_least(1), default=16)
    add("--max-num-seqs", type=int, default=256, help="rows of the engine")
    add("--max-num-batched-tokens", type=int, help="of a step of the engine; default: by trace")
    add("--kv-cache-dtype", choices=ONE_BYTE, help="K/V of the engine; default: the model's dtype")
    add("--requests", type=int, help="default: by trace")
    add("--rate", type=float, default=math.inf, help="arrivals per second; default: all at once")
    add("--prefix-share", type=float, default=0.5, help="share of requests with a system prompt")
    add("--prefix-len", type=int, help="tokens of a system prompt; default: max_model_len / 8")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=60.0, help="limit for each system")
    text = "transformers serves only this many requests, the first ones"
    add("--transformers-requests", type=cli.at_least(1), default=64, help=text)
    return parser


def run_engine(
    model: Decoder,
    trace: Sequence[TraceRequest],
    args: argparse.Namespace,
    *,
    num_pages: int,
    prefix_caching: bool,
    over_http: bool = False,
) -> dict[str, Any]:
    """Serve the trace by a new engine; return the summary of the run."""
    config = EngineConfig(
        num_pages=num_pages,
        page_size=args.page_size,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
        kv_cache_dtype=args.kv_cache_dtype,
        implementation=args.implementation,
    )
    start = time.perf_counter()
    engine = Engine(*engine_model(model), config)
    engine.warmup([replace(trace[0].params, max_tokens=1)])
    gc.collect()
    gc.freeze()  # as the server does
    warmup_s = time.perf_counter() - start
    if over_http:
        from bench.serving.http import serve_over_http  # needs the extra [server]

        record = serve_over_http(engine, trace, seconds=args.seconds)
    else:
        record = serve(engine, trace, seconds=args.seconds)
    return record.summarize() | {"warmup_s": warmup_s}


def run_static(
    model: Decoder, trace: Sequence[TraceRequest], args: argparse.Namespace, *, batch_size: int
) -> dict[str, Any]:
    """Serve the trace by static batches; return the summary of the run."""
    start = time.perf_counter()
    static = StaticBatch(model, batch_size=batch_size, max_len=args.max_model_len)
    static.warmup(trace)
    warmup_s = time.perf_counter() - start
    with Compilations() as compilations:
        record = serve_in_batches(
            trace,
            lambda batch: static.run(batch)[1],
            batch_size=batch_size,
            max_len=args.max_model_len,
            seconds=args.seconds,
        )
    return record.summarize() | {
        "warmup_s": warmup_s,
        "batch_size": batch_size,
        "kv_dtype": model.embed_tokens.weight[...].dtype.name,
        "attention": static.implementation,
        "compilations": compilations.count,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check arguments; a bad one ends the program."""
    parser = make_parser()
    args = parser.parse_args(argv)
    for name, value in _TRACES[args.trace].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    shape = SHAPES[args.shape]
    if args.kv_gib is None:
        args.kv_gib = shape.kv_gib
    if args.max_model_len is None:
        args.max_model_len = shape.max_model_len
    if args.prefix_len is None:
        args.prefix_len = args.max_model_len // 8
    if args.kv_gib * _GIB < args.max_model_len * shape.token_bytes():
        parser.error(f"--kv-gib {args.kv_gib} is too little for one row of {args.max_model_len}")
    return args


def _make_trace(args: argparse.Namespace) -> list[TraceRequest]:
    vocab_size = SHAPES[args.shape].config.vocab_size
    if args.trace == "nano":
        longest = min(_NANO_LONGEST, args.max_model_len // 2)
        shortest = min(_NANO_SHORTEST, longest)
        return nano_vllm_trace(
            args.requests, min_len=shortest, max_len=longest, vocab_size=vocab_size
        )
    return make_trace(
        args.requests,
        vocab_size=vocab_size,
        max_len=args.max_model_len,
        rate=args.rate,
        prefix_share=args.prefix_share,
        prefix_len=args.prefix_len,
        seed=args.seed,
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and return the raw numbers."""
    args = parse(argv)
    shape = SHAPES[args.shape]
    budget = int(args.kv_gib * _GIB)
    num_tokens = budget // shape.token_bytes()
    batch_size = num_tokens // args.max_model_len
    num_pages = budget // shape.token_bytes(args.kv_cache_dtype) // args.page_size
    try:
        trace = _make_trace(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    run: dict[str, Any] = {
        "meta": None,  # asking JAX for the device would take the GPU from the first system
        "shape": args.shape,
        "sizes": {
            "kv_gib": args.kv_gib,
            "capacity": num_tokens,
            "max_len": args.max_model_len,
            "num_pages": num_pages,
            "static_rows": batch_size,
        },
        "trace": describe_trace(trace),
        "systems": {},
    }

    def add(name: str, result: dict[str, Any]) -> None:
        run["systems"][name] = result
        print(report.progress(name, result), file=sys.stderr, flush=True)
        gc.unfreeze()
        gc.collect()  # free this system's memory before the next system takes its own
        cli.write_json(args.json, run)

    if "transformers" in args.systems:  # first, while JAX has not touched the GPU
        result = run_transformers(
            shape.config,
            jnp.dtype(shape.dtype).name,
            trace[: args.transformers_requests],
            batch_size=batch_size,
            max_len=args.max_model_len,
            seconds=args.seconds,
        )
        add("transformers", result)
    run["meta"] = timing.describe_run("bench.serving", argv)
    model = random_model(shape)
    engine = functools.partial(run_engine, model, trace, args, num_pages=num_pages)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "engine": functools.partial(engine, prefix_caching=True),
        "http": functools.partial(engine, prefix_caching=True, over_http=True),
        "engine_no_cache": functools.partial(engine, prefix_caching=False),
        "static": functools.partial(run_static, model, trace, args, batch_size=batch_size),
    }
    for name, run_one in runs.items():
        if name in args.systems or (name == "http" and args.http):
            result = attempt(run_one)  # if it fails, the other systems go on
            add(name, failed(result) if isinstance(result, Exception) else result)
    print(report.markdown(run))
    return run


if __name__ == "__main__":
    main()
