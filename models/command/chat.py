"""The work of `--chat`: a conversation in the terminal, or over pipes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.command.options import say
from models.command.prompts import TEMPERATURE
from models.command.setup import given, load_draft, load_model, prepare, print_defaults
from models.command.signals import Signals
from models.decoder import engine_model
from models.text import Tokenizer, chat_defaults, read_chat_template
from pallas_paged.engine import (
    AsyncEngine,
    Engine,
    EngineConfig,
    EngineDeadError,
    SamplingParams,
)
from pallas_paged.engine.sampling_params import with_defaults
from pallas_paged.server import ChatTemplate

_HELP = "/reset begins a new conversation, /quit or Ctrl-D ends the program, Ctrl-C stops an answer"


def chat(args: argparse.Namespace, signals: Signals | None) -> None:
    """Read messages, one a line, and print the answers, until the input ends.

    Args:
        args: the parsed options.
        signals: of a process of its own, whose Ctrl-C now stops an answer; None: leave them.

    Raises:
        ValueError: an option is out of range, or the checkpoint has no chat template.
        NotImplementedError: this device can't run an option.
    """
    prepare(args, level=logging.WARNING)  # answers stand alone
    if isinstance(sys.stdin, io.TextIOWrapper):  # a message that is not UTF-8 is refused alone
        sys.stdin.reconfigure(errors="surrogateescape")
    draft_params = load_draft(args)
    options, sizes = given(args, SamplingParams), given(args, EngineConfig)
    SamplingParams(**options)  # errors come before the loading of the model
    config = EngineConfig(**{"max_num_seqs": 1} | sizes)
    template = read_chat_template(args.checkpoint, file=args.chat_template)
    if not template.exists and args.checkpoint.is_dir():
        raise ValueError(
            f"{args.checkpoint} has no chat template, --chat needs one: give --chat-template FILE,"
            " or let --prompt TEXT continue a text"
        )
    decoder, more, draft_params = load_model(args, draft_params)
    config = replace(config, **more)
    tokenizer = Tokenizer(args.checkpoint)
    model, weights = engine_model(decoder, max_model_len=args.max_model_len)
    defaults = chat_defaults(args.checkpoint, model, tokenizer, template)
    print_defaults(defaults)
    engine = Engine(model, weights, config=config, tokenizer=tokenizer, draft_params=draft_params)
    conversation = _Conversation(
        engine,
        tokenizer,
        template,
        options={"temperature": TEMPERATURE} | with_defaults(options, defaults),
        variables=args.chat_template_kwargs,
        system=args.system,
    )
    say(f"a context of {engine.max_model_len} tokens; {_HELP}")
    try:
        conversation.run(signals)
    except EngineDeadError as error:
        if isinstance(cause := error.__cause__, ValueError | NotImplementedError | MemoryError):
            raise cause from None  # this device can't run the options; anything else is a bug
        raise


class _Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        options: Mapping[str, Any],
        variables: Mapping[str, Any] | None,
        system: str | None,
    ):
        # Its thread computes, so that Ctrl-C need not wait for a step or a compilation.
        self._engine, self._max_model_len = AsyncEngine(engine), engine.max_model_len
        self._tokenizer, self._template = tokenizer, template
        self._options, self._variables = options, variables
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._beginning)
        self._num_answers = 0

    def run(self, signals: Signals | None) -> None:
        """Answer lines until the input ends."""
        self._engine.start()
        if signals is not None:
            signals.release()
        try:
            while (line := _read_line()) is not None:
                command = line.strip()
                if command in ("/quit", "/exit"):
                    break
                if command == "/reset":
                    self._messages = list(self._beginning)
                    say("a new conversation")
                elif command.startswith("/") and command[1:].isalpha():
                    say(f"unknown command {command}; {_HELP}")
                elif command:
                    with contextlib.suppress(KeyboardInterrupt):
                        self._answer(line)
            if signals is not None:  # an exception could hit functions that run at the exit
                signals.end_at_once()
            stats = asyncio.run(self._engine.stats())
            if self._num_answers:
                say(
                    f"{self._num_answers} answers; time to first token p50 {stats.ttft_p50:.3f} s,"
                    f" per token {1e3 * stats.tpot_p50:.1f} ms; prefix cache hit rate"
                    f" {stats.cache_hit_rate:.1%}"
                )
        finally:
            with contextlib.suppress(EngineDeadError):
                asyncio.run(self._engine.shutdown(drain=False))

    def _answer(self, text: str) -> None:
        """Print the answer to a message, and keep both."""
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            prompt = self._template.render(messages, variables=self._variables)
        except ValueError as error:
            say(f"error: {error}")
            return
        token_ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        room = self._max_model_len - len(token_ids)
        if room < 1:
            say(
                f"error: the conversation has {len(token_ids)} tokens, and the context"
                f" {self._max_model_len}: /reset begins a new one"
            )
            return
        most = self._options.get("max_tokens", room)
        least = self._options.get("min_tokens", 0)
        limits = {"max_tokens": min(most, room), "min_tokens": min(least, room)}
        params = SamplingParams(**{**self._options, **limits})
        if not self._num_answers:
            say("compiling and generating ...")
        self._num_answers += 1
        answer, reason, failure = self._print_answer(token_ids, params)
        if answer:
            self._messages = [*messages, {"role": "assistant", "content": answer}]
        if failure is not None:
            say(f"error: {failure}")
        elif reason == "length" and most >= room:
            say(f"the context of {self._max_model_len} tokens is full: /reset begins a new one")
        elif reason == "length":
            say(f"stopped after --max-tokens {most}")
        elif reason is None:
            say("stopped")

    def _print_answer(
        self, token_ids: list[int], params: SamplingParams
    ) -> tuple[str, str | None, str | None]:
        """Return the text, its finish reason, None after a Ctrl-C, and an error if there is one."""
        answer, reason, failure = "", None, None
        stream = self._engine.submit(token_ids, params)
        try:
            for news in stream:
                for output in news.outputs:
                    answer += output.text
                    reason, failure = output.finish_reason, news.error
                    sys.stdout.write(output.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            stream.close()
            reason = None
        if not answer.endswith("\n"):
            print(flush=True)
        return answer, reason, failure


def _read_line() -> str | None:
    """Return the next message, or None at the end of the input."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            if is_terminal:
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401  # gives input() its editing keys

                return input("> ")
            line = sys.stdin.readline() if sys.stdin is not None else ""
            return line.rstrip("\n") if line else None
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            say(f"\n{_HELP}")
