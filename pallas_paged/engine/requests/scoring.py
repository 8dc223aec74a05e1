"""Log-probabilities of given completions, from requests that compute only their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pallas_paged.engine.requests.input_processor import InputProcessor, check_lists
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.sampling_params import SamplingParams

_PARAMS = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, detokenize=False)


def score_requests(
    inputs: InputProcessor,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> list[Request | None]:
    """Return a request for each completion, None for an empty one; as in `Engine.score`.

    Raises:
        ValueError: the lists differ in length, or a sequence can't be served.
    """
    check_lists(prompts=prompts, completions=completions)
    if len(prompts) != len(completions):
        raise ValueError(
            f"{len(prompts)} prompts must have as many completions, not {len(completions)}"
        )
    requests: list[Request | None] = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        try:
            start, end = inputs.token_ids(prompt), inputs.token_ids(completion, empty=True)
            request = inputs.request(start + end, _PARAMS, score_start=len(start)) if end else None
        except ValueError as error:
            raise ValueError(f"sequence {row}: {error}") from error
        requests.append(request)
    return requests


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
