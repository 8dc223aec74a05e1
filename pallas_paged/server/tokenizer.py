"""Tokenizers, with what the endpoints use of them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pallas_paged.engine import Tokenizer
from pallas_paged.server.answer_format import MARKERS

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# Bytes by the printable characters with which byte-level tokenizers spell them (as GPT-2 did).
BYTE_OF_SYMBOL = {chr(byte): byte for byte in sorted(_PRINTABLE)} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}


class TextTokenizer(Protocol):
    """What the endpoints use of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], /) -> str: ...
    def is_special(self, token_id: int) -> bool: ...
    def token_bytes(self, token_id: int) -> bytes: ...


def text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """Return a tokenizer with the methods that it may lack."""
    if hasattr(tokenizer, "token_bytes") and hasattr(tokenizer, "is_special"):
        return tokenizer
    if hasattr(tokenizer, "backend_tokenizer") or hasattr(tokenizer, "to_str"):
        return HFTokenizer(tokenizer)
    return _PlainTokenizer(tokenizer)


class HFTokenizer:
    """A tokenizer of the library tokenizers, or a fast one of transformers, for the engine.

    Its texts have no special tokens, as the engine expects, but for the markers of calls and of
    reasoning, such as `[TOOL_CALLS]`: the server looks for them.
    """

    def __init__(self, tokenizer: Any):
        """Take a copy, without the truncation and the padding that training may have set.

        Args:
            tokenizer: a `tokenizers.Tokenizer`, or an object that has one as `backend_tokenizer`.

        Raises:
            ValueError: it is neither.
        """
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not (hasattr(inner, "to_str") and hasattr(inner, "get_added_tokens_decoder")):
            raise ValueError(
                f"{tokenizer=} must be a tokenizers.Tokenizer or a fast tokenizer of transformers"
            )
        contents = json.loads(inner.to_str())
        for token in contents["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in MARKERS
        self._tokenizer = type(inner).from_str(json.dumps(contents))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = self._tokenizer.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._added = self._tokenizer.get_added_tokens_decoder()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, such as "</s>"; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: names of special tokens in it become those tokens.
            add_special_tokens: add those that tokenizer.json adds (BOS); False suits a text that
                has them already, such as the result of a chat template.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, broken UTF-8 as U+FFFD."""
        return self._tokenizer.decode(list(token_ids))

    def is_special(self, token_id: int) -> bool:
        """Return whether this is a special token, which `decode` leaves out."""
        token = self._added.get(token_id)
        return token is not None and token.special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character.

        A special token has those of its name, and an id without a token has none.
        """
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._added:
            return (token or "").encode()
        if self._is_byte_level:
            return b"".join(
                bytes([BYTE_OF_SYMBOL[x]]) if x in BYTE_OF_SYMBOL else x.encode() for x in token
            )
        if _BYTE_TOKEN.fullmatch(token):  # as SentencePiece spells a byte without a token
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


class _PlainTokenizer:
    """A tokenizer that only has what the engine needs."""

    def __init__(self, tokenizer: Tokenizer):
        self.decode = tokenizer.decode
        self._encode: Callable[..., Sequence[int]] = tokenizer.encode
        self._adds = "add_special_tokens" in inspect.signature(tokenizer.encode).parameters

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        options = {"add_special_tokens": add_special_tokens} if self._adds else {}
        return [int(token_id) for token_id in self._encode(text, **options)]

    def is_special(self, token_id: int) -> bool:
        return not self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()
