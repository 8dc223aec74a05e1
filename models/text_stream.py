"""The text of one sample as it grows, up to where a stop text cuts it off."""

from __future__ import annotations

from collections.abc import Sequence

from models.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
