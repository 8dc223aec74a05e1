"""Serve one long prompt in chunks: when is its first token there?

Run `python -m bench.serving.long_prompt --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.measuring import cli, timing
from bench.measuring.calls import PEAK_TFLOPS
from bench.measuring.report import table_of
from bench.serving.compilations import Compilations
from bench.serving.models import SHAPES, ServingShape, add_shape, random_model
from models.decoder import ModelConfig, engine_model
from pallas_paged.engine import Engine, EngineConfig, SamplingParams

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


def prompt_flops(config: ModelConfig, length: int) -> dict[str, float]:
    """Return the floating point operations of a prompt: of weights, and of causal attention.

    Only the last token has logits. Of experts those count that are chosen for a token.
    """
    heads, width = config.num_q_heads + 2 * config.num_kv_heads, config.intermediate_size
    if (experts := config.experts) is not None:
        width = experts.moe_intermediate_size * experts.num_experts_per_tok
    layer = config.hidden_size * ((heads + config.num_q_heads) * config.head_dim + 3 * width)
    pairs = length * (length + 1) / 2
    return {
        "weights": 2.0 * length * layer * config.num_layers,
        "attention": 4.0 * pairs * config.num_q_heads * config.head_dim * config.num_layers,
    }


def measure(shape: ServingShape, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds to the first token of a prompt of random tokens, in each run."""
    model, weights = engine_model(random_model(shape))
    pages = math.ceil((length + 1) / args.page_size)
    config = EngineConfig(
        num_pages=pages,
        page_size=args.page_size,
        max_num_seqs=8,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=pages * args.page_size,
        implementation=args.implementation,
    )
    engine = Engine(model, weights, config)
    engine.warmup([_SAMPLING])
    rng = np.random.default_rng(0)
    seconds = []
    before = engine.stats().num_steps
    with Compilations() as compiled:
        for _ in range(args.runs):
            prompt = rng.integers(0, model.vocab_size, length).tolist()  # nothing is cached
            start = time.perf_counter()
            [output] = engine.generate([prompt], _SAMPLING, progress=False)
            seconds.append(time.perf_counter() - start)
            if len(output.outputs[0].token_ids) != 1:
                raise RuntimeError(f"a prompt of {length} tokens ended without its first token")
    flops = prompt_flops(shape.config, length)
    return {
        "length": length,
        "seconds": seconds,
        "num_steps": (engine.stats().num_steps - before) / args.runs,
        "compilations": compiled.count,
        "flops": flops,
        "limit_s": sum(flops.values()) / (PEAK_TFLOPS * 1e12),
    }


def markdown(run: dict[str, Any]) -> str:
    """Return the table and the provenance of its numbers."""

    def seconds(one: dict[str, Any]) -> float:
        return float(np.median(one["seconds"]))

    columns = {
        "tokens": lambda x: str(x["length"]),
        "steps": lambda x: f"{x['num_steps']:.0f}",
        "first token s": lambda x: f"{seconds(x):.3f}",
        "tokens/s": lambda x: f"{x['length'] / seconds(x):.0f}",
        "limit s": lambda x: f"{x['limit_s']:.3f}",
        "time / limit": lambda x: f"{seconds(x) / x['limit_s']:.2f}",
        "attention": lambda x: f"{x['flops']['attention'] / sum(x['flops'].values()):.0%}",
    }
    words = (
        f"{run['shape']}, random weights, chunks of {run['max_num_batched_tokens']} tokens. The"
        f" limit is {PEAK_TFLOPS} TFLOP/s; the last column is attention's part of the operations."
    )
    return timing.page(run["meta"], words, table_of(run["results"], columns))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_parser("bench.serving.long_prompt", __doc__)
    add_shape(parser, "8b")
    add, positive = parser.add_argument, cli.at_least(1)
    add("--lengths", type=int, nargs="+", default=[8192, 32768, 100000], help="tokens of a prompt")
    add("--max-num-batched-tokens", type=positive, default=8192, help="tokens of a chunk")
    add("--page-size", type=positive, default=16)
    add("--runs", type=positive, default=3, help="of each length; the table has the median")
    args = parser.parse_args(argv)
    most = SHAPES[args.shape].config.max_position_embeddings - 1
    if not all(0 < length <= most for length in args.lengths):
        parser.error(f"--lengths {args.lengths} must be from 1 to {most}")
    run: dict[str, Any] = {
        "meta": timing.describe_run(parser.prog, argv),
        "shape": args.shape,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "results": [],
    }
    cli.measure_each(
        run["results"],
        args.lengths,
        lambda length: measure(SHAPES[args.shape], length, args),
        lambda one, took: f"{one['length']} tokens: {min(one['seconds']):.3f} s ({took:.0f} s)",
        run,
        args,
    )
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
