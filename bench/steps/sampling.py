"""Measure ways to sample: logits to tokens and log-probabilities, without a model.

Run `python -m bench.steps.sampling`; bench/README.md explains the numbers. `--cases NAME...`
measures only some ways, `--std` sets the standard deviation of the logits, `--bf16` rounds them to
bfloat16, so that many are equal. `--sorted` measures the definition by sorting too, and
`--implementation xla` the plain passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.measuring import cli, timing
from bench.measuring.measure import call_times, reason
from bench.measuring.report import number, table
from pallas_paged.engine.device.program import GPU_OPTIONS
from pallas_paged.engine.requests.grammar import empty_masks
from pallas_paged.engine.sampling.logprobs import Logprobs, gather_logprobs
from pallas_paged.engine.sampling.sampler import (
    SamplingImplementation,
    SamplingMetadata,
    TokenCounts,
    add_output_tokens,
    process_logits,
    sample,
)
from pallas_paged.engine.sampling_params import SamplingMode, SamplingParams

_NUM_SETS = 2  # arrays of logits among which the calls rotate
_NUM_LOOPS = 16  # times that a run visits all of them
_GREEDY = SamplingParams(temperature=0.0)
_PLAIN = SamplingParams(temperature=0.8)
_TOP_P = SamplingParams(temperature=0.8, top_p=0.9)
# Parameters of the first row, and of all others.
_CASES = {
    "greedy": (_GREEDY, _GREEDY),
    "temperature": (_PLAIN, _PLAIN),
    "top_p": (_TOP_P, _TOP_P),
    "top_k": (SamplingParams(top_k=50),) * 2,
    "top_k=100": (SamplingParams(top_k=100),) * 2,
    "min_p": (SamplingParams(min_p=0.1),) * 2,
    "top_k and top_p": (SamplingParams(top_k=50, top_p=0.9),) * 2,
    "penalties": (SamplingParams(temperature=0.0, frequency_penalty=0.5),) * 2,
    "logprobs=0": (SamplingParams(temperature=0.0, logprobs=0),) * 2,
    "logprobs=5": (SamplingParams(temperature=0.0, logprobs=5),) * 2,
    "one row with top_p, others greedy": (_TOP_P, _GREEDY),
    "one row with top_p, others temperature": (_TOP_P, _PLAIN),
    "greedy, masks": (_GREEDY, _GREEDY),
    "temperature, masks": (_PLAIN, _PLAIN),
    "top_p, masks": (_TOP_P, _TOP_P),
}


def sorted_sample(
    logits: jax.Array, metadata: SamplingMetadata, lens: jax.Array, mode: SamplingMode
) -> jax.Array:
    """Sample by sorting, the definition of the filters."""
    if not mode.filters:
        return sample(logits, metadata, lens, mode)
    top_k, top_p = metadata.top_k[:, None], metadata.top_p[:, None]
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled /= jnp.where(metadata.temperature > 0, metadata.temperature, 1.0)[:, None]
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    kth = jnp.take_along_axis(ordered, jnp.clip(top_k - 1, 0, logits.shape[1] - 1), axis=-1)
    threshold = jnp.where(top_k > 0, kth, -jnp.inf)
    left = jnp.where(ordered < threshold, -jnp.inf, ordered)
    probs = jax.nn.softmax(left, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    least = jnp.min(jnp.where(before < top_p, left, jnp.inf), axis=-1, keepdims=True)
    threshold = jnp.where(top_p < 1, jnp.maximum(threshold, least), threshold)
    threshold = jnp.maximum(threshold, jnp.log(metadata.min_p)[:, None])
    kept = jnp.where(scaled < threshold, -jnp.inf, logits)
    return sample(kept, metadata, lens, dataclasses.replace(mode, filters=0))


def sorted_logprobs(logits: jax.Array, token_ids: jax.Array, num_logprobs: int) -> Logprobs:
    """Log-probabilities of the best by `jax.lax.top_k`, which sorts where k is more than 16."""
    best, tokens = lax.top_k(jax.nn.log_softmax(logits), num_logprobs)
    own = gather_logprobs(logits, token_ids, 0)
    return dataclasses.replace(own, top_logprobs=best, top_token_ids=tokens)


def make_metadata(first: SamplingParams, rest: SamplingParams, num_rows: int) -> SamplingMetadata:
    """The parameters of rows; the first differs."""
    params = [first, *[rest] * (num_rows - 1)]

    def each(name: str, dtype: Any = np.float32) -> jax.Array:
        return jnp.asarray([getattr(one, name) for one in params], dtype)

    seeds = np.stack([np.full(num_rows, 7), np.full(num_rows, 9), np.arange(num_rows)], axis=1)
    return SamplingMetadata(
        seeds=jnp.asarray(seeds, jnp.uint32),
        temperature=each("temperature"),
        top_k=each("top_k", np.int32),
        top_p=each("top_p"),
        min_p=each("min_p"),
        presence_penalty=each("presence_penalty"),
        frequency_penalty=each("frequency_penalty"),
        repetition_penalty=each("repetition_penalty"),
        min_lens=jnp.zeros(num_rows, jnp.int32),
        stop_token_ids=jnp.full((num_rows, 1), -1, jnp.int32),
        bias_token_ids=jnp.full((num_rows, 1), -1, jnp.int32),
        bias=jnp.zeros((num_rows, 1)),
    )


def chain(
    mode: SamplingMode, *, by_sort: bool, implementation: SamplingImplementation | None = None
) -> Any:
    """A function of steps in a loop, as the engine runs them; none begins before the last ends."""
    draw = sorted_sample if by_sort else partial(sample, implementation=implementation)
    rank = sorted_logprobs if by_sort and mode.logprobs > 0 else gather_logprobs

    def step(carry: Any, logits: jax.Array, metadata: SamplingMetadata, masks: Any) -> Any:
        lens, counts, _ = carry
        # Without this, what depends on the logits alone would be computed once for all steps.
        logits, lens = lax.optimization_barrier((logits, lens))
        bits = {} if masks is None else {"masks": masks}
        processed = process_logits(logits, metadata, counts, lens, mode)
        tokens = draw(processed, metadata, lens, mode, **bits)
        found = rank(logits, tokens, mode.logprobs) if mode.logprobs >= 0 else None
        if counts is not None:
            counts = add_output_tokens(counts, jnp.arange(lens.size), tokens)
        return lens + 1 + jnp.minimum(tokens, 0), counts, (tokens, found)

    def run(sets: Sequence[jax.Array], metadata: SamplingMetadata, counts: Any, masks: Any) -> Any:
        carry = (jnp.zeros(sets[0].shape[0], jnp.int32), counts, None)
        out = jax.eval_shape(step, carry, sets[0], metadata, masks)[2]
        carry = (*carry[:2], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out))

        def body(_: Any, carry: Any) -> Any:
            for logits in sets:
                carry = step(carry, logits, metadata, masks)
            return carry

        return lax.fori_loop(0, _NUM_LOOPS, body, carry)

    gpu = jax.default_backend() == "gpu"
    return jax.jit(run, compiler_options=GPU_OPTIONS if gpu else None)


def make_logits(num_rows: int, vocab_size: int, args: argparse.Namespace) -> list[jax.Array]:
    """Normal logits, in as many arrays as the calls rotate among."""

    def make(key: jax.Array) -> jax.Array:
        logits = args.std * jax.random.normal(key, (num_rows, vocab_size))
        return logits.astype(jnp.bfloat16).astype(jnp.float32) if args.bf16 else logits

    return [jax.jit(make)(jax.random.key(index)) for index in range(_NUM_SETS)]


def measure_size(num_rows: int, vocab_size: int, args: argparse.Namespace) -> list[dict]:
    """Results of each case at one size, compiled side by side and then measured.

    Cases of the same mode run the same program.
    """
    logits = make_logits(num_rows, vocab_size, args)
    programs: dict[tuple[SamplingMode, bool], Any] = {}
    jobs: list[tuple[dict, tuple[SamplingMode, bool], Any]] = []
    for name in args.cases:
        if num_rows == 1 and name.startswith("one row"):
            continue
        params = [_CASES[name][0], *[_CASES[name][1]] * (num_rows - 1)]
        mode = reduce(or_, map(SamplingMode.of, params))
        if mode.filters and args.implementation != "xla":
            mode = dataclasses.replace(mode, filters=2)  # one kernel serves all filters
        counts = None
        if mode.penalties:
            shape = (num_rows, vocab_size)
            counts = TokenCounts(prompt=jnp.zeros(shape, bool), output=jnp.zeros(shape, jnp.int32))
        masks = None
        if name.endswith("masks"):  # all bits are set: the work is the same, and so are the tokens
            mode, masks = dataclasses.replace(mode, masks=True), empty_masks(num_rows, vocab_size)
        inputs = (logits, make_metadata(*_CASES[name], num_rows), counts, jax.device_put(masks))
        sorts = args.sorted and masks is None and (mode.filters or mode.logprobs > 0)
        for by_sort in (False, True)[: 1 + sorts]:
            result = {"num_rows": num_rows, "vocab_size": vocab_size, "case": name}
            key = mode, by_sort
            if key not in programs:
                run = chain(mode, by_sort=by_sort, implementation=args.implementation)
                programs[key] = run.lower(*inputs)
            jobs.append((result | {"by_sort": by_sort}, key, inputs))
    compiled = dict(zip(programs, timing.compile_all(programs.values()), strict=True))
    return [
        result | measure(compiled[key], inputs, args.iterations) for result, key, inputs in jobs
    ]


def measure(program: Any, inputs: Any, iterations: int) -> dict[str, Any]:
    """Times of one step, and its tokens."""
    if isinstance(program, Exception):
        return {"reason": reason(program)}
    num_calls = _NUM_SETS * _NUM_LOOPS
    tokens = np.asarray(program(*inputs)[2][0]).tolist()
    found = {"tokens": tokens} | call_times(program, inputs, iterations, num_calls)
    if found["kernel_us"]:
        found["launches"] = found["kernels_per_run"] / num_calls
    return found


def markdown(run: dict[str, Any]) -> str:
    """The table, and the provenance of its numbers."""
    rows = [["rows x words", "case", "wall us", "over greedy", "kernels us", "launches", "by sort"]]
    results = {
        (one["num_rows"], one["vocab_size"], one["case"], one["by_sort"]): one
        for one in run["results"]
    }

    def median(one: dict | None, name: str) -> float | None:
        return one[name]["median"] if one and one.get(name) else None

    for (num_rows, vocab_size, case, by_sort), one in results.items():
        if by_sort:
            continue
        wall = median(one, "wall_us")
        greedy = median(results.get((num_rows, vocab_size, "greedy", False)), "wall_us")
        over = wall - greedy if wall and greedy else None
        other = results.get((num_rows, vocab_size, case, True))
        rows.append(
            [
                f"{num_rows} x {vocab_size}",
                case,
                number(wall),
                number(over, "+.1f"),
                number(median(one, "kernel_us")),
                number(one.get("launches")),
                number(median(other, "wall_us")),
            ]
        )
    reasons = dict.fromkeys(one["reason"] for one in results.values() if "reason" in one)
    blocks = [table(rows), *(f"Missing numbers: {reason}." for reason in reasons)]
    differ = [key[:3] for key, one in results.items() if key[3] and _differs(key, results)]
    blocks += [f"Tokens that differ from those by sort: {key}." for key in differ]
    return timing.page(run["meta"], *blocks)


def _differs(key: tuple, results: dict[tuple, dict]) -> bool:
    return results[key].get("tokens") != results[(*key[:3], False)].get("tokens")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_parser("bench.steps.sampling", __doc__)
    add, positive = parser.add_argument, cli.at_least(1)
    add("--rows", nargs="+", type=positive, default=[1, 64], help="rows of a batch")
    add("--vocab", nargs="+", type=positive, default=[128256], help="sizes of vocabularies")
    add("--cases", nargs="+", choices=_CASES, default=[*_CASES], help="default: all")
    add("--std", type=float, default=2.0, help="standard deviation of the logits")
    add("--bf16", action="store_true", help="round the logits to bfloat16")
    add("--sorted", action="store_true", help="measure the definition by sorting too")
    add("--implementation", choices=get_args(SamplingImplementation), help="default: the engine's")
    add("--iterations", type=positive, default=10, help="timed runs of each")
    args = parser.parse_args(argv)
    run: dict[str, Any] = {"meta": timing.describe_run(parser.prog, argv), "results": []}
    for vocab_size, num_rows in itertools.product(args.vocab, args.rows):
        run["results"] += measure_size(num_rows, vocab_size, args)
        print(f"{num_rows} x {vocab_size}: done", file=sys.stderr, flush=True)
        cli.write_json(args.json, run)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
