"""One sequence in the engine: its tokens, and how far they are computed, read and told."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field

from models.request import Completion, Logprobs, Request
from models.text_stream import TextStream
from pallas_paged import PrefixLease


@dataclass(kw_only=True, eq=False)
class Seq:
    """One continuation of a prompt: at most one row's worth of work.

    Attributes:
        request: whose it is.
        completion: what is told of it.
        tokens: prompt and new tokens, as far as the host has read them.
        limit: most tokens that it may come to.
        stop_tokens: what ends it, and is not part of it.
        stream: its text, if that is wanted.
        steered: whether the host chooses its tokens, by beam search.
        row: while it has one.
        num_spare_rows: rows that it needs beside its own before it starts, for beams to come.
        num_computed: tokens whose K/V are in its pages once all that is dispatched has run.
        num_stored: of those, the ones that the host has read a report of, and knows the pages.
        num_pending: tokens that are sampled but not read.
        pages: of its first `num_stored` tokens.
        lives: times that it has got a row.
        decoding: goes on by itself from the last token on the device.
        parked: has told what it knows, and waits for the host to choose its next token.
        lease: of the prefix cache, while it has a row.
        leader: the sequence that it is to be forked from; until then it only holds its row.
        followers: those that are to be forked from this one, when it is computed up to the last of
            its tokens.
    """

    request: Request
    completion: Completion
    tokens: list[int]
    limit: int
    stop_tokens: Container[int] = ()
    stream: TextStream | None = None
    steered: bool = False
    row: int | None = None
    num_spare_rows: int = 0
    num_computed: int = 0
    num_stored: int = 0
    num_pending: int = 0
    pages: list[int] = field(default_factory=list)
    lives: int = 0
    decoding: bool = False
    parked: bool = False
    lease: PrefixLease | None = None
    leader: Seq | None = None
    followers: list[Seq] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        """Whoever came first is served first."""
        return self.request.number, self.completion.index

    @property
    def seat(self) -> int:
        """Its row, which it must have."""
        if self.row is None:
            raise RuntimeError(f"sequence {self.order} has no row")
        return self.row

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """Of its new tokens and the stop token that ended it; -inf if there are none."""
        by_text = self.stream is not None and self.stream.stopped
        by_token = self.completion.finish_reason == "stopped" and not by_text
        count = len(self.completion.tokens) + by_token
        return self.completion.cumulative_logprob / count if count else -math.inf

    @property
    def can_decode(self) -> bool:
        return self.decoding and len(self.tokens) + self.num_pending < self.limit

    @property
    def wants_last(self) -> bool:
        """Whether all tokens but the last are computed, and the device does not have that one."""
        followed = self.decoding or self.leader is not None or bool(self.followers)
        return not followed and len(self.tokens) - self.num_computed == 1

    @property
    def num_left(self) -> int:
        """Known tokens to compute, not by decoding; a leader stops where it is to be forked."""
        if self.decoding or self.leader is not None:
            return 0
        return len(self.tokens) - bool(self.followers) - self.num_computed

    def store(self, pages: list[int], page_size: int) -> None:
        """Takes note of the pages, one a token, that its next tokens have been put in."""
        first = self.num_stored
        self.num_stored += len(pages)
        if self.num_stored <= len(self.pages) * page_size:
            return
        for block in range(len(self.pages), -(-self.num_stored // page_size)):
            self.pages.append(pages[max(block * page_size - first, 0)])

    def accept(self, token: int, logprobs: Logprobs | None) -> str | None:
        """Takes the next token; returns why that ends the sequence, if it does.

        Args:
            token: -1 if the model gave no numbers.
            logprobs: of the token, if they are needed.
        """
        completion = self.completion
        if token < 0:
            return "bad_logits"
        if logprobs is not None:
            completion.cumulative_logprob += logprobs.token
        if token in self.stop_tokens:
            return "stopped"
        self.tokens.append(token)
        completion.tokens.append(token)
        if logprobs is not None and completion.logprobs is not None:
            completion.logprobs.append(logprobs)
        if self.stream is not None:
            completion.text += self.stream.push([token])
            if self.stream.stopped:
                return "stopped"
        return "max_tokens" if len(self.tokens) >= self.limit else None

    def finish(self, reason: str) -> None:
        """Ends the sequence; its text is then complete."""
        if self.stream is not None:
            self.completion.text += self.stream.finish()
        self.completion.finish_reason = reason
