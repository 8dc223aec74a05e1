"""Tokens of any library's tokenizer, and their log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import codecs
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pallas_paged.engine import Logprob, Tokenizer
from pallas_paged.server.answer_parser import MARKERS

_LEAST = -9999.0  # in place of minus infinity, which JSON lacks; OpenAI has the same
TokenBytes = Callable[[int], bytes]
Entry = Mapping[int, Logprob]  # the token's own first
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


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
            byte_of = _bytes_of_symbols()
            return b"".join(byte_of.get(symbol, symbol.encode()) for symbol in token)
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


class TextOffsets:
    """Counts the characters of a text that comes as the bytes of its tokens."""

    def __init__(self) -> None:
        """Start at the beginning of a text."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def add(self, data: bytes) -> int:
        """Return the offset of the next token, which has these bytes.

        A token that has a part of a character has the offset of that character.
        """
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(data))
        return offset


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], num_top: int, token_bytes: TokenBytes
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = _best(entry, num_top)
        own = _chat_token(token_id, entry[token_id], token_bytes)
        content.append(
            own | {"top_logprobs": [_chat_token(one, entry[one], token_bytes) for one in top]}
        )
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
        tokenizer: of the tokens; special ones have no part of the text.
        offsets: of the tokens, where the completion's earlier ones have been.
    """
    logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    tokens, text_offset = [], []
    for token_id, entry in zip(token_ids, entries, strict=True):
        data = tokenizer.token_bytes(token_id)
        tokens.append(_text(data))
        text_offset.append(offsets.add(b"" if tokenizer.is_special(token_id) else data))
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


def byte_symbols() -> list[str]:
    """The printable character by which byte-level tokenizers spell each byte (as GPT-2 did)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@functools.cache
def _bytes_of_symbols() -> dict[str, bytes]:
    return {symbol: bytes([byte]) for byte, symbol in enumerate(byte_symbols())}
