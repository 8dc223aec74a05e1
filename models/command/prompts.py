"""Prompts, conversations and lines of files to what an engine is asked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from models.text import Tokenizer, chat_defaults, read_chat_template, sampling_defaults
from pallas_paged.engine import Model, SamplingParams, StructuredOutputsParams
from pallas_paged.engine.sampling_params import with_defaults

if TYPE_CHECKING:
    from pallas_paged.server import ChatTemplate

_CHAT_KEYS = ("tools", "documents", "chat_template_kwargs")
_KEYS = (
    "prompt",
    "messages",
    *_CHAT_KEYS,
    "priority",
    # Experts are not in the output.
    *(one.name for one in fields(SamplingParams) if one.name != "return_routed_experts"),
)
MAX_TOKENS, TEMPERATURE = 400, 0.8  # where neither an option, a line nor the checkpoint has them


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt that can be submitted."""

    index: int
    prompt: str | list[int]
    token_ids: Sequence[int]
    params: SamplingParams
    priority: int


@dataclass(kw_only=True)
class JobMaker:
    """Makes jobs; options override the sampling defaults of the checkpoint, and lines the options.

    Attributes:
        args, model, tokenizer: parsed options, and what they name.
        room: most tokens of a sequence; without max_tokens a completion ends there.
        options: those that are fields of `SamplingParams`, without the seed.
        base_seed: of the first prompt.
    """

    args: argparse.Namespace
    model: Model
    tokenizer: Tokenizer
    room: int
    options: Mapping[str, Any]
    base_seed: int

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Of sampling, from the checkpoint; ValueError if its generation_config.json is damaged."""
        return sampling_defaults(self.args.checkpoint)

    @cached_property
    def _template(self) -> ChatTemplate:
        return read_chat_template(self.args.checkpoint, file=self.args.chat_template)

    @cached_property
    def _chat_defaults(self) -> dict[str, Any]:
        checkpoint = self.args.checkpoint
        return chat_defaults(checkpoint, self.model, self.tokenizer, self._template)

    def job(self, index: int, own: dict[str, Any]) -> Job:
        """Return the job of the entries of a line, or raise ValueError if they are not valid."""
        prompt, messages = own.pop("prompt", None), own.pop("messages", None)
        priority = own.pop("priority", 0)
        chat = {name: own.pop(name) for name in _CHAT_KEYS if name in own}
        defaults = self.defaults
        if messages is not None:
            if prompt is not None:
                raise ValueError("prompt and messages exclude each other")
            variables = chat.pop("chat_template_kwargs", {})
            if not isinstance(variables, dict):
                raise ValueError(f"chat_template_kwargs={variables!r} must be an object")
            chat["variables"] = (self.args.chat_template_kwargs or {}) | variables
            prompt = self._template.render(messages, **chat)
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
            defaults = self._chat_defaults
        elif chat:
            raise ValueError(f"{next(iter(chat))} needs messages")
        elif isinstance(prompt, str):
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError("the prompt must be valid UTF-8")
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list):
            token_ids = prompt
        else:
            raise ValueError(f"{prompt=} must be a text or a list of token ids")
        options = {"seed": (self.base_seed + index) % 2**32} | dict(self.options) | own
        max_tokens = max(1, min(MAX_TOKENS, self.room - len(token_ids)))
        values = {"max_tokens": max_tokens, "temperature": TEMPERATURE}
        params = SamplingParams(**values | with_defaults(options, defaults))
        return Job(
            index=index, prompt=prompt, token_ids=token_ids, params=params, priority=priority
        )


def parse_line(line: str) -> dict[str, Any]:
    """Return the entries of a JSON object that are not null."""
    try:
        entries = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{line} must be a JSON object")
    for name in entries:
        if name not in _KEYS:
            raise ValueError(f"unknown key {name!r}; there are {', '.join(_KEYS)}")
    bias = entries.get("logit_bias")
    if isinstance(bias, dict):  # JSON has no other keys than texts
        try:
            entries["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
        except ValueError:
            raise ValueError(f"logit_bias={bias} must have token ids as keys") from None
    structure = entries.get("structured_outputs")
    if isinstance(structure, dict):
        try:
            entries["structured_outputs"] = StructuredOutputsParams(**structure)
        except TypeError:
            names = ", ".join(field.name for field in fields(StructuredOutputsParams))
            raise ValueError(
                f"structured_outputs={structure!r:.80} must have one of {names}"
            ) from None
    return {name: value for name, value in entries.items() if value is not None}
