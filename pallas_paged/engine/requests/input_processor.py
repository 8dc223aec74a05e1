"""Prompts and parameters to requests, checked against the model and the pool; their results."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pallas_paged.checks import check_integer
from pallas_paged.engine.requests.detokenizer import Tokenizer
from pallas_paged.engine.requests.grammar import GrammarCompiler
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.sampling_params import PoolingParams, SamplingParams
from pallas_paged.engine.schedule.kv_cache_manager import KVCacheManager


class InputProcessor:
    """Makes requests; any thread may call it.

    Attributes:
        grammars: of requests with structured outputs.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, pages: KVCacheManager, model: Any, max_model_len: int
    ):
        """Prepare; of the `Model` it needs the vocabulary's size and the ends of sequence."""
        self._vocab_size, self._tokenizer = model.vocab_size, tokenizer
        self._pages, self._max_model_len = pages, max_model_len
        self.grammars = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
        self._random = random.Random()  # seeded by the system, whatever a program seeds
        # The newest parameters, and the tokens of a sequence: many requests have the same ones.
        self._newest: tuple[SamplingParams | None, int] = None, 0

    def request(
        self,
        prompt: object,
        params: SamplingParams | PoolingParams | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        score_start: int | None = None,
    ) -> Request:
        """Make a request; the engine gives it a number, and an id if it has none.

        Args:
            prompt, params, request_id, priority: as in `Engine.submit`.
            score_start: as in `Request`.

        Raises:
            ValueError: the request can never be served.
        """
        pooling = None
        if isinstance(params, PoolingParams):
            pooling, params = params, _PROMPT_ONLY
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{params=} must be SamplingParams")
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise ValueError(f"{request_id=} must be a str that is not empty")
        check_integer("priority", priority, -(2**31))
        token_ids = self.token_ids(prompt)
        if score_start is None and params.prompt_logprobs is not None:
            score_start = 1
        max_len, structure = self._max_len(len(token_ids), params), params.structured_outputs
        return Request(
            request_id=request_id or "",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            seed=self._random.getrandbits(32) if params.seed is None else params.seed,
            priority=priority,
            max_len=max_len,
            grammar=None if structure is None else self.grammars.compile(structure),
            pooling=pooling,
            score_start=score_start,
            prompt_logprobs=None if score_start is None else [None] * len(token_ids),
        )

    def requests(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | PoolingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Make a request for each prompt; arguments as in `Engine.generate`.

        Raises:
            ValueError: a prompt or its parameters can't be served; the message has its index.
        """
        check_lists(prompts=prompts)
        if params is None or isinstance(params, SamplingParams | PoolingParams):
            params = [params or SamplingParams()] * len(prompts)  # type: ignore[list-item]
        check_lists(params=params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params must be one, or one for each of {len(prompts)}")
        requests = []
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self.request(prompt, one))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return requests

    def token_ids(self, prompt: Any, *, empty: bool = False) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: a text or token ids.
            empty: whether it may be empty.

        Raises:
            ValueError: it is neither, or a token is not in the vocabulary.
        """
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("a prompt that is a text needs a tokenizer")
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError("the prompt must be valid UTF-8; it has surrogates")
            prompt = list(self._tokenizer.encode(prompt))
        if not isinstance(prompt, list | tuple | range):
            if not hasattr(prompt, "dtype") or getattr(prompt, "ndim", None) != 1:
                what = "a text or a list of token ids"
                raise ValueError(f"a prompt must be {what}, not {prompt!r:.80}")
            prompt = np.asarray(prompt).tolist()
        if not prompt and not empty:
            raise ValueError("the prompt is empty")
        last = self._vocab_size - 1
        # A few passes in C, for 100,000 prompts in a second.
        if {*map(type, prompt)} == {int} and min(prompt) >= 0 and max(prompt) <= last:
            return list(prompt)
        for token_id in prompt:
            check_integer("token id of the prompt", token_id, 0, last)
        return [int(token_id) for token_id in prompt]

    def _max_len(self, length: int, params: SamplingParams) -> int:
        """Return the tokens at which sequences of a request end; refuse what can't be served."""
        newest, limit = self._newest
        if newest is not params:
            limit = self._limit(params)
            self._newest = params, limit
        max_tokens = params.max_tokens
        sizes = f"(max_model_len={self._max_model_len}, num_pages={self._pages.num_pages})"
        if max_tokens is None:
            if length >= limit:
                raise ValueError(
                    f"a prompt of {length} tokens leaves no room for more: a sequence has at most "
                    f"{limit} tokens {sizes}"
                )
            return limit
        if length + max_tokens > limit:
            raise ValueError(
                f"a prompt of {length} tokens and {max_tokens=} are more than the {limit} tokens "
                f"of a sequence {sizes}"
            )
        return length + max_tokens

    def _limit(self, params: SamplingParams) -> int:
        """Return the most tokens of a sequence with these parameters, which it checks."""
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer; stop_token_ids does not")
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids or ()),
            ("logit_bias", dict(params.logit_bias or ())),
        ):
            for token_id in ids:
                check_integer(f"token id of {name}", token_id, 0, self._vocab_size - 1)
        beams = params.beam_width or 1
        if 2 * beams > max(self._vocab_size, 2):
            raise ValueError(
                f"beam_width={beams} is more than half of vocab_size={self._vocab_size}"
            )
        limit = self._max_model_len
        pages = self._pages
        last = int(params.max_tokens != 0)  # the last new token has no K/V
        if pages.max_pages_held(limit - last) * beams > pages.num_pages:
            limit = min(limit, pages.num_pages // beams * pages.page_size + last)
        return limit


def check_lists(**values: object) -> None:
    """Raise ValueError for values that are not lists or arrays."""
    for name, value in values.items():
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
            raise ValueError(f"{name}={value!r:.80} must be a list")


_PROMPT_ONLY = SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)
_PARAMS = replace(_PROMPT_ONLY, prompt_logprobs=0)


def score_requests(
    inputs: InputProcessor,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    routed_experts: Sequence[np.ndarray] | None = None,
    experts_shape: tuple[int, int] | None = None,
) -> list[Request | None]:
    """Return a request for each completion, None for an empty one.

    Args:
        inputs: makes the requests.
        prompts, completions, routed_experts: as in `Engine.score`.
        experts_shape: (L, k) of the experts that the model reports; None if it reports none.

    Raises:
        ValueError: the lists differ in length, a sequence can't be served, or its experts are not
            those of such a model.
    """
    check_lists(prompts=prompts, completions=completions)
    if len(prompts) != len(completions):
        raise ValueError(
            f"{len(prompts)} prompts must have as many completions, not {len(completions)}"
        )
    if routed_experts is not None:
        check_lists(routed_experts=routed_experts)
        if len(routed_experts) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts must have as many routed_experts, not "
                f"{len(routed_experts)}"
            )
    requests: list[Request | None] = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        try:
            if isinstance(prompt, str) or isinstance(completion, str):
                raise ValueError("prompts and completions must be token ids, not texts")
            start, end = inputs.token_ids(prompt), inputs.token_ids(completion, empty=True)
            request = inputs.request(start + end, _PARAMS, score_start=len(start)) if end else None
            if routed_experts is not None:
                num_tokens = len(start) + len(end)
                given = _given_experts(routed_experts[row], num_tokens, experts_shape)
                if request is not None:
                    request.given_experts = given
        except ValueError as error:
            raise ValueError(f"sequence {row}: {error}") from error
        requests.append(request)
    return requests


def _given_experts(values: Any, num_tokens: int, shape: tuple[int, int] | None) -> np.ndarray:
    """Return the experts `i16[num_tokens, L, k]` of a sequence, of its last token -1.

    Args:
        values: what `Engine.score` got for it.
        num_tokens: of the sequence.
        shape: (L, k) of the model, or None.

    Raises:
        ValueError: the values are not of such a model, or of more tokens than are computed.
    """
    experts, most, rows = np.asarray(values), np.iinfo(np.int16).max, num_tokens - 1
    found = f"routed_experts {experts.dtype}{[*experts.shape]}"
    if shape is None:
        raise ValueError(f"{found} must be None: the model reports no experts")
    is_of_model = experts.dtype.kind in "iu" and experts.shape[1:] == shape
    if not is_of_model or len(experts) < rows:
        layers, k = shape
        raise ValueError(
            f"{found} must be integers [tokens, {layers}, {k}], as of the model, for at least the "
            f"{rows} tokens before the last"
        )
    if (largest := experts.max(initial=0)) > most:
        raise ValueError(f"{found} must be at most {most}, not {largest}")
    if (experts[rows:] >= 0).any():  # rows of `Rollouts`, whose prompts are padded on the left
        raise ValueError(
            f"{found} must be below 0 behind its first {rows} rows, which are of the tokens before "
            "the last, from the first of the prompt on"
        )
    given = np.full((num_tokens, *shape), -1, np.int16)
    given[:rows] = np.maximum(experts[:rows].astype(np.int64), -1)
    return given


def scores_of(requests: Sequence[Request | None]) -> np.ndarray:
    """Return `f32[B, T]` once all requests are finished, padded on the right with 0.

    Raises:
        RuntimeError: a request was aborted, or the model's logits were NaN or infinite.
    """
    rows: list[list[float]] = []
    for request in requests:
        rows.append([])
        if request is None:
            continue
        tokens = list(zip(request.prompt_token_ids, request.prompt_logprobs or (), strict=True))
        for token_id, logprobs in tokens[request.score_start :]:
            if logprobs is None:
                reason = request.outputs[0].finish_reason
                raise RuntimeError(
                    f"sequence {len(rows) - 1} has no scores: it ended with {reason!r}"
                )
            rows[-1].append(logprobs[token_id].logprob)
    scores = np.zeros((len(rows), max(map(len, rows), default=0)), np.float32)
    for row, values in zip(scores, rows, strict=True):
        row[: len(values)] = values
    return scores


def embeddings_of(requests: Sequence[Request]) -> np.ndarray:
    """Return `f32[B, E]` once all requests are finished.

    Raises:
        RuntimeError: a request was aborted, or the model's hidden states were NaN or infinite.
    """
    rows = []
    for index, request in enumerate(requests):
        if (embedding := request.embedding) is None:
            reason = request.error or f"it ended with {request.outputs[0].finish_reason!r}"
            raise RuntimeError(f"prompt {index} has no embedding: {reason}")
        rows.append(embedding)
    return np.array(rows, np.float32) if rows else np.zeros((0, 0), np.float32)
