"""Sampling parameters of a request, and what of them a compiled step can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from pallas_paged.checks import INT32_MAX, check_flag, check_integer, check_number
from pallas_paged.engine.requests.structured_outputs import StructuredOutputsParams

MAX_SAMPLES = 16384
MAX_LOGPROBS = 20  # alternatives of a token with log-probabilities, as many as OpenAI's API has
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
POOLINGS = ("last", "mean")
_NOT_OF_BEAMS = (
    *("best_of", "stop", "logprobs", "prompt_logprobs", "return_routed_experts", "logit_bias"),
    *("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    "structured_outputs",
)
_MAX_LENGTH_PENALTY = 10  # powers of lengths stay far from overflow


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is continued. Names are vLLM's; docs/coming-from.md lists what differs.

    Values are checked at creation, and stored hashable: `stop` and `stop_token_ids` as tuples,
    `logit_bias` as pairs sorted by token id, empty where None was given.

    Attributes:
        n: completions to return, at most 16384.
        best_of: completions to sample; the `n` with the highest mean log-probability are returned.
            None samples `n`.
        beam_width: search with this many beams, at most 10, and return the `n` best; one beam is
            greedy decoding, and `temperature` and the filters are ignored. None samples.
        length_penalty: beams are ranked by log-probability / length ** length_penalty; in -10..10.
        max_tokens: most tokens of a completion; 0 computes the prompt only. None: the rest of the
            context.
        min_tokens: no stop token is sampled before this number of tokens, and a stop text
            within them ends nothing.
        temperature: divides the logits; 0, or less than the least normal f32, is greedy decoding,
            which ignores the filters.
        top_k: keep the k most probable tokens; 0 or -1 is off.
        top_p: keep the fewest most probable tokens whose probabilities sum to it; 1 is off.
        min_p: keep tokens with at least this fraction of the highest probability; 0 is off.
        presence_penalty: subtracted from the logits of generated tokens, in -2..2.
        frequency_penalty: subtracted once for each time that a token was generated, in -2..2.
        repetition_penalty: divides the positive logits and multiplies the negative logits of
            tokens in the prompt or the completion; 1 is off.
        logit_bias: added to the logits, by token id; values in -100..100.
        seed: in 0..2**32 - 1; equal seeds and prompts sample equal tokens, whatever else runs.
            None: random, and the request reports it.
        stop: a text or texts that end a completion. The completion's text ends before it.
        stop_token_ids: at most 64 tokens that end a completion, in addition to the model's end of
            sequence.
        ignore_eos: continue after the model's end of sequence.
        logprobs: number of most probable alternatives to report for each token, 0 to 20, beside the
            token's own log-probability. None reports nothing.
        prompt_logprobs: the same for the tokens of the prompt.
        return_routed_experts: whether to report the experts to which each token was routed, of a
            model with experts.
        detokenize: whether completions have text.
        structured_outputs: what the text of a completion must match; a completion that ends with
            "length", at a stop text or by one of `stop_token_ids` may be the beginning of such a
            text.

    Raises:
        ValueError: a value is out of its range, or two values exclude each other.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_integers()
        self._check_numbers()
        for name in ("ignore_eos", "return_routed_experts", "detokenize"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a bool")
        self._set("top_k", max(self.top_k, 0))
        self._set("stop", self._checked_stop())
        self._set("stop_token_ids", self._checked_stop_token_ids())
        self._set("logit_bias", self._checked_logit_bias())
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True")
        self._check_structured_outputs()
        if self.beam_width is not None:
            self._check_beams()

    @property
    def num_seqs(self) -> int:
        """Sequences that the request runs at a time."""
        return self.beam_width or self.best_of or self.n

    @property
    def ranks(self) -> bool:
        """Whether the completions to return are chosen at the end."""
        return bool(self.beam_width or self.best_of)

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one or is chosen by beam search."""
        return self.beam_width is not None or not _on_device(self.temperature)

    @property
    def needs_logprobs(self) -> bool:
        """Whether log-probabilities of new tokens are needed, to report or to rank by."""
        return self.ranks or self.logprobs is not None

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens to compute for each new one; None: not even its own logprob."""
        if self.beam_width:
            return 2 * self.beam_width  # half of them may end a beam
        return (self.logprobs or 0) if self.needs_logprobs else None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_integers(self) -> None:
        ranges = {
            "n": (1, MAX_SAMPLES),
            "best_of": (self.n, MAX_SAMPLES),
            "beam_width": (1, MAX_LOGPROBS // 2),
            "max_tokens": (0, INT32_MAX),
            "min_tokens": (0, INT32_MAX),
            "top_k": (-1, INT32_MAX),
            "seed": (0, 2**32 - 1),
            "logprobs": (0, MAX_LOGPROBS),
            "prompt_logprobs": (0, MAX_LOGPROBS),
        }
        required = {"n", "min_tokens", "top_k"}
        for name, (least, most) in ranges.items():
            if name in required or getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least, most)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}"
            )

    def _check_numbers(self) -> None:
        rules = {
            "length_penalty": (lambda x: abs(x) <= _MAX_LENGTH_PENALTY, "in -10..10"),
            "temperature": (lambda x: x >= 0, "at least 0"),
            "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
            "min_p": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
            "presence_penalty": (lambda x: abs(x) <= 2, "in -2..2"),
            "frequency_penalty": (lambda x: abs(x) <= 2, "in -2..2"),
            "repetition_penalty": (lambda x: x > 0, "above 0"),
        }
        for name, (holds, rule) in rules.items():
            value = getattr(self, name)
            check_number(name, value)
            if not holds(_on_device(value)):
                raise ValueError(f"{name}={value} must be {rule}")

    def _check_structured_outputs(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise ValueError(
                f"structured_outputs={self.structured_outputs!r:.80} must be "
                "StructuredOutputsParams"
            )
        if self.min_tokens:  # a complete text may be shorter, and nothing could follow it
            raise ValueError(
                f"min_tokens={self.min_tokens} is not possible with structured_outputs"
            )

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop={self.stop!r} must be a text or texts that are not empty")
        return stop

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:  # before a look at millions of them
            raise ValueError(
                f"stop_token_ids has {len(stop_token_ids)} tokens, must have at most "
                f"{MAX_STOP_TOKEN_IDS}"
            )
        for index, token_id in enumerate(stop_token_ids):
            check_integer(f"stop_token_ids[{index}]", token_id, 0)
        return tuple(dict.fromkeys(map(int, stop_token_ids)))

    def _checked_logit_bias(self) -> tuple[tuple[int, float], ...]:
        try:
            bias: dict[Any, Any] = dict(self.logit_bias or ())
        except (TypeError, ValueError):
            raise ValueError(
                f"logit_bias={self.logit_bias!r} must be a mapping of token ids to numbers"
            ) from None
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias has {len(bias)} tokens, must have at most {MAX_LOGIT_BIAS}"
            )
        for token_id, value in bias.items():
            check_integer("logit_bias token_id", token_id, 0)
            check_number(f"logit_bias[{token_id}]", value)
            if abs(value) > 100:
                raise ValueError(f"logit_bias[{token_id}]={value} must be in -100..100")
        return tuple(sorted((int(token_id), float(value)) for token_id, value in bias.items()))

    def _check_beams(self) -> None:
        width = f"beam_width={self.beam_width}"
        if self.n > self.num_seqs:
            raise ValueError(f"n={self.n} must be at most {width}")
        for name in _NOT_OF_BEAMS:
            if (value := getattr(self, name)) not in (getattr(SamplingParams, name), ()):
                raise ValueError(f"{name}={value!r} is not possible with {width}")
        if self.max_tokens == 0:
            raise ValueError(f"max_tokens=0 is not possible with {width}")


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How a prompt becomes a vector, in place of how it is continued. The name is vLLM's.

    Attributes:
        pooling: "last" takes the hidden state of the last token, "mean" the mean of all tokens.
        normalize: whether the vector gets the length 1.

    Raises:
        ValueError: a value is none of these.
    """

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling={self.pooling!r:.80} must be one of {', '.join(POOLINGS)}")
        check_flag("normalize", self.normalize)


# Parameters like those of requests to come. None, alone or among others, is for any request without
# structured outputs, routed experts and pooling.
WarmupParams: TypeAlias = Sequence[SamplingParams | PoolingParams | None] | None


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `SamplingParams`, with those of a model's defaults that they lack.

    Stop texts and stop tokens of the defaults are added to those that are given. Beams take the
    stop tokens only: they draw nothing, and can't have stop texts.
    """
    if "beam_width" in given:
        defaults = {name: x for name, x in defaults.items() if name == "stop_token_ids"}
    values = {**defaults, **given}
    for name in ("stop", "stop_token_ids"):
        if name in defaults and name in given:
            values[name] = as_list(defaults[name]) + as_list(given[name])
    return values


def as_list(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _on_device(value: float) -> np.float32:
    """Return a number in float32, where 1e-60 is 0; a device may take a subnormal as 0, too."""
    number = np.float32(value)
    return number if abs(number) >= np.finfo(np.float32).tiny else np.float32(0)


def _as_tuple(name: str, values: object) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise ValueError(f"{name}={values!r} must be a list")
    return tuple(values)


@dataclass(frozen=True, kw_only=True, order=True)
class SamplingMode:
    """What a compiled step can sample; hashable, for a static argument.

    A parameter that the mode leaves out is ignored, and costs nothing in the compiled program. The
    costliest parts come first, so that the smallest of several modes is the cheapest.

    Attributes:
        prompt_logprobs: as `logprobs`, of the tokens of prompts.
        penalties: rows may have penalties.
        filters: 0 = none, 1 = rows may have a top_k or a top_p, 2 = or both. Kernels take as long
            for 1 as for 2.
        logprobs: -1 = none, 0 = those of the tokens, `MAX_LOGPROBS` = those of the best tokens too.
        processors: rows may have a logit_bias or min_tokens.
        masks: rows may have structured outputs.
        pooling: chunks may be of prompts that become vectors.
        routed_experts: rows may ask for the experts of their tokens.
        draws: rows may have a temperature, and a min_p.
    """

    prompt_logprobs: int = -1
    penalties: bool = False
    filters: int = 0
    logprobs: int = -1
    processors: bool = False
    masks: bool = False
    pooling: bool = False
    routed_experts: bool = False
    draws: bool = False

    @classmethod
    def of(cls, params: SamplingParams | PoolingParams) -> SamplingMode:
        """Return the smallest mode that serves these parameters."""
        if isinstance(params, PoolingParams):
            return cls(pooling=True)
        ranked, prompt = params.beam_width or params.logprobs, params.prompt_logprobs
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        return cls(
            prompt_logprobs=-1 if prompt is None else MAX_LOGPROBS * (prompt > 0),
            penalties=penalties != (0, 0, 1),
            filters=0 if params.greedy else (params.top_k > 0) + (params.top_p < 1),
            logprobs=MAX_LOGPROBS if ranked else 0 if params.needs_logprobs else -1,
            processors=bool(params.logit_bias or params.min_tokens),
            masks=params.structured_outputs is not None,
            routed_experts=bool(params.return_routed_experts),
            draws=not params.greedy,
        )

    def __or__(self, other: SamplingMode) -> SamplingMode:
        """Return the smallest mode that covers both."""
        return SamplingMode(**{name: max(x, vars(other)[name]) for name, x in vars(self).items()})

    def covers(self, other: SamplingMode) -> bool:
        """Return whether a step of this mode serves all that one of the other mode serves."""
        return self | other == self
