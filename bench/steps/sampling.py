"""Measure ways to sample: logits to tokens and log-probabilities, without a model.

Run `python -m bench.steps.sampling --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.measuring import cli, timing
from bench.measuring.measure import call_times, reason
from bench.measuring.report import number, table_of
from pallas_paged.engine.device.program import GPU_OPTIONS
from pallas_paged.engine.requests.grammar import empty_masks
from pallas_paged.engine.sampling.logprobs import gather_logprobs
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


def chain(mode: SamplingMode, implementation: SamplingImplementation | None) -> Any:
    """A function of steps in a loop, as the engine runs them; none begins before the last ends."""

    def step(carry: Any, logits: jax.Array, metadata: SamplingMetadata, masks: Any) -> Any:
        lens, counts, _ = carry
        # Without this, what depends on the logits alone would be computed once for all steps.
        logits, lens = lax.optimization_barrier((logits, lens))
        processed = process_logits(logits, metadata, counts, lens, mode)
        tokens = sample(processed, metadata, lens, mode, masks=masks, implementation=implementation)
        found = gather_logprobs(logits, tokens, mode.logprobs) if mode.logprobs >= 0 else None
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


def make_logits(num_rows: int, vocab_size: int) -> list[jax.Array]:
    """Normal logits, in as many arrays as the calls rotate among."""
    make = jax.jit(lambda key: 2.0 * jax.random.normal(key, (num_rows, vocab_size)))
    return [make(jax.random.key(index)) for index in range(_NUM_SETS)]


def measure_size(num_rows: int, vocab_size: int, args: argparse.Namespace) -> list[dict]:
    """Results of each case at one size, compiled side by side and then measured.

    Cases of the same mode run the same program.
    """
    logits = make_logits(num_rows, vocab_size)
    programs: dict[SamplingMode, Any] = {}
    jobs: list[tuple[dict, SamplingMode, Any]] = []
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
        if mode not in programs:
            programs[mode] = chain(mode, args.implementation).lower(*inputs)
        result = {"num_rows": num_rows, "vocab_size": vocab_size, "case": name}
        jobs.append((result, mode, inputs))
    compiled = dict(zip(programs, timing.compile_all(programs.values()), strict=True))
    return [
        result | measure(compiled[mode], inputs, args.iterations) for result, mode, inputs in jobs
    ]


def measure(program: Any, inputs: Any, iterations: int) -> dict[str, Any]:
    """Times of one step."""
    if isinstance(program, Exception):
        return {"reason": reason(program)}
    num_calls = _NUM_SETS * _NUM_LOOPS
    found = call_times(program, inputs, iterations, num_calls)
    if found["kernel_us"]:
        found["launches"] = found["kernels_per_run"] / num_calls
    return found


def markdown(run: dict[str, Any]) -> str:
    """The table, and the provenance of its numbers."""

    def median(one: dict[str, Any], name: str) -> float | None:
        return one[name]["median"] if one.get(name) else None

    def size(one: dict[str, Any]) -> str:
        return f"{one['num_rows']} x {one['vocab_size']}"

    def over_greedy(one: dict[str, Any]) -> float | None:
        wall, of_greedy = median(one, "wall_us"), greedy.get(size(one))
        return wall - of_greedy if wall and of_greedy else None

    results = run["results"]
    greedy = {size(one): median(one, "wall_us") for one in results if one["case"] == "greedy"}
    columns = {
        "rows x words": size,
        "case": lambda one: one["case"],
        "wall us": lambda one: number(median(one, "wall_us")),
        "over greedy": lambda one: number(over_greedy(one), "+.1f"),
        "kernels us": lambda one: number(median(one, "kernel_us")),
        "launches": lambda one: number(one.get("launches")),
    }
    reasons = dict.fromkeys(one["reason"] for one in results if "reason" in one)
    words = (f"Missing numbers: {reason}." for reason in reasons)
    return timing.page(run["meta"], table_of(results, columns), *words)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_parser("bench.steps.sampling", __doc__)
    add, positive = parser.add_argument, cli.at_least(1)
    add("--rows", nargs="+", type=positive, default=[1, 64], help="rows of a batch")
    add("--vocab", nargs="+", type=positive, default=[128256], help="sizes of vocabularies")
    add("--cases", nargs="+", choices=_CASES, default=[*_CASES], help="default: all")
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
