"""Text to token ids and back, through a folder's tokenizer.json."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, folder: str | Path):
        """Read `folder`/tokenizer.json.

        Raises:
            ValueError: if the file is missing or not a tokenizer.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: {error}") from error
        # Settings of a training run that the file may have kept: a prompt is taken whole.
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
        """Return the text of token ids, special tokens left out, broken UTF-8 as U+FFFD."""
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


def save_byte_tokenizer(folder: str | Path, *, max_length: int) -> None:
    """Write the tokenizer of a byte-level model: 256 tokens, the id of each is its byte.

    Args:
        folder: gets tokenizer.json and the tokenizer_config.json with which transformers'
            AutoTokenizer loads it.
        max_length: positions of the model, for tokenizer_config.json.
    """
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    path = Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _byte_symbols() -> list[str]:
    """The printable character by which byte-level tokenizers spell each byte (as GPT-2 did)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@functools.cache
def _bytes_of_symbols() -> dict[str, bytes]:
    return {symbol: bytes([byte]) for byte, symbol in enumerate(_byte_symbols())}
