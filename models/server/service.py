"""What the endpoints share: the engine, the tokenizer, limits and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from models.chat import ChatTemplate
from models.server.body import Fields
from models.server.config import ServerConfig
from models.server.errors import APIError, bad_request
from models.server.limits import Admission
from models.server.metrics import Metrics
from models.tokenizer import Tokenizer
from pallas_paged.engine import AsyncEngine, Engine

_INLINE_CHARACTERS = 4000  # texts up to this length take less time to encode than a thread to start
T = TypeVar("T")


class Service:
    """What the endpoints share.

    Attributes:
        engine: steps the model; started and stopped with the app.
        config: names and limits.
        chat_template: None where the model has none.
        sampling_defaults, chat_defaults: fields of `SamplingParams` for prompts and for chats that
            lack them; a chat's own stop texts and stop tokens are added to them.
        max_model_len, vocab_size: of the model.
        admission, metrics: of this server.
        is_draining: whether new requests are refused, because the server shuts down.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        chat_defaults: Mapping[str, Any] | None = None,
    ):
        """Take over an engine, whose tokenizer is the same one."""
        self.engine = AsyncEngine(engine)
        self.config, self.chat_template = config, chat_template
        self.sampling_defaults = dict(sampling_defaults or {})
        self.chat_defaults = (
            self.sampling_defaults if chat_defaults is None else dict(chat_defaults)
        )
        self.max_model_len, self.vocab_size = engine.max_model_len, vocab_size
        num_running = engine.config.max_num_seqs * engine.config.data_parallel
        self.admission = Admission(num_running + config.max_queue)
        self.metrics = Metrics(self.engine, config)
        self.is_draining = False
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
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

    def take_model(self, fields: Fields) -> None:
        """Take the name of the model; raise an APIError for another one."""
        name = fields.take("model", str, default=self.config.model_name)
        self.check_model(name)

    def check_model(self, name: str) -> None:
        """Raise an APIError if this is not the model."""
        if name != self.config.model_name:
            message = f"there is no model {name!r:.100}, only {self.config.model_name!r}"
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
