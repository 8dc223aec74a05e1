"""What the engine needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Return the token ids of a prompt, with the special tokens that begin it."""
        ...

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Return the text of token ids, special tokens left out, broken UTF-8 as U+FFFD."""
        ...
