"""The text of one sample as it grows, up to where a stop text cuts it off."""

from __future__ import annotations

from collections.abc import Sequence

from models.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """The text of one sample as it grows; ends before the first of the stop texts.

    What may be the beginning of a stop text, or of a character, is held back until that is known.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]):
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False
        self._stops = stops
        self._told = 0
        # Some tokens read otherwise at the beginning of a text.
        self._decoder = StreamDecoder(tokenizer, prompt)

    def push(self, tokens: Sequence[int]) -> str:
        """Takes tokens, up to the one that completes a stop text, and returns new certain text."""
        for token in tokens:
            if self.stopped:
                break
            self.tokens.append(token)
            self._add(self._decoder.push([token]))
        held = 0 if self.stopped else max((self._overlap(stop) for stop in self._stops), default=0)
        return self._tell(len(self.text) - held)

    def finish(self) -> str:
        """Returns what was held back."""
        if not self.stopped:
            self._add(self._decoder.finish())
        return self._tell(len(self.text))

    def _add(self, piece: str) -> None:
        self.text += piece
        found = [at for stop in self._stops if (at := self.text.find(stop, self._told)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _overlap(self, stop: str) -> int:
        """Characters at the end of the text that a stop text begins with."""
        longest = min(len(stop) - 1, len(self.text) - self._told)
        return next((n for n in range(longest, 0, -1) if self.text.endswith(stop[:n])), 0)

    def _tell(self, end: int) -> str:
        piece, self._told = self.text[self._told : end], end
        return piece
