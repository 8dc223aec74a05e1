"""Outputs of a request: completions, their tokens, text and log-probabilities."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, overload

import numpy as np

FinishReasonName = Literal["stop", "length", "abort", "error"]


class FinishReason(enum.IntEnum):
    """Why a completion ended, as a number for arrays; `str()` is the word used elsewhere."""

    STOP = 0  # by the end of sequence, a stop token or a stop text
    LENGTH = 1  # by max_tokens or the end of the context
    ABORT = 2
    ERROR = 3  # the logits were NaN or infinite, or the tokenizer failed

    def __str__(self) -> str:
        return self.name.lower()


class Logprob(NamedTuple):
    """Log-probability of a token under the raw logits, before temperature and filters.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most probable token of the vocabulary.
    """

    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a token, and of the most probable ones in its place, best first."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]

    @property
    def top(self) -> Iterator[tuple[int, float]]:
        """The most probable tokens, each with its log-probability."""
        return zip(self.top_token_ids, self.top_logprobs, strict=True)

    def by_token(self) -> dict[int, Logprob]:
        """Return them by token id, the token itself first."""
        best = {token: Logprob(x, rank) for rank, (token, x) in enumerate(self.top, 1)}
        return {self.token_id: Logprob(self.logprob, self.rank), **best}


@dataclass(eq=False, repr=False)
class LogprobSequence(Sequence[dict[int, Logprob]]):
    """For each of some tokens its `Logprob` and those of the most probable, by token id.

    The dicts are made when they are read: kept, they would be millions of objects, which Python's
    garbage collector goes through again and again.

    Attributes:
        token_ids, logprobs, ranks: of each token.
        top_token_ids, top_logprobs: of the most probable in its place, best first; each token has
            as many.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)

    def append(self, token: TokenLogprobs) -> None:
        """Add a token."""
        self.token_ids.append(token.token_id)
        self.logprobs.append(token.logprob)
        self.ranks.append(token.rank)
        self.top_token_ids += token.top_token_ids
        self.top_logprobs += token.top_logprobs

    def extend(self, other: LogprobSequence) -> None:
        """Add the tokens of another one."""
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        self.top_token_ids += other.top_token_ids
        self.top_logprobs += other.top_logprobs

    def token(self, index: int) -> TokenLogprobs:
        """Return what is known of a token."""
        top = self._top(index)
        return TokenLogprobs(
            self.token_ids[index],
            self.logprobs[index],
            self.ranks[index],
            self.top_token_ids[top],
            self.top_logprobs[top],
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobSequence: ...
    def __getitem__(self, index: Any) -> dict[int, Logprob] | LogprobSequence:
        places = range(len(self))[index]
        if not isinstance(index, slice):
            return self.token(places).by_token()
        tops = [*map(self._top, places)]
        return LogprobSequence(
            self.token_ids[index],
            self.logprobs[index],
            self.ranks[index],
            [x for top in tops for x in self.top_token_ids[top]],
            [x for top in tops for x in self.top_logprobs[top]],
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    def __repr__(self) -> str:
        return repr([*self])

    def _top(self, index: int) -> slice:
        """Where the most probable tokens of one are."""
        num_top = len(self.top_token_ids) // len(self)
        return slice(index * num_top, (index + 1) * num_top)


@dataclass(kw_only=True, eq=False)
class CompletionOutput:
    """One completion of a request, so far or, in the outputs of a step, what is new of it.

    Attributes:
        index: of the completion within its request.
        text: of the tokens, up to a stop token or stop text; the possible beginning of a stop text
            is held back while the completion runs. Empty without a tokenizer.
        token_ids: with the stop token that ended it, or up to the token that completed a stop text.
        cumulative_logprob: sum over the tokens; None if the request does not need
            log-probabilities.
        logprobs: for each token, the sampled token's first, then the most probable; None if the
            request does not ask for them.
        finish_reason: None while the completion runs.
        stop_reason: the stop text or the stop token's id that ended it; None for all other ends,
            the end of sequence included.
        routed_experts: `i16[prompt + tokens - 1, layers with experts, k]`, the experts of each
            token but the last, which the model did not compute; -1 where an abort came before.
            None while the completion runs, if the request does not ask for them, or if the model
            reports none.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: LogprobSequence | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | None = None
    routed_experts: np.ndarray | None = None

    def since(self, num_tokens: int, num_characters: int) -> CompletionOutput:
        """Return what is new since it had these numbers of tokens and characters."""
        return CompletionOutput(
            index=self.index,
            text=self.text[num_characters:],
            token_ids=self.token_ids[num_tokens:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[num_tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            routed_experts=self.routed_experts,
        )

    def add(self, new: CompletionOutput) -> None:
        """Append what is new of the same completion."""
        self.text += new.text
        self.token_ids += new.token_ids
        if self.logprobs is not None and new.logprobs is not None:
            self.logprobs.extend(new.logprobs)
        self.cumulative_logprob = new.cumulative_logprob
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        self.routed_experts = new.routed_experts


@dataclass(kw_only=True, eq=False)  # not frozen: that takes three times as long to make
class RequestOutput:
    """Completions of one request, complete or, in the outputs of a step, what is new of them.

    Attributes:
        request_id: of the request.
        prompt: text of the prompt; None if it was given as token ids.
        prompt_token_ids: token ids of the prompt.
        prompt_logprobs: for each token of the prompt, None for the first; None if the request does
            not ask for them.
        outputs: the completions, the best first where the request ranks them.
        finished: whether all completions have ended.
        num_cached_tokens: tokens of the prompt that the prefix cache had.
        seed: with which the completions were sampled.
        error: message of the failure where a finish reason is "error".
        restarted: earlier outputs of this request are void, because the weights were replaced.
        embedding: `f32[E]`, what the prompt became; None before, and without `PoolingParams`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    seed: int
    error: str | None = None
    restarted: bool = False
    embedding: np.ndarray | None = None

    def add(self, new: RequestOutput) -> RequestOutput:
        """Return this output and the one after it as one; both change."""
        if new.restarted:
            return new
        outputs = {output.index: output for output in self.outputs}
        for output in new.outputs:
            if (earlier := outputs.setdefault(output.index, output)) is not output:
                earlier.add(output)
        new.outputs[:] = outputs.values()
        return replace(new, restarted=True) if self.restarted else new
