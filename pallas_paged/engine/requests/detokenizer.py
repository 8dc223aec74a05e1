"""What the engine needs of a tokenizer, and the text of a completion as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 3  # a character has at most 4 bytes, so the last 3 tokens or replacements may change
# Tokens of the prompt that are context, and tokens without a clean point after which all but the
# newest half and those without text are dropped. Half of it is more than a character's bytes.
_MAX_CONTEXT = 16


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Return the token ids of a prompt, with the special tokens that begin it."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Return the text of token ids, special tokens left out, broken UTF-8 as U+FFFD."""


class IncrementalDetokenizer:
    """Decodes a completion as its tokens arrive; its text ends before the first stop text.

    One that is complete within the first `min_tokens` tokens ends nothing. The possible beginning
    of a stop text or of a character is held back until it is certain. The texts that `push` and
    `finish` return, joined, are what the tokens add to the prompt's text. Exceptions of the
    tokenizer pass through.

    Attributes:
        num_tokens: tokens taken; those after the one that completed a stop text are not.
        stop_reason: the stop text that was found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """Start after the prompt, whose last tokens are context for the decoding."""
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self._tokenizer, self._prompt = tokenizer, prompt_token_ids
        self._stop, self._min_tokens = tuple(stop), min_tokens
        self._held = ""  # decoded, but a stop text may begin in it

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens, up to the one that completes a stop text, and return new certain text."""
        text = ""
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            piece = self._decoder.push(token_id)
            self.num_tokens += 1
            text += self._certain(piece) if self._stop else piece
        return text

    def finish(self) -> str:
        """Return what was held back."""
        if self.stop_reason is not None or not self.num_tokens:
            return ""
        return self._certain(self._decoder.finish(), last=True)

    @cached_property
    def _decoder(self) -> _StreamDecoder:
        """Made for the first token: it decodes the end of the prompt, which takes its time."""
        return _StreamDecoder(self._tokenizer, self._prompt)

    def _certain(self, piece: str, *, last: bool = False) -> str:
        """Take decoded text; return what is new up to a stop text, or to where one may begin."""
        text, found = self._held + piece, []
        if self.num_tokens > self._min_tokens:
            for stop in self._stop:  # those that end in the piece
                first = max(len(self._held) + 1 - len(stop), 0)
                if (at := text.find(stop, first)) >= 0:
                    found.append((at, len(stop), stop))
        if found:
            end, _, self.stop_reason = min(found)
            self._held = ""
        else:
            overlaps = (overlap(text, stop) for stop in self._stop)
            end = len(text) - (0 if last else max(overlaps, default=0))
            self._held = text[end:]
        return text[:end]


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` with which `marker` begins."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


class _StreamDecoder:
    """Decodes tokens one by one; holds a character back until all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # Tokens since the last but one clean point. The earlier ones are context, because what a
        # token decodes to (a leading space, say) depends on whether it comes first.
        self._window, num_held = self._split(prompt)
        self._context = len(self._window) - num_held  # tokens before the last clean point
        self._emitted = len(tokenizer.decode(self._window[: self._context]))
        # Text of the prompt's tokens after its last clean point: not part of the completion.
        text = tokenizer.decode(self._window)
        self._of_prompt = text[self._emitted :]
        self._length = len(text)  # of the window's text

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that has become certain."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        # Where each byte of an incomplete character is one, fewer of them are in the text itself.
        is_shorter, self._length = len(text) < self._length, len(text)
        if text.endswith(_REPLACEMENT) and not is_shorter:
            certain = len(text.rstrip(_REPLACEMENT))
            if len(self._window) - self._context > _MAX_HELD:
                certain = max(certain, len(text) - _MAX_HELD)
            piece = text[self._emitted : certain]
            self._emitted = max(self._emitted, certain)
            self._shorten(text)
        elif piece := text[self._emitted :]:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._emitted = self._length = len(self._tokenizer.decode(self._window))
            if self._of_prompt:
                piece, self._of_prompt = self._without_prompt(piece), ""
            return piece
        else:
            self._shorten(text)
        return self._without_prompt(piece)

    def finish(self) -> str:
        """Return what was held back; the decoder is empty afterwards."""
        piece = self._tokenizer.decode(self._window)[self._emitted :]
        self._window, self._context, self._emitted = [], 0, 0
        return self._without_prompt(piece)

    def _split(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """Return the prompt's last tokens, and the number of them after the last clean point.

        Both edges are sought between characters. Some tokenizers decode a run of bytes as a whole,
        and make all of it replacement characters if it is cut elsewhere.
        """
        decode = self._tokenizer.decode
        end = len(prompt)
        while end > 0 and not decode(list(prompt[max(end - _MAX_CONTEXT, 0) : end])):
            end -= _MAX_CONTEXT  # no text: special tokens
        end = end if end > 0 else len(prompt)
        first = max(end - _MAX_CONTEXT, 0)
        for start in range(first, max(first - _MAX_HELD, 0) - 1, -1):
            window = list(prompt[start:end])
            for num_held in range(min(_MAX_HELD, len(window)) + 1):
                text = decode(window[: len(window) - num_held])
                if text.endswith(_REPLACEMENT) or (start and text.startswith(_REPLACEMENT)):
                    continue
                # Fewer characters than tokens: a character of several tokens, which is complete.
                complete = len(decode(window)) - len(text) < num_held
                return window, 0 if complete else num_held
        return list(prompt[first:end]), 0

    def _without_prompt(self, piece: str) -> str:
        """Remove the text of the prompt's end, or the character that the prompt began."""
        while self._of_prompt and piece:
            same = piece[0] == self._of_prompt[0]
            piece, self._of_prompt = piece[1:], self._of_prompt[1:] if same else ""
        return piece

    def _shorten(self, text: str) -> None:
        """Shorten a long window between its context and its end, if its held text stays equal."""
        context, new = self._window[: self._context], self._window[self._context :]
        if len(new) < _MAX_CONTEXT:
            return
        spelled = [token for token in new if self._tokenizer.decode([token])]
        window = context + spelled[-_MAX_CONTEXT // 2 :]
        held, shorter = text[self._emitted :], self._tokenizer.decode(window)
        if shorter.endswith(held):
            self._window, self._emitted = window, len(shorter) - len(held)
            self._length = len(shorter)
