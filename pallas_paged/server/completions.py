"""`/v1/completions`: texts that continue prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pallas_paged.engine import CompletionOutput
from pallas_paged.server.call import Answer, Call, Prompt, take_params, take_stream
from pallas_paged.server.fields import APIError, Fields, bad_request
from pallas_paged.server.service import Service
from pallas_paged.server.tokens import TextOffsets, TextTokenizer, completion_logprobs

_MAX_TOKENS = 16  # where a request has no max_tokens, as in OpenAI's API


def parse_completion(fields: Fields, service: Service) -> Call:
    """Return the call of a request.

    Raises:
        APIError: a field is unknown, of another type, or out of its range.
    """
    service.take_model(fields)
    prompts = _prompts(fields.take("prompt", str, list))
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

    def encode() -> list[Prompt]:
        return [_encoded(prompt, service, echo=echo) for prompt in prompts]

    return Call(
        encode=encode,
        num_characters=sum(map(len, prompts)),
        num_prompts=len(prompts),
        params=params,
        answer=_TextAnswer(service, tokenizer, echo=echo, num_top=logprobs or 0, has_ids=ids),
        **options,
    )


def _prompts(value: Any) -> list[str | list[Any]]:
    """Return the prompts: texts, or lists of token ids, which the engine checks."""
    if isinstance(value, list) and value and type(value[0]) is int:
        return [value]
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, list) or not prompts:
        raise bad_request("prompt must be a text, token ids, or a list of those", "prompt")
    if not all(isinstance(prompt, str | list) for prompt in prompts):
        raise bad_request("prompt must be a text, token ids, or a list of those", "prompt")
    return prompts


def _encoded(prompt: str | list[Any], service: Service, *, echo: bool) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(token_ids=service.encode_text(prompt), text=prompt if echo else "")
    if len(prompt) > service.max_model_len:  # before a look at millions of them
        message = (
            f"a prompt of {len(prompt)} tokens is more than the {service.max_model_len} tokens"
        )
        raise APIError(400, f"{message} of a sequence", code="context_length_exceeded")
    service.check_token_ids(prompt, "prompt")
    text = service.tokenizer.decode(prompt) if echo else ""
    return Prompt(token_ids=prompt, text=text)


class _TextAnswer(Answer):
    chunk_object = "text_completion"

    def __init__(
        self,
        service: Service,
        tokenizer: TextTokenizer | None,  # None: without log-probabilities
        *,
        echo: bool,
        num_top: int,
        has_ids: bool,
    ):
        super().__init__("text_completion", "cmpl", service.config.served_model_name)
        self._tokenizer, self._echo = tokenizer, echo
        self._num_top, self._has_ids = num_top, has_ids
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)  # by choice

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
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, prompt, output, echo=echo),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._has_ids:
            choice["token_ids"] = output.token_ids
            if is_first:
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
        return completion_logprobs(
            token_ids, entries, self._num_top, self._tokenizer, self._offsets[index]
        )
