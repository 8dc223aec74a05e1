"""Measure what int8 and fp8 K/V cost a model: perplexity of a checkpoint, distance of logits.

Run `python -m bench.serving.quality --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_paged as pp
from bench.measuring import cli, kv_dtypes, timing
from bench.measuring.report import number, table
from bench.serving.models import SHAPES, add_shape, random_model
from models.decoder import Attend, Decoder, EngineModel, load_checkpoint
from models.text import Tokenizer
from models.train.trainer import split_windows
from pallas_paged.engine.device.pool import create_pool

# The first is the baseline of the others; the second shows the effect of rounding alone.
DTYPES = {"bf16": "bfloat16", "fp32": "float32"} | {
    name: kv_dtypes.NAMES[name] for name in kv_dtypes.ONE_BYTE
}
NAMES = tuple(DTYPES)


def paged_attend(slots: jax.Array, *rows: jax.Array, implementation: str | None) -> Attend:
    """Attention over pages, in the dtype of bf16 or f32 pages, else in the model's dtype.

    Args:
        slots: `i32[T]`, slots of the tokens.
        rows: block_tables, seq_lens and cu_q_lens, as in `pallas_paged.ragged_paged_attention`.
        implementation: as there.
    """

    def attend(q, k, v, cache, *, sliding_window):
        pages = cache.k_pages.dtype
        dtype = q.dtype if pages.itemsize == 1 else pages
        cache = pp.write_kv(cache, k.astype(dtype), v.astype(dtype), slots)
        out = pp.ragged_paged_attention(
            q.astype(dtype),
            cache,
            *rows,
            sliding_window=sliding_window,
            implementation=implementation,
        )
        return out.astype(q.dtype), cache

    return attend


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
    """Hidden states `[B, T, E]` of tokens `i32[B, T]`, with K/V written to and read from pages.

    Args:
        graphdef, params: `nnx.split(model)`.
        tokens: independent rows.
        kv_dtype: of the pages.
        page_size: tokens of a page.
        implementation: of `pallas_paged.ragged_paged_attention`.
    """
    model = nnx.merge(graphdef, params)
    num_seqs, length = tokens.shape
    pages_per_seq = -(-length // page_size)
    dtype = model.embed_tokens.weight[...].dtype
    spec = EngineModel(config=model.config, dtype=dtype, graphdef=graphdef).kv_cache_spec
    pool = create_pool(
        spec, num_pages=num_seqs * pages_per_seq, page_size=page_size, dtype=kv_dtype
    )
    rows = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    attend = paged_attend(
        (rows * pages_per_seq * page_size + positions).ravel(),
        rows * pages_per_seq + jnp.arange(pages_per_seq, dtype=jnp.int32),
        jnp.full(num_seqs, length, jnp.int32),
        jnp.arange(num_seqs + 1, dtype=jnp.int32) * length,
        implementation=implementation,
    )
    hidden, _ = model(tokens.ravel(), positions.ravel(), attend, pool.layers)
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
    """Sums of loss and distance over the positions that count, against reference hidden states.

    Args:
        graphdef, params: `nnx.split(model)`.
        hidden, reference: `[B, T, E]`.
        targets: `i32[B, T]`, the next tokens.
        counts: `f32[B, T]`, 1 or 0.

    Returns:
        `f32[]` each: `nats` of the targets, `top1`, the number of equal top tokens, and `kl`, the
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
    model: Decoder, windows: jax.Array, counts: jax.Array, **how: Any
) -> dict[str, dict[str, float]]:
    """Means per position of the sums of `compare`, for each dtype of K/V against the first.

    Args:
        model: with weights of any dtype.
        windows, counts: as `split_windows` returns them.
        how: page_size and implementation, as in `hidden_states`.
    """
    graphdef, params = nnx.split(model)
    totals = {name: dict.fromkeys(("nats", "top1", "kl"), 0.0) for name in NAMES}
    for tokens, count in zip(windows, counts, strict=True):
        reference = None
        for name in NAMES:
            hidden = hidden_states(graphdef, params, tokens[:, :-1], kv_dtype=DTYPES[name], **how)
            reference = hidden if reference is None else reference
            sums = compare(graphdef, params, hidden, reference, tokens[:, 1:], count)
            for key, value in sums.items():
                totals[name][key] += float(value)
    num_tokens = float(counts.sum())
    return {name: {key: x / num_tokens for key, x in sums.items()} for name, sums in totals.items()}


def measure_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a checkpoint on the last tenth of a text, in windows that do not overlap.

    Raises:
        ValueError: if the checkpoint is invalid or the text too short.
        OSError: if the text can't be read.
    """
    model, config = load_checkpoint(args.checkpoint)
    if args.window > config.max_position_embeddings:
        raise ValueError(f"--window {args.window}: the model has {config.max_position_embeddings=}")
    text = args.text.read_bytes()
    tokenizer = Tokenizer(args.checkpoint)
    tokens = tokenizer.encode(text[len(text) * 9 // 10 :].decode(errors="replace"))
    if len(tokens) < 2:
        raise ValueError(f"{args.text}: its last tenth has {len(tokens)} tokens, at least 2 needed")
    windows, counts = split_windows(np.array(tokens), args.window, args.batch)
    how = {"page_size": args.page_size, "implementation": args.implementation}
    num_bytes = len(tokenizer.decode(tokens[1:]).encode())
    return {
        "checkpoint": str(args.checkpoint),
        "dtype": model.embed_tokens.weight[...].dtype.name,
        "window": args.window,
        "num_tokens": len(tokens) - 1,
        "num_bytes": num_bytes,
        "kv": measure(model, windows, counts, **how),
    }


def measure_random(args: argparse.Namespace) -> dict[str, Any]:
    """Measure random weights on random tokens."""
    shape = SHAPES[args.shape]
    vocab_size = shape.config.vocab_size
    tokens = np.random.default_rng(0).integers(
        vocab_size, size=(1, args.batch, args.window + 1), dtype=np.int32
    )
    how = {"page_size": args.page_size, "implementation": args.implementation}
    counts = jnp.ones((1, args.batch, args.window), jnp.float32)
    return {
        "shape": args.shape,
        "dtype": jnp.dtype(shape.dtype).name,
        "window": args.window,
        "num_tokens": args.batch * args.window,
        "kv": measure(random_model(shape), jnp.asarray(tokens), counts, **how),
    }


def markdown(run: dict[str, Any]) -> str:
    """The tables and the provenance of their numbers."""
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
            " nearly flat, so that small changes move the top token: compare with fp32, which"
            f" differs from bf16 by rounding alone.\n\n{table(rows)}"
        )
    return timing.page(run["meta"], *blocks)


def _distance(name: str, kv: dict[str, float]) -> list[str]:
    top1, kl = (None, None) if name == NAMES[0] else (kv["top1"], kv["kl"])
    return [number(top1, ".3%"), number(kl, ".2e")]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and return the raw numbers."""
    parser = cli.make_parser("bench.serving.quality", __doc__)
    add_shape(parser, None, ", and so are its tokens; beside or without a checkpoint")
    add, positive = parser.add_argument, cli.at_least(1)
    add("--checkpoint", type=Path, help="folder in Hugging Face format; needs --text")
    add("--text", type=Path, help="the checkpoint is measured on its last tenth")
    add("--window", type=positive, default=1024, help="tokens of a row")
    add("--batch", type=positive, default=16, help="rows at a time; for --shape, all rows")
    add("--page-size", type=positive, default=16)
    args = parser.parse_args(argv)
    if (args.checkpoint is None) != (args.text is None):
        parser.error("--checkpoint and --text go together")
    if args.checkpoint is None and args.shape is None:
        parser.error("nothing to do without --checkpoint or --shape")
    meta = timing.describe_run(parser.prog, argv)
    run: dict[str, Any] = {"meta": meta, "checkpoint": None, "random": None}
    try:
        if args.checkpoint:
            run["checkpoint"] = measure_checkpoint(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    if args.shape:
        run["random"] = measure_random(args)
    cli.write_json(args.json, run)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
