"""Log-probabilities of tokens in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from models.tokenizer import Tokenizer
from pallas_paged.engine import Logprob

_LEAST = -9999.0  # in place of minus infinity, which JSON lacks; OpenAI has the same
TokenBytes = Callable[[int], bytes]
Entry = Mapping[int, Logprob]  # the token's own first


class TextOffsets:
    """Counts the characters of a text that comes as the bytes of its tokens."""

    def __init__(self) -> None:
        """Start at the beginning of a text."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def add(self, data: bytes) -> int:
        """Return the offset of the next token, which has these bytes.

        It is that of the character of which the token has the first part or a later one.
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
    tokenizer: Tokenizer,
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
