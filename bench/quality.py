"""What K/V of fewer bits cost a model: perplexity of a checkpoint, and how far logits move.

Run `python -m bench.quality --help`; bench/README.md says what each number means.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench import cli, timing
from bench.report import number, table
from bench.serving.models import SHAPES, random_model
from models.checkpoint import load_checkpoint
from models.config import KV_DTYPES
from models.decoder import Attend, Decoder, paged_attend
from models.generate_state import run_layers
from models.kv_cache import create_pool
from models.tokenizer import Tokenizer
from models.train import split_windows

# The first is what the others are compared with; the second tells what rounding alone does.
NAMES = ("bf16", "fp32", "int8", "fp8")


def cast_to_pages(attend: Attend) -> Attend:
    """`attend` in the dtype of the pages, where that is not of one byte, whatever the model's."""

    def cast(q, k, v, cache, *, sliding_window):
        pages = cache[0].dtype
        dtype = q.dtype if pages.itemsize == 1 else pages
        heads = (x.astype(dtype) for x in (q, k, v))
        out, cache = attend(*heads, cache, sliding_window=sliding_window)
        return out.astype(q.dtype), cache

    return cast


@partial(jax.jit, static_argnames=("graphdef", "kv_dtype", "page_size", "implementation"))
def hidden_states(
    graphdef: nnx.GraphDef[Any],
    params: nnx.State,
    tokens: jax.Array,
    *,
    kv_dtype: str,
    page_size: int,
    implementation: str | None,
) -> jax.Array:
    """`[B, T, E]` of tokens i32`[B, T]`, whose K/V go into pages and are read from there.

    Args:
      graphdef, params: `nnx.split(model)`.
      tokens: rows that know nothing of each other.
      kv_dtype: of the pages.
      page_size: tokens of a page.
      implementation: of `pallas_paged.ragged_paged_attention`.
    """
    model = nnx.merge(graphdef, params)
    num_seqs, length = tokens.shape
    pages_per_seq = -(-length // page_size)
    pool = create_pool(
        model.config, num_pages=num_seqs * pages_per_seq, page_size=page_size, dtype=kv_dtype
    )
    rows = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    attend = paged_attend(
        slots=(rows * pages_per_seq * page_size + positions).ravel(),
        block_tables=rows * pages_per_seq + jnp.arange(pages_per_seq, dtype=jnp.int32),
        seq_lens=jnp.full(num_seqs, length, jnp.int32),
        cu_q_lens=jnp.arange(num_seqs + 1, dtype=jnp.int32) * length,
        implementation=implementation,
    )
    hidden, _ = run_layers(model, tokens.ravel(), positions.ravel(), cast_to_pages(attend), pool)
    return hidden.reshape(num_seqs, length, -1)


@partial(jax.jit, static_argnames="graphdef")
def compare(
    graphdef: nnx.GraphDef[Any],
    params: nnx.State,
    hidden: jax.Array,
    reference: jax.Array,
    targets: jax.Array,
    counts: jax.Array,
) -> dict[str, jax.Array]:
    """Sums over the positions that count of what hidden states say, beside those of a reference.

    Args:
      graphdef, params: `nnx.split(model)`.
      hidden, reference: `[B, T, E]`.
      targets: i32`[B, T]`, the token that comes next.
      counts: f32`[B, T]`, 1 or 0.

    Returns:
      f32`[]` each: `nats` of the targets, how often the `top1` tokens are the same, and `kl`, the
      divergence of the distribution from the reference's.
    """
    model = nnx.merge(graphdef, params)

    def row(args: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
        hidden, reference, targets, counts = args
        ours, theirs = (jax.nn.log_softmax(model.logits(x)) for x in (hidden, reference))
        nats = -jnp.take_along_axis(ours, targets[:, None], axis=1)[:, 0]
        same = jnp.argmax(ours, axis=1) == jnp.argmax(theirs, axis=1)
        kl = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=1)
        return {"nats": nats @ counts, "top1": same @ counts, "kl": kl @ counts}

    sums = jax.lax.map(row, (hidden, reference, targets, counts))
    return jax.tree.map(jnp.sum, sums)


def measure(
    model: Decoder,
    windows: jax.Array,
    counts: jax.Array,
    *,
    page_size: int,
    implementation: str | None,
) -> dict[str, dict[str, float]]:
    """Means of what `compare` sums, for each dtype of K/V beside the first of `NAMES`.

    Args:
      model: with weights of any dtype.
      windows, counts: as `split_windows` gives them.
      page_size, implementation: as in `hidden_states`.
    """
    graphdef, params = nnx.split(model)
    totals = {name: dict.fromkeys(("nats", "top1", "kl"), 0.0) for name in NAMES}
    for tokens, count in zip(windows, counts, strict=True):
        reference = None
        for name in NAMES:
            hidden = hidden_states(
                graphdef,
                params,
                tokens[:, :-1],
                kv_dtype=KV_DTYPES[name],
                page_size=page_size,
                implementation=implementation,
            )
            reference = hidden if reference is None else reference
            sums = compare(graphdef, params, hidden, reference, tokens[:, 1:], count)
            for key, value in sums.items():
                totals[name][key] += float(value)
    num_tokens = float(counts.sum())
    return {name: {key: x / num_tokens for key, x in sums.items()} for name, sums in totals.items()}


def measure_checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Of a checkpoint on the last tenth of a text, in windows that do not overlap.

    Raises:
      ValueError: if the checkpoint or the text is of no use.
      OSError: if the text can't be read.
    """
    model, config = load_checkpoint(options.checkpoint, dtype=options.dtype)
    if options.window > config.max_position_embeddings:
        raise ValueError(
            f"--window {options.window}: the model has {config.max_position_embeddings=}"
        )
    text = options.text.read_bytes()
    tokenizer = Tokenizer(options.checkpoint)
    tokens = tokenizer.encode(text[len(text) * 9 // 10 :].decode(errors="replace"))
    if len(tokens) < 2:
        raise ValueError(
            f"{options.text}: its last tenth has {len(tokens)} tokens, at least 2 needed"
        )
    windows, counts = split_windows(np.array(tokens), options.window, options.batch)
    how = {"page_size": options.page_size, "implementation": options.implementation}
    num_bytes = len(tokenizer.decode(tokens[1:]).encode())
    return {
        "checkpoint": str(options.checkpoint),
        "dtype": model.embed_tokens.weight[...].dtype.name,
        "window": options.window,
        "num_tokens": len(tokens) - 1,
        "num_bytes": num_bytes,
        "kv": measure(model, windows, counts, **how),
    }


def measure_random(options: argparse.Namespace) -> dict[str, Any]:
    """Of random weights on random tokens."""
    shape = SHAPES[options.shape]
    vocab_size = shape.config.vocab_size
    tokens = np.random.default_rng(0).integers(
        vocab_size, size=(1, options.batch, options.window + 1), dtype=np.int32
    )
    how = {"page_size": options.page_size, "implementation": options.implementation}
    counts = jnp.ones((1, options.batch, options.window), jnp.float32)
    return {
        "shape": options.shape,
        "dtype": jnp.dtype(shape.dtype).name,
        "window": options.window,
        "num_tokens": options.batch * options.window,
        "kv": measure(random_model(shape), jnp.asarray(tokens), counts, **how),
    }


def markdown(run: dict[str, Any]) -> str:
    """The tables, with what they were measured on."""
    blocks = []
    head = ["K/V", "same top token as bf16", "KL from bf16, nats"]
    if found := run["checkpoint"]:
        rows = [[head[0], "nats per byte", "perplexity", "of bf16's", *head[1:]]]
        least = found["kv"][NAMES[0]]["nats"]
        for name, kv in found["kv"].items():
            per_byte = kv["nats"] * found["num_tokens"] / found["num_bytes"]
            row = [name, f"{per_byte:.5f}", f"{math.exp(kv['nats']):.4f}"]
            rows.append([*row, f"{math.exp(kv['nats'] - least):.5f}", *_distance(name, kv)])
        blocks.append(
            f"`{found['checkpoint']}` ({found['dtype']}) on {found['num_tokens']} tokens,"
            f" {found['num_bytes']} bytes, in windows of {found['window']}:\n\n{table(rows)}"
        )
    if found := run["random"]:
        rows = [head, *([name, *_distance(name, kv)] for name, kv in found["kv"].items())]
        blocks.append(
            f"Random weights of the shape `{found['shape']}` ({found['dtype']}) on"
            f" {found['num_tokens']} random tokens, rows of {found['window']}. Their logits are"
            " nearly flat, so that the top token is a matter of little: compare with fp32, which"
            f" differs from bf16 by rounding alone.\n\n{table(rows)}"
        )
    return "\n\n".join([*blocks, timing.provenance(run["meta"])]) + "\n"


def _distance(name: str, kv: dict[str, float]) -> list[str]:
    top1, kl = (None, None) if name == NAMES[0] else (kv["top1"], kv["kl"])
    return [number(top1, ".3%"), number(kl, ".2e")]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.quality", description=__doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, help="folder in Hugging Face format; needs --text")
    add("--text", type=Path, help="its last tenth is what the checkpoint is asked for")
    add("--dtype", choices=("float32", "bfloat16"), help="of the weights; default: as stored")
    add("--shape", choices=SHAPES, help="also random weights of this shape, on random tokens")
    add("--window", type=int, default=1024, help="tokens of a row")
    add("--batch", type=int, default=16, help="rows at a time; all the rows that --shape takes")
    add("--page-size", type=int, default=16)
    add("--implementation", help="of attention; default: the best for the platform and dtype")
    add("--json", type=Path, help="write all numbers here")
    add("--markdown", type=Path, help="write the tables here too")
    parser.set_defaults(plot=None)
    options = parser.parse_args(argv)
    if (options.checkpoint is None) != (options.text is None):
        parser.error("--checkpoint and --text go together")
    if options.checkpoint is None and options.shape is None:
        parser.error("nothing to do without --checkpoint or --shape")
    for name in ("window", "batch", "page_size"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {getattr(options, name)} must be at least 1")
    cli.check_outputs(parser, options)
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints the tables and returns the raw numbers."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parse(argv)
    run: dict[str, Any] = {
        "meta": timing.describe_run("bench.quality", argv),
        "checkpoint": None,
        "random": None,
    }
    try:
        if options.checkpoint:
            run["checkpoint"] = measure_checkpoint(options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    if options.shape:
        run["random"] = measure_random(options)
    if options.json:
        options.json.write_text(json.dumps(run, indent=1) + "\n")
    cli.publish(run, options, markdown(run))
    return run


if __name__ == "__main__":
    main()
