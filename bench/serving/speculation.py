"""Decode with and without drafts: what a step that verifies them costs, and what they bring.

Run `python -m bench.serving.speculation --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.measuring import cli, timing
from bench.measuring.report import number, table
from bench.serving.compilations import Compilations
from bench.serving.models import SHAPES, ServingShape, add_shape, random_model
from bench.serving.traces import KINDS, RANDOM_TOKENS, token_ids, traces_of
from models.decoder import engine_model
from pallas_paged.engine import Engine, EngineConfig, SamplingParams

_RANDOM = 2654435761  # Knuth's multiplier: its products' high bits differ from place to place
_DIGITS = 3  # of a token id in base 256: bf16 has these integers
_MOST_COMPILING = 8  # runs of each way that may compile a program
_WAYS = ("without", "always", "by the rule")


@dataclass(frozen=True)
class Emitting:
    """A model at its own cost, whose next token is that of a text.

    Random weights repeat nothing. So this model computes all that the other does, and then makes
    one token certain: its digits are features more of the hidden states. Its weights are those of
    the other, and all tokens of the texts, `i32[texts, L]`.

    Attributes:
        model: the other one.
        share: token ids of a text.
        percent: of the tokens that are those of the text; others are wrong.
    """

    model: Any
    share: int
    percent: int = 100
    cache_key = None  # not that of the other model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, params: Any, tokens: jax.Array, positions: jax.Array, *rest: Any) -> Any:
        weights, texts = params
        hidden, cache = self.model(weights, tokens, positions, *rest)
        text = tokens // self.share
        following = texts.at[text, positions + 1].get(mode="clip")
        random = (positions + 7919 * text).astype(jnp.uint32) * jnp.uint32(_RANDOM) >> 8
        first = following - following % self.share
        wrong = first + (following - first + 1) % self.share
        following = jnp.where(random % 100 < self.percent, following, wrong)
        digits = following[:, None] >> 8 * jnp.arange(_DIGITS) & 255
        return jnp.concatenate([hidden, digits.astype(hidden.dtype)], axis=1), cache

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        logits = self.model.logits(params[0], hidden[:, :-_DIGITS])
        digits = hidden[:, -_DIGITS:].astype(jnp.int32)
        following = jnp.sum(digits << 8 * jnp.arange(_DIGITS), axis=1, keepdims=True)
        return jnp.where(jnp.arange(logits.shape[1]) == following, 1e4, logits)


@dataclass(frozen=True)
class Models:
    """A model and, with `--draft-shape`, the one that drafts, each with its weights."""

    model: Any
    weights: Any
    draft: Any = None
    draft_weights: Any = None

    def engine(self, args: argparse.Namespace, rows: int, length: int, way: str) -> Engine:
        """Make an engine for rows of a length, which drafts in one of `_WAYS`."""
        config: dict[str, Any] = dict(method="ngram", prompt_lookup_max=3, prompt_lookup_min=1)
        if self.draft is not None:
            config = dict(method="draft_model", model=self.draft)
        config |= dict(num_speculative_tokens=args.num_speculative_tokens)
        config |= dict(adaptive=way != "always")
        sizes = EngineConfig(
            num_pages=rows * -(-length // EngineConfig.page_size),
            max_num_seqs=rows,
            max_model_len=length,
            max_num_batched_tokens=args.max_num_batched_tokens,
            watermark=0.0,
            enable_prefix_caching=False,
            implementation=args.implementation,
            speculative_config=None if way == "without" else config,
        )
        draft_params = None if way == "without" else self.draft_weights
        return Engine(self.model, self.weights, sizes, draft_params=draft_params)


def models_of(args: argparse.Namespace, shape: ServingShape) -> Models:
    """Return random models; the draft model has the vocabulary of the other."""
    model = Models(*engine_model(random_model(shape)))
    if args.draft_shape is None:
        return model
    small = SHAPES[args.draft_shape]
    config = replace(small.config, vocab_size=shape.config.vocab_size)
    return Models(
        model.model, model.weights, *engine_model(random_model(replace(small, config=config)))
    )


def measure(case: tuple[int, str], models: Models, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds that requests take without drafts, with them, and by the engine's rule.

    Args:
        case: rows, and the kind of their traces.
        models: that compute.
        args: options of the bench.

    Raises:
        RuntimeError: the tokens are not those of the traces, or too many runs compiled programs.
    """
    num_seqs, kind = case
    vocab_size = models.model.vocab_size
    traces = traces_of(kind, num_seqs, args.max_tokens)
    # One length for all kinds, which then run in the same programs.
    prompts, texts = token_ids(traces, vocab_size, 2 * (args.max_tokens + RANDOM_TOKENS))
    share, on_device = vocab_size // num_seqs, jax.device_put(texts)
    emitting = Models(Emitting(models.model, share), (models.weights, on_device))
    if models.draft is not None:
        draft = Emitting(models.draft, share, args.draft_percent)
        emitting = replace(emitting, draft=draft, draft_weights=(models.draft_weights, on_device))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    first = replace(params, max_tokens=1)
    wanted = [
        [*map(int, row[len(prompt) :][: args.max_tokens])]
        for prompt, row in zip(prompts, texts, strict=True)
    ]
    found: dict[str, Any] = {"num_seqs": num_seqs, "trace": kind}
    for name in _WAYS:
        engine = emitting.engine(args, num_seqs, texts.shape[1], name)
        timed: list[tuple[float, float]] = []
        # The first runs compile what these requests need, not all that a warm-up does. How rows
        # end depends on times, so a later run may compile too: it is not counted.
        for _ in range(1 + args.runs + _MOST_COMPILING):
            with Compilations() as compiled:
                start = time.perf_counter()
                engine.generate(prompts, first, progress=False)
                prompt_seconds = time.perf_counter() - start
                before = engine.stats()
                start = time.perf_counter()
                outputs = engine.generate(prompts, params, progress=False)
                seconds = time.perf_counter() - start
            if [x.outputs[0].token_ids for x in outputs] != wanted:
                raise RuntimeError(f"{name}: the tokens are not those of the traces")
            if not compiled.count:
                timed.append((seconds, prompt_seconds))
            if len(timed) == 1 + args.runs:  # the first makes CUDA graphs
                break
        else:
            raise RuntimeError(f"{name}: more than {_MOST_COMPILING} runs compiled programs")
        after = engine.stats()
        found[name] = {
            "seconds": [x for x, _ in timed[1:]],
            "prompt_seconds": [x for _, x in timed[1:]],
            "num_steps": after.num_steps - before.num_steps,
            "num_rows": after.spec_decode_num_drafts - before.spec_decode_num_drafts,
            "num_drafts": after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens,
            "num_accepted": after.spec_decode_num_accepted_tokens
            - before.spec_decode_num_accepted_tokens,
        }
    return found


def near_ties(args: argparse.Namespace) -> dict[str, Any]:
    """Count the tokens that are others with drafts: a random model, and its own greedy tokens.

    It drafts for itself, so nearly all drafts are right, and its output layer is not its
    embeddings, which would repeat the last token. A row counts to the first token that differs:
    those after it continue another text.
    """
    shape = SHAPES[args.shape]
    shape = replace(shape, config=replace(shape.config, tie_word_embeddings=False))
    model, weights = engine_model(random_model(shape))
    models, rows = Models(model, weights, model, weights), max(args.num_seqs)
    rng = np.random.default_rng(0)
    prompts = rng.integers(model.vocab_size, size=(rows, 16)).tolist()
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    each = []
    for way in _WAYS[:2]:
        engine = models.engine(args, rows, 16 + args.max_tokens, way)
        how = replace(params, logprobs=2) if way == "without" else params
        each.append([x.outputs[0] for x in engine.generate(prompts, how, progress=False)])
    places, gaps, usual = [], [], []
    for one, other in zip(*each, strict=True):
        best = np.reshape(one.logprobs.top_logprobs, (-1, 2))
        usual.append(best[:, 0] - best[:, 1])
        differs = np.flatnonzero(np.not_equal(one.token_ids, other.token_ids))
        places += [int(x) for x in differs[:1]]
        gaps += [float(x) for x in usual[-1][differs[:1]]]
    stats = engine.stats()
    return {
        "dtype": np.dtype(shape.dtype).name,
        "num_seqs": rows,
        "num_accepted": stats.spec_decode_num_accepted_tokens,
        "num_drafts": stats.spec_decode_num_draft_tokens,
        "places": places,
        "gaps": gaps,
        "usual_gap": float(np.median(np.concatenate(usual))),
    }


def markdown(run: dict[str, Any]) -> str:
    """Return the table, the near-ties and the provenance of the numbers."""
    columns = "rows, trace, without ms, always ms, by the rule ms, always, by the rule, decode,"
    columns += " right, tokens a step, step without us, with us, steps"
    rows = [columns.split(", ")]
    for one in run["results"]:
        each = [one[name] for name in _WAYS]
        seconds = [float(np.median(x["seconds"])) for x in each]
        prompts = [float(np.median(x["prompt_seconds"])) for x in each]
        decode = [max(1e-9, x - y) for x, y in zip(seconds, prompts, strict=True)]
        steps = [s / x["num_steps"] * 1e6 for s, x in zip(seconds, each, strict=True)]
        always = each[1]
        right = always["num_accepted"] / max(1, always["num_drafts"])
        per_step = 1 + always["num_accepted"] / max(1, always["num_rows"])
        rows.append(
            [str(one["num_seqs"]), one["trace"]]
            + [number(x * 1e3, ".0f") for x in seconds]
            + [f"{seconds[0] / x:.2f}x" for x in seconds[1:]]
            + [f"{decode[0] / decode[2]:.2f}x", f"{right:.0%}", f"{per_step:.2f}"]
            + [number(steps[0], ".0f"), number(steps[1], ".0f")]
            + [f"{each[0]['num_steps']} to {always['num_steps']}"]
        )
    words = (
        f"{run['shape']}, random weights, {run['max_tokens']} tokens of each row,"
        f" {run['num_speculative_tokens']} drafts a step by {run['drafts']}."
    )
    blocks = [words, table(rows)] if run["results"] else []
    if ties := run.get("near_ties"):
        blocks.append(_words_of(ties, run["max_tokens"]))
    return timing.page(run["meta"], *blocks)


def _words_of(ties: dict[str, Any], max_tokens: int) -> str:
    num_seqs, places, gaps = ties["num_seqs"], ties["places"], ties["gaps"]
    right = ties["num_accepted"] / max(1, ties["num_drafts"])
    words = (
        f"Near ties in {ties['dtype']}: with the model's own tokens, greedy, {right:.1%} of the"
        f" drafts are right, and {len(places)} of {num_seqs} rows of {max_tokens} tokens have"
        " another token with drafts than without."
    )
    if places:
        first = ", ".join(f"{x} ({gap:.4f})" for x, gap in zip(places, gaps, strict=True))
        words += (
            f" The first of each, and the gap of the two best logits there: {first}. The median"
            f" of all gaps is {ties['usual_gap']:.4f}."
        )
    return words


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_parser("bench.serving.speculation", __doc__)
    add_shape(parser, "1b")
    add, positive = parser.add_argument, cli.at_least(1)
    add("--num-seqs", type=positive, nargs="+", default=[1, 8, 64], help="rows that decode")
    text = "texts that the model says; none: near ties alone"
    add("--trace", choices=KINDS, nargs="*", default=[*KINDS], help=text)
    add("--max-tokens", type=cli.at_least(2), default=512, help="of each row")
    text = "a model with random weights that drafts; default: a lookup does"
    add("--draft-shape", choices=SHAPES, help=text)
    text = "drafts of --draft-shape that are the text's"
    add("--draft-percent", type=int, default=80, metavar="0..100", help=text)
    add("--num-speculative-tokens", type=positive, default=7, help="drafts of a row in a step")
    text = "tokens of a step with prompts"
    add("--max-num-batched-tokens", type=positive, default=2048, help=text)
    add("--runs", type=positive, default=3, help="of each; the table has the median")
    text = "count tokens that are others with drafts"
    add("--near-ties", action=argparse.BooleanOptionalAction, default=True, help=text)
    args = parser.parse_args(argv)
    if not 0 <= args.draft_percent <= 100:
        parser.error("--draft-percent must be in 0..100")
    drafts = "a lookup"
    if args.draft_shape is not None:
        drafts = f"a {args.draft_shape}, {args.draft_percent}% of them the text's"
    run: dict[str, Any] = {
        "meta": timing.describe_run(parser.prog, argv),
        "shape": args.shape,
        "max_tokens": args.max_tokens,
        "num_speculative_tokens": args.num_speculative_tokens,
        "drafts": drafts,
        "results": [],
    }
    models = models_of(args, SHAPES[args.shape])
    cli.measure_each(
        run["results"],
        [(num_seqs, kind) for num_seqs in args.num_seqs for kind in args.trace],
        lambda case: measure(case, models, args),
        lambda one, took: f"{one['num_seqs']} rows, {one['trace']} ({took:.0f} s)",
        run,
        args,
    )
    if args.near_ties:
        run["near_ties"] = near_ties(args)
        cli.write_json(args.json, run)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
