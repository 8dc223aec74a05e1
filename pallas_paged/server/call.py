"""A request for completions, and what chats and texts share: fields, and log-probabilities."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pallas_paged.engine import (
    CompletionOutput,
    Logprob,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from pallas_paged.engine.sampling_params import as_list, with_defaults
from pallas_paged.server.fields import Fields, bad_request
from pallas_paged.server.tokenizer import TextTokenizer

MAX_N = 128  # completions of a prompt, as in OpenAI's API
# The engine looks for each stop text after each token.
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 1000
_FIELDS = [one.name for one in dataclasses.fields(SamplingParams)]
# Those that requests have in another form, or not at all.
_OTHERS = (
    *("max_tokens", "logit_bias", "seed", "stop", "logprobs", "prompt_logprobs", "detokenize"),
    *("structured_outputs", "return_routed_experts"),
)
# Fields of OpenAI's API that change nothing here.
_IGNORED_FIELDS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
_LEAST = -9999.0  # in place of minus infinity, which JSON lacks; OpenAI has the same
TokenBytes = Callable[[int], bytes]
Entry = Mapping[int, Logprob]  # the token's own first
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def json_bytes(text: str) -> bytes:
    """Return a text with JSON; of surrogates without a pair, which UTF-8 lacks, the escapes."""
    return text.encode(errors="backslashreplace")


class Answer(ABC):
    """The JSON of the completions of one request.

    Attributes:
        kind, chunk_kind: values of "object", in one piece and in a stream.
        id_prefix: of its id.
        head: fields of the complete answer.
    """

    kind = chunk_kind = id_prefix = ""

    def __init__(self, model: str):
        """Begin an answer of the model with this name."""
        self.head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    def complete(self, choices: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the answer with all completions and the numbers of tokens."""
        return self.head | {"choices": choices, "usage": usage}

    def body(self, choices: list[Any], usage: dict[str, Any]) -> str:
        """Return the JSON of `complete`."""
        return encode_json(self.complete(choices, usage))

    def event(self, delta: Any, *, include_usage: bool) -> str:
        """Return the event of a delta, or several."""
        usage = ',"usage":null' if include_usage else ""
        return f'data: {self._event_head},"choices":[{encode_json(delta)}]{usage}}}\n\n'

    def last_event(self, usage: dict[str, Any], *, include_usage: bool) -> str:
        """Return what ends a stream."""
        last = {"choices": [], "usage": usage} if include_usage else None
        return f"data: {self._event_head},{encode_json(last)[1:]}\n\n" if last else ""

    @functools.cached_property
    def _event_head(self) -> str:
        return encode_json(self.head | {"object": self.chunk_kind})[:-1]

    @abstractmethod
    def choice(self, index: int, prompt: Prompt, output: CompletionOutput) -> Any:
        """Return a completion that has ended."""

    @abstractmethod
    def delta(self, index: int, prompt: Prompt, output: CompletionOutput, *, is_first: bool) -> Any:
        """Return the new part of a completion; None where there is nothing to send."""


@dataclass(kw_only=True)
class Prompt:
    """A prompt of a request.

    Attributes:
        token_ids: of the prompt.
        text: of the prompt, where the answer repeats it.
        logprobs: of its tokens, where the answer reports them; known with the first output.
        is_thinking: whether it opens the reasoning of the answer.
        structured_outputs: what the answer must match, because of the tools.
        embedding: `f32[E]`, what the prompt became, if the request asks for that.
    """

    token_ids: list[int]
    text: str = ""
    logprobs: list[Any] | None = None
    is_thinking: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    embedding: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request for completions.

    Attributes:
        encode: returns the prompts; slow for long texts.
        num_characters: of the texts to encode, and tokens to check.
        num_prompts: that `encode` returns.
        params, priority: as in `AsyncEngine.submit`.
        answer: makes the JSON.
        stream: whether to send the completions as they grow.
        include_usage: whether a stream ends with the numbers of tokens.
        pooling: how prompts become vectors, in place of what `params` say.
        arrival: time of the request, of `time.perf_counter`.
    """

    encode: Callable[[], list[Prompt]]
    num_characters: int
    num_prompts: int
    params: SamplingParams
    priority: int
    answer: Answer
    stream: bool
    include_usage: bool
    pooling: PoolingParams | None = None
    arrival: float = field(default_factory=time.perf_counter)


def take_stream(fields: Fields, params: SamplingParams, *, allow_priority: bool) -> dict[str, Any]:
    """Take "stream", "stream_options" and "priority", as arguments of `Call`."""
    stream = fields.take("stream", bool, default=False)
    options = fields.take("stream_options", dict)
    include_usage = False
    if options is not None:
        if not stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        inner = Fields(options, path="stream_options.")
        include_usage = inner.take("include_usage", bool, default=False)
        inner.take("include_obfuscation", bool)
        inner.end()
    if stream and (params.best_of or params.beam_width):
        name = "best_of" if params.best_of else "beam_width"
        raise bad_request(f"{name} can't be streamed: its completions are ranked at the end", name)
    priority = take_priority(fields, allow_priority=allow_priority)
    return {"stream": stream, "include_usage": include_usage, "priority": priority}


def take_priority(fields: Fields, *, allow_priority: bool) -> int:
    """Take "priority"; raise an APIError for one that is out of range or not allowed."""
    priority = fields.take("priority", int, default=0)
    if abs(priority) >= 2**31:
        raise bad_request(f"{priority=} must be in -2147483647..2147483647", "priority")
    if priority and not allow_priority:
        raise bad_request(f"{priority=} is not allowed by this server", "priority")
    return priority


def take_params(
    fields: Fields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    detokenize: bool = True,
) -> SamplingParams:
    """Take the fields of `SamplingParams`, and those without an effect.

    Args:
        fields: of the request.
        defaults: of the model, as in `with_defaults`.
        max_tokens, logprobs, prompt_logprobs, detokenize: which have other names or forms.
    """
    for name in _IGNORED_FIELDS:
        fields.take(name)
    values = {name: fields.take(name) for name in _FIELDS if name not in _OTHERS}
    values["stop"] = fields.take("stop", str, list)
    seed = fields.take("seed", int)
    values["seed"] = None if seed is None else seed % 2**32
    values["logit_bias"] = _logit_bias(fields.take("logit_bias", dict))
    values["structured_outputs"] = _structured_outputs(fields)
    values |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    given = {name: value for name, value in values.items() if value is not None}
    _check_stop(as_list(given.get("stop", [])))
    given = with_defaults(given, defaults)
    try:
        params = SamplingParams(**given, max_tokens=max_tokens, detokenize=detokenize)
    except ValueError as error:
        raise bad_request(str(error), field_of(str(error))) from None
    for name in ("n", "best_of"):
        if (getattr(params, name) or 1) > MAX_N:
            raise bad_request(f"{name}={getattr(params, name)} must be at most {MAX_N}", name)
    return params


def field_of(message: str) -> str | None:
    """Return the name of the field with which an error's message begins, if it is one."""
    name = re.match(r"\w+", message)
    return name[0] if name and name[0] in _FIELDS else None


def _logit_bias(bias: dict[str, Any] | None) -> dict[int, Any] | None:
    try:
        return None if bias is None else {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise bad_request("logit_bias must have token ids as keys", "logit_bias") from None


def _structured_outputs(fields: Fields) -> StructuredOutputsParams | None:
    """Take "response_format", and "structured_outputs" of vLLM."""
    response_format = fields.take("response_format", dict)
    structure = fields.take("structured_outputs", dict)
    schema = None if response_format is None else _schema_of(response_format)
    if structure is not None and schema is not None:
        message = "response_format and structured_outputs can't be given both"
        raise bad_request(message, "structured_outputs")
    if structure is not None:
        inner, name = Fields(structure, path="structured_outputs."), "structured_outputs"
        values = {
            "json": inner.take("json", str, dict),
            "regex": inner.take("regex", str),
            "choice": inner.take("choice", list),
            "grammar": inner.take("grammar", str),
        }
        inner.end()
    elif schema is not None:
        values, name = {"json": schema}, "response_format"
    else:
        return None
    try:
        return StructuredOutputsParams(**values)
    except ValueError as error:
        raise bad_request(str(error), name) from None


def _schema_of(response_format: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema of answers, which are held to it, strict or not; None for texts."""
    inner = Fields(response_format, path="response_format.")
    kind = inner.take("type", str)
    if kind not in ("text", "json_object", "json_schema"):
        message = 'response_format.type must be "text", "json_object" or "json_schema"'
        raise bad_request(f"{message}, not {kind!r:.50}", "response_format.type")
    schema = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        value = inner.take("json_schema", dict, default={})
        named = Fields(value, path="response_format.json_schema.")
        schema = named.take("schema", dict)
        for name, type_ in {"name": str, "description": str, "strict": bool}.items():
            named.take(name, type_)
        named.end()
        if schema is None:
            raise bad_request("response_format.json_schema must have a schema", "response_format")
    inner.end()
    return schema


def _check_stop(texts: list[Any]) -> None:
    if len(texts) > _MAX_STOPS:
        raise bad_request(f"stop has {len(texts)} texts, must have at most {_MAX_STOPS}", "stop")
    if any(isinstance(text, str) and len(text) > _MAX_STOP_LENGTH for text in texts):
        raise bad_request(f"stop must have at most {_MAX_STOP_LENGTH} characters each", "stop")


class TextOffsets:
    """Counts the characters of a text that comes as the bytes of its tokens."""

    def __init__(self, prompt: str = "") -> None:
        """Start at the beginning of a text, which begins with this prompt."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt, self._num_characters = prompt, 0

    def add(self, data: bytes, *, is_special: bool = False) -> int:
        """Return the offset of the character with which the next token begins or goes on.

        A special token has text only where the prompt has its name.
        """
        start, decode = self._num_characters, self._decoder.decode
        if is_special and not self._prompt.startswith(data.decode(), start):
            return start
        if self._prompt[start : start + 1].strip():  # some tokenizers add a space before a text
            data = data.removeprefix(b" ")
        num_first, has_more = len(decode(data[:1])), bool(self._decoder.getstate()[0])
        self._num_characters = start + num_first + len(decode(data[1:]))
        return start + max(num_first + has_more - 1, 0)


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], num_top: int, token_bytes: TokenBytes
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        own = _chat_token(token_id, entry[token_id], token_bytes)
        top = [_chat_token(one, entry[one], token_bytes) for one in _best(entry, num_top)]
        content.append(own | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    num_top: int,
    tokenizer: TextTokenizer,
    offsets: TextOffsets,
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a text completion.

    Args:
        token_ids: of the text.
        entries: for each token; None for the first token of a prompt.
        num_top: alternatives of each token.
        tokenizer: of the tokens.
        offsets: of the tokens, where the completion's earlier ones have been.
    """
    logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    tokens, text_offset = [], []
    for token_id, entry in zip(token_ids, entries, strict=True):
        data = tokenizer.token_bytes(token_id)
        tokens.append(_text(data))
        text_offset.append(offsets.add(data, is_special=tokenizer.is_special(token_id)))
        if entry is None:
            logprobs.append(None)
            top_logprobs.append(None)
            continue
        top = _best(entry, num_top)
        logprobs.append(_finite(entry[token_id]))
        top_logprobs.append({_text(tokenizer.token_bytes(one)): _finite(entry[one]) for one in top})
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": top_logprobs if num_top else None,
        "text_offset": text_offset,
    }


def _best(entry: Entry, count: int) -> list[int]:
    return sorted(entry, key=lambda token_id: entry[token_id].rank)[:count]


def _chat_token(token_id: int, logprob: Logprob, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(token_id)
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": [*data]}


def _text(data: bytes) -> str:
    """Return the text of a token; of a part of a character its bytes, as OpenAI spells them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST)
