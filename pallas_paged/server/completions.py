"""`/v1/chat/completions` and `/v1/completions`: answers to conversations, texts after prompts."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from pallas_paged.engine import CompletionOutput
from pallas_paged.engine.sampling_params import MAX_LOGPROBS
from pallas_paged.server.answer_parser import AnswerParser, CallPiece, Parts
from pallas_paged.server.call import (
    Answer,
    Call,
    Prompt,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    take_params,
    take_stream,
)
from pallas_paged.server.fields import APIError, Fields, bad_request
from pallas_paged.server.service import Service
from pallas_paged.server.tokenizer import TextTokenizer
from pallas_paged.server.tools import Tools, take_tools

_MAX_TOKENS = 16  # of a text where a request has no max_tokens, as in OpenAI's API


def parse_chat(fields: Fields, service: Service) -> Call:
    """Return the call of a request.

    Raises:
        APIError: a field is unknown, of another type, or out of its range, or the model has no chat
            template.
    """
    service.take_model(fields)
    conversation = take_conversation(fields, service)
    wants_logprobs = fields.take("logprobs", bool, default=False)
    num_top = fields.take("top_logprobs", int, default=0)
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise bad_request(f"top_logprobs={num_top} must be in 0..{MAX_LOGPROBS}", "top_logprobs")
    if num_top and not wants_logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    ids = fields.take("return_token_ids", bool, default=False)
    for name in ("functions", "function_call", "audio", "prediction", "web_search_options"):
        fields.refuse(name)
    fields.refuse("modalities", ["text"])
    params = take_params(
        fields,
        service.chat_defaults,
        max_tokens=_max_tokens(fields),
        logprobs=num_top if wants_logprobs else None,
    )
    has_format = params.structured_outputs is not None
    if conversation.tools.forced and has_format:
        message = "tool_choice forces a call, which can't have a response_format too"
        raise bad_request(message, "tool_choice")
    options = take_stream(fields, params, allow_priority=service.config.allow_priority)
    fields.end()
    return Call(
        encode=lambda: [conversation.prompt(service, has_format=has_format)],
        num_characters=conversation.num_characters,
        num_prompts=1,
        params=params,
        answer=_ChatAnswer(
            service, conversation.tools, has_format=has_format, num_top=num_top, has_ids=ids
        ),
        **options,
    )


class Conversation:
    """The fields of a request that the chat template renders.

    Attributes:
        tools: of the request.
    """

    def __init__(self, messages: list[Any], tools: Tools, **options: Any):
        """Take messages, and the other arguments of `ChatTemplate.render`."""
        self.tools = tools
        self._messages, self._options = messages, {"tools": tools.values, **options}
        self.num_characters = len(str(messages)) + len(str(options))

    def encode(self, service: Service) -> list[int]:
        """Return the token ids of the prompt; errors as of `prompt`."""
        return service.encode_text(self._render(service), add_special_tokens=False)

    def prompt(self, service: Service, *, has_format: bool) -> Prompt:
        """Return the prompt, and what the answer must match because of the tools.

        Args:
            service: with the template.
            has_format: whether the request says itself what the answer must match.

        Raises:
            APIError: the template refuses the messages.
        """
        text, opening = self._render(service), service.reasoning and service.reasoning.open
        is_thinking = bool(opening) and text.rstrip().endswith(str(opening))
        structure = None
        if not has_format:
            structure = self.tools.structure(
                service.calls, service.reasoning, is_thinking=is_thinking
            )
        return Prompt(
            token_ids=service.encode_text(text, add_special_tokens=False),
            is_thinking=is_thinking,
            structured_outputs=structure,
        )

    def _render(self, service: Service) -> str:
        assert service.chat_template is not None
        try:
            return service.chat_template.render(self._messages, **self._options)
        except ValueError as error:
            name = str(error).partition("=")[0]
            place = name if name in ("tools", "documents") else "messages"
            raise bad_request(str(error), place) from None


def take_conversation(fields: Fields, service: Service) -> Conversation:
    """Take the fields that the chat template renders.

    Raises:
        APIError: a field is of another type, or the model has no chat template.
    """
    messages = fields.take("messages", list)
    if not messages:
        raise bad_request("messages must be a list of messages that is not empty", "messages")
    tools = take_tools(fields)
    variables = fields.take("chat_template_kwargs", dict, default={})
    if (effort := fields.take("reasoning_effort", str)) is not None:
        variables = {"reasoning_effort": effort} | variables
    options = {
        "documents": fields.take("documents", list),
        "add_generation_prompt": fields.take("add_generation_prompt", bool, default=True),
        "variables": variables,
    }
    if service.chat_template is None:
        way = "use /v1/completions, or start with --chat-template"
        raise bad_request(f"the model has no chat template: {way}", "messages")
    return Conversation(messages, tools, **options)


def _max_tokens(fields: Fields) -> int | None:
    old, new = fields.take("max_tokens", int), fields.take("max_completion_tokens", int)
    if old is not None and new is not None and old != new:
        message = "max_tokens and max_completion_tokens are the same and must be equal"
        raise bad_request(message, "max_completion_tokens")
    return old if new is None else new


class ParsedAnswer(Answer):
    """An answer whose text is parted into content, reasoning and calls.

    One that the request holds to a format, such as a JSON schema, is content.

    Attributes:
        tools: of the request.
        num_calls: complete ones of each choice so far.
    """

    def __init__(self, service: Service, tools: Tools, *, has_format: bool):
        """Begin an answer."""
        super().__init__(service.config.served_model_name)
        self.tools = tools
        self._reasoning = None if has_format else service.reasoning
        self._format = None if has_format else tools.format(service.calls)
        self._parsers: dict[int, AnswerParser] = {}  # by choice
        self.num_calls: Counter[int] = Counter()

    def parts(self, index: int, prompt: Prompt, output: CompletionOutput) -> Parts:
        """Return the new parts of a choice."""
        if self._reasoning is None and self._format is None:
            return Parts(output.text)
        if index not in self._parsers:
            self._parsers[index] = AnswerParser(
                self._format, self._reasoning, self.tools.schemas, is_thinking=prompt.is_thinking
            )
        is_last = output.finish_reason is not None
        parts = self._parsers[index].push(output.text, is_last=is_last)
        if not self.tools.is_parallel:
            parts.calls = [piece for piece in parts.calls if piece.number == 0]
        self.num_calls[index] += sum(piece.is_last for piece in parts.calls)
        return parts


class _ChatAnswer(ParsedAnswer):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, service: Service, tools: Tools, *, has_format: bool, num_top: int, has_ids: bool
    ):
        super().__init__(service, tools, has_format=has_format)
        self._service, self._num_top, self._has_ids = service, num_top, has_ids

    def choice(self, index: int, prompt: Prompt, output: CompletionOutput) -> dict[str, Any]:
        parts = self.parts(index, prompt, output)
        content = None if parts.calls and not parts.content else parts.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _reasoning_of(parts)
        if parts.calls:
            message["tool_calls"] = [
                _call_head() | {"function": {"name": one.name, "arguments": one.arguments}}
                for one in parts.calls
            ]
        return self._choice(index, output, {"message": message})

    def delta(
        self, index: int, prompt: Prompt, output: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any] | None:
        parts = self.parts(index, prompt, output)
        pieces = [entry for piece in parts.calls for entry in _call_deltas(piece)]
        has_parts = parts.content or parts.reasoning or pieces
        has_news = has_parts or output.finish_reason or output.logprobs or self._has_ids
        if not (is_first or has_news):
            return None
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if is_first or parts.content:
            delta["content"] = parts.content
        delta |= _reasoning_of(parts)
        if pieces:
            delta["tool_calls"] = pieces
        return self._choice(index, output, {"delta": delta})

    def event(self, delta: dict[str, Any], *, include_usage: bool) -> str:
        """Return events with at most one piece of a call each, as in OpenAI's API."""
        pieces = delta["delta"].get("tool_calls", ())
        texts, make = [], partial(super().event, include_usage=include_usage)
        if len(pieces) > 1:
            nothing: dict[str, Any] = dict.fromkeys(("finish_reason", "stop_reason", "logprobs"))
            nothing |= {"token_ids": []} if self._has_ids else {}
            others = delta["delta"]
            for piece in pieces[:-1]:
                texts.append(make(delta | nothing | {"delta": others | {"tool_calls": [piece]}}))
                others = {}
            delta = delta | {"delta": {"tool_calls": [pieces[-1]]}}
        return "".join([*texts, make(delta)])

    def _choice(
        self, index: int, output: CompletionOutput, content: dict[str, Any]
    ) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            token_bytes = self._service.tokenizer.token_bytes
            logprobs = chat_logprobs(output.token_ids, output.logprobs, self._num_top, token_bytes)
        choice = _choice(index, output, content, logprobs, has_ids=self._has_ids)
        if output.finish_reason == "stop" and self.num_calls[index]:
            choice["finish_reason"] = "tool_calls"
        return choice


def _reasoning_of(parts: Parts) -> dict[str, Any]:
    return {"reasoning_content": parts.reasoning} if parts.reasoning else {}


def _call_head() -> dict[str, Any]:
    # Templates of Mistral take no other length of ids.
    return {"id": secrets.token_hex(5)[:9], "type": "function"}


def _call_deltas(piece: CallPiece) -> Iterator[dict[str, Any]]:
    """Yield what a stream has of a piece of a call: its name, and then text of its arguments."""
    index = {"index": piece.number}
    if piece.name:
        yield index | _call_head() | {"function": {"name": piece.name, "arguments": ""}}
    if piece.arguments:
        yield index | {"function": {"arguments": piece.arguments}}


def _choice(
    index: int,
    output: CompletionOutput,
    content: dict[str, Any],
    logprobs: dict[str, Any] | None,
    *,
    has_ids: bool,
) -> dict[str, Any]:
    """Return an entry of "choices"."""
    choice = {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    return choice | ({"token_ids": output.token_ids} if has_ids else {})


def parse_completion(fields: Fields, service: Service) -> Call:
    """Return the call of a request.

    Raises:
        APIError: a field is unknown, of another type, or out of its range.
    """
    service.take_model(fields)
    prompts = take_prompts(fields, "prompt")
    fields.refuse("suffix", "")
    echo = fields.take("echo", bool, default=False)
    logprobs = fields.take("logprobs", int)
    tokenizer = service.tokenizer if logprobs is not None else None
    ids = fields.take("return_token_ids", bool, default=False)
    params = take_params(
        fields,
        service.sampling_defaults,
        max_tokens=fields.take("max_tokens", int, default=_MAX_TOKENS),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        detokenize=service.has_tokenizer,
    )
    options = take_stream(fields, params, allow_priority=service.config.allow_priority)
    fields.end()

    return Call(
        encode=lambda: [encoded(prompt, service, "prompt", echo=echo) for prompt in prompts],
        num_characters=sum(map(len, prompts)),
        num_prompts=len(prompts),
        params=params,
        answer=_TextAnswer(service, tokenizer, echo=echo, num_top=logprobs or 0, has_ids=ids),
        **options,
    )


def take_prompts(fields: Fields, name: str) -> list[str | list[Any]]:
    """Take the field with the prompts: texts, or lists of token ids, which `encoded` checks."""
    value = fields.take(name, str, list)
    if isinstance(value, list) and value and type(value[0]) is int:
        return [value]
    prompts = [value] if isinstance(value, str) else value
    if not prompts or not all(isinstance(prompt, str | list) for prompt in prompts):
        raise bad_request(f"{name} must be a text, token ids, or a list of those", name)
    return prompts


def encoded(prompt: str | list[Any], service: Service, name: str, *, echo: bool = False) -> Prompt:
    """Return a prompt of the field with this name; raise an APIError for one that is not valid."""
    if isinstance(prompt, str):
        return Prompt(token_ids=service.encode_text(prompt), text=prompt if echo else "")
    if len(prompt) > (most := service.max_model_len):  # before a look at millions of them
        message = f"a prompt of {len(prompt)} tokens is more than the {most} tokens of a sequence"
        raise APIError(400, message, code="context_length_exceeded")
    service.check_token_ids(prompt, name)
    text = service.tokenizer.decode(prompt) if echo else ""
    return Prompt(token_ids=prompt, text=text)


class _TextAnswer(Answer):
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(
        self,
        service: Service,
        tokenizer: TextTokenizer | None,  # None: without log-probabilities
        *,
        echo: bool,
        num_top: int,
        has_ids: bool,
    ):
        super().__init__(service.config.served_model_name)
        self._tokenizer, self._echo = tokenizer, echo
        self._num_top, self._has_ids = num_top, has_ids
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    def choice(self, index: int, prompt: Prompt, output: CompletionOutput) -> dict[str, Any]:
        choice = self.delta(index, prompt, output, is_first=True)
        assert choice is not None
        return choice

    def delta(
        self, index: int, prompt: Prompt, output: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any] | None:
        echo = self._echo and is_first
        text = prompt.text + output.text if echo else output.text
        if not (text or output.finish_reason or self._has_ids or output.logprobs):
            return None
        logprobs = self._logprobs(index, prompt, output, echo=echo)
        choice = _choice(index, output, {"text": text}, logprobs, has_ids=self._has_ids)
        if self._has_ids and is_first:
            choice["prompt_token_ids"] = prompt.token_ids
        return choice

    def _logprobs(
        self, index: int, prompt: Prompt, output: CompletionOutput, *, echo: bool
    ) -> dict[str, Any] | None:
        if self._tokenizer is None:
            return None
        token_ids: list[int] = output.token_ids
        entries: Sequence[Any] = output.logprobs or ()
        if echo and prompt.logprobs is not None:
            token_ids, entries = prompt.token_ids + token_ids, [*prompt.logprobs, *entries]
        offsets = self._offsets.setdefault(index, TextOffsets(prompt.text))
        return completion_logprobs(token_ids, entries, self._num_top, self._tokenizer, offsets)
