"""Measure one decode step of models: wall time, kernels and the time to read weights and K/V.

Run `python -m bench.steps --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.measuring import cli, timing
from bench.measuring.kv_dtypes import ONE_BYTE
from bench.measuring.report import number, ratio, table
from bench.serving.models import SHAPES, random_model
from bench.steps import gap
from bench.steps.step import kernel_table, measure_generate, measure_step, step_table
from models.decoder import Decoder, load_checkpoint
from pallas_paged.engine import EngineConfig, SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_TOP_P = SamplingParams(top_p=0.9)
# What all rows sample with; the last case is one row among greedy ones.
_SAMPLING = {
    "greedy": _GREEDY,
    "temperature": SamplingParams(temperature=0.8),
    "top_p": _TOP_P,
    "top_k and top_p": SamplingParams(top_k=50, top_p=0.9),
    "logprobs=5": SamplingParams(temperature=0.0, logprobs=5),
    "one row with top_p": _TOP_P,
}
_LAST = [*_SAMPLING][-1]
_MODES = ("step", "loop", "sampled step", "sampled loop", "generate")
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)


def measure_calls(decoder: Decoder, num_seqs: int, args: argparse.Namespace) -> Iterator[dict]:
    """Measure rows by one step a call, by several, and by `models.generate`."""
    for mode in args.modes:
        each = [_SAMPLED if "sampled" in mode else _GREEDY] * num_seqs
        config = _config(args)
        if mode == "generate":
            tokens = (args.length // 4, args.length // 2)
            result = measure_generate(decoder, each, num_tokens=tokens, **config)
        else:
            config["num_scheduler_steps"] = args.num_scheduler_steps if "loop" in mode else 1
            result = measure_step(decoder, each, length=args.length, num_steps=args.steps, **config)
        yield {"case": mode} | result


def measure_sampling(decoder: Decoder, num_seqs: int, args: argparse.Namespace) -> Iterator[dict]:
    """Measure rows that sample in different ways."""
    for case, params in _SAMPLING.items():
        each = [params] * num_seqs
        if case == _LAST:
            if num_seqs == 1:
                continue
            each[1:] = [_GREEDY] * (num_seqs - 1)
        result = measure_step(
            decoder, each, length=args.length, num_steps=args.steps, **_config(args)
        )
        yield {"case": case} | result


def markdown(run: dict[str, Any], num_kernels: int = 0) -> str:
    """Return the tables and the provenance of their numbers."""
    results = run["results"]
    names = [_name(one) for one in results]
    blocks = [step_table([*zip(names, results, strict=True)], "model, rows x tokens", "run")]
    for (name, case), one in zip(names, results, strict=True):
        if num_kernels and one["kernels"]:
            blocks.append(f"{name}, {case}:\n\n{kernel_table(one, num_kernels)}")
            if one["order"]:
                blocks.append(_in_order(one["order"]))
    reasons = dict.fromkeys(one["reason"] for one in results if "reason" in one)
    blocks += [f"No kernel times: {reason}." for reason in reasons]
    return timing.page(run["meta"], *blocks)


def _name(one: dict[str, Any]) -> tuple[str, str]:
    return f"{one['model']}, {one['num_seqs']} x {one['context']:.0f}", one["case"]


def _in_order(kernels: Sequence[Sequence[Any]]) -> str:
    attention = sum(us for name, us in kernels if gap.is_attention(name))
    total = sum(us for _, us in kernels)
    rows = [["#", "us", "kernel"]]
    rows += [[str(i), f"{us:.2f}", name[:100]] for i, (name, us) in enumerate(kernels, 1)]
    share = number(ratio(attention, total), ".0%")
    return f"In order; attention takes {attention:.1f} us ({share}):\n\n{table(rows)}"


def _config(args: argparse.Namespace) -> dict[str, Any]:
    names = ("num_scheduler_steps", "kv_cache_dtype", "implementation")
    return {name: getattr(args, name) for name in names}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and return the raw numbers."""
    parser = cli.make_parser("bench.steps", __doc__)
    add, positive = parser.add_argument, cli.at_least(1)
    add("--shapes", nargs="+", choices=SHAPES, help="random models; default: 1b and 8b")
    add("--checkpoint", type=Path, help="a model in a folder, in Hugging Face format")
    add("--rows", nargs="+", type=positive, default=[1, 64], help="sequences that decode together")
    text = "tokens of each prompt; default: 2048, for --sampling 256"
    add("--length", type=cli.at_least(8), help=text)
    add("--steps", type=positive, default=64, help="timed steps")
    add("--modes", nargs="+", choices=_MODES, default=["step", "loop", "sampled loop"])
    add("--sampling", action="store_true", help="compare ways to sample instead of ways to run")
    text = "list the N longest kernels, and all"
    add("--kernels", type=cli.at_least(0), default=0, metavar="N", help=text)
    add("--num-scheduler-steps", type=positive, default=EngineConfig.num_scheduler_steps)
    add("--kv-cache-dtype", choices=ONE_BYTE, help="default: the model's dtype")
    add("--implementation", help="of attention; default: the best for the platform")
    args = parser.parse_args(argv)
    args.length = args.length or (256 if args.sampling else 2048)
    if not args.shapes:
        args.shapes = [] if args.checkpoint else ["1b", "8b"]
    run: dict[str, Any] = {"meta": timing.describe_run(parser.prog, argv), "results": []}
    measure = measure_sampling if args.sampling else measure_calls
    for name in [*args.shapes, *([args.checkpoint] if args.checkpoint else [])]:
        decoder = _load(name)
        for num_seqs in args.rows:
            for result in measure(decoder, num_seqs, args):
                run["results"].append({"model": Path(name).name} | result)
                gc.collect()  # free the pool before the next engine allocates its own
                print(_progress(run["results"][-1]), file=sys.stderr, flush=True)
                cli.write_json(args.json, run)
        del decoder
        gc.collect()
    print(markdown(run, args.kernels))
    return run


def _load(name: str | Path) -> Decoder:
    if isinstance(name, str):
        return random_model(SHAPES[name])
    try:
        return load_checkpoint(name)[0]
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


def _progress(one: dict[str, Any]) -> str:
    times = f"{one['wall_us']:.0f} us, kernels {number(one['kernel_us'], '.0f')} us"
    return f"{one['model']}, {one['num_seqs']} rows, {one['case']}: {times}"


if __name__ == "__main__":
    main()
