"""The command `python -m models.generate`: its options, and how it ends."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from models.command.options import (
    add_engine_options,
    add_model_options,
    add_options,
    add_template_option,
    json_object,
    status_of,
)
from models.command.signals import Signals

# Options that are fields of `SamplingParams`: name, type, help.
_SAMPLING_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("n", int, "completions of each prompt (1)"),
    ("best_of", int, "sample N completions and print the --n most probable"),
    ("beam_width", int, "beam search instead of sampling"),
    ("length_penalty", float, "of beams (1)"),
    ("max_tokens", int, "of a completion (400, or the room in the context)"),
    ("min_tokens", int, "tokens before a completion may end (0)"),
    ("temperature", float, "0 is greedy (0.8, see below)"),
    ("top_k", int, "sample from the N most probable tokens"),
    ("top_p", float, "sample from the fewest tokens of this probability"),
    ("min_p", float, "sample from tokens of this fraction of the highest probability"),
    ("presence_penalty", float, "for tokens of the completion, -2 to 2"),
    ("frequency_penalty", float, "for each time that a token was generated, -2 to 2"),
    ("repetition_penalty", float, "for tokens of the prompt and the completion (1)"),
    ("logprobs", int, "print the log-probabilities of each token and of the N best (JSON)"),
)
_NOT_IN_CHATS = ("prompt", "prompts_file", "json", "n", "best_of", "beam_width", "logprobs")
_EPILOG = """\
output:
  The text of one prompt is printed as it is generated. With several prompts or completions, each
  prompt's texts are printed when they are done. --prompts-file and --json print a JSON object a
  line instead, as soon as its prompt is done: the completions or the error, and "index", which
  counts the prompts from 0. Progress and a summary go to the standard error.

prompts file:
  Blank lines are skipped. In a .jsonl file a line is an object with "prompt" (a text or token ids)
  and any fields of SamplingParams, which override the options here; null means the default. The
  key "priority" orders waiting prompts: smaller values go first. In place of "prompt" it may have
  "messages", a conversation as in OpenAI's API, with "tools", "documents" and
  "chat_template_kwargs", which the checkpoint's chat template renders.

chat:
  --chat reads a message a line. /reset begins a new conversation, /quit or Ctrl-D ends the program,
  Ctrl-C stops an answer. An answer may take the rest of the context.

sampling defaults:
  temperature, top_k, top_p, min_p and repetition_penalty of the checkpoint's generation_config.json
  are the defaults of these options; "do_sample": false is a temperature of 0.

exit status:
  0 all prompts were served, 1 some were refused or failed, 2 bad options or files, 130 Ctrl-C,
  141 the reader of the output is gone
"""


def run() -> NoReturn:
    """Run the command as a process of its own, which Ctrl-C ends at once."""
    raise SystemExit(main(signals=Signals(signal.SIGINT)))


def main(argv: Sequence[str] | None = None, *, signals: Signals | None = None) -> int:
    """Run the command and return its exit status; errors of its user are one line on stderr."""
    if sys.stderr is None:  # closed: without this, messages would go to the standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return status_of(lambda: _run(argv, signals))


def _run(argv: Sequence[str] | None, signals: Signals | None) -> int:
    args = _parser().parse_args(argv)
    if sys.stdout is None:
        raise ValueError("the standard output is closed")
    lines = _read_lines(args)
    print("importing JAX ...", file=sys.stderr, flush=True)
    if args.chat:
        from models.command.chat import chat

        chat(args, signals)
        return 0
    from models.command.batch import serve

    status = 0 if serve(args, lines) else 1
    sys.stdout.flush()
    return status


def _read_lines(args: argparse.Namespace) -> list[str]:
    """Return the lines of the prompts file that are not blank."""
    if args.chat:
        for name in _NOT_IN_CHATS:
            value = getattr(args, name)
            if value or type(value) is int:  # 0, too
                raise ValueError(f"--{name.replace('_', '-')} is not possible with --chat")
        return []
    if args.system is not None:
        raise ValueError("--system needs --chat")
    if args.prompts_file is None:
        if not args.prompt:
            raise ValueError("no prompt: give --prompt TEXT, --prompts-file FILE or --chat")
        return []
    # Bytes that are not UTF-8 become surrogates, and only their own line is refused. splitlines
    # would also cut at form feeds and other separators inside a prompt.
    text = args.prompts_file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    lines = [line for line in text.split("\n") if line.strip()]
    if not args.prompt and not lines:
        raise ValueError(f"{args.prompts_file} has no prompt: every line is blank")
    return lines


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m models.generate",
        description="Continue prompts with a checkpoint, over a paged KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prompts = parser.add_argument_group("prompts and output")
    add = prompts.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="repeatable")
    text = "a prompt a line, or a JSON object a line if the name ends in .jsonl; see below"
    add("--prompts-file", type=Path, metavar="FILE", help=text)
    add("--json", action="store_true", help="print JSON lines; see below")
    add("--chat", action="store_true", help="talk with an instruct checkpoint; see below")
    add("--system", metavar="TEXT", help="system message of --chat")
    add_template_option(prompts)
    text = 'variables of the chat template, such as {"enable_thinking": false}'
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help=text)
    add_model_options(parser)
    sampling = parser.add_argument_group("sampling")
    add_options(sampling, _SAMPLING_OPTIONS)
    add = sampling.add_argument
    add("--stop", action="append", metavar="TEXT", help="end there; repeatable")
    text = "go on after the end of sequence"
    add("--ignore-eos", action="store_true", default=None, help=text)
    text = "of the first prompt, the next has N + 1 (random; the summary reports it)"
    add("--seed", type=int, metavar="N", help=text)
    add_engine_options(parser)
    return parser
