"""Decode with and without drafts: what a step that verifies them costs, and what they bring.

Run `python -m bench.serving.speculation --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.measuring import cli, timing
from bench.measuring.report import number, table
from bench.serving.models import SHAPES, add_shape, random_model
from models.decoder import engine_model
from pallas_paged.engine import Engine, EngineConfig, SamplingParams

_PERIOD = 64  # tokens of the text; bf16 has these integers
_PROMPT = 2 * _PERIOD
_RANDOM = 2654435761  # Knuth's multiplier: its products' high bits differ from place to place


@dataclass(frozen=True)
class Repeating:
    """A model at its own cost, whose next token is the next of a period, or a random one.

    Random weights repeat nothing. So this model computes all that the other does, and then makes
    one token certain: a function of the last token and its position, hidden as a feature more.

    Attributes:
        model: the other one.
        percent: of the tokens that go on with the period; a lookup finds them.
    """

    model: Any
    percent: int
    cache_key = None  # not that of the other model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, params: Any, tokens: jax.Array, positions: jax.Array, *rest: Any) -> Any:
        hidden, cache = self.model(params, tokens, positions, *rest)
        random = (positions.astype(jnp.uint32) * jnp.uint32(_RANDOM) >> 8).astype(jnp.int32)
        goes_on = random % 100 < self.percent
        following = jnp.where(goes_on, tokens + 1, random // 100) % _PERIOD
        return jnp.concatenate([hidden, following[:, None].astype(hidden.dtype)], axis=1), cache

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        logits = self.model.logits(params, hidden[:, :-1])
        is_next = jnp.arange(logits.shape[1]) == hidden[:, -1:].astype(jnp.int32)
        return jnp.where(is_next, 1e4, logits)


def measure(case: tuple[int, int], args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds that requests take without drafts, with them, and by the engine's rule.

    Args:
        case: rows, and the percent of tokens that go on with the period.
        args: options of the bench.
    """
    num_seqs, percent = case
    inner, weights = engine_model(random_model(SHAPES[args.shape]))
    model: Any = Repeating(inner, percent)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    prompts = [[(row + i) % _PERIOD for i in range(_PROMPT)] for row in range(num_seqs)]
    length = _PROMPT + args.max_tokens
    drafts = dict(method="ngram", num_speculative_tokens=args.num_speculative_tokens)
    drafts |= dict(prompt_lookup_max=3, prompt_lookup_min=1)
    found: dict[str, Any] = {"num_seqs": num_seqs, "percent": percent}
    for name in ("without", "always", "by the rule"):
        config = EngineConfig(
            num_pages=num_seqs * -(-length // EngineConfig.page_size),
            max_num_seqs=num_seqs,
            max_model_len=length,
            watermark=0.0,
            enable_prefix_caching=False,
            implementation=args.implementation,
            speculative_config=None if name == "without" else drafts,
        )
        engine = Engine(model, weights, config)
        engine.warmup([params])
        drafting = engine.replicas[0].drafting
        if name == "always" and drafting is not None:
            drafting.num_for = lambda num_rows: args.num_speculative_tokens  # type: ignore
        seconds = []
        for _ in range(1 + args.runs):
            before = engine.stats()
            start = time.perf_counter()
            engine.generate(prompts, params, progress=False)
            seconds.append(time.perf_counter() - start)
        after = engine.stats()
        found[name] = {
            "seconds": seconds[1:],
            "num_steps": after.num_steps - before.num_steps,
            "num_drafts": after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens,
            "num_accepted": after.spec_decode_num_accepted_tokens
            - before.spec_decode_num_accepted_tokens,
        }
    return found


def markdown(run: dict[str, Any]) -> str:
    """Return the table and the provenance of its numbers."""
    columns = "rows, going on, without ms, always ms, by the rule ms, always, by the rule, right,"
    rows = [f"{columns} step without us, with us, steps".split(", ")]
    for one in run["results"]:
        each = [one[name] for name in ("without", "always", "by the rule")]
        seconds = [float(np.median(x["seconds"])) for x in each]
        steps = [s / x["num_steps"] * 1e6 for s, x in zip(seconds, each, strict=True)]
        right = each[1]["num_accepted"] / max(1, each[1]["num_drafts"])
        rows.append(
            [str(one["num_seqs"]), f"{one['percent']}%"]
            + [number(x * 1e3, ".0f") for x in seconds]
            + [f"{seconds[0] / x:.2f}x" for x in seconds[1:]]
            + [f"{right:.0%}", number(steps[0], ".0f"), number(steps[1], ".0f")]
            + [f"{each[0]['num_steps']} to {each[1]['num_steps']}"]
        )
    words = (
        f"{run['shape']}, random weights, {run['max_tokens']} tokens of each row,"
        f" {run['num_speculative_tokens']} drafts a step."
    )
    return timing.page(run["meta"], words, table(rows))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_parser("bench.serving.speculation", __doc__)
    add_shape(parser, "1b")
    add, positive = parser.add_argument, cli.at_least(1)
    add("--num-seqs", type=positive, nargs="+", default=[1, 8, 64], help="rows that decode")
    add("--percent", type=int, nargs="+", default=[0, 70, 100], help="tokens that go on")
    add("--max-tokens", type=cli.at_least(2), default=512, help="of each row")
    add("--num-speculative-tokens", type=positive, default=4, help="drafts of a row in a step")
    add("--runs", type=positive, default=3, help="of each; the table has the median")
    args = parser.parse_args(argv)
    if not all(0 <= x <= 100 for x in args.percent):
        parser.error("--percent must be in 0..100")
    run: dict[str, Any] = {
        "meta": timing.describe_run(parser.prog, argv),
        "shape": args.shape,
        "max_tokens": args.max_tokens,
        "num_speculative_tokens": args.num_speculative_tokens,
        "results": [],
    }
    cli.measure_each(
        run["results"],
        [(num_seqs, percent) for num_seqs in args.num_seqs for percent in args.percent],
        lambda case: measure(case, args),
        lambda one, took: f"{one['num_seqs']} rows, {one['percent']}% ({took:.0f} s)",
        run,
        args,
    )
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
