"""Text to token ids and back, through a folder's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens (BOS) that tokenizer.json adds."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out, broken UTF-8 as U+FFFD."""
        return self._tokenizer.decode(list(ids))


class StreamDecoder:
    """Decodes a stream of tokens; a character is held back until all of its bytes are there.

    The pieces returned by `push` and `finish`, joined, are the text of all the tokens.
    """

    # A character has at most 4 bytes, so the last 3 replacement characters may yet change.
    _MAX_HELD = 3
    # Tokens with no clean point in sight after which all but the newest half are forgotten, and
    # those that have no text. That half is more than a character's bytes.
    _MAX_WINDOW = 16

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        """Start after the whole text of a prompt, which is not returned."""
        self._tokenizer = tokenizer
        # Tokens since the last but one clean point: the earlier part is context, because what a
        # token decodes to (a leading space, say) depends on whether it comes first.
        self._window = list(prompt)
        self._context = len(self._window)  # tokens of the window before the last clean point
        # Characters of the window's text already returned.
        self._emitted = len(tokenizer.decode(self._window))

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that has become certain."""
        return "".join(self._push(token) for token in ids)

    def finish(self) -> str:
        """Return what was held back; the decoder is empty afterwards."""
        held = self._tokenizer.decode(self._window)[self._emitted :]
        self._window, self._context, self._emitted = [], 0, 0
        return held

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT):
            if len(self._window) - self._context <= self._MAX_HELD:
                return ""
            certain = max(len(text.rstrip(_REPLACEMENT)), len(text) - self._MAX_HELD)
            piece = text[self._emitted : certain]
            self._emitted = max(self._emitted, certain)
            self._forget(text)
            return piece
        piece = text[self._emitted :]
        if piece:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._emitted = len(self._tokenizer.decode(self._window))
        else:
            self._forget(text)
        return piece

    def _forget(self, text: str) -> None:
        """Shortens a long window between its context and its end, if nothing held back changes."""
        context, new = self._window[: self._context], self._window[self._context :]
        if len(new) < self._MAX_WINDOW:
            return
        spelled = [token for token in new if self._tokenizer.decode([token])]
        window = context + spelled[-self._MAX_WINDOW // 2 :]
        held, shorter = text[self._emitted :], self._tokenizer.decode(window)
        if shorter.endswith(held):
            self._window, self._emitted = window, len(shorter) - len(held)


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
