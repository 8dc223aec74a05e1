"""Measure what a trainer asks of the engine: new weights, scores, and memory given back.

Run `python -m bench.serving.trainer --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.measuring import cli, timing
from bench.measuring.report import number, table
from bench.serving.compilations import Compilations
from bench.serving.models import SHAPES, add_shape, random_model
from models.decoder import engine_model
from pallas_paged.engine import Engine, EngineConfig, SamplingParams

_UPDATES = 10
_MIB = 2**20


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each of the engine's calls for trainers, in the order of a training step.

    Raises:
        RuntimeError: a request ended without all its tokens.
    """
    shape = SHAPES[args.shape]
    model, params = engine_model(random_model(shape))
    num_seqs, prompt_len, max_tokens = args.num_seqs, args.prompt_len, args.max_tokens
    engine = Engine(
        model,
        params,
        EngineConfig(
            num_pages=int(args.kv_gib * 2**30) // shape.token_bytes() // 16,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=prompt_len + max_tokens,
            implementation=args.implementation,
        ),
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(model.vocab_size, size=(num_seqs, prompt_len)).tolist()
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    engine.warmup([sampling])
    results: list[dict[str, Any]] = []

    def record(case: str, call: Callable[[], Any], **more: Any) -> Any:
        """Make a call and wait for the device; note its time, compilations and memory."""
        wait()
        before = memory()
        with Compilations() as compiled:
            start = time.perf_counter()
            value = call()
            wait()
            seconds = time.perf_counter() - start
        one = {"case": case, "ms": seconds * 1e3, "compilations": compiled.count}
        results.append(one | {"bytes_before": before, "bytes_after": memory()} | more)
        return value

    def generate() -> list[tuple[list[int], list[float]]]:
        outputs = [out.outputs[0] for out in engine.generate(prompts, sampling, progress=False)]
        if any(len(output.token_ids) != max_tokens for output in outputs):
            raise RuntimeError("a request ended without all its tokens")
        logprobs = [
            [
                one[token].logprob
                for one, token in zip(out.logprobs or [], out.token_ids, strict=True)
            ]
            for out in outputs
        ]
        return [(out.token_ids, one) for out, one in zip(outputs, logprobs, strict=True)]

    size = {"num_tokens": num_seqs * max_tokens}
    sampled = record("generate", generate, **size)
    completions = [token_ids for token_ids, _ in sampled]
    size = {"num_tokens": num_seqs * (prompt_len + max_tokens)}
    for case in ("score, the first time", "score"):
        engine.reset_prefix_cache()
        scores = record(case, lambda: engine.score(prompts, completions), **size)
    difference = np.abs(scores - np.array([logprobs for _, logprobs in sampled]))
    results[-1] |= {"mean_error": float(difference.mean()), "max_error": float(difference.max())}

    sets = [params, jax.block_until_ready(jax.jit(lambda x: jax.tree.map(jnp.copy, x))(params))]
    for index in range(_UPDATES):
        record("update_params, idle", partial(engine.update_params, sets[(index + 1) % 2]))
    results[-_UPDATES:] = [sorted(results[-_UPDATES:], key=lambda one: one["ms"])[_UPDATES // 2]]
    record("generate after it", generate, num_tokens=num_seqs * max_tokens)

    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    while any(request.first_token_time is None for request in requests):
        engine.step()
    record("update_params, decoding", lambda: engine.update_params(sets[1]))
    record("the next step", engine.step)
    while not engine.idle:
        engine.step()
    if any(len(request.outputs[0].token_ids) != max_tokens for request in requests):
        raise RuntimeError("a request ended without all its tokens")

    record("sleep", engine.sleep)
    record("update_params, asleep", lambda: engine.update_params(sets[0]))
    record("wake", engine.wake_up)
    record("generate after it", generate, num_tokens=num_seqs * max_tokens)
    engine.check()
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"weight_bytes": weight_bytes, "results": results}


def wait() -> None:
    """Wait for what was dispatched to the device; calls run in order."""
    _nothing().block_until_ready()


@jax.jit
def _nothing() -> jax.Array:
    return jnp.zeros(())


def memory() -> int | None:
    """Bytes in use on the device, or None where it does not report them."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else None


def markdown(run: dict[str, Any]) -> str:
    """Return the table and the provenance of its numbers."""
    rows = [["call", "ms", "tokens/s", "compilations", "MiB before", "MiB after"]]
    for one in run["results"]:
        rate = one["num_tokens"] / one["ms"] * 1e3 if "num_tokens" in one else None
        sizes = (one["bytes_before"], one["bytes_after"])
        mib = (number(None if size is None else size / _MIB, ".0f") for size in sizes)
        cells = (f"{one['ms']:.2f}", number(rate, ".0f"), str(one["compilations"]))
        rows.append([one["case"], *cells, *mib])
    (score,) = (one for one in run["results"] if "max_error" in one)
    words = (
        f"{run['shape']}, {run['weight_bytes'] / _MIB:.0f} MiB of weights,"
        f" {run['num_seqs']} sequences. Scores differ from the log-probabilities of sampling by"
        f" {score['mean_error']:.1e} in the mean, {score['max_error']:.1e} at most."
    )
    return timing.page(run["meta"], words, table(rows))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_parser("bench.serving.trainer", __doc__)
    add_shape(parser, "1b")
    add, positive = parser.add_argument, cli.at_least(1)
    add("--num-seqs", type=positive, default=64, help="sequences that are sampled and scored")
    add("--prompt-len", type=positive, default=512, help="tokens of each prompt")
    add("--max-tokens", type=cli.at_least(2), default=512, help="tokens of each completion")
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--kv-gib", type=float, help="memory for K/V; default: all sequences, and a quarter")
    args = parser.parse_args(argv)
    if args.kv_gib is None:
        tokens = args.num_seqs * (args.prompt_len + args.max_tokens + 16)
        args.kv_gib = 1.25 * tokens * SHAPES[args.shape].token_bytes() / 2**30
    run = {
        "meta": timing.describe_run(parser.prog, argv),
        "shape": args.shape,
        "num_seqs": args.num_seqs,
    }
    run |= measure(args)
    cli.write_json(args.json, run)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
