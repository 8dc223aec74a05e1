"""The command line of `python -m models.generate`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from models.cli_common import DEFAULT_MAX_NEW_TOKENS, DEFAULT_TEMPERATURE, is_utf8, pool_size
from models.config import KV_DTYPES

if TYPE_CHECKING:
    from models.decoder import Decoder
    from models.generation import Generation, Stats
    from models.text_stream import TextStream
    from models.tokenizer import Tokenizer

DEFAULT_CHECKPOINT = Path(__file__).parent / "checkpoints" / "shakespeare"
# Options of --prompts-file, and those that it leaves no use for.
_OF_THE_ENGINE = (
    "max_seqs",
    "token_budget",
    "no_prefix_cache",
    "best_of",
    "beam_width",
    "logprobs",
)
_OF_PROMPTS_ALONE = ("prefill_chunk", "json")
_EPILOG = """\
prompts file:
  Blank lines are skipped. A line of a .jsonl file is an object with "prompt" and any of max_tokens,
  n, best_of, beam_width, length_penalty, temperature, top_k, top_p, min_p, seed, stop, stop_tokens
  and logprobs, which go before the options here; null is as if neither were given. All prompts,
  those of --prompt first, are served together, as many at a time as there are rows and pages, and
  what they share is computed once. Each is a line of JSON as soon as it is done: the completions,
  or the error for which it was refused; "index" counts the prompts. The pool has pages for all of
  them at once, but at most 80% of the free memory of a GPU, and elsewhere max-seqs full samples
  or 1 GiB.

exit status:
  0 all is well, 1 prompts beside or in a prompts file were refused or failed, 2 bad options or
  files, 130 Ctrl-C, 141 nobody reads the output
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit status: 0, 1 if prompts of --prompts-file were refused or failed (their lines say
        so), 2 for bad input (told in one line), 130 for Ctrl-C, 141 for a reader of standard output
        that went away.
    """
    try:
        all_served = _run(_parser().parse_args(argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more at exit, and must then find somebody reading.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, NotImplementedError, OSError, MemoryError) as error:
        return _fail(error)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(error)
    return 0 if all_served else 1


def run() -> NoReturn:
    """Runs the command as all that this process is for."""
    status = main()
    if status == 130:
        # A compilation may still be running in another thread, and would crash the interpreter
        # while that takes itself down.
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(status)
    raise SystemExit(status)


def _run(args: argparse.Namespace) -> bool:
    """Runs what was asked for; returns whether all prompts were served."""
    _check(args)
    lines = _read_lines(args.prompts_file) if args.prompts_file is not None else []
    if not args.prompt and not lines:
        raise ValueError(f"{args.prompts_file} has no prompt: every line is blank")

    from models.checkpoint import load_checkpoint
    from models.tokenizer import Tokenizer

    # The library logs which implementation it takes where none is named.
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("pallas_paged").setLevel(logging.INFO)
    model, _ = load_checkpoint(args.checkpoint, dtype=args.dtype)
    tokenizer = Tokenizer(args.checkpoint)
    if args.prompts_file is not None:
        from models.cli_engine import serve

        return serve(args, lines, model, tokenizer)
    _generate(args, model, tokenizer)
    return True


def _generate(args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer) -> None:
    import jax

    from models.generate import generate
    from models.text_stream import TextStream

    prompts = args.prompt
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    room = model.config.max_position_embeddings - max(len(prompt) for prompt in tokens)
    max_new_tokens = args.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = max(1, min(DEFAULT_MAX_NEW_TOKENS, room))
    generation = generate(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        num_samples=args.num_samples,
        temperature=DEFAULT_TEMPERATURE if args.temperature is None else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        page_size=args.page_size,
        num_pages=args.num_pages,
        prefill_chunk=args.prefill_chunk,
        kv_dtype=args.kv_dtype,
        implementation=args.implementation,
    )
    streams = [
        [TextStream(tokenizer, prompt, args.stop) for _ in range(args.num_samples)]
        for prompt in tokens
    ]
    reasons = _follow(generation, prompts, streams, quiet=args.json)
    stats, device = generation.result().stats, jax.devices()[0].device_kind
    if not args.json:
        ends = set(reasons.values())
        print(_summary(stats, ends, device), file=sys.stderr)
        return
    completions = [
        {
            "prompt": prompt,
            "sample": sample,
            "text": stream.text,
            "tokens": stream.tokens,
            "finish_reason": reasons[prompt, sample],
        }
        for prompt, samples in enumerate(streams)
        for sample, stream in enumerate(samples)
    ]
    result = {
        "prompts": prompts,
        "completions": completions,
        "stats": asdict(stats)
        | {
            "prefill_tokens_per_second": stats.prefill_tokens_per_second,
            "decode_tokens_per_second": stats.decode_tokens_per_second,
        },
        "seed": args.seed,
        "device": device,
        "implementation": args.implementation,
    }
    print(json.dumps(result))


def _follow(
    generation: Generation, prompts: list[str], streams: list[list[TextStream]], *, quiet: bool
) -> dict[tuple[int, int], str]:
    """Prints the texts as they come (one sample) or end (several); returns why each ended."""
    reasons: dict[tuple[int, int], str] = {}
    num_samples = sum(map(len, streams))
    for event in generation:
        stream = streams[event.prompt][event.sample]
        if num_samples == 1 and not quiet and not stream.tokens:
            print(prompts[0], end="")
        piece = stream.push(event.tokens)
        reason = event.finish_reason
        if stream.stopped:
            reason = "stopped"
            generation.stop(event.prompt, event.sample)
        if reason is not None:
            piece += stream.finish()
            reasons[event.prompt, event.sample] = reason
        if quiet:
            continue
        if num_samples == 1:
            print(piece, end="" if reason is None else "\n", flush=True)
            continue
        if reason is not None:
            title = f"prompt {event.prompt + 1} of {len(streams)}"
            title += f", sample {event.sample + 1} of {len(streams[event.prompt])}"
            print(f"=== {title} ({reason})\n{prompts[event.prompt]}{stream.text}\n", flush=True)
        if sys.stderr.isatty():
            done = f"{len(reasons)} of {num_samples} samples done"
            print(f"\r{done}", end="\n" if len(reasons) == num_samples else "", file=sys.stderr)
    return reasons


def _check(args: argparse.Namespace) -> None:
    """Checks what can be checked before anything is loaded."""
    if not args.prompt and args.prompts_file is None:
        raise ValueError("no prompt: give --prompt TEXT or --prompts-file FILE")
    if "" in args.prompt:
        raise ValueError("--prompt must not be empty")
    if not all(map(is_utf8, args.prompt)):
        raise ValueError("--prompt must be valid UTF-8")
    if "" in args.stop:
        raise ValueError("--stop must not be empty")
    alone = args.prompts_file is None
    for name in _OF_THE_ENGINE if alone else _OF_PROMPTS_ALONE:
        if getattr(args, name) not in (None, False):
            rule = "needs" if alone else "does not go with"
            raise ValueError(f"--{name.replace('_', '-')} {rule} --prompts-file")


def _read_lines(file: Path) -> list[str]:
    # Bytes that are not UTF-8 become surrogates, for which their own line is refused. Not
    # splitlines, which also cuts at form feeds and other separators inside a prompt.
    lines = file.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
    return [line for line in lines if line.strip()]


def _summary(stats: Stats, ends: set[str], device: str) -> str:
    return (
        f"{stats.prefill_tokens + stats.decode_tokens} new tokens ({', '.join(sorted(ends))}),"
        f" {stats.decode_tokens_per_second:.1f} tokens/s"
        f" (prefill {stats.prefill_tokens_per_second:.1f} tokens/s,"
        f" compiled in {stats.compile_seconds:.1f} s),"
        f" KV pages used {stats.pages_used}/{stats.num_pages},"
        f" pool utilization {stats.pool_utilization:.1%},"
        f" size {pool_size(stats)},"
        f" {device}"
    )


def _fail(error: Exception) -> int:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print("error:", " ".join(text.split()), file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m models.generate",
        description="Continue prompts with a Llama-family model over a paged KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeatable")
    prompts.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="one prompt a line, or one JSON object where the name ends in .jsonl; see below",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--checkpoint",
        type=Path,
        default=DEFAULT_CHECKPOINT,
        metavar="DIR",
        help="folder in Hugging Face format (default: the Shakespeare demo)",
    )
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and computation (default: as stored)",
    )
    model.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        help="of the KV cache (default: that of the weights, the only other choice than int8 and"
        " fp8). int8 and fp8 take about half the memory of bf16, so that as much holds twice the"
        " tokens and long contexts decode faster, and cost precision: int8 rounds K and V to 1/254"
        " of a token's largest element, fp8 (e4m3) each element to 1/16 of itself. Each token has"
        " scales of its own, but for fp8 with a checkpoint that brings k_scale and v_scale",
    )
    model.add_argument(
        "--implementation", metavar="NAME", help="of paged attention (default: the best here)"
    )
    model.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="most tokens of prompts in one step on the device (2048); of --prompt alone",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"of each sample (default: {DEFAULT_MAX_NEW_TOKENS}, or what the model has room for)",
    )
    text.add_argument("--num-samples", type=int, default=1, metavar="N", help="of each prompt (1)")
    text.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 is greedy ({DEFAULT_TEMPERATURE}; 0 for beams)",
    )
    text.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable tokens")
    text.add_argument("--top-p", type=float, metavar="P", help="keep a set of probability P")
    text.add_argument(
        "--min-p", type=float, metavar="P", help="keep tokens of P times the highest probability"
    )
    text.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same text (0)")
    text.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a sample before this text; repeatable",
    )
    pages = parser.add_argument_group("pages")
    pages.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens a page (16)")
    pages.add_argument(
        "--num-pages",
        type=int,
        metavar="N",
        help="of the pool (default: enough for all samples, or see below)",
    )
    engine = parser.add_argument_group("engine (--prompts-file)")
    engine.add_argument(
        "--max-seqs", type=int, metavar="N", help="samples that are computed at a time (64)"
    )
    engine.add_argument(
        "--token-budget", type=int, metavar="N", help="most tokens of a step, above max-seqs (2048)"
    )
    engine.add_argument(
        "--no-prefix-cache", action="store_true", help="compute what prompts share for each anew"
    )
    engine.add_argument(
        "--best-of", type=int, metavar="N", help="draw N, tell the num-samples most probable"
    )
    engine.add_argument(
        "--beam-width", type=int, metavar="N", help="beam search instead of sampling"
    )
    engine.add_argument(
        "--logprobs", type=int, metavar="K", help="tell those of each token and of the K best"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of the texts; of --prompt alone",
    )
    return parser


if __name__ == "__main__":
    run()
