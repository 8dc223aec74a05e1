"""Outputs of a request: completions, their tokens, text and log-probabilities."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

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


TokenLogprobs = list[tuple[int, Logprob]]  # of a token, and of the most probable in its place


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
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | None = None

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
        )

    def add(self, new: CompletionOutput) -> None:
        """Append what is new of the same completion."""
        self.text += new.text
        self.token_ids += new.token_ids
        if self.logprobs is not None:
            self.logprobs += new.logprobs or []
        self.cumulative_logprob = new.cumulative_logprob
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestOutput:
    """Completions of one request, whole or, in the outputs of a step, what is new of them.

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
