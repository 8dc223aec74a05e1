"""Measure attention, decode steps and serving on one GPU and on several.

Run `python -m bench.parallel --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from bench.measuring import cli, timing
from bench.measuring.report import number, ratio, table_of
from bench.parallel import calls as parallel_calls
from bench.parallel.calls import make_mesh
from bench.parallel.model import Rates, decode_step
from bench.serving.models import SHAPES, random_model
from bench.serving.requests import nano_vllm_trace
from bench.steps.step import measure_step
from models.decoder import engine_model
from pallas_paged.engine import Engine, EngineConfig, SamplingParams
from pallas_paged.pages.sharding import TENSOR_AXIS

_PARTS = ("attention", "context", "sums", "steps", "serving")


def measure_steps(name: str, rows: Sequence[int], count: int, args: argparse.Namespace) -> Any:
    """Measure the engine's decode steps of a model whose weights `count` devices share."""
    decoder = random_model(SHAPES[name], make_mesh(count, TENSOR_AXIS) if count > 1 else None)
    for num_seqs in rows:
        result = measure_step(
            decoder,
            [SamplingParams(temperature=0.0)] * num_seqs,
            length=args.length,
            num_steps=args.steps,
            tensor_parallel_size=count,
        )
        if result["read_gbps"]:  # each device reads its part of the weights and of the K/V
            length = round(result["context"])
            part = decode_step(decoder.config, num_seqs=num_seqs, length=length, tensor=count)
            result["limit_us"] = part.read_us(Rates(read=result["read_gbps"]))
        yield {"model": name, "devices": count} | result
        gc.collect()  # free the pool before the next engine allocates its own


def measure_serving(name: str, config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Serve requests that come at once; the same on any number of devices."""
    shape = SHAPES[name]
    tensor_parallel_size = config["tensor_parallel_size"]
    mesh = make_mesh(tensor_parallel_size, TENSOR_AXIS) if tensor_parallel_size > 1 else None
    model, weights = engine_model(random_model(shape, mesh))
    max_len = min(args.max_len, shape.max_model_len // 2)
    trace = nano_vllm_trace(
        args.requests, min_len=max_len // 8, max_len=max_len, vocab_size=model.vocab_size
    )
    prompts, params = [one.prompt.tolist() for one in trace], [one.params for one in trace]
    engine = Engine(
        model,
        weights,
        EngineConfig(
            num_pages=int(args.kv_gib * 2**30) // shape.token_bytes() // 16,
            max_num_seqs=min(128, args.requests),
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=2 * max_len,
            **config,
        ),
    )
    start = time.perf_counter()
    engine.warmup(params[:1])
    warmup, seconds = time.perf_counter() - start, []
    for _ in range(2):
        engine.reset_prefix_cache()
        start = time.perf_counter()
        engine.generate(prompts, params, progress=False)
        seconds.append(time.perf_counter() - start)
    num_tokens = sum(one.max_tokens or 0 for one in params)
    return {
        "model": name,
        **config,
        "warmup_s": warmup,
        "seconds": min(seconds),
        "tokens_per_s": num_tokens / min(seconds),
    }


def markdown(run: dict[str, Any]) -> str:
    """Return the tables and the provenance of their numbers."""
    blocks = [
        f"{title} over the GPUs, wall time of calls in a row:\n\n{_call_table(run[part])}"
        for part, title in (("attention", "KV heads"), ("context", "The pages of each row"))
        if run[part]
    ]
    if run["sums"]:
        sums = table_of(
            run["sums"],
            {
                "bf16": lambda x: x["name"],
                "GPUs": lambda x: str(x["devices"]),
                "way": lambda x: x["way"],
                "us": lambda x: number(x["us"]),
            },
        )
        blocks.append(f"A sum over the GPUs, in a chain:\n\n{sums}")
    if run["steps"]:
        blocks.append(f"Decode steps of the engine:\n\n{_step_table(run['steps'])}")
    if run["serving"]:
        first = run["serving"][0]["seconds"]
        serving = table_of(
            run["serving"],
            {
                "model": lambda x: x["model"],
                "tensor": lambda x: str(x["tensor_parallel_size"]),
                "data": lambda x: str(x["data_parallel_size"]),
                "warm-up s": lambda x: number(x["warmup_s"]),
                "seconds": lambda x: number(x["seconds"], ".2f"),
                "output tokens/s": lambda x: number(x["tokens_per_s"], ".0f"),
                "speedup": lambda x: number(first / x["seconds"], ".2f"),
            },
        )
        blocks.append(f"{run['requests']} requests at once:\n\n{serving}")
    return timing.page(run["meta"], *blocks)


def _call_table(results: Sequence[dict[str, Any]]) -> str:
    def us(one: dict[str, Any]) -> float:
        return one["us"]["median"]

    one_gpu = {x["name"]: us(x) for x in results if x["devices"] == 1}
    return table_of(
        results,
        {
            "shape": lambda x: x["name"],
            "GPUs": lambda x: str(x["devices"]),
            "way": lambda x: x["way"],
            "us a call": lambda x: number(us(x)),
            "speedup": lambda x: number(ratio(one_gpu.get(x["name"]), us(x)), ".2f"),
            "GB/s of each GPU": lambda x: f"{x['num_bytes'] / x['devices'] / us(x) / 1e3:.0f}",
        },
    )


def _step_table(results: Sequence[dict[str, Any]]) -> str:
    def name(one: dict[str, Any]) -> str:
        return f"{one['model']}, {one['num_seqs']} x {one['length']}"

    one_gpu = {name(x): x["wall_us"] for x in results if x["devices"] == 1}
    return table_of(
        results,
        {
            "model, rows x tokens": name,
            "GPUs": lambda x: str(x["devices"]),
            "wall us": lambda x: number(x["wall_us"], ".0f"),
            "limit us": lambda x: number(x["limit_us"], ".0f"),
            "wall / limit": lambda x: number(ratio(x["wall_us"], x["limit_us"]), ".2f"),
            "speedup": lambda x: number(ratio(one_gpu.get(name(x)), x["wall_us"]), ".2f"),
        },
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.make_parser("bench.parallel", __doc__)
    add, positive, eight = parser.add_argument, cli.at_least(1), cli.at_least(8)
    add("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="default: all")
    add("--devices", nargs="+", type=int, help="numbers of GPUs; default: 1, and all there are")
    add("--tiny", action="store_true", help="sizes for a dry run without GPUs")
    add("--shapes", nargs="+", choices=SHAPES, default=["8b", "qwen3-32b"], help="for steps")
    add("--rows", nargs="+", type=positive, default=[1, 64], help="sequences that decode together")
    add("--length", type=eight, default=2048, help="tokens of each prompt of the steps")
    add("--steps", type=positive, default=64, help="timed steps")
    add("--serving-shape", choices=SHAPES, default="8b")
    add("--requests", type=positive, default=256, help="of the serving trace")
    add("--max-len", type=eight, default=1024, help="most tokens of a prompt, and of an output")
    add("--max-num-batched-tokens", type=int, default=4096)
    add("--kv-gib", type=float, default=24.0, help="memory for K/V of the serving trace")
    add("--iterations", type=positive, default=10, help="timed runs of each call")
    args = parser.parse_args(argv)
    args.devices = sorted(set(args.devices or (1, len(jax.devices()))))
    if not 1 <= args.devices[0] <= args.devices[-1] <= len(jax.devices()):
        parser.error(f"--devices {args.devices} must be from 1 to {len(jax.devices())}")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and return the raw numbers."""
    args = _parse(argv)
    run: dict[str, Any] = {
        "meta": timing.describe_run("bench.parallel", argv),
        "requests": args.requests,
        **{part: [] for part in _PARTS},
    }

    def note(part: str, results: Iterator[dict[str, Any]]) -> None:
        if part not in args.parts:
            return
        for result in results:
            run[part].append(result)
            print(f"{part}: {_progress(result)}", file=sys.stderr, flush=True)
            cli.write_json(args.json, run)
        gc.collect()

    how = args.devices, args.iterations
    tiny = (parallel_calls.TINY,) if args.tiny else ()
    for shape in tiny or parallel_calls.ATTENTION:
        note("attention", parallel_calls.measure_attention(shape, *how))
    for shape in tiny or parallel_calls.CONTEXT:
        note("context", parallel_calls.measure_context(shape, *how))
    for sizes in parallel_calls.SUMS:
        note("sums", parallel_calls.measure_sums(sizes, *how))
    for name in args.shapes:
        for count in args.devices:
            note("steps", measure_steps(name, args.rows, count, args))
    configs = [(1, 1)] + [x for n in args.devices if n > 1 for x in ((n, 1), (1, n))]
    for tensor, data in configs:
        config = {"tensor_parallel_size": tensor, "data_parallel_size": data}
        note("serving", (measure_serving(args.serving_shape, one, args) for one in (config,)))
    print(markdown(run))
    return run


def _progress(one: dict[str, Any]) -> str:
    if "us" in one:
        us = one["us"] if isinstance(one["us"], float) else one["us"]["median"]
        return f"{one['name']}, {one['devices']} by {one['way']}: {us:.1f} us"
    if "wall_us" in one:
        limit = number(one["limit_us"], ".0f")
        rows = f"{one['model']}, {one['num_seqs']} rows on {one['devices']}"
        return f"{rows}: {one['wall_us']:.0f} us, limit {limit} us"
    sizes = f"tensor {one['tensor_parallel_size']}, data {one['data_parallel_size']}"
    return f"{one['model']}, {sizes}: {one['seconds']:.2f} s"


if __name__ == "__main__":
    main()
