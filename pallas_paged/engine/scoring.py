"""Log-probabilities of given completions, from requests that compute only their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pallas_paged.engine.input_processor import InputProcessor
from pallas_paged.engine.request import Request
from pallas_paged.engine.sampling_params import SamplingParams

_PARAMS = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, detokenize=False)


class Scoring:
    """One call of `Engine.score`.

    Attributes:
        requests: those whose completion is not empty, by row.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
    ):
        """Make the requests.

        Args:
            inputs: of the engine.
            prompts, completions: as in `Engine.score`.

        Raises:
            ValueError: the lists differ in length, or a sequence can't be served.
        """
        if len(prompts) != len(completions):
            raise ValueError(
                f"{len(prompts)} prompts must have as many completions, not {len(completions)}"
            )
        self.requests: dict[int, Request] = {}
        self._shape = (len(prompts), max(map(len, completions), default=0))
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            try:
                start, end = inputs.token_ids(prompt), inputs.token_ids(completion, empty=True)
                if end:
                    self.requests[row] = inputs.request(
                        start + end, _PARAMS, score_start=len(start)
                    )
            except ValueError as error:
                raise ValueError(f"sequence {row}: {error}") from error

    def scores(self) -> np.ndarray:
        """Return `f32[B, T]` once all requests are finished, padded on the right with 0.

        Raises:
            RuntimeError: a request was aborted, or the model's logits were NaN or infinite.
        """
        scores = np.zeros(self._shape, np.float32)
        for row, request in self.requests.items():
            assert request.score_start is not None and request.prompt_logprobs is not None
            tokens = request.prompt_token_ids[request.score_start :]
            found = request.prompt_logprobs[request.score_start :]
            for column, (token_id, logprobs) in enumerate(zip(tokens, found, strict=True)):
                if logprobs is None:
                    reason = request.outputs[0].finish_reason
                    raise RuntimeError(f"sequence {row} has no scores: it ended with {reason!r}")
                scores[row, column] = logprobs[token_id].logprob
        return scores
