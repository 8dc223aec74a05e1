"""What the commands share: options of the model and the engine, and how they end."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEFAULT_CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "shakespeare"
_ENGINE_OPTIONS = (  # fields of `EngineConfig`
    ("page_size", int, "tokens a page (16)"),
    ("num_pages", int, "of the pool (for sequences of full length, if they fit)"),
    ("memory_fraction", float, "of the GPU's free memory that the pool may take (0.8)"),
    (
        "max_model_len",
        int,
        "tokens of a sequence, prompt included (the model's; with linear or dynamic rotary scaling"
        " more is possible)",
    ),
    ("max_num_seqs", int, "sequences that run at a time (64)"),
    ("max_num_batched_tokens", int, "tokens of a step, more than --max-num-seqs (2048)"),
    ("tensor_parallel_size", int, "devices that share the model and its pool (1)"),
    ("data_parallel_size", int, "copies of the model, each on devices of its own (1)"),
)


def say(text: str) -> None:
    """Print a line for the user, who may read the standard output elsewhere."""
    print(text, file=sys.stderr, flush=True)


def status_of(work: Callable[[], int]) -> int:
    """Return the exit status of a command; errors of its user are one line on stderr."""
    try:
        return work()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except (ValueError, NotImplementedError, OSError, MemoryError) as error:
        return _fail(error)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(error)


def _fail(error: Exception) -> int:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror is not None:
        text = f"{error.filename or 'standard output'}: {error.strerror}"
        if error.filename is None:
            _discard_output()
    print("error:", " ".join(text.split()), file=sys.stderr)
    return 2


def _discard_output() -> None:
    """Keep Python's last flush from failing again where the output can't be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a checkpoint."""
    add = parser.add_argument_group("model").add_argument
    text = "folder in Hugging Face format (the Shakespeare demo)"
    add("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT, metavar="DIR", help=text)
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="of weights and computation (as stored)")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that are fields of `EngineConfig`, and --compilation-cache."""
    engine = parser.add_argument_group("engine")
    add_options(engine, _ENGINE_OPTIONS)
    add = engine.add_argument
    text = "about half the memory of bf16, and less precise (that of the weights): int8 rounds K"
    text += " and V to 1/254 of a token's largest element, fp8 (e4m3) each one to 1/16 of itself"
    add("--kv-cache-dtype", choices=("int8", "fp8"), help=text)
    text = "compute what prompts share only once (yes)"
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help=text)
    text = "verify drafts of several tokens in a step, such as"
    text += ' {"method": "ngram", "num_speculative_tokens": 4}; of "draft_model", "model" is the'
    text += ' folder of a smaller checkpoint, of "eagle" that of a draft head (no drafts)'
    add("--speculative-config", type=json_object, metavar="JSON", help=text)
    add("--implementation", metavar="NAME", help="of attention (the best here)")
    text = "where compiled programs are kept for the next run ($JAX_COMPILATION_CACHE_DIR, or"
    text += " pallas_paged in the user's cache folder)"
    add("--compilation-cache", metavar="DIR|off", help=text)


def json_object(text: str) -> dict[str, Any]:
    """Read an option that is a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value


def add_template_option(group: Any) -> None:
    """Add --chat-template."""
    text = "Jinja template for chats (the checkpoint's)"
    group.add_argument("--chat-template", type=Path, metavar="FILE", help=text)


def add_options(group: Any, options: tuple[tuple[str, Any, str], ...]) -> None:
    """Add numbers, each by its name, type and help."""
    for name, kind, text in options:
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
