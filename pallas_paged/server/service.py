"""What the endpoints share: the engine, the tokenizer, names, limits and metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from pallas_paged.checks import check_flag, check_has, check_integer, check_number
from pallas_paged.engine import AsyncEngine, PoolingParams, SamplingParams, Tokenizer
from pallas_paged.server.answer_format import PARSERS, find_formats
from pallas_paged.server.chat_template import ChatTemplate
from pallas_paged.server.fields import APIError, Bodies, Fields, bad_request, read_fields
from pallas_paged.server.metrics import Metrics
from pallas_paged.server.tokenizer import TextTokenizer, text_tokenizer

_INLINE_CHARACTERS = 4000  # texts up to this length take less time to encode than a thread to start
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Names and limits of a server.

    Attributes:
        served_model_name: of the model in requests and answers.
        api_keys: a request must have one of these keys; empty: requests need none.
        allowed_hosts: the header Host must be one of these names, without its port; empty: any.
        allow_priority: whether a request may have a priority, and so pass others.
        tool_call_parser: how the model writes calls of tools: a name that docs/server.md lists,
            "auto" (by the text of the chat template), or "none".
        reasoning_parser: how it writes its reasoning: likewise.
        pooling: how the model makes a vector of a prompt, as in `PoolingParams`.
        max_body_bytes: most bytes of a request's body.
        max_total_body_bytes: most bytes of all bodies that are being read; more requests get status
            503.
        max_queue: most sequences that wait for a slot of the engine; more requests get status 429.
        max_connections: most open connections; more get status 503.
        request_timeout: most seconds that a request takes, its time in the queue included.
        drain_timeout: seconds that a shutdown waits for requests before it aborts them.

    Raises:
        ValueError: a value is out of its range.
    """

    served_model_name: str = "model"
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allow_priority: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    pooling: Literal["last", "mean"] = "last"
    max_body_bytes: int = 8 << 20
    max_total_body_bytes: int = 256 << 20
    max_queue: int = 1024
    max_connections: int = 4096
    request_timeout: float = 600.0
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not (isinstance(self.served_model_name, str) and self.served_model_name):
            raise ValueError(
                f"served_model_name={self.served_model_name!r} must be a text that is not empty"
            )
        for name in ("api_keys", "allowed_hosts"):
            values = getattr(self, name)  # not in the message: keys are secret
            if not isinstance(values, tuple) or not all(map(_is_ascii_text, values)):
                raise ValueError(f"{name} must be a tuple of ASCII texts that are not empty")
        for host in self.allowed_hosts:
            if re.search(r":\d*$", host):
                raise ValueError(f"allowed_hosts has {host!r}, which must be without a port")
        check_flag("allow_priority", self.allow_priority)
        for name, parsers in PARSERS.items():
            if (value := getattr(self, name)) not in parsers:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(parsers)}")
        PoolingParams(pooling=self.pooling)
        for name in ("max_body_bytes", "max_total_body_bytes", "max_connections"):
            check_integer(name, getattr(self, name), 1)
        check_integer("max_queue", self.max_queue, 0)
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            check_number(name, value)
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")


class Admission:
    """Counts the sequences that the engine runs or queues, and refuses those beyond a limit.

    Attributes:
        num_seqs: sequences of admitted requests.
        num_requests: admitted requests.
    """

    def __init__(self, max_seqs: int):
        """Admit up to `max_seqs` sequences at a time."""
        self.num_seqs = self.num_requests = 0
        self._max_seqs = max_seqs

    @contextmanager
    def admit(self, num_seqs: int) -> Iterator[None]:
        """Count sequences until the block ends.

        Raises:
            APIError: the queue is full, or can never hold them.
        """
        if num_seqs > self._max_seqs:
            raise bad_request(
                f"a request for {num_seqs} sequences is more than the {self._max_seqs} that fit"
                " the queue"
            )
        if self.num_seqs + num_seqs > self._max_seqs:
            raise APIError(
                429,
                f"the queue is full: {self.num_seqs} sequences are running or waiting",
                headers={"retry-after": "1"},
            )
        self.num_seqs += num_seqs
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_seqs -= num_seqs
            self.num_requests -= 1


class Service:
    """What the endpoints share.

    Attributes:
        engine: steps the model; started and stopped with the app.
        config: names and limits.
        chat_template: None where the model has none.
        sampling_defaults, chat_defaults: fields of `SamplingParams` for prompts and for chats that
            lack them; a chat's own stop texts and stop tokens are added to them.
        calls, reasoning: how the model writes them, None where that is not known.
        max_model_len, vocab_size: of the model.
        admission, metrics: of this server.
        is_draining: whether new requests are refused, because the server shuts down.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | str | Callable[..., str] | None = None,
        *,
        config: ServerConfig | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        chat_defaults: Mapping[str, Any] | None = None,
    ):
        """Take over an engine that is not started; arguments and errors are `create_app`'s."""
        if not isinstance(engine, AsyncEngine):
            raise ValueError(f"{engine=} must be an AsyncEngine")
        if not isinstance(config, ServerConfig | None):
            raise ValueError(f"{config=} must be a ServerConfig")
        inner = engine.engine
        if tokenizer is None:
            tokenizer = inner.tokenizer
        elif inner.tokenizer is None:
            raise ValueError("the engine must have the tokenizer too: Engine(tokenizer=...)")
        else:
            check_has("tokenizer", tokenizer, "encode", "decode")
        if chat_template is not None and tokenizer is None:
            raise ValueError("a chat_template needs a tokenizer, and the engine has none")
        if not isinstance(chat_template, ChatTemplate | None):
            chat_template = ChatTemplate(chat_template)
        self.engine, self.chat_template = engine, chat_template
        self.config = config = config or ServerConfig()
        self.calls, self.reasoning = find_formats(
            "" if chat_template is None else chat_template.source,
            config.tool_call_parser,
            config.reasoning_parser,
        )
        self.sampling_defaults = _checked_defaults("sampling_defaults", sampling_defaults)
        self.chat_defaults = self.sampling_defaults
        if chat_defaults is not None:
            self.chat_defaults = _checked_defaults("chat_defaults", chat_defaults)
        self.max_model_len, self.vocab_size = inner.max_model_len, inner.model.vocab_size
        num_running = inner.config.max_num_seqs * inner.config.data_parallel_size
        self.admission = Admission(num_running + config.max_queue)
        self.metrics = Metrics(engine, config.served_model_name)
        self.is_draining = False
        self._bodies = Bodies(config.max_total_body_bytes)
        self._tokenizer = None if tokenizer is None else text_tokenizer(tokenizer)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer.

        Raises:
            APIError: there is none.
        """
        if self._tokenizer is None:
            raise bad_request("the model has no tokenizer: give token ids in place of texts")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    async def read_fields(self, request: Request) -> Fields:
        """Return the fields of a request's JSON object; errors as of `fields.read_fields`."""
        return await read_fields(request, self.config.max_body_bytes, self._bodies)

    def take_model(self, fields: Fields) -> None:
        """Take the name of the model; raise an APIError for another one."""
        name = fields.take("model", str, default=self.config.served_model_name)
        self.check_model(name)

    def check_model(self, name: str) -> None:
        """Raise an APIError if this is not the model."""
        if name != self.config.served_model_name:
            message = f"there is no model {name!r:.100}, only {self.config.served_model_name!r}"
            raise APIError(404, message, param="model", code="model_not_found")

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises:
            APIError: it is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad_request("a text must be valid Unicode; it has lone surrogates") from None
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_token_ids(self, token_ids: list[Any], name: str) -> None:
        """Raise an APIError for a list with anything but token ids."""
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                rule = f"token ids in 0..{self.vocab_size - 1}"
                raise bad_request(f"{name} must have {rule}, not {token_id!r:.50}", name)

    async def encode(self, function: Callable[[], T], num_characters: int) -> T:
        """Call a function that encodes texts of this length; long ones in a thread."""
        if num_characters <= _INLINE_CHARACTERS:
            return function()
        return await asyncio.to_thread(function)


def _is_ascii_text(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value != ""


def _checked_defaults(name: str, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    defaults = dict(defaults or {})
    try:
        SamplingParams(**defaults)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={defaults}: {error}") from None
    return defaults
