"""List the GPU kernels of one decode step of a model, in order, with the time of the whole step.

Run `python -m bench.decode_step --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench import cli, profiler, timing
from models.checkpoint import load_checkpoint
from models.config import ModelConfig
from models.decoder import Decoder
from models.generate_state import GenerateState, create_generate_state, decode
from models.prefill import Requests, pack, prefill, reserve
from models.sampling import RowSampling

_CHECKPOINT = Path(__file__).parents[1] / "models" / "checkpoints" / "shakespeare"
_ATTENTION = "paged_"  # part of the names of the library's kernels
_CHUNK = 2048  # prompt tokens that go through the model at once, all rows together


def start_rows(
    model: Decoder, config: ModelConfig, *, num_seqs: int, length: int, num_steps: int
) -> GenerateState:
    """A state of running rows with random prompts, each with at least num_steps steps to go."""
    page_size = 16
    pages_per_seq = -(-(length + num_steps + 1) // page_size)
    sampling = RowSampling.create(num_seqs, temperature=0.8)
    state = create_generate_state(
        config,
        num_pages=num_seqs * pages_per_seq,
        page_size=page_size,
        max_seqs=num_seqs,
        pages_per_seq=pages_per_seq,
        max_new_tokens=num_steps + 2,
        sampling=sampling,
        dtype=model.embed_tokens.weight[...].dtype,
    )
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(num_seqs, length))
    requests = Requests(
        lens=jnp.full(num_seqs, length, jnp.int32),
        rows=jnp.arange(num_seqs, dtype=jnp.int32)[:, None],
        keys=jax.random.split(jax.random.key(0), (num_seqs, 1)),
        max_new_tokens=jnp.full(num_seqs, num_steps + 2, jnp.int32),
        stop_tokens=jnp.zeros((num_seqs, 0), jnp.int32),
        sampling=sampling,
    )
    state, rows = reserve(state, requests)
    if not np.all(rows < num_seqs):
        raise RuntimeError("prefill did not start every row")
    for chunk in pack(tokens.tolist(), np.asarray(rows), size=_CHUNK, max_prompts=num_seqs):
        state = prefill(*nnx.split(model), state, chunk)
    return state


def one_step(
    one: list[profiler.Timed], many: Sequence[list[profiler.Timed]], num_steps: int
) -> list[profiler.Timed]:
    """The kernels that every step of a loop repeats, with their median times.

    Args:
        one: the kernels of a run of one step.
        many: the kernels of several runs of num_steps steps each.
        num_steps: at least 3.

    Raises:
        RuntimeError: if the steps do not all run the same list of kernels.
    """
    length, rest = divmod(len(many[0]) - len(one), num_steps - 1)
    names = [name for name, _ in many[0]]
    span = (num_steps - 1) * length
    starts = [
        first
        for first in range(len(names) - span - length + 1)
        if names[first : first + span] == names[first + length : first + length + span]
    ]
    if rest or length < 1 or not starts:
        raise RuntimeError(
            f"runs of 1 and {num_steps} steps have {len(one)} and {len(names)} kernels, "
            "so the steps do not all run the same list"
        )
    first = starts[0]
    times = np.array([[us for _, us in run[first : first + span + length]] for run in many])
    medians = np.median(times.reshape(-1, length), axis=0)
    return [(names[first + i], float(us)) for i, us in enumerate(medians)]


def measure(
    model: Decoder,
    state: GenerateState,
    *,
    num_steps: int,
    iterations: int,
    implementation: str | None,
) -> dict[str, Any]:
    """The wall time of a step, and its kernels where there is a GPU."""
    graphdef, params = nnx.split(model)

    @jax.jit
    def run(params, state, num_steps):  # not donated: each run starts from the same state
        return decode(graphdef, params, state, num_steps, implementation=implementation)

    args_one, args_many = (params, state, jnp.int32(1)), (params, state, jnp.int32(num_steps))
    wall_one = timing.wall_times(run, args_one, iterations=iterations)
    wall_many = timing.wall_times(run, args_many, iterations=iterations)
    # Work around the loop, mostly the copy of the state, is in both runs and cancels out.
    wall = float(np.median(wall_many) - np.median(wall_one)) / (num_steps - 1)
    result: dict[str, Any] = {"wall_us": wall, "kernels": None}
    try:
        one = timing.kernel_times(run, args_one, iterations=1)[0]
        many = timing.kernel_times(run, args_many, iterations=iterations)
        kernels = one_step(one, many, num_steps)
    except Exception as error:  # no GPU or no CUPTI: the wall time is still valid
        return result | {"reason": f"{type(error).__name__}: {error}"}
    total = sum(us for _, us in kernels)
    attention = sum(us for name, us in kernels if _ATTENTION in name)
    return result | {
        "kernels": kernels,
        "kernel_us": total,
        "attention_us": attention,
        "attention_share": attention / total,
    }


def report(result: dict[str, Any]) -> str:
    """The list of kernels and their sums."""
    if result["kernels"] is None:
        return f"wall {result['wall_us']:.1f} us per step; no kernel times: {result['reason']}\n"
    lines = ["|  # | us | kernel |", "|---|---|---|"]
    lines += [f"| {i} | {us:.2f} | {name} |" for i, (name, us) in enumerate(result["kernels"], 1)]
    lines += [
        "",
        f"{len(result['kernels'])} kernels, {result['kernel_us']:.1f} us in all, of which paged "
        f"attention {result['attention_us']:.1f} us ({result['attention_share']:.0%}); wall "
        f"{result['wall_us']:.1f} us per step.",
        "",
        timing.provenance(result["meta"]),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the list and return the raw numbers."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="bench.decode_step", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=_CHECKPOINT)
    parser.add_argument("--num-seqs", type=int, default=1, help="rows that decode together")
    parser.add_argument("--length", type=int, default=256, help="tokens of each row's prompt")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run, at least 3")
    parser.add_argument("--iterations", type=int, default=10, help="timed runs")
    parser.add_argument("--implementation", help="default: the best for the platform")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    args = parser.parse_args(argv)
    cli.require_at_least(parser, args, num_seqs=1, length=1, steps=3, iterations=1)
    try:
        model, config = load_checkpoint(args.checkpoint)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    state = start_rows(
        model, config, num_seqs=args.num_seqs, length=args.length, num_steps=args.steps
    )
    result = measure(
        model,
        state,
        num_steps=args.steps,
        iterations=args.iterations,
        implementation=args.implementation,
    )
    result = {"meta": timing.describe_run("bench.decode_step", argv)} | result
    sys.stdout.write(report(result))
    if args.json:
        cli.write_json(args.json, result)
    return result


if __name__ == "__main__":
    main()
