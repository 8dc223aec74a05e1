"""What is asked of the engine and what comes of it: sampling parameters, requests, completions."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

_MAX_PENALTY = 10  # far beyond use, and far from where powers of lengths overflow
MAX_LOGPROBS = 20  # most alternatives a token is told with, as many as OpenAI's API has


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is continued; checked when it is made.

    Attributes:
        max_tokens: tokens after which a completion ends, at least 1.
        n: completions to return.
        best_of: completions to draw, of which the n with the highest mean log-probability are
            returned; None draws n.
        beam_width: None samples; else beam search, greedy for one beam, which returns the n best.
        length_penalty: a finished beam is ranked by log-probability / length ** length_penalty; at
            most 10 in size.
        temperature: 0 is greedy, which ignores the filters.
        top_k: keep the k most probable tokens; 0 is off.
        top_p: keep the smallest set of probability top_p; 1 is off.
        min_p: keep tokens of min_p times the highest probability; 0 is off.
        seed: same seed and prompt, same draws, whatever else runs; None takes the number
            of the request.
        stop: texts that end a completion, and are not part of it, or None.
        stop_tokens: tokens that end a completion, and are not part of it; None takes the model's
            end of sequence.
        logprobs: None tells none; k tells that of each token and those of the k best.

    Raises:
        ValueError: a value is out of its range, or two exclude one another.
    """

    max_tokens: int = 256
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | None = None
    stop_tokens: Sequence[int] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, 1)
        check_integer("n", self.n, 1)
        check_integer("top_k", self.top_k, 0)
        if self.best_of is not None:
            check_integer("best_of", self.best_of, self.n)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**32 - 1)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("temperature", "top_p", "min_p", "length_penalty"):
            check_number(name, getattr(self, name))
        # As the device has them: 1e-60 is 0 there.
        temperature, top_p, min_p = map(np.float32, (self.temperature, self.top_p, self.min_p))
        if not temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= min_p < 1:
            raise ValueError(f"min_p={self.min_p} must be at least 0 and below 1")
        if abs(self.length_penalty) > _MAX_PENALTY:
            raise ValueError(
                f"length_penalty={self.length_penalty} must be in -{_MAX_PENALTY}..{_MAX_PENALTY}"
            )
        if self.stop is not None:
            stop = _tuple("stop", self.stop)
            if isinstance(self.stop, str) or not all(isinstance(x, str) and x for x in stop):
                raise ValueError(f"stop={self.stop!r} must be texts that are not empty")
            object.__setattr__(self, "stop", stop)
        if self.stop_tokens is not None:
            stop_tokens = _tuple("stop_tokens", self.stop_tokens)
            for token in stop_tokens:
                check_integer("stop token", token, 0, 2**31 - 1)
            object.__setattr__(self, "stop_tokens", stop_tokens)
        if self.beam_width is not None:
            # Each beam asks for the best of twice the width, half of which may end it.
            check_integer("beam_width", self.beam_width, self.n, MAX_LOGPROBS // 2)
            if self.temperature or self.best_of is not None:
                raise ValueError(
                    f"beam_width={self.beam_width} excludes temperature={self.temperature} and"
                    f" best_of={self.best_of}"
                )
            if self.stop or self.logprobs is not None:
                raise ValueError(
                    f"beam_width={self.beam_width} excludes stop={self.stop!r} and"
                    f" logprobs={self.logprobs}: beams end by tokens, and rank by their sum"
                )

    @property
    def num_rows(self) -> int:
        """Sequences that run at a time."""
        return self.beam_width or self.best_of or self.n

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are needed, to be told or to rank by."""
        return bool(self.beam_width or self.best_of) or self.logprobs is not None

    @property
    def filtered(self) -> bool:
        """Whether a filter narrows what is drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities before temperature and filters: of the token, and of the best ones."""

    token: float
    top: dict[int, float]


@dataclass(kw_only=True, eq=False)
class Completion:
    """One continuation of a prompt, as far as it is known.

    Attributes:
        index: which of the request's.
        tokens: without the stop token, and up to the one that completed a stop text.
        text: of the tokens, up to a stop text; what may yet become one is held back. Empty without
            a tokenizer.
        logprobs: one for each token, if they were asked for.
        cumulative_logprob: of all tokens and the stop token, where the request needs it
            (`best_of`, `beam_width`, `logprobs`); else 0.
        finish_reason: None while it runs; "stopped" (a stop token or text), "max_tokens",
            "aborted", "bad_logits" (the model gave NaN or infinite scores) or "failed".
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt in the engine's hands.

    Attributes:
        number: counts the engine's requests; the order in which they are served.
        prompt: token ids.
        params: as submitted.
        seed: that of `params`, or what the engine chose.
        completions: `n` of them, best first where they are ranked, which is known at the end.
        error: what went wrong, where a finish reason is "failed".
        num_cached_tokens: of the prompt, those found in the prefix cache when it first started.
        num_preemptions: times a sequence of it lost its pages and was computed again.
        arrival, first_token_time, finish_time: on the clock of `time.perf_counter`, or None.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    completions: list[Completion] = field(default_factory=list)
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None
    finish_time: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_time is not None


@dataclass(frozen=True, kw_only=True)
class News:
    """What a completion has gained: tokens and text since the last news, and how it ended."""

    request: Request = field(repr=False)
    index: int
    tokens: list[int]
    text: str
    finish_reason: str | None

    @classmethod
    def since(cls, completion: Completion, request: Request, tokens: int, characters: int) -> News:
        """What a completion has gained since it had so many tokens and characters."""
        return cls(
            request=request,
            index=completion.index,
            tokens=completion.tokens[tokens:],
            text=completion.text[characters:],
            finish_reason=completion.finish_reason,
        )


def check_integer(name: str, value: object, least: int, most: int = 2**31 - 1) -> None:
    """Raises ValueError unless a value is an integer in a range."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} must be an integer in {least}..{most}")


def check_number(name: str, value: object) -> None:
    """Raises ValueError unless a value is a number that f32 has."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    largest = float(np.finfo(np.float32).max)
    if not is_number or isinstance(value, bool) or not -largest <= value <= largest:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} must be a finite number")


def _tuple(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} must be a list")
    return tuple(values)


def token_ids(prompt: str | Sequence[int], tokenizer: Tokenizer | None) -> list[int]:
    """The tokens of a prompt, which is a text or token ids.

    Raises:
        ValueError: it is neither, or a text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a prompt that is a text needs a tokenizer")
        prompt = tokenizer.encode(prompt)
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise ValueError("the prompt must be a text or integers, its tokens") from None
