"""`/v1/chat/completions`: answers to conversations."""

from __future__ import annotations

from typing import Any

from pallas_paged.engine import CompletionOutput
from pallas_paged.engine.sampling_params import MAX_LOGPROBS
from pallas_paged.server.call import Answer, Call, Prompt, take_params, take_stream
from pallas_paged.server.fields import Fields, bad_request
from pallas_paged.server.service import Service
from pallas_paged.server.tokens import chat_logprobs


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
    options = take_stream(fields, params, allow_priority=service.config.allow_priority)
    fields.end()
    return Call(
        encode=lambda: [Prompt(token_ids=conversation.encode(service))],
        num_characters=conversation.num_characters,
        num_prompts=1,
        params=params,
        answer=_ChatAnswer(service, num_top=num_top, has_ids=ids),
        **options,
    )


class Conversation:
    """The fields of a request that the chat template renders."""

    def __init__(self, messages: list[Any], **options: Any):
        """Take messages, and the other arguments of `ChatTemplate.render`."""
        self._messages, self._options = messages, options
        self.num_characters = len(str(messages)) + len(str(options))

    def encode(self, service: Service) -> list[int]:
        """Return the token ids of the prompt.

        Raises:
            APIError: the template refuses the messages.
        """
        assert service.chat_template is not None
        try:
            text = service.chat_template.render(self._messages, **self._options)
        except ValueError as error:
            name = str(error).partition("=")[0]
            raise bad_request(
                str(error), name if name in ("tools", "documents") else "messages"
            ) from None
        return service.encode_text(text, add_special_tokens=False)


def take_conversation(fields: Fields, service: Service) -> Conversation:
    """Take the fields that the chat template renders.

    Raises:
        APIError: a field is of another type, or the model has no chat template.
    """
    messages = fields.take("messages", list)
    if not messages:
        raise bad_request("messages must be a list of messages that is not empty", "messages")
    tools = fields.take("tools", list)
    choice = fields.take("tool_choice", str, dict, default="auto")
    if choice not in ("auto", "none"):
        raise bad_request('tool_choice must be "auto" or "none"', "tool_choice")
    fields.take("parallel_tool_calls", bool)
    variables = fields.take("chat_template_kwargs", dict, default={})
    if (effort := fields.take("reasoning_effort", str)) is not None:
        variables = {"reasoning_effort": effort} | variables
    options = {
        "tools": tools if choice == "auto" else None,
        "documents": fields.take("documents", list),
        "add_generation_prompt": fields.take("add_generation_prompt", bool, default=True),
        "variables": variables,
    }
    if service.chat_template is None:
        message = (
            "the model has no chat template: use /v1/completions, or start with --chat-template"
        )
        raise bad_request(message, "messages")
    return Conversation(messages, **options)


def _max_tokens(fields: Fields) -> int | None:
    old, new = fields.take("max_tokens", int), fields.take("max_completion_tokens", int)
    if old is not None and new is not None and old != new:
        message = "max_tokens and max_completion_tokens are the same and must be equal"
        raise bad_request(message, "max_completion_tokens")
    return old if new is None else new


class _ChatAnswer(Answer):
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, *, num_top: int, has_ids: bool):
        super().__init__("chat.completion", "chatcmpl", service.config.served_model_name)
        self._service, self._num_top, self._has_ids = service, num_top, has_ids

    def choice(self, index: int, prompt: Prompt, output: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return self._choice(index, output, {"message": message})

    def delta(
        self, index: int, prompt: Prompt, output: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any] | None:
        has_news = output.text or output.finish_reason or output.logprobs or self._has_ids
        if not (is_first or has_news):
            return None
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if is_first or output.text:
            delta["content"] = output.text
        return self._choice(index, output, {"delta": delta})

    def _choice(
        self, index: int, output: CompletionOutput, content: dict[str, Any]
    ) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            token_bytes = self._service.tokenizer.token_bytes
            logprobs = chat_logprobs(output.token_ids, output.logprobs, self._num_top, token_bytes)
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return choice | ({"token_ids": output.token_ids} if self._has_ids else {})
