"""Requests of a serving run: arrival, prompt and output length of each."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_paged.engine import SamplingParams

# Means of ShareGPT from the PagedAttention paper (Kwon et al., 2023, figure 11), which has no other
# numbers. The sigmas are chosen to reach from a few tokens to over a thousand, as in the figure.
_PROMPT_MEAN, _PROMPT_SIGMA = 161.0, 1.0
_OUTPUT_MEAN, _OUTPUT_SIGMA = 338.0, 0.8
_MIN_LEN = 4
_NANO_LAST_TOKEN, _NANO_TEMPERATURE = 10000, 0.6
_FULL_LEN = 2048  # with a smaller max_len, lengths shrink in proportion


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceRequest:
    """One request.

    Attributes:
        arrival: seconds after the start of the run.
        prompt: `i32[n]`.
        num_tokens: tokens of output.
        temperature: 0 for the most likely token.
    """

    arrival: float
    prompt: np.ndarray
    num_tokens: int
    temperature: float = 0.0

    @property
    def params(self) -> SamplingParams:
        """The parameters with which the engine samples exactly `num_tokens` tokens."""
        return SamplingParams(
            max_tokens=self.num_tokens, temperature=self.temperature, ignore_eos=True
        )


def make_trace(
    num_requests: int,
    *,
    vocab_size: int,
    max_len: int,
    rate: float = math.inf,
    prefix_share: float = 0.0,
    prefix_len: int = 0,
    num_prefixes: int = 4,
    seed: int = 0,
) -> list[TraceRequest]:
    """Make requests with ShareGPT's mean lengths, sorted by arrival.

    Lengths of prompts and outputs are log-normal, clipped to `[4, max_len / 2]` so that both fit in
    max_len; below a max_len of 2048 their means shrink with it. Arrivals are a Poisson process.

    Args:
        num_requests: number of requests.
        vocab_size: tokens are uniform in `[0, vocab_size)`.
        max_len: most tokens of a prompt and its output together.
        rate: requests per second; inf: all arrive at the start.
        prefix_share: share of requests whose prompt starts with one of the system prompts.
        prefix_len: tokens of a system prompt, at most `max_len / 2 - 4`.
        num_prefixes: number of system prompts.
        seed: seed of all random numbers.

    Raises:
        ValueError: if an argument is out of range.
    """
    limit = max_len // 2
    if num_requests < 1 or num_prefixes < 1 or limit < _MIN_LEN:
        raise ValueError(
            f"{num_requests=} and {num_prefixes=} must be positive, {max_len=} at least 8"
        )
    if not rate > 0 or not 0 <= prefix_share <= 1 or not 0 <= prefix_len <= limit - _MIN_LEN:
        raise ValueError(
            f"{rate=} must be above 0, {prefix_share=} in [0, 1], {prefix_len=} in "
            f"[0, {limit - _MIN_LEN}]"
        )
    rng = np.random.default_rng(seed)
    scale = min(1.0, max_len / _FULL_LEN)
    own = _lengths(rng, num_requests, scale * _PROMPT_MEAN, _PROMPT_SIGMA, limit)
    outputs = _lengths(rng, num_requests, scale * _OUTPUT_MEAN, _OUTPUT_SIGMA, limit)
    arrivals = np.cumsum(rng.exponential(1.0, num_requests)) / rate
    has_prefix = rng.random(num_requests) < prefix_share
    choice = rng.integers(num_prefixes, size=num_requests)
    prefixes = rng.integers(vocab_size, size=(num_prefixes, prefix_len), dtype=np.int32)
    requests = []
    for i in range(num_requests):
        prefix = prefixes[choice[i]] if has_prefix[i] else prefixes[0, :0]
        rest = min(int(own[i]), limit - len(prefix))
        tokens = rng.integers(vocab_size, size=rest, dtype=np.int32)
        requests.append(
            TraceRequest(
                arrival=float(arrivals[i]),
                prompt=np.concatenate([prefix, tokens]),
                num_tokens=int(outputs[i]),
            )
        )
    return requests


def nano_vllm_trace(
    num_requests: int, *, min_len: int, max_len: int, vocab_size: int
) -> list[TraceRequest]:
    """Make the requests of nano-vllm's own bench, with what Python's `random` draws from seed 0.

    Args:
        num_requests: number of requests, which all arrive at the start.
        min_len, max_len: bounds of the tokens of a prompt, and of an output.
        vocab_size: of the model; token ids are at most 10000, as in nano-vllm's bench.

    Raises:
        ValueError: if there are no requests.
    """
    if num_requests < 1:
        raise ValueError(f"{num_requests=} must be positive")
    rng = random.Random(0)
    last, lens = min(_NANO_LAST_TOKEN, vocab_size - 1), (min_len, max_len)
    prompts = [
        [rng.randint(0, last) for _ in range(rng.randint(*lens))] for _ in range(num_requests)
    ]
    return [
        TraceRequest(
            arrival=0.0,
            prompt=np.array(prompt, np.int32),
            num_tokens=rng.randint(*lens),
            temperature=_NANO_TEMPERATURE,
        )
        for prompt in prompts
    ]


def describe_trace(trace: list[TraceRequest]) -> dict[str, Any]:
    """Statistics of the requests of a trace."""
    prompts = [len(request.prompt) for request in trace]
    outputs = [request.num_tokens for request in trace]
    return {
        "num_requests": len(trace),
        "prompt_mean": float(np.mean(prompts)),
        "prompt_max": max(prompts),
        "output_mean": float(np.mean(outputs)),
        "output_max": max(outputs),
        "last_arrival": trace[-1].arrival,
    }


def _lengths(
    rng: np.random.Generator, count: int, mean: float, sigma: float, limit: int
) -> np.ndarray:
    """`i64[count]`, log-normal with this mean before clipping."""
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), _MIN_LEN, limit).astype(np.int64)
