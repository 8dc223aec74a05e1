"""Decode with grammars and without: what masks cost a step, on the device and on the host.

Run `python -m bench.serving.structured --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from bench.measuring import cli, timing
from bench.measuring.report import number, table_of
from bench.serving.models import SHAPES, add_shape, random_model
from models.decoder import engine_model
from pallas_paged.engine import Engine, EngineConfig, SamplingParams, StructuredOutputsParams
from pallas_paged.engine.device import runner

_PROMPT = 16  # tokens
_NUM_FIELDS = 16  # of a schema; each is a text without a bound
_LETTERS = "etaoinshrdlu .,_-ABC"
# What a case measures, by name.
_CASES = {
    "without": "no grammars",
    "one step a call": "no grammars, and one step a call",
    "all allowed": "masks without grammars: all bits are set",
    "grammars": "a JSON schema for each row",
}


class Vocabulary:
    """A tokenizer of all bytes and random words, as large as the model's vocabulary."""

    def __init__(self, size: int):
        """Make the same words in each run."""
        rng, words = random.Random(0), {bytes([i]): i for i in range(256)}
        while len(words) < size:
            word = "".join(rng.choices(_LETTERS, k=rng.randint(2, 9))).encode()
            words.setdefault(word, len(words))
        self._words = [*words][:size]

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id]

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._words[x] for x in token_ids).decode(errors="replace")


class AllAllowed:
    """In place of a grammar and its states: allows all, without any work."""

    is_complete = False

    def start(self, stop_token_ids: Any) -> AllAllowed:
        return self

    def accept(self, token_id: int) -> None:
        pass

    look_ahead = accept

    def check(self) -> None:
        pass

    def forced_tokens(self) -> list[int]:
        return []


def make_params(name: str, row: int, max_tokens: int) -> SamplingParams:
    """The parameters of a row in a case; schemas differ by row."""
    structure = None
    if name in ("all allowed", "grammars"):
        fields = [f"text_{row}_{i}" for i in range(_NUM_FIELDS)]
        schema = {
            "type": "object",
            "properties": {field: {"type": "string"} for field in fields},
            "required": fields,
            "additionalProperties": False,
        }
        structure = StructuredOutputsParams(json=schema)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0,
        seed=row,
        ignore_eos=True,
        structured_outputs=structure,
    )


def serve(engine: Engine, params: Sequence[SamplingParams]) -> dict[str, Any]:
    """Serve a request of each parameters; return the times of the steps in which all decode.

    These begin when each row has an eighth of its tokens: the first ones of a schema are forced.
    """
    first = max(1, (params[0].max_tokens or 0) // 8)
    prompts = [[1 + (row + i) % 255 for i in range(_PROMPT)] for row in range(len(params))]
    requests = [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
    masks_s, points = _time_masks(engine), []
    while not engine.idle:
        engine.step()
        lens = [len(request.outputs[0].token_ids) for request in requests]
        if min(lens) >= first and not any(request.finished for request in requests):
            count = engine.replicas[0].counters.num_steps
            points.append((time.perf_counter(), count, sum(masks_s), sum(lens)))
    errors = [request.error for request in requests if request.error]
    if errors or len(points) < 2:
        raise RuntimeError(f"{len(points)} steps in which all rows decode: {errors[:1]}")
    seconds, steps, masks, tokens = (b - a for a, b in zip(points[0], points[-1], strict=True))
    return {"seconds": seconds, "num_steps": steps, "masks_s": masks, "num_tokens": tokens}


def _time_masks(engine: Engine) -> list[float]:
    """Return a list to which the seconds are added that each call waits for its masks."""
    own: Any = engine.replicas[0].runner
    inner, seconds = type(own)._with_masks, [0.0]

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        batch = inner(*args)
        seconds.append(time.perf_counter() - start)
        return batch

    own._with_masks = timed
    return seconds


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the times of a case, each a list of `--runs`."""
    shape = SHAPES[args.shape]
    if args.vocab_size is not None:
        shape = replace(shape, config=replace(shape.config, vocab_size=args.vocab_size))
    model, weights = engine_model(random_model(shape))
    length = _PROMPT + args.max_tokens
    config = EngineConfig(
        num_pages=args.num_seqs * -(-length // EngineConfig.page_size),
        max_num_seqs=args.num_seqs,
        max_model_len=length,
        watermark=0.0,
        enable_prefix_caching=False,
        implementation=args.implementation,
    )
    engine = Engine(model, weights, config, Vocabulary(model.vocab_size))
    params = [make_params(name, row, args.max_tokens) for row in range(args.num_seqs)]
    if name == "one step a call":
        engine.replicas[0].step_policy = lambda: 1
    if name == "all allowed":
        engine._inputs.grammars.compile = lambda structure: AllAllowed()  # type: ignore
    fill = (lambda *_: None) if name == "all allowed" else runner.fill_masks
    with mock.patch.object(runner, "fill_masks", fill):  # a Mock would keep all masks
        engine.warmup(params)
        serve(engine, params)
        gc.collect()
        gc.freeze()  # as the server does: a full collection would take 0.3 s of some run
        return {"case": name, "runs": [serve(engine, params) for _ in range(args.runs)]}


def markdown(run: dict[str, Any]) -> str:
    """Return the table and the provenance of its numbers."""

    def step_ms(one: dict[str, Any], name: str = "seconds") -> float:
        return float(np.median([x[name] / x["num_steps"] for x in one["runs"]])) * 1e3

    def tokens(one: dict[str, Any]) -> float:
        return float(np.median([x["num_tokens"] / x["num_steps"] for x in one["runs"]]))

    base = step_ms(run["results"][0])
    columns = {
        "case": lambda one: f"{one['case']}: {_CASES[one['case']]}",
        "step ms": lambda one: number(step_ms(one), ".3f"),
        "over the first": lambda one: f"{step_ms(one) / base - 1:+.1%}",
        "masks ms": lambda one: number(step_ms(one, "masks_s"), ".3f"),
        "tokens": lambda one: number(tokens(one)),
    }
    words = (
        f"{run['shape']}, random weights, {run['num_seqs']} rows, {run['max_tokens']} tokens of"
        f" each, a vocabulary of {run['vocab_size']}."
    )
    return timing.page(run["meta"], words, table_of(run["results"], columns))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_parser("bench.serving.structured", __doc__)
    add_shape(parser, "1b")
    add, positive = parser.add_argument, cli.at_least(1)
    add("--num-seqs", type=positive, default=64, help="rows that decode")
    add("--vocab-size", type=cli.at_least(256), help="default: that of the shape")
    add("--max-tokens", type=cli.at_least(16), default=512, help="of each row")
    add("--cases", nargs="+", choices=_CASES, default=[*_CASES], help="default: all")
    add("--runs", type=positive, default=3, help="of each; the table has the median")
    args = parser.parse_args(argv)
    run: dict[str, Any] = {
        "meta": timing.describe_run(parser.prog, argv),
        "shape": args.shape,
        "num_seqs": args.num_seqs,
        "max_tokens": args.max_tokens,
        "vocab_size": args.vocab_size or SHAPES[args.shape].config.vocab_size,
        "results": [],
    }
    cli.measure_each(
        run["results"],
        args.cases,
        lambda name: measure(name, args),
        lambda one, took: f"{one['case']} ({took:.0f} s)",
        run,
        args,
    )
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
